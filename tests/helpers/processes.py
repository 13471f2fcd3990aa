"""Finding and ending every process of a test by a mark in its environment.

As a program it is the guard of one launch: `python processes.py MARK` waits for the end of its
standard input, which comes even when the test process is killed, and then ends what bears the mark.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

MARK = "COPUS_TEST_MARK"
"""Environment variable; its value is one launch, and children of children inherit it."""


def marked(mark: str) -> list[int]:
    """Returns the ids of live processes that bear the mark; zombies and the caller are left out."""
    wanted = f"{MARK}={mark}".encode()
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


def end_marked(mark: str, *, timeout_s: float = 10.0) -> list[int]:
    """Kills every marked process and waits until none is left.

    Returns:
        Ids that outlived the time-out.
    """
    deadline = time.monotonic() + timeout_s
    # A dying parent may have started one more child between two looks.
    while (left := marked(mark)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return left


def main() -> None:
    """Guards one launch."""
    sys.stdin.buffer.read()
    end_marked(sys.argv[1])


if __name__ == "__main__":
    main()
