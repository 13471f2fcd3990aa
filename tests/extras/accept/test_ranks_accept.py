"""`copus accept` on CPU ranks: what must hold on GPUs holds here, and a missed limit fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from copus_ext.extras.accept import command, many, one
from tests.helpers.launch import ROOT
from tests.helpers.processes import wait_until

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]
CHECKS = ["arithmetic", "noise", "resume", "moves", "moves_of_experts"]
CHECKS += ["checkpoints", "noise_of_layouts"]
OF_GPUS = ["memory", "communicators"]


def test_checks_pass_on_two_ranks(tmp_path: Path) -> None:
    file = tmp_path / "accept.jsonl"
    words = ["--device", "cpu", "--nproc-per-node", "2", "--output", str(file)]
    assert command.main([*words, "--checks", ",".join([*CHECKS, *OF_GPUS])]) == 0
    first, *rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert first["check"] == "environment" and first["versions"]["torch"]
    verdicts = {row["check"]: row["verdict"] for row in rows}
    assert verdicts == dict.fromkeys(CHECKS, "passed") | dict.fromkeys(OF_GPUS, "skipped")
    moves = next(row for row in rows if row["check"] == "moves")
    assert [move["kind"] for move in moves["moves"][0]] == ["moved"] * 12
    layouts = next(row for row in rows if row["check"] == "checkpoints")
    assert layouts["line"].startswith("16 pairs of 4 layouts") and layouts["differ"] == []
    assert all(row["seconds"] > 0 and row["line"] for row in rows if row["check"] in CHECKS)


def test_what_is_beyond_its_limit_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(many, "_MAX_NOISE", 0.0)
    monkeypatch.setattr(one, "_sums", lambda run: {"of": id(run)})
    file = tmp_path / "accept.jsonl"
    words = ["--device", "cpu", "--nproc-per-node", "2", "--output", str(file)]
    assert command.main([*words, "--checks", "resume,noise_of_layouts"]) == 1
    rows = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    assert [row["verdict"] for row in rows] == ["failed", "failed"]
    assert "NOT bit-equal" in rows[0]["line"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_ranks_and_leaves_nothing(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    words = ["--device", "cpu", "--nproc-per-node", "1", "--checks", "resume"]
    start = [sys.executable, str(ROOT / "copus_ext/commands/main.py"), "accept", *words]
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(start, env=env, stdout=subprocess.DEVNULL) as child:
        assert wait_until(lambda: list(tmp_path.glob("*/resume-whole/output.txt")), 120)
        child.send_signal(number)
        assert child.wait(60) == code
    assert list(tmp_path.glob("copus-accept-*")) == []
    # The kernel takes a moment to end what was killed.
    assert wait_until(lambda: not _processes_of(tmp_path), 20), _processes_of(tmp_path)


def _processes_of(folder: Path) -> str:
    return subprocess.run(["pgrep", "-af", str(folder)], capture_output=True, text=True).stdout
