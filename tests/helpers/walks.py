"""Ways through layouts."""

from __future__ import annotations

from typing import Any


def walk(layouts: list[Any]) -> list[Any]:
    """A closed walk over every ordered pair once."""
    left = {a: [b for b in layouts if b != a] for a in layouts}
    stack, path = [layouts[0]], []
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            path.append(stack.pop())
    return path[::-1]
