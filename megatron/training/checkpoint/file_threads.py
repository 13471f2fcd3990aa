"""Writes the files of a checkpoint by threads, and tells when a file system holds one.

A thread cannot be ended while a file system keeps it. It is then given up: it writes nothing more
once it is free, and no save begins before it has ended.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

STALL_S = 60.0
"""Seconds without a further byte after which a write is given up. Servers of files answer within
seconds; after 60 s an NFS client itself asks for the first time whether its server is there."""
STALL_VARIABLE = "COPUS_SAVE_STALL_S"
"""Environment variable with another number of seconds."""
_PIECE_BYTES = 1 << 22
_SYNC_BYTES = 1 << 26
_BUFFER_BYTES = 1 << 16
_END_S = 1.0
_POLL_S = 0.05

_T = TypeVar("_T")
_given_up: list[threading.Thread] = []


class GivenUp(Exception):
    """Ends a thread that nobody waits for any more."""


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


class _GrowingFile(io.FileIO):
    """A file that is written and synchronized in pieces, each of which counts.

    One call for all of it, or for its synchronization, may last minutes on a disk that is slow but
    well.
    """

    def __init__(self, path: Any, count: Callable[[int], None]) -> None:
        super().__init__(path, "w")
        self._count = count
        self._unsynced = 0
        count(0)  # to open it may have taken long

    def write(self, data: Any) -> int:
        """Writes up to one piece; returns how many bytes."""
        self._count(0)
        written = super().write(memoryview(data).cast("B")[:_PIECE_BYTES]) or 0
        self._count(written)
        self._unsynced += written
        if self._unsynced >= _SYNC_BYTES:
            self.sync()
        return written

    def sync(self) -> None:
        """Waits until the disk has what was written; counts as one byte."""
        os.fsync(self.fileno())
        self._unsynced = 0
        self._count(1)


def write_file(
    path: Any, items: Sequence[Any], count: Callable[[int], None]
) -> list[tuple[int, int]]:
    """Writes one file as megatron-core's `write_preloaded_data` does, byte for byte.

    Args:
        path: of the file.
        items: bytes, or tensors on the CPU.
        count: told of the bytes as they are written.

    Returns:
        Of each item where it begins and how long it is.

    Raises:
        OSError, RuntimeError: the file system refuses.
    """
    places = []
    file = _GrowingFile(path, count)
    with io.BufferedWriter(file, _BUFFER_BYTES) as stream:
        for item in items:
            start = stream.tell()
            if isinstance(item, torch.Tensor):
                torch.save(item, stream)
            else:
                stream.write(item)
            places.append((start, stream.tell() - start))
        stream.flush()
        file.sync()
    return places


class FileThreads:
    """Writes files in this process, by one thread each: megatron-core plans as many as its
    strategy's `thread_count`.

    Args:
        files: path and items of each; see `write_file`.
        count: told of a file's number and further bytes.
        anew: files that lie there are left to whoever may still write them, and replaced.
    """

    def __init__(
        self,
        files: Sequence[tuple[Any, Sequence[Any]]],
        *,
        count: Callable[[int, int], None] | None = None,
        anew: bool = False,
    ) -> None:
        self._told = count
        self._anew = anew
        self._counts = [0] * len(files)
        self._is_given_up = threading.Event()
        self._results: dict[int, list[tuple[int, int]]] = {}
        self._error: Exception | None = None
        self._threads = [
            threading.Thread(target=self._write, args=(i, *file), daemon=True, name=f"save {i}")
            for i, file in enumerate(files)
        ]
        try:
            for thread in self._threads:
                _start(thread)
        except OSError:
            self._is_given_up.set()
            raise

    def _write(self, number: int, path: Any, items: Sequence[Any]) -> None:
        try:
            self._count(number, 0)
            if self._anew:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            count = functools.partial(self._count, number)
            self._results[number] = write_file(path, items, count)
        except GivenUp:
            pass
        except Exception as error:  # whatever it is, the save has failed
            self._error = error

    def _count(self, number: int, written: int) -> None:
        if self._is_given_up.is_set():
            raise GivenUp
        self._counts[number] += written
        if self._told is not None:
            self._told(number, written)

    @property
    def written(self) -> int:
        return sum(self._counts)

    def is_done(self, wait_s: float = 0.0) -> bool:
        """Whether all have ended, in whatever way, within so many seconds."""
        deadline = time.monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def outcome(self) -> dict[int, list[tuple[int, int]]] | Exception:
        """By file what `write_file` has returned, or an error; when done."""
        for thread in self._threads:
            thread.join()
        return self._error or self._results

    def end(self) -> None:
        self._is_given_up.set()
        if not self.is_done(_END_S):
            _given_up.extend(thread for thread in self._threads if thread.is_alive())


def _start(thread: threading.Thread) -> None:
    """Starts a thread.

    Raises:
        OSError: the system allows no more.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(f"no thread to write files can be started ({error})") from error


def answer_of(act: Callable[[Callable[[int], None]], _T]) -> _T:
    """Returns what a short act on files does, from a thread of its own.

    Args:
        act: given a function that is told of further bytes; one that lasts must call it.

    Raises:
        TimeoutError: the file system has not answered for too long; the act may still happen.
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
    _start(thread)
    while thread.is_alive():
        thread.join(_POLL_S)
        if thread.is_alive() and stall.is_over(counts[0]):
            _given_up.append(thread)
            raise TimeoutError(f"the file system has not answered for {limit_s:g} s")
    if failed:
        raise failed[0]
    return done[0]


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
