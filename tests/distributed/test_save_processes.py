"""Processes that write asynchronous saves are killed and stopped: the run goes on, the next save
commits, and the losses are those of a run that nothing happened to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from megatron.trainer.checkpoint import files
from megatron.trainer.logging.metrics import read_metrics
from tests.helpers import processes
from tests.helpers.jobs import TINY, losses_of
from tests.helpers.launch import ROOT

pytestmark = [pytest.mark.waits, pytest.mark.timeout(900)]

WORKER = Path(__file__).with_name("worker_save_processes.py")
STEPS, INTERVAL, STALL_S = 30, 5, 4
HARM = {"5:0": "kill", "10:1": "stop"}
"""Iteration and rank of a save, and what becomes of its process."""


def train(folder: Path, harm: dict[str, str], *own: str, long_step_s: float = 0.0) -> str:
    """A run on two ranks under the supervisor, to its end; returns what it said."""
    processes.guard_session()
    mark = uuid.uuid4().hex
    env = {**os.environ, "PYTHONPATH": str(ROOT), processes.MARK: mark}
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"COPUS_TEST_HARM": json.dumps(harm), "COPUS_TEST_FOLDER": str(folder)}
    env |= {"COPUS_SAVE_STALL_S": str(STALL_S), "COPUS_TEST_LONG_STEP": str(long_step_s)}
    command = [sys.executable, "-m", "copus_ext.launch.supervisor", "--restart-wait", "0"]
    command += ["--nproc-per-node", "2", *own, "--", str(WORKER), *TINY.split()]
    command += ["--split", "1,0,0", "--train-iters", str(STEPS)]
    command += ["--save", str(folder / "run"), "--save-interval", str(INTERVAL), "--async-save"]
    command += ["--use-distributed-optimizer", "--no-ckpt-fully-parallel-save"] * (not own)
    log = folder / "log"
    with log.open("wb") as out:
        child = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=out)
        try:
            code = child.wait(600)
        finally:
            orphans = processes.end_marked(mark) if child.poll() is None else processes.marked(mark)
            child.kill()
    assert code == 0, log.read_text()[-6000:]
    assert orphans == [], log.read_text()[-6000:]
    return log.read_text()


def check(folder: Path, *, ranks: int = 2) -> dict[int, list[str]]:
    """Every save is there, and nothing is left of any; returns the notes of those that commit.

    Args:
        folder: of the run.
        ranks: how many have come to the end, at least.
    """
    records = read_metrics(folder / "run", superseded=True)
    assert not [r for r in records if r["kind"] == "checkpoint.failed"]
    wanted = list(range(INTERVAL, STEPS + 1, INTERVAL))
    found = files.complete_iterations(folder / "run")
    assert set(found) <= set(wanted) and found[-1] == STEPS
    assert not list((folder / "run").glob("*.unfinished"))
    assert all(not files.damage(files.folder_of(folder / "run", i)) for i in found)
    left: list[dict[str, Any]] = [json.loads(p.read_text()) for p in folder.glob("left-*.json")]
    assert len(left) >= ranks
    for one in left:
        assert one["writers"] <= 1 and one["zombies"] == 0 and one["threads"] == []
        assert one["handles"] <= 3 and one["maps"] <= 1, "kept for the next save"
    return {r["iteration"]: r.get("notes", []) for r in records if r["kind"] == "checkpoint.commit"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("plain")
    train(folder, {})
    assert set(check(folder)) == set(range(INTERVAL, STEPS + 1, INTERVAL))
    return losses_of(folder / "run")


def check_long_step(folder: Path, plain: list[float], *own: str) -> None:
    """Runs with a step of a minute, in which the processes of a save are killed and stopped."""
    train(folder, HARM, *own, long_step_s=60.0)
    for what, line in (("kill", "ended with -9"), ("stop", "has not moved on for 4 s")):
        told = json.loads((folder / f"long-{what}.json").read_text())
        assert told["seen_s"] is not None and line in told["lines"][0], told
        assert "the rank writes itself" in told["lines"][0]
        assert told["written_s"] is not None, "by the rank, before the step ended"
    assert set(check(folder)) == set(range(INTERVAL, STEPS + 1, INTERVAL))
    assert losses_of(folder / "run") == pytest.approx(plain, rel=1e-6)


def test_a_long_step_hides_no_process_that_is_lost(tmp_path: Path, plain: list[float]) -> None:
    check_long_step(tmp_path, plain)
