"""Acts on files that end in time, whatever the file system does.

A thread cannot be ended while a file system keeps it. Such an act is given up: whoever asked goes
on without it, and no save begins before the thread has ended.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

STALL_S = 60.0
"""Seconds without a further byte after which a write is given up. Servers of files answer within
seconds; after 60 s an NFS client itself asks for the first time whether its server is there."""
STALL_VARIABLE = "COPUS_SAVE_STALL_S"
"""Environment variable with another number of seconds."""
_POLL_S = 0.05

_T = TypeVar("_T")
_given_up: list[threading.Thread] = []


def stall_s(environment: Mapping[str, str] = os.environ) -> float:
    """Seconds without a further byte after which a write is given up."""
    return float(environment.get(STALL_VARIABLE) or STALL_S)


class Stall:
    """Tells when a count has stood still for too long.

    Two looks that lie far apart count for no more than a quarter of the limit: all processes of
    the run may have been stopped together in between.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._count = -1
        self._still_s = 0.0
        self._looked_s = time.monotonic()

    def is_over(self, count: int) -> bool:
        """Whether the count, which only grows, has been this one for longer than the limit."""
        now = time.monotonic()
        self._still_s += min(now - self._looked_s, self._limit_s / 4)
        self._looked_s = now
        if count != self._count:
            self._count, self._still_s = count, 0.0
        return self._still_s > self._limit_s


class FileSystemStuck(TimeoutError):
    """The file system has not answered for too long; the act may still happen.

    Args:
        thread: in which it may.
        limit_s: how long was waited.
    """

    def __init__(self, thread: threading.Thread, limit_s: float) -> None:
        super().__init__(f"the file system has not answered for {limit_s:g} s")
        self.thread = thread


def start_thread(thread: threading.Thread) -> None:
    """Starts a thread.

    Raises:
        OSError: the system allows no more.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(f"no thread to write files can be started ({error})") from error


def answer_of(act: Callable[[Callable[[int], None]], _T], *, holds_saves: bool = True) -> _T:
    """Returns what a short act on files does, from a thread of its own.

    Args:
        act: given a function that is told of further bytes; one that lasts must call it.
        holds_saves: no save begins while it is still held; see `refuse_while_stuck`.

    Raises:
        FileSystemStuck: the file system has not answered for too long.
        OSError: no thread can be started.
    """
    done: list[_T] = []
    failed: list[BaseException] = []
    counts = [0]

    def count(number: int) -> None:
        counts[0] += number

    def run() -> None:
        try:
            done.append(act(count))
        except BaseException as error:  # it is raised below
            failed.append(error)

    limit_s = stall_s()
    stall = Stall(limit_s)
    thread = threading.Thread(target=run, daemon=True, name="files")
    start_thread(thread)
    while thread.is_alive():
        thread.join(_POLL_S)
        if thread.is_alive() and stall.is_over(counts[0]):
            if holds_saves:
                give_up([thread])
            raise FileSystemStuck(thread, limit_s)
    if failed:
        raise failed[0]
    return done[0]


def give_up(threads: Iterable[threading.Thread]) -> None:
    """Lets no save begin before these threads have ended."""
    _given_up.extend(thread for thread in threads if thread.is_alive())


def refuse_while_stuck(wait_s: float) -> None:
    """Gives threads that were given up so many seconds to end.

    Raises:
        TimeoutError: one has not. It would hold memory, and may write into the next checkpoint.
    """
    deadline = time.monotonic() + wait_s
    for thread in list(_given_up):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            raise TimeoutError("the file system still holds a write of an earlier save")
        _given_up.remove(thread)
