"""The last lines of JSON-lines files that may be large and may still grow."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from megatron.training.logging.metrics import decode

_MOST_BYTES = 1 << 20
_LONGEST_LINE = 1 << 24


def open_plain(path: Path) -> BinaryIO:
    """Opens what anybody may have put there: no link is followed, no pipe waited for.

    Raises:
        OSError: it cannot be read, or is no plain file.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link", str(path)) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is no plain file", str(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


class Tail:
    """The new records of a growing file, so many bytes of them at a time.

    Args:
        path: need not be there yet.
        most_bytes: where to begin before the end, and how much to take in at once.
    """

    def __init__(self, path: Path, *, most_bytes: int = _MOST_BYTES) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._at: int | None = None

    def records(self) -> Iterator[dict[str, Any]]:
        """What came since the last call; torn lines and what is no object are passed over."""
        try:
            with open_plain(self._path) as file:
                size = os.fstat(file.fileno()).st_size
                if self._at is None:
                    self._at = max(size - self._most_bytes, 0)
                elif size < self._at:
                    self._at = 0
                file.seek(self._at)
                data = file.read(self._most_bytes)
        except OSError:
            return
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) == self._most_bytes:
            whole = len(data)
        self._at += whole
        for line in data[:whole].split(b"\n"):
            record = decode(line.decode(errors="replace"))
            if record is not None:
                yield record


def last_lines(path: Path, most_bytes: int) -> Iterator[bytes]:
    """The lines among the last bytes of a file, undecoded, for those who need few of them; none, if
    it cannot be read. The first may lack its beginning."""
    return (line for _, line in placed_lines(path, most_bytes))


def placed_lines(path: Path, most_bytes: int) -> Iterator[tuple[int, bytes]]:
    """The same with the place where each begins."""
    try:
        with open_plain(path) as file:
            size = file.seek(0, os.SEEK_END)
            at = file.seek(max(size - most_bytes, 0))
            while line := file.readline(_LONGEST_LINE):
                yield at, line
                at += len(line)
    except OSError:
        return
