"""How often the 95 % interval of the noise scale misses the truth, in drawn runs.

Runs of one-step estimates are drawn from gradients with Gaussian noise of a known noise scale, and
smoothed as training does. For a perfect interval each side misses 2.5 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from copus_ext.gns.estimators import Estimate
from copus_ext.gns.smoothing import Z_95, Smoothed, half_life_tokens

_POWERS = [1.0 / k for k in range(1, 31)]
SPECTRA: dict[str, list[tuple[float, int, float]]] = {
    "400 equal directions": [(1.0, 400, 1.0)],
    "40 equal directions": [(1.0, 40, 1.0)],
    "30 directions, the k-th with 1/k": [
        (p / sum(_POWERS), 1, math.sqrt(p) / sum(map(math.sqrt, _POWERS))) for p in _POWERS
    ],
    "3 directions with 40 %": [(0.4, 3, 0.5), (0.6, 300, 0.5)],
    "1 direction with 20 %": [(0.2, 1, 0.5), (0.8, 300, 0.5)],
}
"""Groups of equal directions: share of tr(Sigma), number, share of |G|^2."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of run."""

    spectrum: str
    """A name of `SPECTRA`."""
    noise_scale_over_batch: float
    """phi/B."""
    batch: int
    """Samples of a step."""
    groups: int
    """Small gradients of a step, of equal size."""
    measurements: int
    """Steps of the run."""
    half_life: float | None
    """In measurements; None: the default."""


def one_step(case: Case, rng: np.random.Generator, draws: int) -> tuple[Any, Any]:
    """|G|^2 and V as estimated from one step, in many runs at once; truly they are 1 and phi."""
    square, v = np.zeros(draws), np.zeros(draws)
    for of_noise, number, of_signal in SPECTRA[case.spectrum]:
        variance = of_noise * case.noise_scale_over_batch * case.batch / number
        deviation = math.sqrt(variance / case.batch)
        square += (math.sqrt(of_signal) + deviation * rng.standard_normal(draws)) ** 2
        if number > 1:
            square += deviation**2 * rng.chisquare(number - 1, draws)
        v += variance * rng.chisquare(number * (case.groups - 1), draws) / (case.groups - 1)
    return square - v / case.batch, v


def misses(
    case: Case, *, seed: Sequence[int], draws: int, z: float | None = None
) -> dict[str, float]:
    """Percent of runs whose interval lies above the truth, below it, and has no upper end; with
    another level where `z` is given."""
    rng, states = np.random.default_rng(seed), Smoothed()
    for step in range(1, case.measurements + 1):
        half_life = case.half_life or half_life_tokens(step, 1.0)
        g2, v = one_step(case, rng, draws)
        states = states.update(
            Estimate(grad_norm_sq=g2, grad_variance_trace=v), tokens=1.0, half_life=half_life
        )
    columns = {name: np.broadcast_to(x, draws).tolist() for name, x in vars(states).items()}
    truth = case.noise_scale_over_batch * case.batch
    above = below = unbounded = 0
    for values in zip(*columns.values(), strict=True):
        interval = Smoothed(**dict(zip(columns, values))).interval(z or Z_95)
        assert interval.low is not None
        above += interval.low > truth
        below += interval.high is not None and interval.high < truth
        unbounded += interval.high is None
    counts = {"above": above, "below": below, "unbounded": unbounded}
    return {name: 100 * count / draws for name, count in counts.items()}
