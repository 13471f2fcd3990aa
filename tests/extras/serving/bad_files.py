"""Wrong files for `tests/helpers/bad_inputs.py`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from copus_ext.extras.serving.sensitivity import Sensitivity
from megatron.trainer.common.errors import UsageError
from tests.helpers import spoil


def sensitivity(rng: random.Random, folder: Path) -> str | None:
    """Measured losses of quantised layers."""
    whole = Sensitivity(
        settings={"iteration": 3},
        group_size=64,
        loss=2.0,
        loss_16=2.001,
        loss_increase=[{"4": 0.1, "8": 0.01}] * 2,
        standard_error=[{"4": 0.01, "8": 0.01}] * 2,
    )
    path = folder / "sensitivity.json"
    whole.write(path)
    path.write_bytes(spoil.spoiled_json(rng, json.loads(path.read_text())))

    def read() -> None:
        found = Sensitivity.read(path)
        found.table([4, 8, 16])
        assert found.rounding >= 0

    return spoil.problem_of(read, UsageError)


KINDS: dict[str, Callable[[random.Random, Path], str | None]] = {"sensitivity": sensitivity}
"""What can be wrong, and its check."""
