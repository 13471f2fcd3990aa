"""Finds slow ranks, in a job where every step takes as long as the slowest rank.

The wall time of a step is the same on all ranks. A rank's own part differs: it reads data and runs
its forward and backward passes until it waits for the gradients of the other replicas. Ranks of one
replica wait for each other on the way, so a slow rank makes its whole replica look slow. With one
replica nothing shows.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from megatron.trainer.common.trace import Trace

WINDOW = 100
"""Steps per mean."""
LIMIT = 1.5
"""A rank is slow from this multiple of the median on."""


class StepClock:
    """Times this rank's own part of a step; on a GPU by its own events, without waiting."""

    def __init__(self, *, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._marks: list[Any] = []
        self._trace = Trace()

    def start(self, trace: Trace) -> None:
        """The step begins.

        Args:
            trace: gets the reduction that ends the rank's own part as a span.
        """
        self._marks = [self._mark()]
        self._trace = trace

    def stopped_by(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        """The function that reduces gradients, which ends the rank's own part."""

        @functools.wraps(reduce)
        def run(*args: Any, **kwargs: Any) -> Any:
            if len(self._marks) == 1:
                self._marks.append(self._mark())
            with self._trace.span("reduce"):
                return reduce(*args, **kwargs)

        return run

    def own_s(self) -> float:
        """Seconds from start to reduce, 0 if there was none. On a GPU its kernels must be done."""
        if len(self._marks) < 2:
            return 0.0
        start, end = self._marks
        return start.elapsed_time(end) / 1000.0 if self._is_cuda else end - start

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class RankTimes:
    """Adds up the time that ranks need for their own part."""

    def __init__(self) -> None:
        self._total: torch.Tensor | None = None
        self._steps = 0

    def add(self, own_s: torch.Tensor) -> None:
        """Adds one step.

        Args:
            own_s: [world size], seconds.
        """
        self._total = own_s.clone() if self._total is None else self._total + own_s
        self._steps += 1

    def slow(self) -> str | None:
        """Once in `WINDOW` steps names the ranks that were slow in them, if any."""
        if self._total is None or self._steps < WINDOW:
            return None
        means = (self._total / self._steps).tolist()
        self._total, self._steps = None, 0
        return slow_ranks(means)


def slow_ranks(means_s: list[float]) -> str | None:
    """One line about ranks that take `LIMIT` times as long as the median rank, or None.

    Args:
        means_s: mean seconds by rank.
    """
    median = sorted(means_s)[(len(means_s) - 1) // 2]
    slow = {rank: s for rank, s in enumerate(means_s) if s > LIMIT * median > 0}
    if not slow:
        return None
    worst = sorted(slow, key=lambda rank: -slow[rank])[:8]
    told = ", ".join(f"{rank} ({1000 * slow[rank]:.0f} ms)" for rank in worst)
    more = f" and {len(slow) - len(worst)} more" if len(slow) > len(worst) else ""
    return (
        f"slow over {WINDOW} steps: rank {told}{more}, where the median is {1000 * median:.0f} ms "
        "for data, forward and backward of a step"
    )
