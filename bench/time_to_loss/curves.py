"""Loss curves, targets, the time to each, and what a policy saves over another."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_WINDOW, _EARLIEST = 5, 8
"""Evaluations that make a smoothed one; part of a run before which no target lies."""
Times = dict[str, dict[int, list[float | None]]]
"""[policy][seed][target] seconds, None where it is not reached."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Smoothed evaluations of one run, in order."""

    samples: Sequence[int]
    """Samples trained before each."""
    seconds: Sequence[float]
    """Clock of the run at each."""
    losses: Sequence[float]
    """Validation losses, from a straight line over ln(samples) through the nearest few."""

    def time_to(self, target: float) -> float | None:
        """Seconds until the loss first is at most the target; None if it never is.

        A target that is met before the first evaluation counts as met there.
        """
        for i, loss in enumerate(self.losses):
            if loss > target:
                continue
            if i == 0:
                return self.seconds[0]
            before = self.losses[i - 1]
            part = (before - target) / (before - loss)
            return self.seconds[i - 1] + part * (self.seconds[i] - self.seconds[i - 1])
        return None


def curve_of(run: dict[str, Any]) -> Curve:
    """The smoothed evaluations of a run of a results file."""
    samples, seconds, losses = zip(*run["evaluations"])
    return Curve(samples=samples, seconds=seconds, losses=_smooth(samples, losses))


@functools.cache
def _smooth(samples: tuple[int, ...], losses: tuple[float, ...]) -> tuple[float, ...]:
    x, y = np.log(samples), np.asarray(losses, dtype=float)
    size, smooth = min(_WINDOW, len(x)), []
    if size < 3:
        return losses
    for i in range(len(x)):
        first = min(max(i - size // 2, 0), len(x) - size)
        some = slice(first, first + size)
        smooth.append(float(np.polyfit(x[some] - x[i], y[some], 1)[1]))
    return tuple(smooth)


def targets(statics: dict[str, list[Curve]], number: int) -> list[float]:
    """Losses to reach, chosen by what static batches do and by nothing else.

    The highest is the least loss that any static run has after an eighth of its samples. The lowest
    is what half of the static batches or more end at or below in every one of their seeds. The
    others lie between at equal distances.

    Args:
        statics: curves by policy, one for each seed and link.
        number: of targets.

    Raises:
        ValueError: no curves.
    """
    if not statics:
        raise ValueError("targets come from static runs, and there are none yet")
    every = [curve for curves in statics.values() for curve in curves]
    highest = min(np.interp(c.samples[-1] / _EARLIEST, c.samples, c.losses) for c in every)
    lowest = statistics.median_low([max(c.losses[-1] for c in own) for own in statics.values()])
    if number == 1 or not lowest < highest:
        return [lowest]
    return [float(x) for x in np.linspace(highest, lowest, number)]


def times(runs: Iterable[dict[str, Any]], goals: Sequence[float]) -> Times:
    """Seconds to each target, of the runs of one link."""
    found: Times = {}
    for run in runs:
        curve = curve_of(run)
        found.setdefault(run["policy"], {})[run["seed"]] = [curve.time_to(g) for g in goals]
    return found


def mean_times(of_policy: dict[int, list[float | None]]) -> list[float | None]:
    """Mean over the seeds, for each target; None where a seed does not reach it."""
    columns = ([v for v in column if v is not None] for column in zip(*of_policy.values()))
    return [statistics.fmean(c) if len(c) == len(of_policy) else None for c in columns]


def saved(found: Times, policy: str, baseline: str) -> list[list[float]]:
    """Part of the baseline's time that a policy saves, [target][seed]; empty where either does not
    reach a target in every seed that both have."""
    seeds = sorted(found[policy].keys() & found[baseline].keys())
    rows = []
    for pairs in zip(*(zip(found[policy][seed], found[baseline][seed]) for seed in seeds)):
        known = [1.0 - a / b for a, b in pairs if a is not None and b is not None]
        rows.append(known if len(known) == len(pairs) else [])
    return rows


def fastest(found: Times, names: Iterable[str]) -> list[str | None]:
    """Of some policies the one with the least mean time, for each target; None if none reaches it.

    Who has fewer seeds than another takes no part: losses come early in one seed, late in another.
    """
    known = {name: found[name] for name in names if name in found}
    most = max(map(len, known.values()), default=0)
    means = {name: mean_times(seeds) for name, seeds in known.items() if len(seeds) == most}
    best: list[str | None] = []
    for i in range(max((len(m) for m in means.values()), default=0)):
        able = {name: t for name, m in means.items() if (t := m[i]) is not None}
        best.append(min(able, key=lambda name: able[name], default=None))
    return best


def saved_over_fastest(found: Times, policy: str, baselines: Iterable[str]) -> list[list[float]]:
    """What a policy saves over the fastest baseline of each target, [target][seed].

    The baseline is the one that is fastest on average over the seeds, chosen with the result in
    hand: nobody could have chosen it before.
    """
    best = fastest(found, baselines)
    return [saved(found, policy, name)[i] if name else [] for i, name in enumerate(best)]


def summary(rows: Sequence[Sequence[float]]) -> dict[str, Any] | None:
    """Of savings [target][seed]: the mean over both, and the mean of each seed; None without any.

    Only targets that all seeds have count.
    """
    rows = [row for row in rows if row]
    if not rows:
        return None
    of_seed = [statistics.fmean(column) for column in zip(*rows)]
    best = max(statistics.fmean(row) for row in rows)
    mean = statistics.fmean(of_seed)
    return {"mean": mean, "by_seed": of_seed, "best": best, "targets": len(rows)}


def percent(part: float | None) -> str:
    """Text of a part; a dash for None."""
    return "-" if part is None else f"{100 * part:.1f} %"


def savings_line(rows: Sequence[Sequence[float]], what: str) -> str:
    """One line on what a policy saves, target by target, and by seed."""
    cells = [percent(statistics.fmean(row) if row else None) for row in rows]
    found = summary(rows)
    if found is None:
        return f"{what}: no target in common"
    seeds = ", ".join(percent(part) for part in found["by_seed"])
    return (
        f"{what}: {', '.join(cells)}; mean of {found['targets']} targets "
        f"{percent(found['mean'])} (seeds {seeds}), best {percent(found['best'])}"
    )
