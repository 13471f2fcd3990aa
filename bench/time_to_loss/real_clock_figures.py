"""Times to a loss, and figures S3 and S4, out of the rows of `real_clock`.

A shared machine is slower in one hour than in the next, so a step does not count with its own time.
Every configuration has a usual time on a link, out of all runs and timings there (`usual`). A run
counts with its own clock, corrected by the difference between its ordinary steps and the usual
ones. So its set-up, pauses, decisions and slow first steps count as they were.

A static run trains on a link without limit, because its losses do not depend on the link. On each
link it counts with the usual time of the fastest configuration that any run or timing had there for
its batch. Some batches have runs of several lengths, and count in the best one.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.support import figure, interval_of_few
from bench.time_to_loss.results import MEASURING

ORDINARY = 1.5
"""A step longer than this times the median of its configuration is not an ordinary one."""
MIN_STEPS = 4
"""A configuration with fewer steps in a run says nothing about its usual time."""
_WINDOW = 5
"""Evaluations that make a smoothed one."""
Way = tuple[str, int, int]
"""Layout, micro-batch, batch."""
Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Smoothed evaluations of one run, in order."""

    samples: Sequence[int]
    """Samples trained before each."""
    seconds: Sequence[float]
    """Clock of the run at each."""
    losses: Sequence[float]
    """Held-out losses, from a straight line over ln(samples) through the nearest few."""

    def time_to(self, target: float) -> float | None:
        """Seconds until the loss first is at most the target, on a straight line between two
        evaluations; None if it never is.

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
def smooth(samples: tuple[int, ...], losses: tuple[float, ...]) -> tuple[float, ...]:
    """Losses from a straight line over ln(samples) through the nearest `_WINDOW` of them."""
    x, y = np.log(samples), np.asarray(losses, dtype=float)
    size = min(_WINDOW, len(x))
    if size < 3:
        return losses
    found = []
    for i in range(len(x)):
        first = min(max(i - size // 2, 0), len(x) - size)
        some = slice(first, first + size)
        found.append(float(np.polyfit(x[some] - x[i], y[some], 1)[1]))
    return tuple(found)


def ordinary_mean(seconds: Sequence[float]) -> float:
    """Mean of those that are at most `ORDINARY` times the median."""
    middle = statistics.median(seconds)
    return statistics.fmean(s for s in seconds if s <= ORDINARY * middle)


def way_of(record: Mapping[str, Any]) -> Way:
    return record["layout"], record["micro_batch"], record["batch"]


def usual(rows: Rows, link: str) -> dict[Way, float]:
    """Seconds of an ordinary step without measuring, by configuration, in an hour of usual pace.

    Each run has a pace of its own, by which all its steps are longer than usual. Without it, a
    configuration that only runs of a fast hour were in would look faster than others. Logarithms of
    the steps are a sum of configuration and pace, by least squares. A mean of n steps counts n
    times. All timings of a seed share a pace. A run of one configuration tells nothing about
    its pace, and has the usual one, which is the mean of the others. Steps under the controller
    have measuring in them, those of static runs and timings do not.
    """
    steps: dict[Hashable, list[tuple[Way, float, float]]] = {}
    for number, row in enumerate(rows):
        spec = row["spec"]
        if spec["link"] != link:
            continue
        factor = 1 + MEASURING * (spec["kind"] == "copus")
        run = ("timing", spec["seed"]) if spec["kind"] == "timing" else number
        for speed in row["speeds"]:
            if speed["steps"] >= MIN_STEPS:
                level = math.log(speed["step_s"] / factor)
                one = (way_of(speed), level, float(speed["steps"]))
                steps.setdefault(run, []).append(one)
    ways = list(dict.fromkeys(way for own in steps.values() for way, _, _ in own))
    several = [run for run, own in steps.items() if len({way for way, _, _ in own}) > 1]
    cells = [(run, *one) for run, own in steps.items() for one in own]
    weights = np.sqrt([weight for *_, weight in cells])
    design = np.zeros((len(cells), len(ways) + max(len(several) - 1, 0)))
    for i, (run, way, _, _) in enumerate(cells):
        design[i, ways.index(way)] = 1.0
        # The last pace is what makes the mean of all of them the usual one.
        if run in several[:-1]:
            design[i, len(ways) + several.index(run)] = 1.0
        elif run in several:
            design[i, len(ways) :] = -1.0
    levels = np.array([level for _, _, level, _ in cells])
    found = np.linalg.lstsq(design * weights[:, None], levels * weights, rcond=None)[0]
    return {way: math.exp(level) for way, level in zip(ways, found)}


def curve_of(row: dict[str, Any], targets: Mapping[Way, float]) -> Curve:
    """The curve of a run with another time for its ordinary steps."""
    own = {way_of(speed): speed["step_s"] for speed in row["speeds"]}
    longer = {way: targets.get(way, step_s) - step_s for way, step_s in own.items()}
    samples, seconds, losses = zip(*row["curve"])
    starts = [*(way["samples"] for way in row["ways"]), samples[-1]]
    clocks = []
    for n, clock in zip(samples, seconds):
        for way, (begin, end) in zip(row["ways"], itertools.pairwise(starts)):
            steps = -(-(min(n, end) - begin) // way["batch"]) if n > begin else 0
            clock += steps * longer[way_of(way)]
        clocks.append(clock)
    return Curve(samples=samples, seconds=clocks, losses=smooth(samples, losses))


def static_curve(row: dict[str, Any], usual_s: Mapping[Way, float]) -> Curve | None:
    """A static run on a link, in the fastest configuration that is known there for its batch; None
    if none is known.

    It trains beside other work, which slows its set-up and some of its steps. So nothing of its own
    clock counts. Every step takes the usual time. A set-up of a tenth of a second is its gain.
    """
    batch = row["spec"]["batch"]
    steps_s = [s for way, s in usual_s.items() if way[2] == batch]
    if not steps_s:
        return None
    samples, _, losses = zip(*row["curve"])
    seconds = [-(-n // batch) * min(steps_s) for n in samples]
    return Curve(samples=samples, seconds=seconds, losses=smooth(samples, losses))


def copus_curve(row: dict[str, Any], usual_s: Mapping[Way, float]) -> Curve:
    """A run under the controller on its link, all of it counted."""
    return curve_of(row, {way: (1 + MEASURING) * s for way, s in usual_s.items()})


def parts_of(row: dict[str, Any], usual_s: Mapping[Way, float]) -> dict[str, float]:
    """What a run under the controller took its time for, as parts of it all; their sum is 1.

    `fastest` is what its steps take in the fastest configuration known for their batches, `slower`
    what the configurations that it was in take beyond that. `other` is decisions and slow steps.
    """
    fastest: dict[int, float] = {}
    for way, step_s in usual_s.items():
        fastest[way[2]] = min(step_s, fastest.get(way[2], step_s))
    own = {way_of(speed): speed["step_s"] / (1 + MEASURING) for speed in row["speeds"]}
    parts: dict[str, float] = {"fastest": 0.0, "slower": 0.0, "measuring": 0.0}
    starts = [*(way["samples"] for way in row["ways"]), row["curve"][-1][0]]
    for named, (begin, end) in zip(row["ways"], itertools.pairwise(starts)):
        way = way_of(named)
        steps = -(-(end - begin) // way[2])
        step_s = usual_s.get(way, own[way])
        min_s = fastest.get(way[2], step_s)
        parts["fastest"] += steps * min_s
        parts["slower"] += steps * (step_s - min_s)
        parts["measuring"] += steps * step_s * MEASURING
    parts["pauses"] = sum(move["pause_s"] for move in row["moves"])
    parts["set_up"] = row["set_up_s"]
    whole_s = copus_curve(row, usual_s).seconds[-1]
    parts["other"] = whole_s - sum(parts.values())
    return {name: seconds / whole_s for name, seconds in parts.items()}


def mean_parts(rows: Rows, compared: Sequence[Comparison]) -> dict[str, float]:
    """`parts_of` the runs under the controller that were compared, in the mean."""
    keys = {(one.link, one.seed, one.first_batch) for one in compared}
    found = [
        parts_of(row, usual(rows, spec["link"]))
        for row in rows
        if (spec := row["spec"])["kind"] == "copus"
        and (spec["link"], spec["seed"], spec["batch"]) in keys
    ]
    return {name: statistics.fmean(parts[name] for parts in found) for name in found[0]}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One run under the controller against the static batches of its seed and link."""

    link: str
    seed: int
    first_batch: int
    loss: float
    """The lowest that this run and a static one reach."""
    seconds: float
    """Of this run to that loss."""
    best_batch: int
    """The static batch that is there first."""
    best_s: float
    same_s: float | None
    """Of the static run of the first batch; None if it never gets there or was not trained."""

    @property
    def behind(self) -> float:
        """Part of the best static time that this run takes longer."""
        return self.seconds / self.best_s - 1

    @property
    def saved(self) -> float:
        """Part of the best static time that this run saves."""
        return -self.behind


Statics = Mapping[int, Sequence[Curve]]
"""By batch: the curves of its static runs, the run of the scenario's length first."""


def curves_of(rows: Rows, link: str, seed: int) -> tuple[Statics, dict[int, Curve]]:
    """Curves of the static runs and of the controller's, by first batch."""
    usual_s = usual(rows, link)
    statics: dict[int, list[Curve]] = {}
    ours: dict[int, Curve] = {}
    for row in sorted(rows, key=other_length):
        spec = row["spec"]
        if spec["seed"] != seed:
            continue
        if spec["kind"] == "static" and (curve := static_curve(row, usual_s)) is not None:
            statics.setdefault(spec["batch"], []).append(curve)
        elif spec["kind"] == "copus" and spec["link"] == link:
            ours[spec["batch"]] = copus_curve(row, usual_s)
    return statics, ours


def other_length(row: dict[str, Any]) -> float:
    """How far the length of a run is from that of the scenario; 0 for the same."""
    return abs(row["spec"].get("length", 1.0) - 1.0)


def static_time_to(curves: Sequence[Curve], loss: float) -> float | None:
    """Seconds in which a static batch gets to a loss, in a run of the length that is best for it;
    None if it does not.

    It gets there on the way in the run of the scenario's length, or at the end of another one. What
    a longer run has on its way does not count, since runs under the controller have no other length
    either.

    Args:
        curves: of its runs, that of the scenario's length first. Between the ends of two of them
            lie the ends of runs of the lengths between, on a straight line of the loss over
            ln(seconds).
        loss: to be reached.
    """
    times = [t for curve in curves[:1] if (t := curve.time_to(loss)) is not None]
    ends = sorted((curve.seconds[-1], curve.losses[-1]) for curve in curves)
    for (early_s, early), (late_s, late) in itertools.pairwise(ends):
        if early > loss >= late:
            part = (early - loss) / (early - late)
            times.append(early_s * (late_s / early_s) ** part)
    return min(times, default=None)


def compare(
    rows: Rows,
    starts: Mapping[int, Mapping[str, Sequence[int]]],
    *,
    batches: Sequence[int],
) -> tuple[list[int], list[Comparison]]:
    """Every run under the controller of the seeds that are complete, and those seeds."""
    complete, found = [], []
    for seed, by_link in starts.items():
        own: list[Comparison] = []
        for link, firsts in by_link.items():
            still, ours = curves_of(rows, link, seed)
            lacks = any(len(still.get(b, ())) < n for b, n in Counter(batches).items())
            if lacks or not set(firsts) <= ours.keys():
                break
            own += [_comparison(link, seed, b, ours[b], still) for b in firsts]
        else:
            complete.append(seed)
            found += own
    return complete, found


def _comparison(
    link: str, seed: int, first_batch: int, ours: Curve, statics: Statics
) -> Comparison:
    lowest = min(min(curve.losses) for curves in statics.values() for curve in curves)
    loss = max(min(ours.losses), lowest)
    times = {b: t for b, some in statics.items() if (t := static_time_to(some, loss)) is not None}
    best = min(times, key=times.__getitem__)
    seconds = ours.time_to(loss)
    assert seconds is not None
    return Comparison(
        link=link,
        seed=seed,
        first_batch=first_batch,
        loss=loss,
        seconds=seconds,
        best_batch=best,
        best_s=times[best],
        same_s=times.get(first_batch),
    )


def result(found: Sequence[Comparison]) -> dict[str, Any]:
    """Mean and worst time over that of the best static batch, an interval over runs, and the rows
    that they come from.

    Args:
        found: of `compare`, at least one.
    """

    def mean(some: Sequence[Comparison]) -> float:
        return 1.0 + statistics.fmean(one.behind for one in some)

    return {
        "mean": mean(found),
        "worst": 1.0 + max(one.behind for one in found),
        "mean_interval": interval_of_few(found, mean),
        "runs": len(found),
        "seeds": list(dict.fromkeys(one.seed for one in found)),
        "by_first_batch": {
            str(b): mean([one for one in found if one.first_batch == b])
            for b in dict.fromkeys(one.first_batch for one in found)
        },
        "rows": [{**vars(one), "behind": one.behind} for one in found],
    }


def draw(path: Path, statics: Mapping[int, Curve], ours: Mapping[int, Curve], loss: float) -> None:
    """Held-out loss over time: static batches on the left, the controller on the right."""
    most = 2.2 * max(t for c in ours.values() if (t := c.time_to(loss)) is not None)
    with figure(path, 1, 2, figsize=(8, 3), sharex=True, sharey=True) as axes:
        sides = (("static batches, tuned rates", statics), ("--copus, started at batch", ours))
        for axis, (title, curves) in zip(axes, sides):
            for i, batch in enumerate(sorted(ours)):
                if batch not in curves:
                    continue
                curve = curves[batch]
                axis.plot(curve.seconds, curve.losses, color=f"C{i}", lw=1.3, label=f"{batch}")
                if (reached := curve.time_to(loss)) is not None and reached <= most:
                    axis.plot([reached], [loss], "o", color=f"C{i}", ms=5)
            axis.axhline(loss, color="grey", lw=0.8, ls="--")
            axis.set_title(title, fontsize="medium")
            axis.set(xlabel="seconds", xlim=(0, most))
            axis.legend(fontsize="small", frameon=False)
        top = max(float(np.interp(0.1 * most, c.seconds, c.losses)) for c in ours.values())
        axes[0].set(ylabel="held-out loss", ylim=(loss - 0.05 * (top - loss), top))
