"""What the live page shows: made of the files of a run when these have grown, once for all."""

from __future__ import annotations

import functools
import gzip
import secrets
import threading
import time
from pathlib import Path
from typing import Any

from copus_ext.monitor.page import ReportData, render, script_json

POLL_S = 5.0
"""The page looks so often."""
_REST = 9.0
"""After working for a second the files are left alone for so many: a tenth of one core at most."""


class Body:
    """What is sent.

    Args:
        plain: its bytes.
        level: of compression, 1 to 9.
    """

    def __init__(self, plain: bytes, *, level: int = 4) -> None:
        self.plain, self._level = plain, level

    @functools.cached_property
    def zipped(self) -> bytes:
        """The same, smaller."""
        return gzip.compress(self.plain, self._level)


class Source:
    """The data of the page, read again when there may be news and it is time to.

    Args:
        run: directory of the run, or its journal.

    Raises:
        ValueError: no such run.
    """

    def __init__(self, run: Path) -> None:
        self._book = ReportData([run])
        self._lock = threading.Lock()
        self._not_before = 0.0
        self._payload: dict[str, Any] = {}
        self._data: Body | None = None
        self._page: Body | None = None
        self._number, self._begun = 0, secrets.token_hex(4)

    def data(self) -> tuple[Body, str]:
        """The payload as JSON, and a tag that changes with it.

        Raises:
            OSError: a file cannot be read.
        """
        with self._lock:
            return self._look(), f'"{self._begun}.{self._number}"'

    def page(self) -> Body:
        """The page with the data of now; errors as of `data`."""
        with self._lock:
            self._look()
            if self._page is None:
                started = time.monotonic()
                self._page = Body(render(self._payload, is_served=True).encode())
                self._rest(started)
            return self._page

    def _look(self) -> Body:
        started = time.monotonic()
        if self._data is not None and started < self._not_before:
            return self._data
        if self._book.refresh() or self._data is None:
            self._payload = self._book.payload(poll_s=POLL_S)
            self._data = Body(script_json(self._payload).encode())
            self._page = None
            self._number += 1
        self._rest(started)
        return self._data

    def _rest(self, started: float) -> None:
        now = time.monotonic()
        self._not_before = max(self._not_before, now) + _REST * (now - started)
