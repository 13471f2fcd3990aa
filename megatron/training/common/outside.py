"""JSON that anybody may have written: from a socket, or from a file that may be damaged."""

from __future__ import annotations

import json
from typing import Any

MAX_NESTING = 100
"""Objects and lists inside one another. What is deeper makes a parser, or whatever copies, prints
or stores the value later, fail with RecursionError."""


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: one line. It is no JSON, bytes are no text, a number has too many digits, or
            the value is nested deeper than `MAX_NESTING`.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    brackets = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    # Counted first, which is cheap: most texts have too few to be deep.
    if sum(map(text.count, brackets)) > MAX_NESTING and _is_deep(value):  # pyright: ignore[reportArgumentType]
        raise ValueError("it is nested too deeply")
    return value


def _is_deep(value: Any) -> bool:
    """Whether a value is nested deeper than `MAX_NESTING`; goes down by one level at a time."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        level = [
            child
            for one in level
            if isinstance(one, (dict, list))
            for child in (one.values() if isinstance(one, dict) else one)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True
