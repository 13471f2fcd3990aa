"""Fewer points of long series that look the same in a picture. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

Column = Sequence[float | None]


def downsample(columns: Sequence[Column], most: int) -> list[int]:
    """Indices to keep of columns of one length: the first; of each of equal stretches the last; and
    of each column there the smallest value, the largest and the first gap.

    Args:
        columns: None is a gap.
        most: about how many to keep; all if there are no more.
    """
    length = len(columns[0]) if columns else 0
    if length <= most:
        return list(range(length))
    num = max(most // (2 * len(columns) + 1), 1)
    chosen = {0}
    for k in range(num):
        begin, end = k * length // num, (k + 1) * length // num
        chosen.add(end - 1)
        for column in columns:
            known = [i for i in range(begin, end) if column[i] is not None]
            if len(known) < end - begin:
                chosen.add(next(i for i in range(begin, end) if column[i] is None))
            if known:
                chosen.add(min(known, key=column.__getitem__))  # type: ignore[arg-type]
                chosen.add(max(known, key=column.__getitem__))  # type: ignore[arg-type]
    return sorted(chosen)


def changes(column: Sequence[object]) -> list[int]:
    """Indices at which a value differs from the one before; and the first and the last."""
    if not column:
        return []
    turns = [i for i in range(1, len(column)) if column[i] != column[i - 1]]
    return sorted({0, *turns, len(column) - 1})


def running_mean(values: Column, window: int) -> list[float | None]:
    """Mean of the last values up to each, gaps left out; None where all are gaps."""
    recent: deque[float | None] = deque(maxlen=window)
    result: list[float | None] = []
    for value in values:
        recent.append(value)
        # Summed anew each time: one enormous value leaves no trace behind it.
        known = [x for x in recent if x is not None]
        result.append(math.fsum(known) / len(known) if known else None)
    return result


def running_rate(amounts: Column, seconds: Column, window: int) -> list[float | None]:
    """Sum of the last amounts over the sum of their seconds; gaps left out."""
    both = [
        (a, s) if a is not None and s is not None and s > 0 else (None, None)
        for a, s in zip(amounts, seconds)
    ]
    tops = running_mean([a for a, _ in both], window)
    lows = running_mean([s for _, s in both], window)
    return [a / s if a is not None and s else None for a, s in zip(tops, lows)]
