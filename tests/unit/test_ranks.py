"""The number of ranks for a price: the rule of a run, and schedules of a known course."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest

from copus_ext.goodput import ranks
from copus_ext.goodput.headroom import Course
from copus_ext.goodput.inputs import ConfigThroughput
from copus_ext.planner.configuration import Configuration
from megatron.training.config.layout import Layout

pytestmark = pytest.mark.unit


def row(n: int, batch: int, speed: float, *, tp: int = 1, sd: float = 0.0) -> ConfigThroughput:
    layout = Layout.from_record((tp, 1, 1, n // tp))
    return ConfigThroughput(
        configuration=Configuration(layout=layout, micro_batch_size=1, global_batch_size=batch),
        samples_per_s=speed,
        relative_sd=sd,
        source="profiled",
    )


def rows_of(numbers: tuple[int, ...] = (2, 4, 8), *, fixed_s: float = 0.5) -> tuple:
    """Steps of a fixed part and one that the ranks share."""
    batches = [2**k for k in range(3, 11)]
    return tuple(
        row(n, b, b / (fixed_s + 0.1 * b / n)) for n in numbers for b in batches if b % n == 0
    )


def growing(intervals: int = 60, low: float = 2.0, high: float = 800.0) -> Course:
    return Course(
        progress=np.full(intervals, 50.0),
        critical_batch_size=np.geomspace(low, high, intervals),
    )


def price_of(
    path: tuple[int, ...], rows: Any, course: Course, cost: float, pause: float
) -> tuple[float, float, float]:
    """Price, seconds and rank-seconds of one configuration for every interval."""
    seconds = rank_s = 0.0
    for k, at in enumerate(path):
        n, b = ranks.ranks_of(rows[at]), rows[at].global_batch_size
        phi = float(course.critical_batch_size[k])
        time_s = float(course.progress[k]) * (1 + b / phi) / rows[at].samples_per_s
        if k and rows[path[k - 1]].layout != rows[at].layout:
            seconds += pause
            rank_s += pause * max(n, ranks.ranks_of(rows[path[k - 1]]))
        seconds, rank_s = seconds + time_s, rank_s + n * time_s
    return rank_s + cost * seconds, seconds, rank_s


@pytest.mark.parametrize("pause", [0.0, 3.0])
@pytest.mark.parametrize("cost", [0.0, 1.5, 20.0])
def test_a_schedule_equals_brute_force(pause: float, cost: float) -> None:
    rng = np.random.default_rng(7)
    for _ in range(6):
        rows = [row(n, b, float(rng.uniform(5, 40) * n**0.7)) for n in (1, 2, 4) for b in (8, 32)]
        course = Course(progress=rng.uniform(20, 90, 4), critical_batch_size=rng.uniform(4, 200, 4))
        found = ranks.schedule(
            rows, course, cost, pause_s=lambda a, b, pause=pause: pause * (a != b)
        )
        every = itertools.product(range(len(rows)), repeat=4)
        least, seconds, rank_s = min(price_of(path, rows, course, cost, pause) for path in every)
        assert found.rank_seconds + cost * found.seconds == pytest.approx(least)
        assert (found.seconds, found.rank_seconds) == pytest.approx((seconds, rank_s))


def test_an_infinite_cost_of_time_is_the_fastest_and_none_the_cheapest() -> None:
    rows, course = rows_of(), growing()
    speeds = ranks.progress_per_s(rows, course.critical_batch_size)
    counts = np.array([ranks.ranks_of(r) for r in rows])
    fastest = ranks.schedule(rows, course, math.inf)
    cheapest = ranks.schedule(rows, course, 0.0)
    assert fastest.seconds == pytest.approx(np.sum(course.progress / speeds.max(axis=1)))
    assert cheapest.rank_seconds == pytest.approx(
        np.sum(course.progress * (counts / speeds).min(axis=1))
    )
    assert ranks.best_row(rows, 50.0, 1e12) == ranks.best_row(rows, 50.0, math.inf)


def test_a_larger_cost_of_time_never_takes_more_time_nor_fewer_rank_hours() -> None:
    rows, course = rows_of(), growing()
    for pause in (0.0, 20.0):
        found = [
            ranks.schedule(rows, course, cost, pause_s=lambda a, b, p=pause: p * (a != b))
            for cost in (0.0, *np.geomspace(0.01, 1e4, 40).tolist(), math.inf)
        ]
        seconds, rank_s = [f.seconds for f in found], [f.rank_seconds for f in found]
        assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(seconds))
        assert all(b >= a * (1 - 1e-12) for a, b in itertools.pairwise(rank_s))
        assert seconds[-1] < 0.9 * seconds[0]


def test_ranks_grow_with_the_critical_batch_size() -> None:
    found = ranks.schedule(rows_of(), growing(), 4.0)
    assert found.ranks == sorted(found.ranks) and len(found.ranks) > 1
    dear = ranks.schedule(rows_of(), growing(), 4.0, pause_s=lambda a, b: 1e4 * (a != b))
    assert len(dear.ranks) == 1


def two_phases() -> tuple[tuple[ConfigThroughput, ...], Course]:
    """Four ranks are no faster than two while the critical batch size is small."""
    rows = (row(2, 8, 10.0), row(4, 8, 10.0), row(2, 1024, 20.0), row(4, 1024, 40.0))
    return rows, Course(
        progress=np.array([100.0, 100.0]), critical_batch_size=np.array([1e-3, 1e12])
    )


def test_equal_time_is_exact_on_a_known_case() -> None:
    rows, course = two_phases()
    first = 100.0 * (1 + 8 / 1e-3) / 10.0
    always = ranks.fixed(rows, course, 4)
    assert always.seconds == pytest.approx(first + 100.0 / 40.0)
    assert always.rank_seconds == pytest.approx(4 * always.seconds)
    found = ranks.at_equal_time(rows, course, always.seconds)
    assert found.schedule.ranks == [2, 4]
    assert found.schedule.seconds == pytest.approx(always.seconds)
    assert found.rank_seconds == pytest.approx(2 * first + 4 * 100.0 / 40.0)
    # Every cost of time above 0 leads there.
    again = ranks.schedule(rows, course, found.cost_of_time)
    assert again.seconds == pytest.approx(always.seconds)


def test_a_time_between_two_schedules_costs_a_mixture_of_them() -> None:
    # The second phase alone: 100 units at 20 or 40 a second, with 2 or 4 ranks.
    rows = (row(2, 8, 20.0), row(4, 8, 30.0))
    many = Course(progress=np.ones(1000), critical_batch_size=np.full(1000, 1e12))
    slow, fast = ranks.fixed(rows, many, 2), ranks.fixed(rows, many, 4)
    found = ranks.at_equal_time(rows, many, (slow.seconds + fast.seconds) / 2)
    assert found.rank_seconds == pytest.approx((slow.rank_seconds + fast.rank_seconds) / 2)
    # Four ranks cost 4 + x for 1/30, two 2 + x for 1/20: the same at x = 2.
    assert found.cost_of_time == pytest.approx(2.0)
    with pytest.raises(ValueError, match="the fastest run takes 33 s, not 30"):
        ranks.at_equal_time(rows, many, 30.0)
    assert ranks.at_equal_time(rows, many, 1e9).schedule.ranks == [2]


def inputs(rows: Any, n: int, *, phi: float | None, **more: Any) -> ranks.RankInputs:
    now = next(r for r in rows if ranks.ranks_of(r) == n)
    known: dict[str, Any] = {"cost_of_time": 4.0, "remaining_s": 1e5, "pause_s": 20.0}
    return ranks.RankInputs(rows=tuple(rows), now=now, critical_batch_size=phi, **{**known, **more})


def test_the_rule_takes_the_least_price_of_progress() -> None:
    rows = rows_of()
    for phi in np.geomspace(2.0, 2000.0, 30).tolist():
        best = ranks.ranks_of(ranks.best_row(rows, phi, 4.0))
        found = ranks.choose_ranks(inputs(rows, 2, phi=phi, pause_s=0.0))
        if found.changes:
            assert ranks.ranks_of(found.to) == best != 2 and found.gain > ranks.MARGIN
        else:
            own = [r for r in rows if ranks.ranks_of(r) == 2]
            prices = [ranks.price(some, phi, 4.0).min() for some in (own, rows)]
            assert prices[0] / prices[1] <= math.exp(ranks.MARGIN)


def test_a_change_must_pay_for_its_pause_and_be_certain() -> None:
    rows = rows_of()
    sure = ranks.choose_ranks(inputs(rows, 2, phi=500.0))
    assert sure.changes and ranks.ranks_of(sure.to) == 8 and "needs" in sure.reason
    late = ranks.choose_ranks(inputs(rows, 2, phi=500.0, remaining_s=15.0))
    assert not late.changes and "pause" in late.reason
    doubtful = tuple(dataclasses.replace(r, relative_sd=0.5) for r in rows)
    unsure = ranks.choose_ranks(inputs(doubtful, 2, phi=500.0))
    assert not unsure.changes and unsure.gain < unsure.needed
    blind = ranks.choose_ranks(inputs(rows, 2, phi=None))
    assert not blind.changes and "not known" in blind.reason
    held = ranks.choose_ranks(inputs(rows, 2, phi=500.0, blocked_reason="cooling down"))
    assert (held.changes, held.reason) == (False, "cooling down")


def test_noise_of_the_critical_batch_size_never_turns_a_change_round() -> None:
    rows, rng, sd = rows_of(), np.random.default_rng(1), 0.15
    for centre in np.geomspace(5.0, 1000.0, 25).tolist():
        now, last, changes = 4, None, []
        for _ in range(200):
            phi = centre * math.exp(sd * float(np.clip(rng.standard_normal(), -2.7, 2.7)))
            found = ranks.choose_ranks(
                inputs(rows, now, phi=phi, pause_s=0.0, last=last, log_noise_variance=sd**2)
            )
            if found.changes:
                after = ranks.ranks_of(found.to)
                last = ranks.RankChange(before=now, after=after, critical_batch_size=phi)
                changes.append(after - now)
                now = after
        assert len({change > 0 for change in changes}) <= 1


def test_a_change_may_turn_round_once_the_critical_batch_size_has_truly_moved() -> None:
    rows = rows_of()
    last = ranks.RankChange(before=2, after=8, critical_batch_size=500.0)
    near = inputs(rows, 8, phi=200.0, last=last, cost_of_time=0.1, log_noise_variance=0.04)
    assert "not 3.0 times smaller" in ranks.choose_ranks(near).reason
    far = dataclasses.replace(near, critical_batch_size=20.0)
    assert ranks.choose_ranks(far).changes
    fewer = ranks.RankChange(before=8, after=2, critical_batch_size=400.0)
    back = inputs(rows, 2, phi=500.0, last=fewer)
    assert "not 4.0 times larger" in ranks.choose_ranks(back).reason


def test_one_number_of_ranks_stays() -> None:
    rows = rows_of((4,))
    found = ranks.choose_ranks(inputs(rows, 4, phi=500.0))
    assert not found.changes and found.to == rows[0]
    course = growing()
    for cost in (0.0, 3.0, math.inf):
        assert ranks.schedule(rows, course, cost) == ranks.fixed(rows, course, 4)
    with pytest.raises(ValueError, match="no configuration of 3 ranks"):
        ranks.fixed(rows, course, 3)
