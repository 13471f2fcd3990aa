"""Runs on the virtual clock whose number of nodes may change, and the figures of S9."""

from __future__ import annotations

import itertools
import math
from functools import cache
from types import SimpleNamespace

import pytest

from bench.time_to_loss import ranks_for_a_price as s9
from bench.time_to_loss import scenarios
from copus_ext.goodput import ranks
from copus_ext.simulate import ranks as simulated
from copus_ext.simulate.ranks import Holding, Machines, RankRun, course_of, simulate_ranks
from copus_ext.simulate.run import Run, simulate
from copus_ext.simulate.speeds import NoSpeed

pytestmark = pytest.mark.unit
COST = 35.0


@cache
def machines(*nodes: int) -> Machines:
    s = scenarios.growing("16xh100-13b", *scenarios.GROWTHS["level"])
    return Machines(s.change(batches=(16, 32, 64, 128, 256)), nodes)


@cache
def growing_run(seed: int = 0) -> RankRun:
    some = machines(16, 40)
    who = s9.contender(some.of_nodes(16))
    return simulate_ranks(some, who, cost_of_time=COST, seed=seed)


def test_one_number_of_nodes_is_the_run_of_before() -> None:
    some = machines(32)
    s = some.of_nodes(32)
    who = s9.contender(s)
    found, plain = (
        simulate_ranks(some, who, cost_of_time=COST, seed=1),
        simulate(s, who, seed=1),
    )
    assert found.run == plain
    assert found.holdings == (Holding(clock_s=0.0, ranks=64),)
    assert found.rank_seconds(100.0) == 6400.0


def test_nodes_come_after_their_time_and_are_paid_for() -> None:
    found = growing_run()
    sizes = [ranks.Layout.from_text(c.layout).world_size for c in found.run.changes]
    at = next(i for i, (a, b) in enumerate(itertools.pairwise(sizes), start=1) if a != b)
    assert sizes[0] == 32 and sizes[at] == 80
    joined = found.run.changes[at].clock_s  # behind the pause
    began = found.holdings[1].clock_s
    pause = found.run.paused_s
    assert simulated.ELASTIC_S < pause < 60.0
    assert joined - pause - began == pytest.approx(simulated.NODE_START_S)
    assert began + simulated.NODE_START_S > simulated.NODE_WAIT_S
    assert found.rank_seconds(joined) == pytest.approx(32 * began + 80 * (joined - began))


def test_the_same_seed_gives_the_same_run() -> None:
    again = simulate_ranks(
        machines(16, 40), s9.contender(machines(16, 40).of_nodes(16)), cost_of_time=COST, seed=0
    )
    assert again == growing_run()


def test_rank_seconds_add_up_what_is_held() -> None:
    holdings = (
        Holding(clock_s=0.0, ranks=2),
        Holding(clock_s=10.0, ranks=8),
        Holding(clock_s=12.0, ranks=4),
    )
    found = RankRun(run=Run(name="a", times_s={}), holdings=holdings)
    assert [found.rank_seconds(t) for t in (5.0, 10.0, 11.0, 20.0)] == [10.0, 20.0, 28.0, 68.0]


def test_no_run_beats_the_plan_that_knows_the_course() -> None:
    some, found = machines(16, 40), growing_run()
    last = found.run.times_s["2.5"]
    assert last is not None
    plan = ranks.schedule(some.rows, course_of(some.of_nodes(16)), COST, pause_s=some.pause_s)
    cost = found.rank_seconds(last) + COST * last
    assert plan.rank_seconds + COST * plan.seconds <= cost * (1 + 1e-9)


def test_nodes_on_which_nothing_fits_are_left_out() -> None:
    some = machines(1, 16)
    assert list(some.by_ranks) == [32]
    with pytest.raises(NoSpeed, match="nothing fits on 1 nodes"):
        some.of_nodes(1)


def test_costs_of_time_around_a_time() -> None:
    points = {1.0: (10.0, 4.0), 2.0: (8.0, 5.0), 4.0: (2.0, 9.0)}
    assert s9.crossing(points, 5.0) == (2.0, 4.0)
    assert s9.crossing(points, 8.0) == (2.0, 2.0)
    assert s9.crossing(points, 1.0) is None
    assert s9.between((8.0, 5.0), (2.0, 9.0), 5.0) == pytest.approx(7.0)


def test_time_beyond_the_wanted_one_is_paid_for_and_less_earns_nothing() -> None:
    ends = [(8.0, 5.0), (2.0, 9.0)]
    assert s9.at_value(ends, 5.0, 3.0) == pytest.approx(7.0)
    assert s9.at_value(ends, 1.0, 3.0) == pytest.approx(9.0 + 3.0)
    assert s9.at_value(ends, 9.0, 3.0) == pytest.approx(5.0)


@pytest.mark.parametrize("growth", scenarios.GROWTHS.values())
def test_in_theory_ranks_save_more_the_larger_the_fixed_cost(growth: tuple[float, ...]) -> None:
    saved = [s9.in_theory(growth, cost) for cost in (1e-4, 0.25, 1.0, 4.0)]
    assert saved == sorted(saved)
    assert abs(saved[0]) < 0.003
    assert saved[-1] < 0.2


def test_a_fixed_number_that_misses_the_last_target_has_no_figure() -> None:
    """As where large batches use up the samples before the last loss."""
    case = object.__new__(s9.Case)  # making one takes a minute
    of_plan = {"perfect": 0.1, "perfect_of_mixing": 0.1, "plan": [], "cost_of_time": COST}
    vars(case).update(
        **of_plan,
        fixed_nodes=2,
        rival_ranks=16,
        machines=SimpleNamespace(by_ranks={}),
        rival=lambda seed: None,
        static=lambda: s9.Point(seconds=3.0, gpu_s=9.0),
        tuned=lambda cost: None,
    )
    row = case.row([10])
    assert [row[key] for key in ("saved", "faster", "saved_over_static")] == [None] * 3
    assert (row["rival_s"], row["static_s"]) == ([], 3.0)
    found = s9.summary([{"cluster": "8xh100-3b", "growth": "level", "times": 1, **row}], [10])
    table = found["by_growth_and_number"]["level, x1"]
    assert table["perfect"] == pytest.approx(0.1)
    assert math.isnan(table["saved"])
    assert math.isnan(found["saved"])
