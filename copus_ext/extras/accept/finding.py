"""What a check is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a check has found."""

    verdict: str
    """`passed`, `failed` or `skipped`."""
    line: str
    """What was found and what is needed; of a check that was skipped, why."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """All that was measured, for the file."""


class Skipped(Exception):
    """A check makes no sense here; the message says why."""


class Failed(Exception):
    """A part that a check needs did not work; the message says how it ended.

    Args:
        line: in one line.
        tail: last lines of what the run printed.
    """

    def __init__(self, line: str, tail: str = "") -> None:
        super().__init__(line)
        self.tail = tail


class OutOfTime(Failed):
    """What a check has started was still running at the end of its time."""


@dataclass(frozen=True)
class Check:
    """A check by name."""

    name: str
    what: str
    """What it shows, in a few words."""
    min_ranks: int
    """Ranks that it needs at least."""
    limit_s: float
    """It fails after so many seconds."""
    run: Callable[[Any], Finding]
    """Called with the `Bench`."""


def judged(holds: bool, line: str, **numbers: Any) -> Finding:
    """A finding that passes if a condition holds."""
    return Finding(verdict="passed" if holds else "failed", line=line, numbers=numbers)


def apart(found: float, wanted: float) -> float:
    """Relative difference of a number from the one that it should be."""
    return abs(found - wanted) / max(abs(wanted), 1e-30)


def most_apart(found: list[float], wanted: list[float]) -> float:
    """The largest relative difference of two series; infinite where their lengths differ."""
    if not wanted or len(found) != len(wanted):
        return float("inf")
    return max(map(apart, found, wanted))
