"""Fits the constants of the cost model to measured step times.

In logarithms, robust against rows that no smooth model explains, and held near prior values where
the data say nothing: a free fit invents links of 280 TB/s.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.rows import ConfigBatch
from copus_ext.cost_model.step import step_time

PRIOR_WEIGHT = 0.1
"""Residuals that a factor e away from the prior counts for, against a relative error of 1."""
ROBUST_SCALE = 0.1
"""Relative error above which a row counts by its distance and not by its square."""


def fit_constants(
    rows: ConfigBatch,
    seconds: Any,
    *,
    prior: Constants,
    weights: Any = 1.0,
    prior_weight: float = PRIOR_WEIGHT,
) -> Constants:
    """Finds the constants that explain measured step times.

    Args:
        rows: what was measured.
        seconds: [n] measured seconds of a step.
        prior: where to start, and where to stay without data.
        weights: [n] of the rows.

    Raises:
        ValueError: a time is not positive.
    """
    from scipy.optimize import least_squares

    measured = np.asarray(seconds, dtype=float)
    if not (np.isfinite(measured).all() and (measured > 0).all()):
        raise ValueError("measured step times must be positive")
    names = [f.name for f in fields(Constants)]
    start = np.log([getattr(prior, n) for n in names])
    scale = np.sqrt(np.broadcast_to(weights, len(measured)))

    def constants(theta: Any) -> Constants:
        return Constants(**dict(zip(names, np.exp(theta).tolist())))

    def errors(theta: Any) -> Any:
        return np.log(step_time(rows, constants(theta)).step_s / measured)

    def residuals(theta: Any) -> Any:
        robust = _soft(errors(theta), ROBUST_SCALE) * scale
        return np.concatenate([robust, prior_weight * (theta - start)])

    bounds = start - np.log(30), start + np.log(30)
    found = least_squares(residuals, start, bounds=bounds, x_scale=1.0, diff_step=1e-4)
    return constants(found.x)


def _soft(error: Any, scale: float) -> Any:
    """Signed root of the soft-L1 loss: the error itself when small, its root when large."""
    return np.sign(error) * scale * np.sqrt(2 * (np.sqrt(1 + (error / scale) ** 2) - 1))
