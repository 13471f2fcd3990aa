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
    command = [sys.executable, "bench/planner_memory.py", "--cases", "3", "--output", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    cases = json.loads(file.read_text())["cases"]
    assert len(cases) == 3
    for case in cases:
        for rank in case["ranks"]:
            moving = rank["measured_bytes"] - rank["resting_bytes"]
            assert moving > rank["resting_bytes"] / 5, "the step itself must count"
        assert max(map(abs, case["errors"])) < 0.05, case
