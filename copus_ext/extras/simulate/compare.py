"""All contenders over some seeds, against the fastest baseline at each target and the oracle.

The oracle is the least time to a target with full knowledge of dynamics and speeds. It starts in
any layout, changes the batch at no cost, and pays the scenario's pause of a change of layout. Its
segments are the intervals of the dynamics, within which no other time to switch is better.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from copus_ext.extras.simulate.contenders import Contender
from copus_ext.extras.simulate.run import Run, simulate
from copus_ext.extras.simulate.scenario import Scenario
from copus_ext.extras.simulate.speeds import Speeds


def segments(scenario: Scenario, speeds: Speeds, target: float) -> list[list[float]]:
    """`[segments][layouts]` seconds at the best batch, up to the progress of a target.

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
    return np.stack(columns, axis=1).tolist()


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


def optimum(scenario: Scenario, speeds: Speeds, target: float) -> float:
    layouts = speeds.layouts
    costs_s = [[scenario.pause_s(a, b) for b in layouts] for a in layouts]
    return best_moves(segments(scenario, speeds, target), costs_s)[1]


def optima(scenario: Scenario) -> dict[str, float]:
    """The least seconds to every target, each by itself: together they are no single run. Empty on
    a noisy quadratic, whose optimum nobody knows."""
    if scenario.quadratic is not None:
        return {}
    return {n: optimum(scenario, scenario.speeds, at) for n, at in scenario.targets.items()}


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
    relayouts: float
    resizes: float
    """Changes of layout and of batch, median of the seeds."""

    @property
    def mean_saved(self) -> float | None:
        return _mean(self.saved)


@dataclass(kw_only=True)
class Comparison:
    scenario: Scenario
    seeds: tuple[int, ...]
    runs: dict[str, list[Run]] = field(default_factory=dict)
    """By contender, one for each seed."""
    baselines: set[str] = field(default_factory=set)
    best: dict[str, float] = field(default_factory=dict)
    """Seconds of the oracle to each target."""

    def fastest(self, target: str, i: int) -> float | None:
        """Seconds of the fastest baseline at a target with the i-th seed, None without one."""
        times = [self.runs[name][i].times_s[target] for name in self.baselines]
        return min((t for t in times if t is not None), default=None)

    def _saved(self, times_s: dict[str, float] | dict[str, float | None], i: int) -> float | None:
        """Share of the fastest baseline's time, mean over the targets that one has reached."""
        found: list[float | None] = []
        for target in self.scenario.targets:
            base, own = self.fastest(target, i), times_s.get(target)
            if base is not None:
                found.append(None if own is None else 1 - own / base)
        return _mean(found)

    @property
    def oracle_saved(self) -> float | None:
        """What the oracle saves over the fastest baseline, mean over targets and seeds."""
        return _mean([self._saved(self.best, i) for i in range(len(self.seeds))])

    def score(self, name: str) -> Score:
        runs = self.runs[name]
        times: dict[str, float | None] = {}
        for target in self.scenario.targets:
            reached = [t for run in runs if (t := run.times_s[target]) is not None]
            times[target] = statistics.median(reached) if len(reached) == len(runs) else None
        return Score(
            name=name,
            is_baseline=name in self.baselines,
            times_s=times,
            saved=[self._saved(run.times_s, i) for i, run in enumerate(runs)],
            relayouts=statistics.median(run.relayouts for run in runs),
            resizes=statistics.median(run.resizes for run in runs),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types: the times of every seed, the first seed's changes."""
        s = self.scenario
        scores = [self.score(name) for name in self.runs]
        return {
            "scenario": s.name,
            "seeds": list(self.seeds),
            "targets": s.targets,
            "pause_range_s": s.pause_range_s(),
            "truth": s.truth_name,
            "noise_scale_multiplier": s.truth.noise_scale_multiplier,
            "oracle_s": self.best,
            "oracle_saved": self.oracle_saved,
            "contenders": {
                score.name: {
                    **vars(score),
                    "mean_saved": score.mean_saved,
                    "times_by_seed_s": [run.times_s for run in self.runs[score.name]],
                    "changes": [vars(change) for change in self.runs[score.name][0].changes],
                }
                for score in scores
            },
        }


def compare(
    scenario: Scenario,
    who: Sequence[Contender],
    *,
    seeds: Sequence[int],
    baselines: Sequence[Contender] = (),
    done: Callable[[], object] = lambda: None,
) -> Comparison:
    """Runs everybody, and baselines besides; `done` is told of every run."""
    result = Comparison(scenario=scenario, seeds=tuple(seeds), best=optima(scenario))
    everybody = {c.name: c for c in [*who, *baselines]}
    for contender in everybody.values():
        result.runs[contender.name] = []
        if contender.is_baseline:
            result.baselines.add(contender.name)
        for seed in seeds:
            result.runs[contender.name].append(simulate(scenario, contender, seed=seed))
            done()
    return result
