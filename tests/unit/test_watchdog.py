"""A rank without progress writes its stacks and leaves in the end; one that works does not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.trainer.common.control import HEARTBEATS, STACKS
from megatron.trainer.common.errors import UsageError
from megatron.trainer.resilience import watchdog
from megatron.trainer.resilience.lock import process_start
from megatron.trainer.resilience.watchdog import EXIT_CODE, Watchdog, WatchdogLimits
from tests.helpers.processes import wait_until

HANG = """
import subprocess, sys, time
from pathlib import Path
from megatron.trainer.resilience.watchdog import WatchdogLimits, Watchdog
def stuck():
    time.sleep(1000)
notes = lambda kind, **fields: print(kind, fields[kind], flush=True)
limits = WatchdogLimits(stall_s=0.2, exit_s=0.4)
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
    gone = wait_until(lambda: process_start(int(child)) is None, 30)
    assert gone, "it takes its children along"


def watch(tmp_path: Path, told: list[str], **limits: float) -> Watchdog:
    def note(kind: str, **fields: Any) -> None:
        told.append(kind)

    return Watchdog(tmp_path, launch="l", limits=WatchdogLimits(**limits), note=note)


def test_a_rank_that_works_has_a_heartbeat(tmp_path: Path) -> None:
    told: list[str] = []
    path = tmp_path / HEARTBEATS / "0"
    with watch(tmp_path, told, stall_s=0.1, exit_s=600) as dog:
        dog.step(1, 100.0)  # a pace at which nothing stalls here
        deadline = time.monotonic() + 20
        while not (path.exists() and path.read_text()):
            assert time.monotonic() < deadline
            dog.beat()
            time.sleep(0.005)
        heartbeat = path.read_text()
    assert told == [] and not (tmp_path / STACKS).exists()
    assert f'"pid": {os.getpid()}' in heartbeat and '"iteration": 1' in heartbeat
    assert not (tmp_path / HEARTBEATS).exists(), "it goes with the watchdog"


class Looks:
    """Stands in for the event that ends a watchdog and for its clock.

    Args:
        seconds: that pass before each look.
        meanwhile: called before each.
    """

    def __init__(self, seconds: list[float], meanwhile: Callable[[], None]) -> None:
        self.now, self.seconds, self.meanwhile = 0.0, iter(seconds), meanwhile

    def monotonic(self) -> float:
        return self.now

    def wait(self, period_s: float) -> bool:
        self.meanwhile()
        passed = next(self.seconds, None)
        self.now += passed or 0.0
        return passed is None


@pytest.mark.parametrize(
    ("seconds", "beats", "is_told"),
    [
        ([0.05] * 9, False, False),
        ([0.05] * 20, False, True),
        ([0.05] * 200, True, False),
        # It was stopped and goes on, so that it has not hung.
        ([0.05] * 3 + [1000.0] + [0.05] * 3, False, False),
    ],
)
def test_only_time_without_progress_counts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: list[float],
    beats: bool,
    is_told: bool,
) -> None:
    dog = watch(tmp_path, [], stall_s=0.5, exit_s=1e6)
    dog.step(1, 0.001)
    looks = Looks(seconds, dog.beat if beats else lambda: None)
    monkeypatch.setattr(watchdog, "time", looks)
    monkeypatch.setattr(dog, "_ended", looks)
    dog._watch()
    assert dog._to_write.empty() is not is_told


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
    dog.reset_step_times()
    assert dog.limits_now() == (600, None)


def test_a_file_system_that_hangs_does_not_keep_it_from_leaving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    left = threading.Event()

    def leave(code: int) -> None:
        codes.append(code)
        left.set()
        dog._ended.set()

    monkeypatch.setattr(watchdog, "_LAST_WORDS_S", 0.1)
    monkeypatch.setattr(watchdog, "exit_immediately", leave)
    blocked = threading.Event()

    def note(kind: str, **fields: Any) -> None:
        blocked.wait(20)

    dog = Watchdog(tmp_path, limits=WatchdogLimits(stall_s=0.05, exit_s=0.1), note=note)
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
        *((text, None) for text in ("soon", "1:2:3", "-1", "nan", "5:inf")),
    ],
)
def test_the_environment_sets_the_limits(
    text: str | None, limits: tuple[float, float] | None
) -> None:
    env = {} if text is None else {"COPUS_WATCHDOG_S": text}
    if limits is None:
        with pytest.raises(UsageError, match="COPUS_WATCHDOG_S"):
            WatchdogLimits.of(env, timeout_minutes=10)
    else:
        found = WatchdogLimits.of(env, timeout_minutes=10)
        assert (found.stall_s, found.exit_s) == limits
