"""Draws what the noise scale's estimator sees of a step.

Gradient noise is taken to be Gaussian, alike in `dimension` directions: the batch's squared norm is
then a non-central chi-square, the scatter of the micro-batches around it an independent chi-square.
Real noise has that many effective directions, tr(Sigma)^2 / tr(Sigma^2).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from copus_ext.gns.estimators import Estimate

DIMENSION = 200
"""Effective directions of the noise; the tests of `bench/noise_accuracy.py` had 170."""
_AHEAD = 256


class NoiseEstimatorModel:
    """A stream of one-step estimates.

    Args:
        seed: of the draws.
        dimension: effective directions of the noise.
    """

    def __init__(self, seed: int, *, dimension: int = DIMENSION) -> None:
        self._random = np.random.default_rng([seed, 0x6E5])
        self.dimension = dimension
        self._drawn: dict[int, Any] = {}

    def read(self, phi: float, batch: int, groups: int) -> Estimate | None:
        """The estimates of one step, in units of the noise's trace; None with a single group.

        Args:
            phi: noise scale, samples.
            batch: samples of the step.
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
        return Estimate(g2=big - v / batch, v=v)

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
