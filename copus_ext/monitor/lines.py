"""JSON lines that may still be written: each record once, with the place where it begins."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from copus_ext.monitor.values import table
from copus_ext.reshard.checked import read_value
from megatron.training.logging.tail_reader import open_plain

_LONGEST_LINE = 1 << 26


class Lines:
    """The records of a growing file.

    Args:
        path: need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at, self._file_number = 0, -1

    def is_another(self) -> bool:
        """Whether what was read is no longer the beginning of the file; the next call of `new`
        starts over then."""
        try:
            status = self.path.lstat()
        except OSError:
            return self._at > 0
        return status.st_size < self._at or (self._at > 0 and status.st_ino != self._file_number)

    def new(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """What came since the last call: where a record begins, and the record. Torn lines and what
        is no object are passed over; an unfinished last line is left for later.

        Raises:
            OSError: it is there and cannot be read.
        """
        if self.is_another():
            self._at = 0
        try:
            file = open_plain(self.path)
        except (FileNotFoundError, NotADirectoryError):  # of a run only the journal is left
            return
        with file:
            self._file_number = os.fstat(file.fileno()).st_ino
            file.seek(self._at)
            while line := file.readline(_LONGEST_LINE):
                begin, record = self._at, record_of(line)
                if record is None and not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
                    return
                self._at += len(line)
                if record is not None:
                    yield begin, record

    def at(self, place: int) -> dict[str, Any]:
        """The record that begins at a place; empty if it is no longer there."""
        try:
            with open_plain(self.path) as file:
                file.seek(place)
                return record_of(file.readline(_LONGEST_LINE)) or {}
        except OSError:
            return {}


def record_of(line: bytes) -> dict[str, Any] | None:
    """The object on a line; None if it is torn or something else."""
    try:
        record = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def small_json(path: Path, most_bytes: int = 1 << 20) -> dict[str, Any]:
    """The object in a small file that anybody may have written; empty if there is none."""
    try:
        return table(read_value(path, lambda value: value, most_bytes=most_bytes))
    except ValueError:
        return {}
