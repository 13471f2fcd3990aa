"""All contenders over some seeds, against the fastest baseline at each target and the oracle.

The oracle is the least time to a target with full knowledge of dynamics and speeds. It starts in
any layout, changes the batch at no cost, and pays the scenario's pause of a change of layout. Its
segments are the intervals of the dynamics, within which no other time to switch is better.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from copus_ext.simulate.contenders import Contender
from copus_ext.simulate.run import Run, simulate
from copus_ext.simulate.scenario import Scenario
from copus_ext.simulate.speeds import Speeds
from copus_ext.simulate.tuned_schedules import BatchSchedule, Tuned

_PAPERS = ("static", "cbs")


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The best way to one target."""

    seconds: float
    """From the start."""
    relayouts: int
    """Changes of layout on it."""


def segments(scenario: Scenario, speeds: Speeds, target: float) -> tuple[list[list[float]], list]:
    """`[segments][layouts]` seconds at the best batch, and the layouts.

    Args:
        scenario: its training dynamics.
        speeds: of all configurations.
        target: progress at which the last segment ends.

    Raises:
        ValueError: a truth with a `rate_exponent`: what a segment takes would depend on the way to
            it.
    """
    if scenario.truth.rate_exponent:
        raise ValueError("the oracle does not know the schedule of the learning rate")
    dynamics = scenario.dynamics
    edges = np.array(dynamics.edges)
    lengths = np.clip(target - edges[:-1], 0.0, np.diff(edges))
    lengths = lengths[lengths > 0]
    columns = []
    for layout in speeds.layouts:
        rows = [row for b in speeds.batches if (row := speeds.at(layout, b)) is not None]
        rates = [dynamics.rates(r.global_batch_size) * r.samples_per_s for r in rows]
        columns.append(lengths / np.max(rates, axis=0)[: len(lengths)])
    return np.stack(columns, axis=1).tolist(), speeds.layouts


def best_moves(
    times: Sequence[Sequence[float]] | np.ndarray, costs_s: Sequence[Sequence[float]] | np.ndarray
) -> tuple[list[int], float]:
    """The layouts of all segments of a run that take least time together.

    Args:
        times: for each segment its seconds under each layout.
        costs_s: seconds of a change from each layout (row) to each between two segments.

    Returns:
        A layout for every segment, and the seconds. The run starts in any layout.
    """
    costs = np.asarray(costs_s, dtype=float)
    best = np.zeros(len(costs))
    choices = []
    for segment, row in enumerate(times):
        came = np.arange(len(costs))
        if segment:
            ways = best[:, None] + costs
            came = np.argmin(ways, axis=0)
            stays = np.diag(ways) <= ways.min(axis=0)
            came = np.where(stays, np.arange(len(costs)), came)
            best = ways[came, np.arange(len(costs))]
        best = best + np.asarray(row)
        choices.append(came)
    at = int(np.argmin(best))
    total, path = float(best[at]), [at]
    for came in reversed(choices[1:]):
        at = int(came[at])
        path.append(at)
    return path[::-1], total


def optimum(scenario: Scenario, speeds: Speeds, target: float) -> Optimum:
    """The least time to a progress."""
    times, layouts = segments(scenario, speeds, target)
    costs_s = [[scenario.pause_s(a, b) for b in layouts] for a in layouts]
    path, seconds = best_moves(times, costs_s)
    return Optimum(seconds=seconds, relayouts=sum(a != b for a, b in itertools.pairwise(path)))


def _tried(scenario: Scenario) -> list[BatchSchedule]:
    """Batch schedules for a noisy quadratic: static, and growing as the rate decays."""
    return [
        BatchSchedule(pieces=((0.0, first),), decay=decay, choices=scenario.batches)
        for first in scenario.batches
        for decay in (0.0, 0.5, 1.0)
    ]


def _best_tried(ways: Sequence[Tuned]) -> Optimum:
    return Optimum(seconds=min(way.seconds for way in ways), relayouts=0)


def optima(scenario: Scenario, seed: int = 0) -> dict[str, Optimum]:
    """The least time to every target, each by itself: together they are no single run. On a noisy
    quadratic it is that of the best schedule tried, at no cost of a change."""
    if scenario.quadratic is not None:
        return {n: _best_tried(ways) for n, ways in scenario.tuned(_tried(scenario)).items()}
    speeds = scenario.speeds(seed)
    return {name: optimum(scenario, speeds, at) for name, at in scenario.targets.items()}


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean; None if one is not known, or there is none."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


@dataclass(frozen=True, kw_only=True)
class Score:
    """One contender over all seeds."""

    name: str
    is_baseline: bool
    times_s: dict[str, float | None]
    """Median seconds to each target; None where a seed did not reach it."""
    saved: list[float | None]
    """By seed: time saved over the fastest baseline at each target, mean over the targets; None if
    it missed one that a baseline reached."""
    saved_paper: list[float | None]
    """The same over the fastest static batch or `cbs`, the baselines of arXiv 2604.26687."""
    peak: float | None
    """Largest saving at a target, of all seeds."""
    worst: float | None
    """Smallest."""
    oracle_share: float | None
    """Mean saving over that of the oracle."""
    relayouts: float
    resizes: float
    """Changes of layout and of batch, median of the seeds."""

    @property
    def mean_saved(self) -> float | None:
        """Mean of the seeds."""
        return _mean(self.saved)


@dataclass(kw_only=True)
class Comparison:
    """The runs of all contenders."""

    scenario: Scenario
    seeds: tuple[int, ...]
    runs: dict[str, list[Run]] = field(default_factory=dict)
    """By contender, one for each seed."""
    baselines: set[str] = field(default_factory=set)
    best: list[dict[str, Optimum]] = field(default_factory=list)
    """The oracle, by seed."""

    def fastest(self, target: str, i: int, among: tuple[str, ...] = ("",)) -> float | None:
        """Seconds of the fastest baseline at a target with the i-th seed, None without one.

        Args:
            target: name of a loss.
            i: index of the seed.
            among: beginnings of the names of those that count.
        """
        names = [name for name in self.baselines if name.startswith(among)]
        times = [self.runs[name][i].times_s[target] for name in names]
        return min((t for t in times if t is not None), default=None)

    def _savings(self, name: str, i: int, among: tuple[str, ...] = ("",)) -> list[float | None]:
        """By target that a baseline reached."""
        found: list[float | None] = []
        for target in self.scenario.targets:
            base, own = self.fastest(target, i, among), self.runs[name][i].times_s[target]
            if base is not None:
                found.append(None if own is None else 1 - own / base)
        return found

    def oracle_saved(self, i: int) -> float:
        """What the oracle saves over the fastest baseline, mean over the targets."""
        found = []
        for target in self.scenario.targets:
            base = self.fastest(target, i)
            if base is not None:
                found.append(1 - self.best[i][target].seconds / base)
        return statistics.fmean(found) if found else 0.0

    def score(self, name: str) -> Score:
        """One contender."""
        runs = self.runs[name]
        savings = [self._savings(name, i) for i in range(len(runs))]
        means = [_mean(one) for one in savings]
        single = [s for one in savings for s in one if s is not None]
        oracle = statistics.fmean(self.oracle_saved(i) for i in range(len(runs)))
        known = [m for m in means if m is not None]
        share = None
        if len(known) == len(means) and known and oracle > 0:
            share = statistics.fmean(known) / oracle
        times: dict[str, float | None] = {}
        for target in self.scenario.targets:
            reached = [t for run in runs if (t := run.times_s[target]) is not None]
            times[target] = statistics.median(reached) if len(reached) == len(runs) else None
        return Score(
            name=name,
            is_baseline=name in self.baselines,
            times_s=times,
            saved=means,
            saved_paper=[_mean(self._savings(name, i, _PAPERS)) for i in range(len(runs))],
            peak=max(single, default=None),
            worst=min(single, default=None),
            oracle_share=share,
            relayouts=statistics.median(run.relayouts for run in runs),
            resizes=statistics.median(run.resizes for run in runs),
        )

    def scores(self) -> list[Score]:
        """All, in the order they ran."""
        return [self.score(name) for name in self.runs]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types: the times of every seed, the first seed's changes."""
        s = self.scenario
        return {
            "scenario": s.name,
            "seeds": list(self.seeds),
            "targets": s.targets,
            "switch_cost_s": s.switch_cost_s,
            "pause_range_s": s.pause_range_s(),
            "assumed_cost_s": s.assumed_cost_s,
            "truth": {
                "objective": s.truth_name,
                "noise_scale_multiplier": s.truth.noise_scale_multiplier,
            },
            "speed_error": s.speed_error,
            "oracle": [{t: vars(o) for t, o in one.items()} for one in self.best],
            "oracle_saved": [self.oracle_saved(i) for i in range(len(self.seeds))],
            "fastest_baseline_s": [
                {t: self.fastest(t, i) for t in s.targets} for i in range(len(self.seeds))
            ],
            "contenders": {
                score.name: {
                    **vars(score),
                    "mean_saved": score.mean_saved,
                    "times_by_seed_s": [run.times_s for run in self.runs[score.name]],
                    "steps": [run.steps for run in self.runs[score.name]],
                    "changes": [vars(change) for change in self.runs[score.name][0].changes],
                }
                for score in self.scores()
            },
        }


def compare(
    scenario: Scenario,
    who: Sequence[Contender],
    *,
    seeds: Sequence[int],
    baselines: Sequence[Contender] = (),
    done: Callable[[str], None] = lambda name: None,
) -> Comparison:
    """Runs everybody.

    Args:
        scenario: what it is of.
        who: to run; baselines among them count as such.
        seeds: of the estimates' noise and the speeds' errors.
        baselines: to run besides.
        done: told of every run.
    """
    result = Comparison(scenario=scenario, seeds=tuple(seeds))
    everybody = {c.name: c for c in [*who, *baselines]}
    for contender in everybody.values():
        result.runs[contender.name] = []
        if contender.is_baseline:
            result.baselines.add(contender.name)
        for seed in seeds:
            result.runs[contender.name].append(simulate(scenario, contender, seed=seed))
            done(contender.name)
    for seed in seeds:
        same = scenario.speed_error == 0 and result.best
        result.best.append(result.best[0] if same else optima(scenario, seed))
    return result
