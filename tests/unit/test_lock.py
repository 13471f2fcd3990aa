"""Two runs never write one directory; a lock whose holder is dead is in nobody's way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron.trainer.common.control import LOCK_FILE
from megatron.trainer.common.errors import UsageError
from megatron.trainer.resilience.lock import Lock, machine, process_start
from tests.helpers.processes import wait_until

HOLD = """
import sys
from pathlib import Path
from megatron.trainer.resilience.lock import Lock
try:
    with Lock(Path(sys.argv[1]), flag="--save", launch=sys.argv[2]):
        print("held", flush=True)
        sys.stdin.readline()
except Exception as error:
    print(error, flush=True)
"""
ELSEWHERE = {"host": "node7", "machine": "another", "pid": 1, "started": "1", "token": "x"}


@contextmanager
def holder(folder: Path, launch: str = "first.0.0") -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock until its input ends, as far as it gets it."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), launch],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def lock(folder: Path, **changes: Any) -> Lock:
    """The lock of this process, with a short temper."""
    values = {"flag": "--save", "launch": "second.0.0", "touch_s": 0.06}
    return Lock(folder, **{**values, **changes})


def leave_lock(folder: Path, *, age_s: float, **changes: Any) -> Path:
    """A lock of another machine, touched so long ago."""
    path = folder / LOCK_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    # Whoever watches the lock sees all of it or nothing.
    whole = path.with_name("lock.whole")
    whole.write_text(json.dumps({**ELSEWHERE, "launch": "other.0.0", **changes}))
    then = time.time() - age_s
    os.utime(whole, (then, then))
    whole.replace(path)
    return path


def test_the_second_is_told_of_the_first_and_may_come_after_it(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        assert said(first) == "held"
        with pytest.raises(UsageError) as refused, lock(tmp_path, force_unlock=True):
            pass
        line = str(refused.value)
        assert "\n" not in line
        for word in (f"--save {tmp_path}", f"process {first.pid}", os.uname().nodename):
            assert word in line
        assert "launch first.0.0" in line and "s ago" in line
        first.communicate("\n")
    assert not (tmp_path / LOCK_FILE).exists()
    with lock(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == [], "nothing is left"


@pytest.mark.parametrize("reap", [True, False], ids=["reaped", "zombie"])
def test_what_a_killed_holder_leaves_is_taken_at_once(tmp_path: Path, reap: bool) -> None:
    with holder(tmp_path) as first:
        assert said(first) == "held"
        os.kill(first.pid, signal.SIGKILL)
        if reap:
            first.wait()
        else:
            while process_start(first.pid) is not None:
                time.sleep(0.01)
        with lock(tmp_path):
            pass


def test_a_process_that_has_got_the_number_since_is_not_the_holder(tmp_path: Path) -> None:
    own = {"machine": machine(), "pid": os.getpid(), "host": os.uname().nodename}
    leave_lock(tmp_path, age_s=0, **own, started="1")
    with lock(tmp_path):
        pass
    leave_lock(tmp_path, age_s=10_000, **own, started=process_start(os.getpid()))
    # However old its last sign of life looks: the process is there.
    with pytest.raises(UsageError, match="end that run"), lock(tmp_path, force_unlock=True):
        pass


@pytest.mark.parametrize("age_s", [3600, -3600], ids=["old", "clock set back"])
def test_a_stale_lock_of_another_machine_is_taken_only_when_told_to(
    tmp_path: Path, age_s: float
) -> None:
    path = leave_lock(tmp_path, age_s=age_s)
    with pytest.raises(UsageError, match=r"on node7.*--force-unlock"), lock(tmp_path):
        pass
    with lock(tmp_path, force_unlock=True):
        assert json.loads(path.read_text())["launch"] == "second.0.0"


def test_a_fresh_lock_of_another_machine_stays(tmp_path: Path) -> None:
    path = leave_lock(tmp_path, age_s=100)
    for changes in ({}, {"is_supervised": True}):
        with pytest.raises(UsageError, match=r"node7.*100 s ago"), lock(tmp_path, **changes):
            pass
    assert json.loads(path.read_text())["host"] == "node7"
    # A supervisor vouches for its own launches alone, and for a job that was queued again.
    path = leave_lock(tmp_path, age_s=100, supervisor="another")
    with pytest.raises(UsageError), lock(tmp_path, is_supervised=True, launch="other.0.1"):
        pass
    with lock(tmp_path, is_supervised=True, launch="other.1.0"):
        pass
    leave_lock(tmp_path, age_s=100)
    with lock(tmp_path, is_supervised=True, launch="other.0.1"):
        pass
    assert not path.exists()


def test_the_lock_of_a_dead_machine_is_waited_for_when_told_to(tmp_path: Path) -> None:
    path = leave_lock(tmp_path, age_s=0)
    with lock(tmp_path, force_unlock=True, stale_s=0.5):
        assert json.loads(path.read_text())["launch"] == "second.0.0"


@pytest.mark.parametrize("age_s", [0, 3600])
def test_a_lock_that_only_looks_stale_is_seen_to_be_touched(tmp_path: Path, age_s: float) -> None:
    path = leave_lock(tmp_path, age_s=age_s)
    toucher = threading.Timer(0.1, os.utime, (path,))
    toucher.start()
    held = lock(tmp_path, force_unlock=True, touch_s=0.2)
    with pytest.raises(UsageError, match="just now"), held:
        pass
    toucher.join()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', "\x00\xff" * 3000])
def test_a_damaged_lock_counts_until_it_is_stale(tmp_path: Path, text: str) -> None:
    path = leave_lock(tmp_path, age_s=0)
    path.write_text(text)
    with pytest.raises(UsageError, match="unknown host"), lock(tmp_path):
        pass
    os.utime(path, (1, 1))
    with lock(tmp_path, force_unlock=True):
        pass


def test_a_lock_that_was_taken_between_look_and_removal_stays(tmp_path: Path) -> None:
    class Overtaken(Lock):
        is_first = True

        def _age_s(self, path: Path) -> float:
            if self.is_first:
                leave_lock(tmp_path, age_s=0, machine=machine(), pid=os.getppid(), token="quick")
                started = process_start(os.getppid())
                path.write_text(path.read_text().replace('"1"', f'"{started}"'))
            self.is_first = False
            return 0.0

    path = leave_lock(tmp_path, age_s=0, machine=machine(), pid=2**22 + 1)
    with (
        pytest.raises(UsageError, match=f"process {os.getppid()} "),
        Overtaken(tmp_path, flag="--save", launch="slow.0.0"),
    ):
        pass
    assert json.loads(path.read_text())["token"] == "quick"
    assert [file.name for file in path.parent.iterdir()] == ["lock"]


@pytest.mark.parametrize("again", range(5))
def test_of_many_that_start_together_one_gets_it(tmp_path: Path, again: int) -> None:
    leave_lock(tmp_path, age_s=0, machine=machine(), pid=2**22 + 1)
    got: list[int] = []
    refused: list[str] = []
    ready, done = threading.Barrier(8), threading.Barrier(8)

    def start(number: int) -> None:
        ready.wait()
        try:
            with lock(tmp_path, launch=f"job{number}.0.0"):
                got.append(number)
                done.wait()
        except UsageError as error:
            refused.append(str(error))
            done.wait()
        except BaseException:
            done.abort()
            raise

    threads = [threading.Thread(target=start, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1 and len(refused) == 7
    assert all(f"launch job{got[0]}.0.0" in line for line in refused)


def test_a_holder_shows_signs_of_life_and_notices_that_it_has_lost(tmp_path: Path) -> None:
    lost: list[str] = []
    path = tmp_path / LOCK_FILE
    with lock(tmp_path, touch_s=0.02, on_lost=lost.append):
        os.utime(path, (1, 1))
        assert wait_until(lambda: path.stat().st_mtime != 1, 30)
        path.unlink()
        assert wait_until(path.exists, 30), "nobody has taken it: it is put back"
        assert not lost
        leave_lock(tmp_path, age_s=0)
        assert wait_until(lambda: lost, 30)
    assert "node7" in lost[0] and "other.0.0" in lost[0]
    assert path.exists(), "the lock of another stays"
