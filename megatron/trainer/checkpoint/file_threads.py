"""Writes the files of a checkpoint by threads.

One that the file system keeps is given up (`file_limits`), and writes nothing more once it is free.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.trainer.common.file_limits import give_up, start_thread

_PIECE_BYTES = 1 << 22
_SYNC_BYTES = 1 << 26
_BUFFER_BYTES = 1 << 16
_END_S = 1.0


class GivenUp(Exception):
    """Ends a thread that nobody waits for any more."""


class GrowingFile(io.FileIO):
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
        items: bytes, or tensors on the CPU.
        count: told of the bytes as they are written.

    Returns:
        Of each item where it begins and how long it is.

    Raises:
        OSError, RuntimeError: the file system refuses.
    """
    places = []
    file = GrowingFile(path, count)
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
                start_thread(thread)
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
            give_up(self._threads)
