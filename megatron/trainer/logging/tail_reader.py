"""JSON-lines files that may be large, may still grow, and may have been written by anybody."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.trainer.common.plain_file import open_plain
from megatron.trainer.logging.metrics import decode

_MAX_BYTES = 1 << 20
_LONGEST_LINE = 1 << 26


class Tail:
    """The new lines of a growing file. A file that was replaced or cut is read from its beginning.

    Args:
        path: need not be there yet.
        max_bytes: how far before the end to begin, and how much to take in at once; None reads
            everything from the beginning.
    """

    def __init__(self, path: Path, *, max_bytes: int | None = _MAX_BYTES) -> None:
        self.path, self._max_bytes = path, max_bytes
        self._at: int | None = None if max_bytes else 0
        self._inode = -1
        self.is_whole = True
        """Whether reading began at the beginning of the file."""
        self.begun_at = 0
        """Offset of the first line that was read. Unless `is_whole`, it may lack its beginning."""

    def is_replaced(self) -> bool:
        """Whether what was read is no longer the beginning of the file."""
        if not self._at:
            return False
        try:
            status = self.path.lstat()
        except OSError:
            return True
        return status.st_size < self._at or status.st_ino != self._inode

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """What came since the last call: the offset of each line and the line. An unfinished last
        line is left for the next call.

        Raises:
            OSError: the file is there and cannot be read.
        """
        if self.is_replaced():
            self._at, self.is_whole, self.begun_at = 0, True, 0
        try:
            file = open_plain(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return
        longest = self._max_bytes or _LONGEST_LINE
        with file:
            status = os.fstat(file.fileno())
            self._inode = status.st_ino
            if self._at is None:
                self._at = max(status.st_size - longest, 0)
                self.is_whole, self.begun_at = self._at == 0, self._at
            until = self._at + longest if self._max_bytes else math.inf
            file.seek(self._at)
            while self._at < until and (line := file.readline(longest)):
                if not line.endswith(b"\n") and len(line) < longest:
                    return
                begin = self._at
                self._at += len(line)
                yield begin, line

    def records(self) -> Iterator[dict[str, Any]]:
        """The records on the new lines. Torn lines, what is not an object, and a file that cannot
        be read are passed over."""
        with contextlib.suppress(OSError):
            for _, line in self.lines():
                record = decode(line.decode(errors="replace"))
                if record is not None:
                    yield record

    def line_at(self, offset: int) -> bytes:
        """The line that begins at an offset; empty if it is no longer there."""
        try:
            with open_plain(self.path) as file:
                file.seek(offset)
                return file.readline(_LONGEST_LINE)
        except OSError:
            return b""


def last_lines(path: Path, max_bytes: int) -> Iterator[bytes]:
    """The lines among the last bytes of a file, undecoded, for those who need few of them; none if
    it cannot be read. The first may lack its beginning."""
    with contextlib.suppress(OSError):
        for _, line in Tail(path, max_bytes=max_bytes).lines():
            yield line
