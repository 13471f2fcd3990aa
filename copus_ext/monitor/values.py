"""Values that anybody may have written, taken if they are of the right kind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

FOREIGN = (TypeError, KeyError, ValueError, AttributeError, IndexError, ArithmeticError)
"""Errors of reading a value of another kind."""
LINE = 300
"""Characters of a text on a screen."""
_MAX_TEXT = 2000
_ENDLESS = 1e300
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def number(value: Any) -> float | None:
    """The value, unchanged, if it is a finite number."""
    known = measured(value)
    return known if known is not None and abs(known) < _ENDLESS else None


def measured(value: Any) -> float | None:
    """The value, unchanged, if it is a number; NaN and infinities count, also as the record writes
    them. A whole number beyond all bounds is none."""
    if isinstance(value, str):
        return _NON_FINITE.get(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) < _ENDLESS or isinstance(value, float) else None


def whole(value: Any) -> int | None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and abs(value) < _ENDLESS else None


def text(value: Any, most: int = _MAX_TEXT) -> str:
    """The value as one short line without control characters; empty for None."""
    if value is None:
        return ""
    shown = value if isinstance(value, str) else str(value)
    # A lone surrogate is legal JSON and cannot be written to a file.
    shown = shown[: most + 1].encode(errors="replace").decode()
    shown = " ".join(shown.split())
    if not shown.isprintable():
        shown = "".join(c for c in shown if c.isprintable())
    return shown if len(shown) <= most else shown[:most] + "..."


def table(value: Any) -> dict[str, Any]:
    """The value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def rows(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def seconds_of(date: Any) -> float | None:
    """Seconds since the epoch of an ISO date; None if it is none."""
    try:
        return datetime.fromisoformat(date).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def written(record: Mapping[str, Any]) -> float | None:
    """When a record was written, seconds since the epoch; None if it does not say."""
    t = number(record.get("t"))
    return seconds_of(record.get("time")) if t is None else t
