"""How sure a predicted peak of memory is, and what measured ones say about others.

Two numbers are not known: a factor on all that comes and goes within a step, which depends on how
layers are implemented, and the bytes of a process besides. Both are Gaussian around what was
predicted. A measured peak has an error of its own. That a run ran, or ran out of memory, bounds its
peak from above or below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

KINDS = (
    *("weights", "grads", "optimizer", "activations", "logits", "buffers", "context"),
    "fragmentation",
)
MOVING = ("activations", "logits", "buffers", "fragmentation")
"""What comes and goes within a step."""
MIN_PEAK_SD = 0.03
"""Relative uncertainty of a peak of which much was measured."""
_UNSEEN = 1.5
"""Times that the doubt of a peak is larger than `relative_sd` where none was measured: of runs on
clusters unseen that were said to fit with 90 to 99 %, half ran (decision 078)."""
_WIDER = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Times that the spread of both numbers may be larger, if measured peaks say so."""
_TOLD = 0.99
"""A bound that holds with this probability anyway says nothing."""
_GRID = np.linspace(-5.0, 5.0, 41)
"""In standard deviations, where bounds are weighed."""
_FAR = -20.0
"""Standard deviations below which the tail of a Gaussian is as its first asymptotic term."""
_LIKELY = 0.05
"""Probability of all bounds from which on they do not call for a wider spread."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of many configurations."""

    stages: dict[str, Any]
    """Of each of `KINDS`, [max pp, n]; zero beyond a row's own stages."""
    peak_bytes: Any
    """[n] of the stage that needs most."""
    worst_stage: Any
    """[n] which stage that is."""
    prior_sd: Any
    """[2, n] standard deviations of a factor on `moving_bytes`, and of the bytes of a process
    besides, before any peak was measured."""

    @property
    def moving_bytes(self) -> Any:
        """[n] what comes and goes on that stage."""
        at = self.worst_stage, np.arange(len(self.worst_stage))
        return np.sum([self.stages[kind][at] for kind in MOVING], axis=0)


@dataclass(frozen=True, kw_only=True)
class PeakCorrection:
    moving: float = 1.0
    """Factor on activations, logits and buffers, which depend on the implementation."""
    fixed_bytes: float = 0.0
    """Of a process, besides its context."""
    covariance: tuple[float, float, float] | None = None
    """Of both: variance of the factor, covariance, variance of the bytes; None: nothing was
    measured."""
    without: PeakCorrection | None = None
    """The same without the runs that ran out of memory; None: none did, or they say nothing."""

    @classmethod
    def of(
        cls,
        predicted: Memory,
        measured_bytes: Any,
        *,
        at_most: Any = None,
        at_least: Any = None,
    ) -> PeakCorrection:
        """The posterior of both. Several peaks tell them apart, such as one with and one without
        recomputation. Their spread is that of a prediction, or wider: the likeliest of a few for
        measured peaks, and then the least with which the bounds have a probability of 5 %.

        Args:
            predicted: of the same configurations, not corrected.
            measured_bytes: [m] their peaks; NaN where none was measured.
            at_most: [m] bytes that a run which ran cannot have exceeded, infinity where it is not
                known; None: of none.
            at_least: [m] bytes that a run which ran out of memory needed; minus infinity as above.
        """
        measured = np.asarray(measured_bytes, dtype=float)
        if not len(measured):
            return cls()
        moving, peak = predicted.moving_bytes, predicted.peak_bytes
        prior = np.max(predicted.prior_sd, axis=1)
        known = np.isfinite(measured)
        effects = np.stack([moving, np.ones(len(measured))], axis=1)
        bounds = [
            (sign * effects, sign * (np.asarray(limit, dtype=float) - peak), peak)
            for sign, limit in ((1.0, at_most), (-1.0, at_least))
            if limit is not None
        ]
        peaks = effects[known], (measured - peak)[known], measured[known], prior
        mean, root = np.zeros(2), np.diag(prior)
        for wider in _widths(*peaks):
            mean, root = _gaussian(*peaks, wider)
            some = [_telling(*bound, mean, root) for bound in bounds]
            if not any(len(gap) for _, gap, _ in some):
                if not known.any():
                    return cls()
                break
            mean, root, share = _bounded(some, mean, root)
            if share >= _LIKELY:
                break
        spread = root @ root.T
        context = float(predicted.stages["context"].max())
        # No process does with less than nothing: what comes and goes is smaller instead.
        if (lack := -context - mean[1]) > 0:
            mean = mean + spread[:, 1] / spread[1, 1] * lack
        lacked = at_least is not None and bool(np.isfinite(at_least).any())
        return cls(
            without=cls.of(predicted, measured, at_most=at_most) if lacked else None,
            moving=max(1.0 + float(mean[0]), 0.2),
            fixed_bytes=float(mean[1]),
            covariance=(float(spread[0, 0]), float(spread[0, 1]), float(spread[1, 1])),
        )

    def relative_sd(self, peak: Any, moving: Any, prior_sd: Any) -> Any:
        """[n] relative uncertainty of corrected peaks. One that was not measured, and has much that
        comes and goes, stays uncertain.

        Args:
            peak: [n] bytes.
            moving: [n] of them, what comes and goes, as predicted.
            prior_sd: [2, n] as `Memory.prior_sd`.
        """
        if self.covariance is None:
            variance = np.square(prior_sd[0] * moving) + np.square(prior_sd[1])
        else:
            factor, both, fixed = self.covariance
            variance = factor * moving**2 + 2.0 * both * moving + fixed
        return np.sqrt(MIN_PEAK_SD**2 + variance / np.square(peak))

    def fit_probability(self, peak: Any, limit_bytes: float, sd: Any) -> Any:
        """[n] probability of corrected peaks with some relative uncertainty to stay below a limit.
        As long as nothing is known of a run that ran, neither are the allocator's settings and
        libraries that the user has."""
        wider = _UNSEEN if (self.without or self).covariance is None else 1.0
        return fit_probability(peak, limit_bytes, wider * sd)


AS_PREDICTED = PeakCorrection()


def less_likely(one: Any, other: Any, limit_bytes: float) -> tuple[Any, Any]:
    """Peaks of configurations with relative uncertainties ([n] each), as wide as it takes to be no
    likelier below a limit than other ones; the other ones where no width does that."""
    (peak, sd), (other_peak, other_sd) = one, other
    room = (limit_bytes - peak) / peak
    far, most = room / sd, (limit_bytes - other_peak) / (other_sd * other_peak)
    as_wide = room / np.where(most == 0.0, 1.0, most)
    bounded, changes = most < far, as_wide <= 0.0
    changes |= most == 0.0
    sd = np.where(bounded, np.where(changes, other_sd, as_wide), sd)
    return np.where(bounded & changes, other_peak, peak), sd


def _widths(effects: Any, left: Any, measured: Any, prior: Any) -> tuple[float, ...]:
    """Times that the prior may be wider, from the one that makes measured peaks likeliest on. The
    arguments are those of `_gaussian`."""
    if not len(left):
        return _WIDER
    noise = MIN_PEAK_SD * measured
    slopes, left = effects * prior / noise[:, None], left / noise

    def likelihood(wider: float) -> float:
        covariance = wider**2 * slopes @ slopes.T + np.eye(len(left))
        return -left @ np.linalg.solve(covariance, left) - np.linalg.slogdet(covariance)[1]

    return _WIDER[_WIDER.index(max(_WIDER, key=likelihood)) :]


def _gaussian(effects: Any, left: Any, measured: Any, prior: Any, wider: float) -> tuple[Any, Any]:
    """Mean [2] of both numbers less what was predicted, and a root [2, 2] of their covariance.

    Args:
        effects: [m, 2] bytes that one unit of each adds to a peak.
        left: [m] bytes measured less predicted.
        measured: [m] bytes.
        prior: [2] standard deviations.
        wider: what they are multiplied by.
    """
    noise = MIN_PEAK_SD * measured
    slopes, left = effects * prior / noise[:, None], left / noise
    covariance = np.linalg.inv(slopes.T @ slopes + np.eye(2) / wider**2)
    return prior * (covariance @ (slopes.T @ left)), prior[:, None] * np.linalg.cholesky(covariance)


def _telling(effects: Any, gap: Any, peak: Any, mean: Any, root: Any) -> tuple[Any, Any, Any]:
    """The bounds that say something: those of effects @ numbers <= gap that may not hold anyway."""
    finite = np.isfinite(gap)
    effects, gap, peak = effects[finite], gap[finite], peak[finite]
    sd = np.hypot(np.linalg.norm(effects @ root, axis=1), MIN_PEAK_SD * peak)
    open_ = _log_share((gap - effects @ mean) / sd) < math.log(_TOLD)
    return effects[open_], gap[open_], peak[open_]


def _bounded(bounds: Any, mean: Any, root: Any) -> tuple[Any, Any, float]:
    """Mean and root of the covariance of a Gaussian within some bounds, by its moments on a grid,
    and the probability of the bounds."""
    at = np.stack(np.meshgrid(_GRID, _GRID), axis=-1).reshape(-1, 2)
    before = -np.square(at).sum(axis=1) / 2
    logs, numbers = before, mean + at @ root.T
    for effects, gap, peak in bounds:
        z = (gap - numbers @ effects.T) / (MIN_PEAK_SD * peak)
        logs = logs + _log_share(z).sum(axis=1)
    weights = np.exp(logs - logs.max())
    share = math.exp(logs.max()) * weights.sum() / np.exp(before).sum()
    weights /= weights.sum()
    found = weights @ numbers
    away = numbers - found
    covariance = (weights[:, None] * away).T @ away
    scale = np.linalg.norm(root, axis=1)
    # A grid is no finer than its steps.
    covariance += np.diag(np.square(1e-3 * scale))
    return found, scale[:, None] * np.linalg.cholesky(covariance / np.outer(scale, scale)), share


def _log_share(z: Any) -> Any:
    """Logarithm of the share of a Gaussian below z standard deviations."""
    z = np.asarray(z, dtype=float)
    low = np.minimum(z, _FAR)
    far = -np.square(low) / 2 - np.log(-low * math.sqrt(2 * math.pi))
    return np.where(z < _FAR, far, np.log(0.5 * _erfc(-np.maximum(z, _FAR) / math.sqrt(2.0))))


_erfc = np.vectorize(math.erfc, otypes=[float])


def fit_probability(peak_bytes: Any, limit_bytes: Any, sd: Any) -> Any:
    """Probability that a configuration fits, the peak being Gaussian around its prediction with a
    relative standard deviation."""
    peak = np.asarray(peak_bytes, dtype=float)
    return 0.5 * (1.0 + _erf((limit_bytes - peak) / (sd * peak * np.sqrt(2.0))))


def max_bytes(peak_bytes: Any, sd: Any, deviations: float) -> Any:
    """What a peak stays below with the probability of so many standard deviations."""
    return peak_bytes * (1.0 + deviations * sd)


def _erf(x: Any) -> Any:
    """Error function to 1.5e-7 (Abramowitz and Stegun 7.1.26)."""
    t = 1.0 / (1.0 + 0.3275911 * np.abs(x))
    series = t * (
        0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    )
    return np.sign(x) * (1.0 - series * np.exp(-x * x))
