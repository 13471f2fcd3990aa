"""Does a run whose critical batch size grows save GPU-hours by beginning on few nodes?

    python -m bench.time_to_loss.scenarios --only S9

A contender may change the number of its nodes, at a cost of time. It is compared at equal time with
the best fixed number of nodes under the same controller, which adapts batch and layout as well, and
with the best static batch there. The fixed number is that of the cluster, and twice and four times
that. The contender chooses from a half to twice the fixed number, in steps of a quarter. Both have
batches of 2^k and 3 x 2^k, and begin at the smallest.

The cost of time is found on seeds 0 and 1, by bisection around the one of a perfect plan of the
true course. Where the time jumps between two of them, the figure is on the line through both. Runs
with other seeds then have the same costs of time, and pay by them for time beyond the rival's. A
user needs such a plan or an earlier run, too.
"""

from __future__ import annotations

import itertools
import math
import operator
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.time_to_loss import scenarios
from bench.time_to_loss.intervals import interval
from copus_ext.goodput import ranks
from copus_ext.simulate.contenders import Contender
from copus_ext.simulate.ranks import Machines, course_of, simulate_ranks
from copus_ext.simulate.run import Run, simulate
from copus_ext.simulate.scenario import Scenario

TUNING = (0, 1)
"""Seeds on which the cost of time is chosen."""
TIMES_FIXED, QUARTERS = {"level": (1, 2, 4)}, (2, 3, 4, 5, 6, 8)
"""Fixed numbers over that of the cluster by growth, and choices in quarters of the fixed one."""
_OTHER_TIMES = (1, 4)
FACTORS = tuple((2.0 ** (np.arange(-4, 5) / 2)).tolist())
"""Costs of time that are tried, over that of the plan."""
_FIXED_COSTS = (0.04, 0.25, 1.0, 4.0)
_BISECTIONS, _SAME = 4, 1e-3
_AS_SLOW = 1.005
"""A fixed number counts as fast enough up to this multiple of the wanted time."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A run: what it takes, with all that a user waits for."""

    seconds: float
    gpu_s: float
    num_changes: int = 0
    """Changes of the number of ranks."""


def contender(s: Scenario) -> Contender:
    """The shipped controller with the batches of a scenario."""
    grid = ",".join(map(str, s.batches))
    return scenarios.copus(s, s.batches[0], copus_batch_grid=grid)


def fixed_run(s: Scenario, seed: int) -> Point | None:
    """The controller on a fixed cluster; None if it does not reach the last target."""
    run = simulate(s, contender(s), seed=seed)
    reached = _reached(s, run)
    if reached is None:
        return None
    return Point(seconds=reached, gpu_s=reached * s.cluster.world_size)


def rank_run(machines: Machines, s: Scenario, cost_of_time: float, seed: int) -> Point | None:
    """The contender; None if it does not reach the last target."""
    found = simulate_ranks(machines, contender(s), cost_of_time=cost_of_time, seed=seed)
    reached, last = _reached(s, found.run), found.run.times_s[_last(s)]
    if reached is None or last is None:
        return None
    # Measuring and deciding take as many ranks as the run has on average.
    gpu_s = found.rank_seconds(last) * reached / last
    layouts = [change.layout for change in found.run.changes]
    sizes = [ranks.Layout.from_text(text).world_size for text in layouts]
    changes = sum(a != b for a, b in itertools.pairwise(sizes))
    return Point(seconds=reached, gpu_s=gpu_s, num_changes=changes)


def _last(s: Scenario) -> str:
    return max(s.targets, key=s.targets.__getitem__)


def _reached(s: Scenario, run: Run) -> float | None:
    last = run.times_s[_last(s)]
    return None if last is None else scenarios.counted(last, run)


def between(slow: tuple[float, float], fast: tuple[float, float], at: float) -> float:
    """The second number where the first is `at`, on the line through two points."""
    if slow[0] == fast[0]:
        return min(slow[1], fast[1])
    share = (at - fast[0]) / (slow[0] - fast[0])
    return fast[1] + share * (slow[1] - fast[1])


def at_value(ends: Sequence[tuple[float, float]], at: float, price: float) -> float:
    """The second number of runs where the first is `at`. Runs that all have more of the first pay
    for it at a price, and those that all have less get nothing for that.

    Args:
        ends: of the runs.
        at: the wanted first number.
        price: of the first number, in the second one.
    """
    low, high = min(ends), max(ends)
    if low[0] <= at <= high[0]:
        return between(high, low, at)
    near = low if at < low[0] else high
    return near[1] + price * max(near[0] - at, 0.0)


def crossing(points: dict[float, tuple[float, float]], at: float) -> tuple[float, float] | None:
    """Two neighbouring costs of time between which the first number passes `at`; twice the same one
    where it has that value. None comes back where it never does.

    Args:
        points: by cost of time.
        at: the wanted first number.
    """
    pairs = [(own[1], c, c) for c, own in points.items() if abs(own[0] / at - 1) < _SAME]
    pairs += [
        (between(points[a], points[b], at), a, b)
        for a, b in itertools.pairwise(sorted(points))
        if (points[a][0] - at) * (points[b][0] - at) < 0
    ]
    return min(pairs)[1:] if pairs else None


class Case:
    """One cluster, growth and fixed number of nodes.

    Args:
        s: the scenario on the cluster of its preset.
        times: fixed number of nodes over that.
    """

    def __init__(self, s: Scenario, times: int) -> None:
        batches = sorted({*s.batches, *(b * 3 // 2 for b in s.batches)})
        self.s = s.change(batches=tuple(batches))
        self.fixed_nodes = times * s.cluster.num_nodes
        nodes = {self.fixed_nodes * k // 4 for k in QUARTERS if self.fixed_nodes * k % 4 == 0}
        self.machines = Machines(self.s, sorted(nodes))
        self.course = course_of(self.s)
        rows, pause_s = self.machines.rows, self.machines.pause_s
        fixed = {
            n: ranks.fixed(rows, self.course, n, pause_s=pause_s) for n in self.machines.by_ranks
        }
        own = self.machines.of_nodes(self.fixed_nodes).cluster.world_size
        wanted = fixed[own].seconds
        able = [n for n, one in fixed.items() if one.seconds <= _AS_SLOW * wanted]
        self.rival_ranks = min(able, key=lambda n: fixed[n].rank_seconds)
        plan = ranks.at_equal_time(rows, self.course, wanted, pause_s=pause_s)
        self.cost_of_time = plan.cost_of_time
        self.perfect = 1 - plan.rank_seconds / fixed[self.rival_ranks].rank_seconds
        self.perfect_of_mixing = 1 - mixing(list(fixed.values()), wanted) / (
            fixed[self.rival_ranks].rank_seconds
        )
        self.plan = plan.schedule.ranks
        self._points: dict[tuple[float, int], Point | None] = {}

    def point(self, cost_of_time: float, seed: int) -> Point | None:
        """A run, each made once."""
        key = cost_of_time, seed
        if key not in self._points:
            self._points[key] = rank_run(self.machines, self.s, cost_of_time, seed)
        return self._points[key]

    def tuned(self, cost_of_time: float) -> Point | None:
        """The mean of the tuning seeds; None if one does not reach the target."""
        own = [one for seed in TUNING if (one := self.point(cost_of_time, seed)) is not None]
        if len(own) < len(TUNING):
            return None
        return _mean_point(own)

    def rival(self, seed: int) -> Point | None:
        """The best fixed number of ranks under the same controller."""
        return fixed_run(self.machines.by_ranks[self.rival_ranks], seed)

    def static(self) -> Point:
        """The best static batch on the fixed number of nodes, known afterwards."""
        one = self.machines.of_nodes(self.fixed_nodes)
        seconds = min(scenarios.static_seconds(one).values())
        return Point(seconds=seconds, gpu_s=seconds * one.cluster.world_size)

    def row(self, seeds: Sequence[int]) -> dict[str, Any]:
        """The figures of all seeds; None where the best fixed number misses the last target,
        or no cost of time leads to the wanted value."""
        tuning = [one for seed in TUNING if (one := self.rival(seed)) is not None]
        rivals = [one for seed in seeds if (one := self.rival(seed)) is not None]
        reaches = len(tuning) == len(TUNING) and len(rivals) == len(seeds)
        wanted = _mean_point(tuning) if reaches else None
        static = self.static()
        statics = [static] * len(seeds)
        return {
            "fixed_nodes": self.fixed_nodes,
            "choices": [one.cluster.num_nodes for one in self.machines.by_ranks.values()],
            "rival_ranks": self.rival_ranks,
            "rival_s": [one.seconds for one in rivals],
            "rival_gpu_s": [one.gpu_s for one in rivals],
            "static_s": static.seconds,
            "perfect": self.perfect,
            "perfect_of_mixing": self.perfect_of_mixing,
            "plan": self.plan,
            "cost_of_time": self.cost_of_time,
            "saved": self._figure(wanted, rivals, seeds, "seconds", "gpu_s"),
            "faster": self._figure(wanted, rivals, seeds, "gpu_s", "seconds"),
            "saved_over_static": self._figure(static, statics, seeds, "seconds", "gpu_s"),
        }

    def _pair(self, at: float, same: str, figure: str) -> tuple[float, float] | None:
        """The costs of time between which one number of the tuning seeds has a value."""
        points: dict[float, tuple[float, float]] = {}

        def add(cost: float) -> None:
            if (found := self.tuned(cost)) is not None:
                points[cost] = getattr(found, same), getattr(found, figure)

        for factor in FACTORS:
            add(factor * self.cost_of_time)
        pair = crossing(points, at)
        for _ in range(_BISECTIONS):
            if pair is None or pair[0] == pair[1]:
                break
            add(math.sqrt(pair[0] * pair[1]))
            pair = crossing(points, at)
        return pair

    def _figure(
        self,
        wanted: Point | None,
        rivals: Sequence[Point],
        seeds: Sequence[int],
        same: str,
        figure: str,
    ) -> dict[str, Any] | None:
        """What is saved of one number where another is that of the rival."""
        if wanted is None or (pair := self._pair(getattr(wanted, same), same, figure)) is None:
            return None
        values, ratios, changes = [], [], []
        for rival, seed in zip(rivals, seeds):
            some = [one for cost in pair if (one := self.point(cost, seed)) is not None]
            if len(some) < len(pair):
                return None
            ends = [(getattr(one, same), getattr(one, figure)) for one in some]
            at = getattr(rival, same)
            cost = math.sqrt(pair[0] * pair[1])
            price = cost if same == "seconds" else 1 / cost
            values.append(1 - at_value(ends, at, price) / getattr(rival, figure))
            ratios.append([end[0] / at for end in ends])
            changes.append([one.num_changes for one in some])
        return {"values": values, "costs_of_time": pair, "over_rival": ratios, "changes": changes}


def _mean_point(points: Sequence[Point]) -> Point:
    return Point(
        seconds=statistics.fmean(one.seconds for one in points),
        gpu_s=statistics.fmean(one.gpu_s for one in points),
    )


def mixing(fixed: Sequence[ranks.Schedule], seconds: float) -> float:
    """Rank-seconds of runs with fixed numbers of ranks, one half with one number and one half with
    another, or in other parts, whose mean time is a given one."""
    ends = [(one.seconds, one.rank_seconds) for one in fixed]
    return min(
        between(slow, fast, seconds)
        for slow, fast in itertools.product(ends, repeat=2)
        if fast[0] <= seconds <= slow[0]
    )


def s9(seeds: Sequence[int], say: Callable[[str], None]) -> dict[str, Any]:
    """Share of GPU-hours saved at equal time over the best fixed number of ranks, with a critical
    batch size that levels off, on the paper's clusters; other growths and numbers beside it."""
    rows: list[dict[str, Any]] = []
    cases = [
        (name, growth, values, times)
        for name, (growth, values) in itertools.product(
            scenarios.clusters(), scenarios.GROWTHS.items()
        )
        for times in TIMES_FIXED.get(growth, _OTHER_TIMES)
    ]
    for name, growth, values, times in cases:
        case = Case(scenarios.growing(name, *values), times)
        row = {"cluster": name, "growth": growth, "times": times, **case.row(seeds)}
        rows.append(row)
        means = {key: _mean(row[key]) for key in ("saved", "faster", "saved_over_static")}
        told = ", ".join(f"{key} {value:.3f}" for key, value in means.items())
        say(f"{name}, {growth}, {case.fixed_nodes} nodes: perfect {case.perfect:.3f}, {told}")
    found = summary(rows, seeds)
    theory = {
        growth: {f"{cost:g}": in_theory(values, cost) for cost in _FIXED_COSTS}
        for growth, values in scenarios.GROWTHS.items()
    }
    return {**found, "in_theory": theory, "rows": rows}


def in_theory(growth: Sequence[float], fixed_cost: float) -> float:
    """Rank-hours that a perfect schedule saves at equal time, where any number of ranks and any
    batch may be had, and where a step takes a constant time and one in proportion to batch / ranks.

    Args:
        growth: of the critical batch size, as in `scenarios.GROWTHS`.
        fixed_cost: samples that take the fixed number of ranks as long as the constant part of a
            step, over the critical batch size. Of that the harmonic mean over the progress counts.
    """
    exponent, level_at = (*growth, 1.0)[:2]
    edges = np.concatenate([[0.0], np.geomspace(1e-4, 1.0, 400)])
    middle, width = np.sqrt(edges[1:] * np.maximum(edges[:-1], edges[1] / 2)), np.diff(edges)
    phi = np.minimum(middle / level_at, 1.0) ** exponent
    phi *= float(np.sum(width / phi))
    numbers = np.geomspace(1 / 16, 16, 257)
    # At its best batch a unit of progress takes (sqrt(a / Phi) + sqrt(b / n))^2 seconds.
    each = (np.sqrt(fixed_cost / phi) + 1 / np.sqrt(numbers)[:, None]) ** 2
    fixed_s = float(each[128] @ width)
    times, costs = [], []
    for cost_of_time in np.geomspace(1e-3, 1e4, 400):
        best = ((numbers + cost_of_time)[:, None] * each).argmin(axis=0)
        seconds = width * each[best, np.arange(len(width))]
        times.append(float(seconds.sum()))
        costs.append(float(seconds @ numbers[best]))
    return 1 - float(np.interp(fixed_s, times[::-1], costs[::-1])) / fixed_s


def _mean(found: dict[str, Any] | None) -> float:
    return math.nan if found is None else statistics.fmean(found["values"])


def summary(rows: Sequence[dict[str, Any]], seeds: Sequence[int]) -> dict[str, Any]:
    """Means over the clusters: of the growth that levels off on the clusters' own number of nodes,
    and by growth and number beside it; NaN where no case has one."""

    def cells(key: str, growth: str = "level", times: int = 1) -> list[tuple[str, int, float]]:
        own = [r for r in rows if (r["growth"], r["times"]) == (growth, times) and r[key]]
        return [(r["cluster"], *one) for r in own for one in zip(seeds, r[key]["values"])]

    def mean(some: Sequence[tuple[str, int, float]]) -> float:
        return statistics.fmean(value for *_, value in some) if some else math.nan

    keys, by = ("saved", "faster", "saved_over_static"), tuple(map(operator.itemgetter, range(2)))
    tables = {
        f"{growth}, x{times}": {
            **{key: mean(cells(key, growth, times)) for key in keys},
            **{
                key: statistics.fmean(
                    r[key] for r in rows if (r["growth"], r["times"]) == (growth, times)
                )
                for key in ("perfect", "perfect_of_mixing")
            },
        }
        for growth, times in dict.fromkeys((r["growth"], r["times"]) for r in rows)
    }
    return {
        **{key: mean(cells(key)) for key in keys},
        "interval": {key: interval(cells(key), mean, by) for key in keys},
        "by_growth_and_number": tables,
    }
