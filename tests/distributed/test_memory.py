"""The predicted peak of memory is that of the allocator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launch import ROOT


@pytest.mark.timeout(200)
def test_the_peak_is_predicted_within_five_percent(tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    command = [sys.executable, "-m", "bench.planner_memory", "--cases", "3", "--output", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    cases = json.loads(file.read_text())["cases"]
    assert len(cases) == 3
    for case in cases:
        for rank in case["ranks"]:
            state = sum(rank[name] for name in ("weights", "grads", "optimizer"))
            moving = rank["measured_bytes"] - state
            assert moving > 0.3 * state, "what a step adds must count"
            assert rank["predicted_bytes"] - state == pytest.approx(moving, rel=0.07)
        assert max(map(abs, case["errors"])) < 0.05, case
