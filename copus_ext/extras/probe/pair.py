"""The times of messages between two nodes, measured by both ends within a budget of seconds."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

MORE_OF_THE_SMALLEST = 8
"""Times as many repeats of the smallest message: they cost nothing and scatter most."""
EXCHANGES = 3
"""Messages in both directions at once, after a first one."""
DEVICES = {"gloo": "cpu", "nccl": "cuda"}
"""Where the messages of a backend lie."""
_WATCHDOG = 20
"""Times our own limit after which NCCL's watchdog would end the process."""


class Wire:
    """One end of a link: the other process of the default group of two. Every call returns when the
    message is through."""

    def __init__(self, peer: int, *, device: str, max_bytes: int, timeout_s: float) -> None:
        import torch

        self._peer, self._timeout_s = peer, timeout_s
        self._message = torch.zeros(max_bytes, dtype=torch.uint8, device=device)
        self._other = torch.zeros_like(self._message)
        self._order = torch.zeros(2, dtype=torch.int64, device=device)

    def send(self, num_bytes: int) -> None:
        """Sends a message of a size; its content has no meaning."""
        self._do("send", self._message[:num_bytes])

    def receive(self, num_bytes: int) -> None:
        self._do("recv", self._message[:num_bytes])

    def exchange(self, num_bytes: int) -> None:
        """Sends a message of that size while the other end, which does the same, sends one."""
        import torch.distributed as dist

        messages = self._message[:num_bytes], self._other[:num_bytes]
        # The receive goes first: gloo's readiness to receive would wait behind the message that
        # is sent, so that large messages pass one after the other.
        ways = (dist.irecv, messages[1]), (dist.isend, messages[0])
        sent = dist.batch_isend_irecv([dist.P2POp(way, m, self._peer) for way, m in ways])
        for one in sent:
            one.wait()
        self._finish(messages[1])

    def order(self, num_bytes: int, count: int) -> None:
        """Tells the other end the size and the number of the next messages; 0 ends the link."""
        self._order[0], self._order[1] = num_bytes, count
        self._do("send", self._order)

    def next_order(self) -> tuple[int, int]:
        self._do("recv", self._order)
        num_bytes, count = self._order.tolist()
        return num_bytes, count

    def _do(self, what: str, message: torch.Tensor) -> None:
        import torch.distributed as dist

        getattr(dist, what)(message, self._peer)
        self._finish(message)

    def _finish(self, message: torch.Tensor) -> None:
        """gloo waits by itself; NCCL only queues the message on the GPU."""
        import torch

        if message.is_cuda:
            queue, until = torch.cuda.current_stream(), time.monotonic() + self._timeout_s
            while not queue.query():
                if time.monotonic() > until:
                    raise TimeoutError(f"no answer for {self._timeout_s:g} s")


def lead(
    wire: Wire,
    sizes: Sequence[int],
    *,
    repeats: int,
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, list[float]]:
    """Times messages to the other end, which runs `follow`, and its answers of the smallest size.

    The first message of a size is not timed. A size whose first message would exceed the budget
    is left out with all larger ones, except the first two: a slow link gets fewer messages.

    Args:
        sizes: of the messages, growing; two or more.
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


def both_ways(
    wire: Wire,
    trips: dict[int, list[float]],
    *,
    leads: bool,
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[int, float]:
    """Times messages in both directions at once, of the largest size that the budget allows.

    Args:
        wire: to the other end, which calls the same.
        trips: of `lead`.
        leads: whether this end is the first, which chooses the size.
        budget_s: seconds for all of it.
        clock: seconds.

    Returns:
        The size, and the median seconds until both were through.
    """
    if leads:
        cheap = [n for n, some in trips.items() if median(some) * (EXCHANGES + 1) <= budget_s]
        size = max(cheap, default=min(trips))
        wire.order(size, EXCHANGES)
    else:
        size, _ = wire.next_order()
    seconds = []
    for _ in range(EXCHANGES + 1):
        began = clock()
        wire.exchange(size)
        seconds.append(clock() - began)
    return size, median(seconds[1:])


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
    """Seconds of a message of another size, at the least."""
    smallest, largest = min(trips), max(trips)
    least = median(trips[smallest])
    grown = max(median(trips[largest]) - least, 0.0)
    return least + grown * (size - smallest) / (largest - smallest)


def measure(
    store: dist.Store,
    place: int,
    *,
    backend: str,
    gpu: int,
    sizes: Sequence[int],
    repeats: int,
    pair_s: float,
    timeout_s: float,
) -> tuple[dict[int, list[float]], tuple[int, float]]:
    """Times the link to the other process of a pair, which calls the same.

    Args:
        place: 0 or 1; the other process has the other.
        backend: `gloo` or `nccl`.
        gpu: of this process; not used under gloo.
        sizes: bytes of the messages, growing.
        pair_s: seconds for both directions; half as much again for both at once.
        timeout_s: a connection or message that takes longer is an error.

    Returns:
        As of `lead`, of the direction from here; and as of `both_ways`.
    """
    import torch
    import torch.distributed as dist

    if DEVICES[backend] == "cuda":
        torch.cuda.set_device(gpu)
    limit = datetime.timedelta(seconds=timeout_s * (_WATCHDOG if backend == "nccl" else 1))
    dist.init_process_group(backend, store=store, rank=place, world_size=2, timeout=limit)
    trips: dict[int, list[float]] = {}
    both = sizes[0], 0.0
    try:
        wire = Wire(1 - place, device=DEVICES[backend], max_bytes=sizes[-1], timeout_s=timeout_s)
        for leader in (0, 1):
            if leader == place:
                trips = lead(wire, sizes, repeats=repeats, budget_s=pair_s / 2)
            else:
                follow(wire, sizes[0])
        both = both_ways(wire, trips, leads=place == 0, budget_s=pair_s / 2)
    finally:
        dist.destroy_process_group()
    return trips, both
