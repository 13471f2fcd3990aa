"""The phases of a run under names, for a profiler that may listen."""

from __future__ import annotations

import contextlib
from typing import Any

Span = contextlib.AbstractContextManager[Any]
NO_SPAN: Span = contextlib.nullcontext()


class Trace:
    """Accepts the names of phases and drops them; `logging.profiler` has one that writes them."""

    def span(self, name: str) -> Span:
        """A phase, for as long as it is entered."""
        return NO_SPAN

    def step(self, done: int) -> None:
        """A step is about to start, after so many."""

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, failure: type[BaseException] | None, *exc: object) -> None:
        """No step follows."""
