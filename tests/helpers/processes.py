"""Finding and ending every process of a test by a mark in its environment.

As a program it is the guard of one session: `python processes.py PID SESSION` waits until that
process is gone, in whatever way it ends, and then ends what bears the mark of the session.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

MARK = "COPUS_TEST_MARK"
"""Environment variable; its value is one launch, and children of children inherit it."""
SESSION = "COPUS_TEST_SESSION"
"""The same for all that a test process starts."""
_guards: list[subprocess.Popen[bytes]] = []


def guard_session() -> None:
    """Marks what this process starts from now on, and has all of it killed when this process is
    gone, even by SIGKILL. Supervisors, for one, would start ranks again for ever.

    A process that was started by a guarded one does nothing.
    """
    if SESSION in os.environ or sys.platform != "linux":
        return
    session = uuid.uuid4().hex
    command = [sys.executable, "-S", __file__, str(os.getpid()), session]
    quiet = subprocess.DEVNULL
    _guards.append(
        subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    )
    os.environ[SESSION] = session


def marked(mark: str, *, name: str = MARK) -> list[int]:
    """Returns the ids of live processes that bear the mark; zombies and the caller are left out."""
    wanted = f"{name}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        # A process may end, or belong to someone else, between the listing and the reading.
        with contextlib.suppress(OSError, IndexError):
            if wanted not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX":
                found.append(int(entry.name))
    return sorted(found)


def wait_until(condition: Callable[[], object], timeout_s: float, *, poll_s: float = 0.02) -> bool:
    """Polls; whether it came true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True


def end_marked(mark: str, *, name: str = MARK, timeout_s: float = 10.0) -> list[int]:
    """Kills every marked process and waits until none is left.

    Returns:
        Ids that outlived the time-out.
    """
    deadline = time.monotonic() + timeout_s
    # A dying parent may have started one more child between two looks.
    while (left := marked(mark, name=name)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return left


def main() -> None:
    """Guards one session."""
    # Gone already, if it cannot be found.
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(int(sys.argv[1]))], [], [])
    end_marked(sys.argv[2], name=SESSION)


if __name__ == "__main__":
    main()
