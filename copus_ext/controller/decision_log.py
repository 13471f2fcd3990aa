"""The journal of a run's decisions: one JSON line each, written before it is obeyed and never
changed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

NAME = "journal.jsonl"
VERSION = 1


class DecisionLog:
    """Appends records to `<run>/journal.jsonl`; a kill loses at most the line being written."""

    def __init__(self, run_dir: Path) -> None:
        """Writes nothing yet."""
        self.path = run_dir / NAME

    def append(self, kind: str, **fields: Any) -> None:
        """Writes a record and waits until it is on disk.

        Args:
            kind: `start`, `decision`, `outcome`, `paused`, `resumed`, `failure` or `end`; of a
                change of layout `switch` and `switch.requested`, `.begin`, `.commit`,
                `.cancelled` or `.abandoned`.
            fields: plain JSON types.

        Raises:
            OSError: it cannot be written.
        """
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        record = {"kind": kind, "version": VERSION, "time": now, **fields}
        text = json.dumps(record, allow_nan=False) + "\n"
        is_cut = self.path.exists() and self.path.stat().st_size > 0 and not _ends_well(self.path)
        with self.path.open("a") as file:
            # A line that a kill cut short ends here, so that it spoils no other.
            file.write("\n" * is_cut + text)
            file.flush()
            os.fsync(file.fileno())


def _ends_well(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a journal, in order; lines that a kill cut short are passed over.

    Raises:
        OSError: it cannot be read.
    """
    with path.open(errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and "kind" in record:
                yield record
