"""A run does what it is asked by files, and ends when one of its ranks hangs."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from copus_ext.reshard.relaunch import Request, read_request
from megatron.trainer.checkpoint import files
from megatron.trainer.common.control import HEARTBEATS, LOCK_FILE, SAVE_FILE, STACKS, STOP_FILE
from megatron.trainer.logging.metrics import decode, read_metrics
from megatron.trainer.resilience.lock import Lock, process_start
from tests.helpers.jobs import ENDLESS, TINY, evaluations_of, losses_of, steps_of, train
from tests.helpers.launch import ROOT, RanksResult, run_ranks
from tests.helpers.processes import wait_until

pytestmark = pytest.mark.waits

WAIT_S = 200


def run(
    flags: list[str], run_dir: Path, *, launch: str = "", ranks: int = 2, **env: str
) -> RanksResult:
    """Every rank to its own end, supervised if the launch has a name."""
    args = [ROOT / "pretrain_gpt.py", *TINY.split(), *flags, "--run-dir", run_dir]
    env = {**env, **({"COPUS_LAUNCH": launch} if launch else {})}
    return run_ranks(args, ranks, timeout_s=480, env=env, launcher="direct", ends_all=False)


def steps_since(run_dir: Path, launch: str) -> int:
    """Steps that a launch has recorded so far."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    records = [record for record in map(decode, lines) if record]
    return sum(r["kind"] == "step" and r["launch"] == launch for r in records)


class Beside(threading.Thread):
    """Does something beside a run."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.act, self.is_done = act, False
        self.start()

    def run(self) -> None:
        self.act()
        self.is_done = True

    def check(self) -> None:
        self.join(5)
        assert self.is_done


def requested(run_dir: Path, launch: str) -> Request:
    found = read_request(run_dir, launch=launch)
    assert found is not None
    return found


def test_saved_and_stopped_by_files_it_goes_on_bit_for_bit(
    tmp_path: Path, uninterrupted: list[float]
) -> None:
    path, save = tmp_path / "run", tmp_path / "save"
    flags = [*ENDLESS, "--save", str(save), "--load", str(save)]

    def save_then_stop() -> None:
        assert wait_until(lambda: steps_since(path, "job.0.0") >= 2, WAIT_S)
        (path / SAVE_FILE).touch()
        assert wait_until(lambda: not (path / SAVE_FILE).exists(), WAIT_S)
        assert (files.read_latest(save) or 0) > 0
        assert (path / LOCK_FILE).exists()
        (path / STOP_FILE).touch()

    beside = Beside(save_then_stop)
    # Slow enough that it is stopped within the steps of `uninterrupted`.
    first = run(flags, path, launch="job.0.0", COPUS_TEST_STEP_S="0.2")
    beside.check()
    assert first.codes == (85, 85), first.tail()
    stopped, on_request = sorted(files.complete_iterations(save))[::-1]
    assert stopped > on_request > 0
    asked = requested(path, "job.0.0")
    assert (asked.kind, asked.iteration) == ("requeue", stopped)
    assert asked.checkpoint == str(save) and "control/stop" in asked.line
    assert not (path / STOP_FILE).exists() and not (path / LOCK_FILE).exists()

    def stop_evaluation() -> None:
        assert wait_until(lambda: steps_since(path, "job.0.1") >= 1, WAIT_S)
        (path / STOP_FILE).write_text("time limit\n")

    beside = Beside(stop_evaluation)
    evaluating = ["--eval-interval", "1", "--eval-iters", "20000"]
    second = run([*flags, *evaluating], path, launch="job.0.1")
    beside.check()
    assert second.codes == (85, 85), second.tail()
    assert "time limit" in requested(path, "job.0.1").line
    assert files.read_latest(save) == stopped + 1 and evaluations_of(path) == []

    third = run([*flags, "--exit-interval", "10"], path, launch="job.0.2")
    assert third.codes == (0, 0), third.tail()
    done = requested(path, "job.0.2")
    assert done.kind == "done" and done.iteration % 10 == 0 and "--exit-interval" in done.line
    assert losses_of(path) == uninterrupted[: done.iteration]
    assert [s["consumed_samples"] for s in steps_of(path)] == [
        8 * (i + 1) for i in range(done.iteration)
    ]
    kinds = [r["kind"] for r in read_metrics(path)]
    assert kinds.count("signal") == 2 and kinds.count("alert") == 0


def test_when_a_rank_hangs_the_others_say_where_and_leave(tmp_path: Path) -> None:
    def stop_rank_one() -> None:
        beats = [tmp_path / HEARTBEATS / str(rank) for rank in range(2)]
        assert wait_until(lambda: all(beat.exists() for beat in beats), WAIT_S)
        assert wait_until(lambda: steps_since(tmp_path, "job.0.0") >= 2, WAIT_S)
        pids = [json.loads(beat.read_text())["pid"] for beat in beats]
        os.kill(pids[1], signal.SIGSTOP)
        assert wait_until(lambda: process_start(pids[0]) is None, WAIT_S)
        os.kill(pids[1], signal.SIGKILL)

    beside = Beside(stop_rank_one)
    flags = ["--train-iters", "100000"]
    result = run(flags, tmp_path, launch="job.0.0", COPUS_WATCHDOG_S="2:4")
    beside.check()
    assert result.codes == (86, -signal.SIGKILL), result.tail()
    lines = [line for line in result.stderr.splitlines() if line.startswith("copus: rank 0, ")]
    assert len(lines) == 2 and "no progress" in lines[0] and "exits with 86" in lines[1]
    stacks = (tmp_path / STACKS / "job.0.0.0.txt").read_text()
    assert "in train_step" in stacks
    assert read_request(tmp_path, launch="job.0.0") is None, "a crash"
    kinds = [r["kind"] for r in read_metrics(tmp_path)]
    assert "alert" in kinds and "fault" in kinds
    assert (tmp_path / LOCK_FILE).exists()
    train(["--train-iters", "1"], 1, tmp_path).check()
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_second_run_on_a_directory_is_refused(tmp_path: Path) -> None:
    save = tmp_path / "save"
    with Lock(save, flag="--save", launch="other.0.0"):
        flags = ["--train-iters", "2", "--save", str(save)]
        result = train([*flags, "--force-unlock"], 1, tmp_path / "run")
    assert result.returncode == 2, result.tail()
    (line,) = [line for line in result.stderr.splitlines() if "error:" in line]
    assert f"--save {save}" in line and f"process {os.getpid()}" in line
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists() and not save.exists(), "nothing is left"


def test_a_run_that_never_trains_says_why(tmp_path: Path) -> None:
    flags = ["--train-iters", "2", "--save", str(tmp_path)]
    (tmp_path / STOP_FILE).parent.mkdir()
    (tmp_path / STOP_FILE).touch()
    asked = run(flags, tmp_path, launch="job.0.0", ranks=1)
    assert asked.codes == (85,), asked.tail()
    request = requested(tmp_path, "job.0.0")
    assert (request.kind, request.iteration) == ("requeue", 0)
    assert steps_of(tmp_path) == [] and not (tmp_path / STOP_FILE).exists()

    missing = ["--load", str(tmp_path / "no"), "--exit-on-missing-checkpoint"]
    failed = run([*flags, *missing], tmp_path, launch="job.0.1", ranks=1)
    assert failed.codes == (1,), failed.tail()
    request = requested(tmp_path, "job.0.1")
    assert request.kind == "abort" and "holds no checkpoint" in request.line

    # Nobody has asked this one: the file is of an earlier run.
    (tmp_path / STOP_FILE).touch()
    alone = run(flags, tmp_path, ranks=1).check()
    assert "control/stop of an earlier run" in alone.stdout
    assert len(steps_of(tmp_path)) == 2 and not (tmp_path / STOP_FILE).exists()


@pytest.fixture(autouse=True)
def unsupervised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COPUS_LAUNCH", raising=False)
