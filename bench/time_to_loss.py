"""Time to loss: the arithmetic of B8 and B9. Smooth curves, targets, times, savings, tables."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

WINDOW = 5
"""Evaluations that a smoothed one is made of."""
EARLIEST = 8
"""No target lies above what the best static run has after this part of its samples."""
Times = dict[str, dict[int, list[float | None]]]
"""[policy][seed][target] seconds, None where it is not reached."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Evaluations of one run, in order."""

    samples: list[int]
    """Samples trained before each."""
    seconds: list[float]
    """Clock of the run at each."""
    losses: list[float]
    """Validation losses."""

    def smoothed(self) -> Curve:
        """The same with losses from a straight line over ln(samples) through the nearest few."""
        losses = list(_smooth(tuple(self.samples), tuple(self.losses)))
        return Curve(samples=self.samples, seconds=self.seconds, losses=losses)

    def at_samples(self, samples: float) -> float:
        """The loss after so many samples, between two evaluations on a straight line."""
        return float(np.interp(samples, self.samples, self.losses))

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


@functools.cache
def _smooth(samples: tuple[int, ...], losses: tuple[float, ...]) -> tuple[float, ...]:
    x, y = np.log(samples), np.asarray(losses, dtype=float)
    size = min(WINDOW, len(x))
    smooth = []
    for i in range(len(x)):
        first = min(max(i - size // 2, 0), len(x) - size)
        some = slice(first, first + size)
        if size < 3:
            smooth.append(float(y[i]))
            continue
        level = np.polyfit(x[some] - x[i], y[some], 1)[1]
        smooth.append(float(level))
    return tuple(smooth)


def curve_of(run: dict[str, Any]) -> Curve:
    """The smoothed evaluations of a run of a results file."""
    samples, seconds, losses = map(list, zip(*run["evaluations"]))
    return Curve(samples=samples, seconds=seconds, losses=losses).smoothed()


def targets(statics: dict[str, list[Curve]], number: int) -> list[float]:
    """Losses to reach, chosen by what static batches do and by nothing else.

    The highest is the least loss that any static run has after an eighth of its samples. The lowest
    is what half of the static batches or more end at or below in every one of their seeds. The
    others lie between at equal distances.

    Args:
        statics: smoothed curves by policy, one for each seed and link.
        number: of targets.

    Raises:
        ValueError: no curves, or runs so short that the lowest is not below the highest.
    """
    if not statics:
        raise ValueError("targets come from static runs, and there are none yet")
    all_of_them = [curve for curves in statics.values() for curve in curves]
    highest = min(c.at_samples(c.samples[-1] / EARLIEST) for c in all_of_them)
    ends = [max(c.losses[-1] for c in curves) for curves in statics.values()]
    lowest = statistics.median_low(ends)
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
    columns = zip(*of_policy.values())
    return [_mean(column) for column in columns]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def saved(found: Times, policy: str, baseline: str, extra_s: float = 0.0) -> list[list[float]]:
    """Part of the baseline's time that a policy saves, [target][seed]; empty where either does not
    reach a target in every seed that both have.

    Args:
        found: of one link.
        policy: whose savings.
        baseline: over which.
        extra_s: seconds that the policy is charged besides, at the start.
    """
    seeds = sorted(found[policy].keys() & found[baseline].keys())
    pairs = [zip(found[policy][seed], found[baseline][seed]) for seed in seeds]
    rows = []
    for of_target in zip(*pairs):
        known = [(a, b) for a, b in of_target if a is not None and b is not None]
        whole = len(known) == len(of_target)
        rows.append([1.0 - (a + extra_s) / b for a, b in known] if whole else [])
    return rows


def fastest(found: Times, names: Iterable[str]) -> list[str | None]:
    """Of some policies the one with the least mean time, for each target; None if none reaches it.

    Who has fewer seeds than another takes no part: losses come early in one seed, late in another.
    """
    known = {name: found[name] for name in names if name in found}
    most = max(map(len, known.values()), default=0)
    means = {name: mean_times(seeds) for name, seeds in known.items() if len(seeds) == most}
    number = max((len(m) for m in means.values()), default=0)
    best: list[str | None] = []
    for i in range(number):
        able = {name: m[i] for name, m in means.items() if m[i] is not None}
        best.append(min(able, key=lambda name: able[name] or 0.0) if able else None)
    return best


def saved_over_fastest(
    found: Times, policy: str, baselines: Iterable[str], extra_s: float = 0.0
) -> list[list[float]]:
    """What a policy saves over the fastest baseline of each target, [target][seed].

    The baseline is the one that is fastest on average over the seeds, chosen with the result in
    hand: nobody could have chosen it before.
    """
    rows = []
    for i, baseline in enumerate(fastest(found, baselines)):
        row = [] if baseline is None else saved(found, policy, baseline, extra_s)[i]
        rows.append(row)
    return rows


def summary(rows: Sequence[Sequence[float]]) -> dict[str, Any] | None:
    """Of savings [target][seed]: the mean over both, and the mean of each seed; None without any.

    Only targets that all seeds have count.
    """
    rows = [row for row in rows if row]
    if not rows:
        return None
    of_seed = [statistics.fmean(column) for column in zip(*rows)]
    return {
        "mean": statistics.fmean(of_seed),
        "by_seed": of_seed,
        "best": max(statistics.fmean(row) for row in rows),
        "targets": len(rows),
    }


def percent(part: float | None, digits: int = 1) -> str:
    """Text of a part; a dash for None."""
    return "-" if part is None else f"{100 * part:.{digits}f} %"


def table(found: Times, goals: Sequence[float], notes: dict[str, str]) -> str:
    """Mean seconds to each target, with half of the range over the seeds; one line a policy.

    Args:
        found: of one link.
        goals: the targets.
        notes: of policies, last on their lines.
    """
    width = max([len(name) for name in found] + [6])
    head = "".join(f"{f'{g:.3f}':>14}" for g in goals)
    lines = [f"{'policy':<{width}}{head}  batch and layout"]
    for name, of_seeds in found.items():
        cells = []
        for column in zip(*of_seeds.values()):
            mean = _mean(column)
            known = [v for v in column if v is not None]
            spread = (max(known) - min(known)) / 2 if known else 0.0
            text = "-" if mean is None else f"{mean:.1f}"
            cells.append(f"{text if len(known) < 2 or mean is None else f'{text} +-{spread:.1f}'}")
        lines.append(
            f"{name:<{width}}" + "".join(f"{c:>14}" for c in cells) + f"  {notes.get(name, '')}"
        )
    return "\n".join(lines)


def savings_line(name: str, rows: Sequence[Sequence[float]], what: str) -> str:
    """One line on what a policy saves, target by target, and by seed."""
    cells = [percent(statistics.fmean(row) if row else None) for row in rows]
    found = summary(rows)
    if found is None:
        return f"{name} {what}: no target in common"
    seeds = ", ".join(percent(part) for part in found["by_seed"])
    return (
        f"{name} {what}: {', '.join(cells)}; mean of {found['targets']} targets "
        f"{percent(found['mean'])} (seeds {seeds}), best {percent(found['best'])}"
    )


def path_of(values: Iterable[Any]) -> str:
    """Values in the order in which they came, without repeats in a row."""
    return " > ".join(str(value) for value, _ in itertools.groupby(values))


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive numbers."""
    return math.exp(statistics.fmean(math.log(v) for v in values))
