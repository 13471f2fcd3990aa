"""The least time to a target for somebody who knows the course and every speed.

Starts in any layout, changes the batch for nothing and in any direction, and the layout for the
pause that the scenario has. Intervals of the course are the segments: within one nothing changes,
so that no other time to switch is better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from copus_ext.goodput.switch_rule import best_moves
from copus_ext.simulate.scenario import Scenario
from copus_ext.simulate.speeds import Speeds


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The best way to one target."""

    seconds: float
    """From the start."""
    relayouts: int
    """Changes of layout on it."""


def segments(scenario: Scenario, speeds: Speeds, target: float) -> tuple[list[list[float]], list]:
    """[segments][layouts] seconds at the best batch, and the layouts.

    Args:
        scenario: its course.
        speeds: of all configurations.
        target: progress at which the last segment ends.

    Raises:
        ValueError: a truth with a `rate_exponent`: what a segment takes would depend on the way to
            it.
    """
    if scenario.truth.rate_exponent:
        raise ValueError("the oracle does not know the schedule of the learning rate")
    course = scenario.course
    edges = np.array(course.edges)
    lengths = np.clip(target - edges[:-1], 0.0, np.diff(edges))
    lengths = lengths[lengths > 0]
    columns = []
    for layout in speeds.layouts:
        rows = [row for b in speeds.batches if (row := speeds.at(layout, b)) is not None]
        rates = [course.rates(r.global_batch_size) * r.samples_per_s for r in rows]
        columns.append(lengths / np.max(rates, axis=0)[: len(lengths)])
    return np.stack(columns, axis=1).tolist(), speeds.layouts


def optimum(scenario: Scenario, speeds: Speeds, target: float) -> Optimum:
    """The least time to a progress."""
    times, layouts = segments(scenario, speeds, target)
    best = Optimum(seconds=math.inf, relayouts=0)
    for start in range(len(layouts)):
        path, seconds = best_moves(times, scenario.switch_cost_s, start)
        if seconds < best.seconds:
            moves = sum(a != b for a, b in zip([start, *path], path))
            best = Optimum(seconds=seconds, relayouts=moves)
    return best


def optima(scenario: Scenario, seed: int = 0) -> dict[str, Optimum]:
    """The least time to every target, each by itself: together they are no single run."""
    speeds = scenario.speeds(seed)
    return {name: optimum(scenario, speeds, at) for name, at in scenario.targets.items()}
