"""Ranks that take longer than the others are named once in a window."""

from __future__ import annotations

import pytest
import torch

from megatron.trainer.common.trace import Trace
from megatron.trainer.distributed.stragglers import WINDOW, RankTimes, StepClock, slow_ranks


@pytest.mark.parametrize(
    ("means", "named"),
    [
        ([1.0, 1.0, 1.4, 1.0], None),
        ([1.0, 1.0, 1.6, 1.0], "rank 2 (1600 ms), where the median is 1000 ms"),
        ([1.0, 1.6], "rank 1 (1600 ms)"),
        ([1.0, 1.0, 3.0, 2.0, 1.0], "rank 2 (3000 ms), 3 (2000 ms)"),
        ([1.0] * 20 + [2.0] * 10, "and 2 more"),
        ([0.0, 0.0, 0.0], None),
        ([7.0], None),
    ],
)
def test_slow_is_half_again_the_median(means: list[float], named: str | None) -> None:
    line = slow_ranks(means)
    assert line is None if named is None else line is not None and named in line


def test_a_window_is_told_once_and_then_begins_anew() -> None:
    times = RankTimes()
    for window in (2.0, 1.0, 9.0):
        for number in range(WINDOW):
            times.add(torch.tensor([1.0, window, 1.0], dtype=torch.float64))
            line = times.slow()
            assert (line is not None) == (number == WINDOW - 1 and window > 1.5)


def test_the_clock_stops_at_the_first_reduce() -> None:
    clock = StepClock(is_cuda=False)
    reduce = clock.stopped_by(lambda value: value + 1)
    assert clock.own_s() == 0.0
    clock.start(Trace())
    assert reduce(1) == 2
    first = clock.own_s()
    assert reduce(2) == 3 and clock.own_s() == first > 0
    clock.start(Trace())
    assert clock.own_s() == 0.0
