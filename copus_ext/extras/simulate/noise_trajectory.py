"""The noise scale over the training as a power law, and the estimates of it that a run sees.

Progress is counted in samples of a run with small batches: the number that it needs to get as far
(`GroundTruth` says how many a larger batch needs).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from copus_ext.gns.estimators import Estimate

DIMENSION = 200
"""Effective directions of the noise; the tests of `bench/noise.py` had 170."""
_AHEAD = 256


@dataclass(frozen=True, kw_only=True)
class NoiseTrajectory:
    """Noise scale at some points; between them it is a power of the progress."""

    progress: tuple[float, ...]
    """Progress, samples, ascending and positive; at least two points."""
    phi: tuple[float, ...]
    """Noise scale as it would be measured, samples."""

    def phi_at(self, progress: Any) -> Any:
        """The noise scale; beyond the ends it goes on as a power of the progress."""
        return _power(progress, self.progress, self.phi)


def power_law(*, end: float, phi_end: float, exponent: float) -> NoiseTrajectory:
    start = end / 1e4
    phi = phi_end * (start / end) ** exponent
    return NoiseTrajectory(progress=(start, end), phi=(phi, phi_end))


def _power(at: Any, x: Sequence[float], y: Sequence[float]) -> Any:
    """Straight lines between points in logarithms, going on beyond the ends."""
    at, lx, ly = np.log(np.asarray(at, dtype=float)), np.log(x), np.log(y)
    i = np.clip(np.searchsorted(lx, at) - 1, 0, len(lx) - 2)
    slope = (ly[i + 1] - ly[i]) / (lx[i + 1] - lx[i])
    return np.exp(ly[i] + slope * (at - lx[i]))


class NoiseEstimatorModel:
    """A stream of one-step estimates.

    Gradient noise is Gaussian and alike in `dimension` directions. So the squared norm of the batch
    is a non-central chi-square, and the scatter of the micro-batches around it an independent
    chi-square. Real noise has tr(Sigma)^2 / tr(Sigma^2) such directions.
    """

    def __init__(self, seed: int, *, dimension: int = DIMENSION) -> None:
        self._random = np.random.default_rng([seed, 0x6E5])
        self.dimension = dimension
        self._drawn: dict[int, Any] = {}

    def draw(self, phi: float, batch: int, groups: int) -> Estimate | None:
        """The estimates of one step, in units of the noise's trace; None with a single group.

        Args:
            phi: noise scale, samples.
            groups: small gradients that are compared, of equal size.
        """
        if groups < 2:
            return None
        along, across, scatter = self._next(groups)
        # In every direction the mean gradient has variance 1/(B d); |G|^2 is 1/phi.
        unit = batch * self.dimension
        shift = math.sqrt(unit / phi)
        big = ((along + shift) ** 2 + across) / unit
        v = scatter / (self.dimension * (groups - 1))
        return Estimate(grad_norm_sq=big - v / batch, grad_variance_trace=v)

    def _next(self, groups: int) -> tuple[float, float, float]:
        stock = self._drawn.get(groups)
        if not stock:
            d = self.dimension
            columns = (
                self._random.standard_normal(_AHEAD),
                self._random.chisquare(d - 1, _AHEAD),
                self._random.chisquare(d * (groups - 1), _AHEAD),
            )
            stock = self._drawn[groups] = list(zip(*(column.tolist() for column in columns)))
        return stock.pop()
