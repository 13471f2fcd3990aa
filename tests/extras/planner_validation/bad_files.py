"""Wrong files for `tests/helpers/bad_inputs.py`."""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Callable
from pathlib import Path

from copus_ext.cost_model.spec_file import SpecError
from copus_ext.extras.planner_validation.validation import read_table
from tests.helpers import spoil


def table(rng: random.Random, folder: Path) -> str | None:
    """Measured runs as CSV."""
    row = {
        "cluster": "a100-80g:8",
        "num_layers": "16",
        "hidden_size": "2048",
        "num_attention_heads": "32",
        "vocab_size": "32000",
        "seq_length": "2048",
        "tp": "2",
        "micro_batch_size": "1",
        "global_batch_size": "32",
        "step_s": "1.5",
    }
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerows([list(row), list(row.values())])
    path = folder / "runs.csv"
    path.write_bytes(spoil.spoiled_text(rng, out.getvalue()).encode(errors="surrogatepass"))
    return spoil.problem_of(lambda: read_table(path), SpecError, OSError, UnicodeDecodeError)


KINDS: dict[str, Callable[[random.Random, Path], str | None]] = {"table": table}
"""What can be wrong, and its check."""
