"""`copus accept` on CUDA and NCCL of the stub: what it checks on GPUs holds there."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_stub import on_stub
from tests.gpu_stub.launch import variables
from tests.helpers.launch import ROOT

CHECKS = {
    1: ["arithmetic,resume,memory,out_of_memory"],
    2: ["moves,moves_of_experts,communicators", "recovery,checkpoints,noise_of_layouts"],
}
"""By the number of GPUs. `noise` has tests of its own here."""
CASES = [(gpus, checks) for gpus, parts in CHECKS.items() for checks in parts]


def accepted(gpus: int, checks: str, folder: Path, **more: str) -> list[dict[str, Any]]:
    """The rows of checks of which none has failed; `more` are variables of the environment."""
    file = folder / "accept.jsonl"
    words = ["--size", "small", "--checks", checks, "--output", str(file)]
    program = [on_stub.venv() / "bin/python", ROOT / "copus_ext/commands/main.py", "accept"]
    env = {**os.environ, **variables(gpus), "TMPDIR": str(folder), **more}
    # Each check has a limit of its own.
    done = subprocess.run([*program, *words], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert (first["device"], first["ranks"]) == ("cuda", gpus) and first["versions"]["nccl"]
    assert [row["check"] for row in rows] == checks.split(",")
    assert {row["verdict"] for row in rows} == {"passed"}, rows
    return rows


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("gpus", "checks"), CASES)
def test_checks_pass(gpus: int, checks: str, tmp_path: Path) -> None:
    rows = accepted(gpus, checks, tmp_path)
    for row in (row for row in rows if row["check"] == "memory"):
        # Of so small a model a check within 2 % would miss half of what moves.
        for peaks in row["rows"].values():
            assert peaks["alone"]["peak"] == peaks["allocated_bytes"]


NEED = r".* [0-9.]+ GB are needed beside the old state and [0-9.]+ GB are free"
REFUSED = r"cancelled .*(1\.9|2\.6)\d GB are needed beside the old state and 1\.7\d GB are free"
SHORT = {16: REFUSED, 26: "moved"}
"""GiB of a GPU, and how every move ends while a tenth of it is free. New communicators of NCCL and
buffers of messages need 1.9 GB as a move reckons, and with context parallelism 2.6 GB, whatever the
model."""


@pytest.mark.parametrize("size", SHORT)
def test_a_move_where_memory_is_short_is_refused_or_done(size: int, tmp_path: Path) -> None:
    (row,) = accepted(2, "moves_when_full", tmp_path, STUB_GPU_BYTES=str(size << 30))
    full, edge = ([m for m in row["moves"] if m["memory"] == name] for name in ("full", "edge"))
    assert len(full) == len(edge) == 6
    assert all(re.fullmatch(NEED, move["refused"]) for move in edge)
    for move in full:
        end = f"{move['kind']} {move['reason']}".strip()
        assert re.fullmatch(SHORT[size], end), (move["to"], end)
