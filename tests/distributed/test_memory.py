"""The predicted peak of memory is that of the allocator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.worker_memory import CASES
from tests.helpers.launch import ROOT, run_ranks
from tests.helpers.nightly import case


@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", [case(n, daily=n == 0, id=str(CASES[n][2])) for n in range(3)])
def test_the_peak_is_predicted_within_five_percent(tmp_path: Path, number: int) -> None:
    file = tmp_path / "memory.json"
    program = [ROOT / "tests/distributed/worker_memory.py", str(number), file]
    run_ranks(program, CASES[number][0], timeout_s=360).check()
    ranks = json.loads(file.read_text())["ranks"]
    assert len(ranks) == CASES[number][0]
    for rank in ranks:
        state = sum(rank[name] for name in ("weights", "grads", "optimizer"))
        moving = rank["measured_bytes"] - state
        assert moving > 0.3 * state, "what a step adds must count"
        assert rank["predicted_bytes"] - state == pytest.approx(moving, rel=0.07)
        assert rank["predicted_bytes"] == pytest.approx(rank["measured_bytes"], rel=0.05)
