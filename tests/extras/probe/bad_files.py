"""Wrong files for `tests/helpers/bad_inputs.py`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from copus_ext.extras.probe.link_fit import Timed
from copus_ext.extras.probe.record import LinkRecord
from megatron.trainer.common.errors import UsageError
from tests.helpers import spoil


def links(rng: random.Random, folder: Path) -> str | None:
    """The file of a probe that goes on."""
    path, hosts = folder / "links.json", ["a", "b", "c"]
    timed = Timed(num_bytes=(1, 1 << 20), seconds=(1e-4, 1e-3), both_ways=(1 << 20, 2e-3))
    begun = LinkRecord(path, hosts, {"backend": "gloo"})
    begun.known = {(0, 1): timed, (1, 0): timed}
    begun.flush()
    path.write_bytes(spoil.spoiled_json(rng, json.loads(path.read_text())))

    def read() -> None:
        found = LinkRecord(path, hosts, {"backend": "gloo"})
        found.begin(resume=True)
        assert all(len(matrix) == 3 for matrix in found.matrices())

    return spoil.problem_of(read, UsageError, OSError)


KINDS: dict[str, Callable[[random.Random, Path], str | None]] = {"links": links}
"""What can be wrong, and its check."""
FEW = {"links": 12}
"""Of ten thousand: a check takes 30 ms."""
