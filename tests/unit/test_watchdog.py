"""A rank without progress writes its stacks and leaves in the end; one that works does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.training.control import HEARTBEATS, STACKS
from megatron.training.errors import UsageError
from megatron.training.lock import process_start
from megatron.training.watchdog import EXIT_CODE, Limits, Watchdog

HANG = """
import subprocess, sys, time
from pathlib import Path
from megatron.training.watchdog import Limits, Watchdog
def stuck():
    time.sleep(1000)
notes = lambda kind, **fields: print(kind, fields[kind], flush=True)
limits = Limits(stall_s=0.3, exit_s=1.0)
with Watchdog(Path(sys.argv[1]), launch="job.0.0", rank=3, limits=limits, note=notes) as dog:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    print(child.pid, flush=True)
    dog.step(17, 0.01)
    stuck()
"""


def test_a_rank_that_hangs_leaves_its_stacks_and_86(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANG, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == EXIT_CODE == 86
    lines = done.stderr.splitlines()
    assert len(lines) == 2 and all("rank 3, after step 17 (training)" in line for line in lines)
    stacks = tmp_path / STACKS / "job.0.0.3.txt"
    assert str(stacks) in lines[0] and "86" in lines[1]
    assert stacks.read_text().count("in stuck\n") == 2
    child, *told = done.stdout.splitlines()
    assert told == ["alert no progress", "fault no progress"]
    deadline = time.monotonic() + 30
    while process_start(int(child)) is not None:
        assert time.monotonic() < deadline, "it takes its children along"
        time.sleep(0.01)


def watch(tmp_path: Path, told: list[str], **limits: float) -> Watchdog:
    def note(kind: str, **fields: Any) -> None:
        told.append(kind)

    return Watchdog(tmp_path, launch="l", limits=Limits(**limits), note=note)


def test_progress_of_any_kind_keeps_it_quiet(tmp_path: Path) -> None:
    told: list[str] = []
    with watch(tmp_path, told, stall_s=0.5, exit_s=0.5) as dog:
        dog.step(1, 0.001)
        begin = time.monotonic()
        while time.monotonic() - begin < 1.2:
            dog.beat()
            time.sleep(0.02)
        heartbeat = (tmp_path / HEARTBEATS / "0").read_text()
    assert told == [] and not (tmp_path / STACKS).exists()
    assert f'"pid": {os.getpid()}' in heartbeat and '"iteration": 1' in heartbeat
    assert not (tmp_path / HEARTBEATS).exists(), "it goes with the watchdog"


def test_long_phases_and_the_time_before_the_first_step_end_nothing(tmp_path: Path) -> None:
    dog = watch(tmp_path, [], stall_s=60, exit_s=600)
    assert dog.limits_now() == (600, None)
    dog.step(1, 2.0)
    assert dog.limits_now() == (60, 600)
    with dog.phase("evaluating"):
        assert dog.limits_now() == (60, 600)
        with dog.phase("saving", patient=True), dog.phase("more"):
            assert dog.limits_now() == (600, None)
    for seconds in (100.0, 100.0, 1.0):
        dog.step(2, seconds)
    assert dog.limits_now() == (10 * 51.0, 600), "ten steps, by the median"
    for _ in range(10):
        dog.step(3, 100.0)
    assert dog.limits_now() == (1000, 1000), "a slow step is no hang"
    dog.forget_pace()
    assert dog.limits_now() == (600, None)


def test_a_process_that_was_stopped_and_goes_on_has_not_hung(tmp_path: Path) -> None:
    code = HANG.replace("stall_s=0.3, exit_s=1.0", "stall_s=2, exit_s=2").replace(
        "    stuck()", "    print('on', flush=True)\n    sys.stdin.readline()\n    child.kill()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    while child.stdout.readline() != "on\n":
        pass
    time.sleep(0.5)  # it has looked at least once
    child.send_signal(signal.SIGSTOP)
    time.sleep(3)
    child.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    _, errors = child.communicate("\n", timeout=60)
    assert child.returncode == 0 and errors == "" and not (tmp_path / STACKS).exists()


def test_a_file_system_that_hangs_does_not_keep_it_from_leaving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.training import watchdog

    codes: list[int] = []
    left = threading.Event()

    def leave(code: int) -> None:
        codes.append(code)
        left.set()
        dog._ended.set()

    monkeypatch.setattr(watchdog, "_LAST_WORDS_S", 0.1)
    monkeypatch.setattr(watchdog, "leave_at_once", leave)
    blocked = threading.Event()

    def note(kind: str, **fields: Any) -> None:
        blocked.wait(20)

    dog = Watchdog(tmp_path, limits=Limits(stall_s=0.1, exit_s=0.2), note=note)
    with dog:
        dog.step(1, 0.001)
        assert left.wait(20)
        blocked.set()
    assert codes == [86]


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        (None, (60, 570)),
        ("5", (5, 570)),
        ("3:9", (3, 9)),
        ("0", (0, 570)),
    ],
)
def test_the_environment_sets_the_limits(text: str | None, limits: tuple[float, float]) -> None:
    env = {} if text is None else {"COPUS_WATCHDOG_S": text}
    found = Limits.of(env, timeout_minutes=10)
    assert (found.stall_s, found.exit_s) == limits


@pytest.mark.parametrize("text", ["soon", "1:2:3", "-1", "nan", "5:inf"])
def test_limits_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="COPUS_WATCHDOG_S"):
        Limits.of({"COPUS_WATCHDOG_S": text}, timeout_minutes=10)
