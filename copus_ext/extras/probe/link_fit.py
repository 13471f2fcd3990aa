"""Latency and bandwidth of a link, fitted to the times of messages of several sizes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

_LARGEST_BYTES, _LONGEST_S = 1 << 53, 1e6
ROBUST_SCALE = 0.1
"""Relative error above which a size counts by its distance and not by its square: a network sends
messages of some sizes in another way, or lets some through before it holds them back."""
_MIN_SHARE = 0.1
"""Of the time of the largest message, what its bytes take at the least."""
_BURST = 4.0
"""Where the largest message takes so much longer than the others let expect, a limited link let
those through at once, and the time of the largest counts."""
_MIN_DUPLEX = 0.25
"""Two directions that share everything leave a half to each; less is a disturbed timing."""
_TRUST_LAST = 0.8
"""Then the bandwidth is at most that between the two largest sizes over this."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    num_bytes: tuple[int, ...]
    """[sizes] of the messages, growing."""
    seconds: tuple[float, ...]
    """[sizes] one way, the median of repeats."""
    both_ways: tuple[int, float] | None = None
    """Size of a message, and seconds until one each way was through; None: not timed."""

    def __post_init__(self) -> None:
        sizes, seconds = self.num_bytes, self.seconds
        if len(sizes) != len(seconds) or len(sizes) < 2 or sizes[0] < 1:
            raise ValueError(f"{len(sizes)} sizes and {len(seconds)} times: give 2 or more of each")
        if any(b <= a for a, b in itertools.pairwise(sizes)):
            raise ValueError(f"sizes {list(sizes)} do not grow")
        if not all(math.isfinite(s) and s > 0 for s in seconds):
            raise ValueError(f"times {list(seconds)} are not all positive")
        if self.both_ways is not None and not (self.both_ways[0] >= 1 and self.both_ways[1] > 0):
            raise ValueError(f"both_ways {self.both_ways} is not positive")

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Timed:
        """Reads what `to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is not that.
        """
        sizes, seconds = data["num_bytes"], data["seconds"]
        both = data.get("both_ways")
        if both is not None and len(both) != 2:
            raise ValueError("both_ways is not a size and time")
        size, time_s = ([], []) if both is None else ([both[0]], [both[1]])
        if not all(type(n) is int and n < _LARGEST_BYTES for n in [*sizes, *size]):
            raise TypeError("sizes are whole numbers")
        if not all(type(s) in (int, float) and s < _LONGEST_S for s in [*seconds, *time_s]):
            raise TypeError("times are numbers of seconds")
        return cls(
            num_bytes=tuple(sizes),
            seconds=tuple(float(s) for s in seconds),
            both_ways=None if both is None else (int(both[0]), float(both[1])),
        )

    def to_json(self) -> dict[str, Any]:
        timed = {"num_bytes": list(self.num_bytes), "seconds": list(self.seconds)}
        return timed if self.both_ways is None else {**timed, "both_ways": list(self.both_ways)}

    @property
    def latency_s(self) -> float:
        return self.seconds[0]

    @functools.cached_property
    def bytes_per_s(self) -> float:
        return fit_line(self.num_bytes, self.seconds)[1]


def least(one: Timed, other: Timed) -> Timed:
    """The least times of two measurements of a direction, size by size; the larger sizes of the one
    that has more."""
    few, more = sorted((one, other), key=lambda timed: len(timed.num_bytes))
    both = [timed.both_ways for timed in (one, other) if timed.both_ways is not None]
    seconds = [min(pair) for pair in zip(few.seconds, more.seconds)]
    return Timed(
        num_bytes=more.num_bytes,
        seconds=(*seconds, *more.seconds[len(seconds) :]),
        both_ways=min(both, key=lambda timed: (-timed[0], timed[1]), default=None),
    )


def fit_line(num_bytes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Fits alpha + bytes / beta in logarithms, robust against sizes that lie off the line.

    Args:
        num_bytes: [n] of the messages, growing; two or more.
        seconds: [n] they took.

    Returns:
        alpha in seconds and beta in bytes per second. Times that do not grow with the size bound
        beta from below only; it is then ten times that bound.
    """
    from scipy.optimize import least_squares

    sizes, measured = np.asarray(num_bytes, dtype=float), np.asarray(seconds, dtype=float)
    # In units of the largest message, so that both numbers are of the size of 1.
    x, y = sizes / sizes[-1], measured / measured[-1]
    last, before = (y[-1] - y[-2]) / (x[-1] - x[-2]), (y[-2] - y[0]) / max(x[-2] - x[0], 1e-12)
    is_burst = len(x) > 2 and last > _BURST * max(before, 0.0) and last > _MIN_SHARE
    least = min(max(_TRUST_LAST * last, _MIN_SHARE), 1.0) if is_burst else _MIN_SHARE
    slope = min(max((y[-1] - y[0]) / (1 - x[0]), least), 1.0)
    start = np.log([max(y[0] - slope * x[0], 1e-9), slope])

    def off(logs: np.ndarray) -> np.ndarray:
        alpha, one = np.exp(logs)
        return np.log(alpha + one * x) - np.log(y)

    found = least_squares(
        off,
        start,
        bounds=([math.log(1e-12), math.log(least) - 1e-9], [math.log(1e6), math.log(1e6)]),
        loss="soft_l1",
        f_scale=ROBUST_SCALE,
        xtol=1e-12,
        ftol=1e-12,
        gtol=1e-12,
    )
    alpha, one = np.exp(found.x)
    return float(alpha * measured[-1]), float(sizes[-1] / (one * measured[-1]))


def one_way(
    round_trips: dict[int, list[float]], both_ways: tuple[int, float] | None = None
) -> Timed:
    """Times of one direction, from those of messages that the other side answers with the smallest.

    Args:
        round_trips: seconds of every repeat by size of the message; the smallest size is also that
            of the answers.
        both_ways: a size, and the seconds that such messages take in both directions at once.

    Returns:
        Half of the smallest round trip is its way; that is taken off the others. A difference of
        the ways of empty messages cannot be seen without a common clock.
    """
    sizes = sorted(round_trips)
    middle = [median(round_trips[size]) for size in sizes]
    back = middle[0] / 2
    # Noise may make a trip shorter than the answer alone.
    seconds = [back, *(max(trip - back, trip / 2) for trip in middle[1:])]
    return Timed(num_bytes=tuple(sizes), seconds=tuple(seconds), both_ways=both_ways)


def duplex(there: Timed, back: Timed) -> float | None:
    """Share of the bandwidth of a link that is left while as much is sent the other way; None: not
    timed. Both messages are through when the slower direction's is, so that one counts."""
    if there.both_ways is None:
        return None
    size, seconds = there.both_ways
    alone = max(one.latency_s + size / one.bytes_per_s for one in (there, back))
    return min(max(alone / seconds, _MIN_DUPLEX), 1.0)
