"""Stop files tell an operator's wish from a job's end, and no second start touches a living run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from copus_ext.launch.options import read_options
from copus_ext.launch.restart_policy import AGAIN
from copus_ext.launch.slurm_job import SIGNAL_LEAD, SlurmWatch
from copus_ext.launch.supervisor import LeaderNode, StopSignals
from megatron.trainer.common import control
from megatron.trainer.common.control import LOCK_FILE, SIGNALLED, STOP_FILE, TIME_LIMIT, write_stop
from megatron.trainer.common.errors import UsageError
from megatron.trainer.resilience.lock import Lock
from tests.unit.test_slurm import TASK

ROOT = Path(__file__).parents[2]
ALONE: dict[str, str] = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}
ALONE |= {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "n1"}
ALONE |= {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}


@pytest.mark.parametrize("has_links", [True, False])
def test_a_stop_file_appears_with_its_text_and_replaces_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    seen: list[str] = []

    def before(name: str, real: Any) -> Any:
        def place(source: Path, target: Path) -> None:
            seen.append(source.read_text())
            if name == "link" and not has_links:
                raise OSError("no links")
            real(source, target)

        return place

    for name in ("link", "replace"):
        monkeypatch.setattr(control.os, name, before(name, getattr(os, name)))
    write_stop(tmp_path, TIME_LIMIT)
    assert set(seen) == {f"{TIME_LIMIT}\n"}, "what comes into place is whole"
    write_stop(tmp_path, SIGNALLED)
    assert (tmp_path / STOP_FILE).read_text() == f"{TIME_LIMIT}\n"
    assert [path.name for path in (tmp_path / "control").iterdir()] == ["stop"]


def test_who_passes_an_end_on_leaves_a_stop_by_hand_alone(tmp_path: Path) -> None:
    path = tmp_path / STOP_FILE
    watch, stops = SlurmWatch("5", tmp_path, say=lambda line: None), StopSignals(tmp_path, 10.0)
    for write, text in ((lambda: watch._stop(1.0), TIME_LIMIT), (stops._write, SIGNALLED)):
        watch.is_ending = False
        write()
        assert path.read_text() == f"{text}\n"
        path.write_text("")
        watch.is_ending = False
        write()
        assert path.read_text() == ""
        path.unlink()


@pytest.fixture
def leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the leader of a job under a number, outside SLURM without."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}

    def make(job: str | None) -> LeaderNode:
        for name in TASK:
            monkeypatch.delenv(name, raising=False)
        for name, value in {**TASK, **ALONE, "SLURM_JOB_ID": job}.items():
            if job is not None and value is not None:
                monkeypatch.setenv(name, value)
        monkeypatch.setenv("PATH", str(tmp_path))
        words = ["--nproc-per-node", "1", "--", "pretrain_gpt.py", "--run-dir", str(tmp_path)]
        return LeaderNode(read_options(words))

    yield make
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_second_start_touches_nothing_of_a_living_run(tmp_path: Path, leader: Any) -> None:
    with Lock(tmp_path, flag="--run-dir", launch="4.0.0"):
        for name in (STOP_FILE, Path("control/next.json"), Path("control/nodes/1.json")):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("theirs")
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises(UsageError, match=r"is being written by process .*launch 4\.0\.0"):
            leader("5").run_job()
        assert before == {path: path.read_bytes() for path in before}
    assert not (tmp_path / LOCK_FILE).exists()


@pytest.mark.parametrize(("job", "is_kept"), [("5", True), (None, False)])
def test_a_signal_to_the_batch_script_before_the_leader_is_honoured(
    tmp_path: Path, leader: Any, monkeypatch: pytest.MonkeyPatch, job: str | None, is_kept: bool
) -> None:
    monkeypatch.setenv(SIGNAL_LEAD, "900")
    write_stop(tmp_path, TIME_LIMIT)
    made = leader(job)
    seen: list[bool] = []

    def note() -> list[int]:
        seen.append((tmp_path / STOP_FILE).exists())
        write_stop(tmp_path, TIME_LIMIT)  # no ranks in this test
        return []

    made._wait_for_nodes = note
    assert made.run_job() == AGAIN and seen == [is_kept]


@pytest.mark.parametrize(
    ("holder", "age_s", "left"),
    [(None, 0, None), ("4.0.0", 0, ""), ("4.0.0", 300, None), ("5.0.0", 0, None)],
)
def test_the_batch_script_clears_only_what_is_its_own(
    tmp_path: Path, holder: str | None, age_s: int, left: str | None
) -> None:
    run, stop, lock = tmp_path / "run", tmp_path / "run" / STOP_FILE, tmp_path / "run" / LOCK_FILE
    stop.parent.mkdir(parents=True)
    stop.touch()
    if holder is not None:
        lock.write_text(json.dumps({"launch": holder}))
        at = lock.stat().st_mtime - age_s
        os.utime(lock, (at, at))
    found, end = tmp_path / "found", tmp_path / "end"
    programs = {
        "srun": f"cp {stop} {found}; kill -USR1 $PPID; sleep 0.2; cp {stop} {end}",
        "python": "exit 1",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "COPUS_ROOT": str(ROOT), "SLURM_JOB_ID": "5"}
    env |= {"COPUS_USE_PYTHON": str(tmp_path / "python"), "COPUS_RUN": str(run)}
    command = ["bash", ROOT / "scripts/slurm/pretrain.sbatch", "--train-iters", "1"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (found.read_text() if found.exists() else None) == left, done.stderr
    assert end.read_text() == ("time limit\n" if left is None else left)
