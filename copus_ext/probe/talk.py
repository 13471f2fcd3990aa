"""What the two ends of a link say to each other while it is timed, within a budget of seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

MORE_OF_THE_SMALLEST = 8
"""Times as many repeats of the smallest message: they cost nothing and scatter most."""


class Wire(Protocol):
    """One end of a link. Every call returns when the message is through."""

    def send(self, num_bytes: int) -> None:
        """Sends a message of some size, content of no meaning."""
        ...

    def receive(self, num_bytes: int) -> None:
        """Waits for one of that size."""
        ...

    def order(self, num_bytes: int, count: int) -> None:
        """Tells the other end what comes next."""
        ...

    def next_order(self) -> tuple[int, int]:
        """Waits for that: size and number of messages; 0 messages are the end."""
        ...


def lead(
    wire: Wire,
    sizes: Sequence[int],
    *,
    repeats: int,
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, list[float]]:
    """Times messages to the other end, which runs `follow`, and its answers of the smallest size.

    Every size has one message that is not timed. A size whose first message would outlast the
    budget is left out with all that are larger, but for the first two: a slow link is timed with
    fewer and smaller messages.

    Args:
        wire: to the other end.
        sizes: of the messages, growing; two or more.
        repeats: messages of each size.
        budget_s: seconds for all of it.
        clock: seconds.

    Returns:
        Seconds of every round trip by size.
    """
    began = clock()
    trips: dict[int, list[float]] = {}
    for size in sizes:
        if len(trips) >= 2 and _expected(trips, size) > budget_s - (clock() - began):
            break
        (first,) = _trips(wire, size, 1, sizes[0], clock)
        left = budget_s - (clock() - began)
        wanted = repeats if trips else repeats * MORE_OF_THE_SMALLEST
        count = min(wanted, int(left / first)) if first > 0 else wanted
        trips[size] = _trips(wire, size, count, sizes[0], clock) if count > 0 else [first]
    wire.order(0, 0)
    return trips


def follow(wire: Wire, answer_bytes: int) -> None:
    """The other end of `lead`: answers every message with one of `answer_bytes`."""
    while True:
        size, count = wire.next_order()
        if not count:
            return
        for _ in range(count):
            wire.receive(size)
            wire.send(answer_bytes)


def _trips(
    wire: Wire, size: int, count: int, answer_bytes: int, clock: Callable[[], float]
) -> list[float]:
    wire.order(size, count)
    seconds = []
    for _ in range(count):
        began = clock()
        wire.send(size)
        wire.receive(answer_bytes)
        seconds.append(clock() - began)
    return seconds


def _expected(trips: dict[int, list[float]], size: int) -> float:
    """Seconds of a message of another size; no more than it will take on a link without tricks."""
    smallest, largest = min(trips), max(trips)
    least = median(trips[smallest])
    grown = max(median(trips[largest]) - least, 0.0)
    return least + grown * (size - smallest) / (largest - smallest)
