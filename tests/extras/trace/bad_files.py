"""Wrong inputs of this extra for `tests.helpers.bad_inputs`."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from pathlib import Path

from copus_ext.extras.trace.timeline import base_of, with_steps, write_trace
from tests.helpers import spoil


def trace(rng: random.Random, folder: Path) -> str | None:
    """A trace of steps, from torch's profiler."""
    events = [
        {"ph": "M", "pid": 7, "name": "process_name", "args": {"name": "python"}},
        {"ph": "X", "pid": 7, "tid": 1, "ts": 5.5, "dur": 2.0, "name": "step", "id": 3},
    ]
    path = folder / "rank0.steps1-2.json.gz"
    content = spoil.spoiled_json(rng, {"baseTimeNanoseconds": 5, "traceEvents": events})
    packed = gzip.compress(content, 1)
    path.write_bytes(spoil.spoiled_bytes(rng, packed) if rng.random() < 0.3 else packed)

    def read() -> None:
        base_of(path)
        whole, problems = with_steps({"baseTimeNanoseconds": 0, "traceEvents": []}, [path])
        write_trace(folder / "whole.json", whole)
        assert all("\n" not in problem for problem in problems)

    return spoil.problem_of(read)


KINDS: dict[str, Callable[[random.Random, Path], str | None]] = {"trace": trace}
