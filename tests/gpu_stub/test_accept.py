"""`copus accept` on CUDA and NCCL of the stub: what it checks on GPUs holds there."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.gpu_stub import on_stub
from tests.gpu_stub.launch import variables
from tests.helpers.launch import ROOT

CHECKS = {1: "sums,resume,memory", 2: "moves,moves_when_full,noise_of_layouts,recovery"}
"""By the number of GPUs. `noise` has tests of its own here; a full GPU has, too."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("gpus", CHECKS)
def test_checks_pass(gpus: int, tmp_path: Path) -> None:
    file = tmp_path / "accept.jsonl"
    words = ["--size", "small", "--checks", CHECKS[gpus], "--output", str(file)]
    program = [on_stub.venv() / "bin/python", ROOT / "copus_ext/commands/main.py", "accept"]
    env = {**os.environ, **variables(gpus), "TMPDIR": str(tmp_path)}
    # Each check has a limit of its own.
    done = subprocess.run([*program, *words], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert (first["device"], first["ranks"]) == ("cuda", gpus) and first["versions"]["nccl"]
    assert [row["check"] for row in rows] == CHECKS[gpus].split(",")
    assert {row["verdict"] for row in rows} == {"passed"}
