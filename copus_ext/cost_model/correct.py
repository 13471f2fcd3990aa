"""Corrects predictions of configurations not measured by those that were.

ln(measured / predicted) is a sum of independent Gaussians with mean zero:

- a factor that all configurations share, one for the tensor size and one for the pipeline size;
- one for the pair of the two, which changes slowly with the micro-batch;
- one for each configuration, and one for how it grows with its micro-batches;
- noise, and for measurements of an earlier time a factor for what has changed since.

One small linear solve gives their posterior, the same in whatever order data come. The spread of
the shared factor is the likeliest one, if that is more than the prior. A machine of another speed
throughout then says nothing about one layout against another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Standard deviations of the parts of ln(measured / predicted)."""

    common: float = 0.10
    """Of the factor that all configurations share, at least."""
    tensor: float = 0.05
    """Of that of a tensor size."""
    pipeline: float = 0.05
    """Of that of a pipeline size."""
    pair: float = 0.08
    """Of that of a (tensor, pipeline) pair, which changes slowly with the micro-batch."""
    octaves: float = 3.0
    """Doublings of the micro-batch after which the pair's factor is another one by 1 - 1/e."""
    own: float = 0.04
    """Of that of a configuration, whatever its global batch."""
    growth: float = 0.03
    """Of the part of a configuration's factor that goes with the logarithm of its micro-batches."""
    drift: float = 0.05
    """Of the factor that all measurements of an earlier time have besides."""
    noise: float = 0.01
    """Of a measurement, at least."""

    @property
    def variance(self) -> float:
        """Of the logarithm of a factor before anything was measured, at `USUAL_COUNT`."""
        parts = (self.common, self.tensor, self.pipeline, self.pair, self.own)
        return sum(part**2 for part in parts)


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What measurements say about predictions."""

    factor: Any
    """[n]: multiply the predicted seconds by this."""
    relative_sd: Any
    """[n]: uncertainty of the corrected seconds, without the noise of a measurement."""
    against_sd: Any = None
    """[n]: uncertainty of the corrected seconds over those of one of them; None if none was
    named. Less than the two uncertainties together, as much of them is common."""


USUAL_COUNT = 4.0
"""Micro-batches at which a configuration's growth counts nothing."""


def correct(
    keys: Any,
    measured_keys: Any,
    log_ratios: Any,
    *,
    counts: Any = USUAL_COUNT,
    measured_counts: Any = USUAL_COUNT,
    noise: Sequence[float] | None = None,
    earlier: Sequence[bool] | None = None,
    against: int | None = None,
) -> Correction:
    """The posterior of the factors of some configurations.

    Args:
        keys: [n, k] configurations to correct: tensor, pipeline, micro-batch size; further columns
            only tell configurations apart.
        measured_keys: [m, k] configurations measured, repeats allowed.
        log_ratios: [m] ln(measured / predicted).
        counts: [n] micro-batches.
        measured_counts: [m] micro-batches.
        noise: [m] standard deviation of each measurement, where it is more than the spread's.
        earlier: [m] whether a measurement is of an earlier time than the rest; the answer is for
            the time of the rest. All or none of them: there is but one time.
        against: index of the configuration that all are compared with.

    Returns:
        Factor 1 and the prior's deviation where nothing was measured.
    """
    s = Spread()
    ask = _table(keys, counts)
    if not len(measured_keys):
        nothing = np.zeros((len(ask[0]), 0))
        return _answer(ask, s, nothing, nothing, np.zeros(0), against)
    known = _table(measured_keys, measured_counts)
    sd = np.maximum(s.noise, np.zeros(len(known[0])) if noise is None else noise)
    ratios = np.asarray(log_ratios, dtype=float)
    old = np.zeros(len(sd)) if earlier is None else np.asarray(earlier, dtype=float)
    apart = np.diag(sd**2) + (0.0 if old.all() else s.drift**2 * np.outer(old, old))
    inner = _kernel(known, known, s) + apart
    s = replace(s, common=_common(inner - s.common**2, ratios, at_least=s.common))
    inner = _kernel(known, known, s) + apart
    cross = _kernel(ask, known, s)
    return _answer(ask, s, np.linalg.solve(inner, cross.T).T, cross, ratios, against)


def _answer(
    ask: tuple[Any, Any], s: Spread, weights: Any, cross: Any, ratios: Any, against: int | None
) -> Correction:
    """The posterior.

    Args:
        ask: configurations, n of them.
        s: spread of the parts.
        weights: [n, m] of the measurements.
        cross: [n, m] covariance with the measurements.
        ratios: [m] of the measurements.
        against: see `correct`.
    """
    prior = np.square(ask[1]) * s.growth**2 + s.variance
    variance = np.maximum(prior - np.einsum("ij,ij->i", weights, cross), 0.0)
    found = Correction(factor=np.exp(weights @ ratios), relative_sd=np.sqrt(variance))
    if against is None:
        return found
    one = ask[0][against : against + 1], ask[1][against : against + 1]
    shared = _kernel(ask, one, s)[:, 0] - weights @ cross[against]
    gap = variance + variance[against] - 2.0 * shared
    gap[against] = 0.0
    return replace(found, against_sd=np.sqrt(np.maximum(gap, 0.0)))


def _common(rest: Any, ratios: Any, *, at_least: float) -> float:
    """The likeliest standard deviation of the common factor.

    Args:
        rest: [m, m] covariance of the measurements without it.
        ratios: [m] of the measurements.
        at_least: where less would be likelier.
    """
    weights = np.linalg.solve(rest, np.ones(len(ratios)))
    mean = weights @ ratios / weights.sum()
    return math.sqrt(max(at_least**2, mean**2 - 1.0 / weights.sum()))


def _table(keys: Any, counts: Any) -> tuple[Any, Any]:
    """Keys as whole numbers, and the logarithm of the micro-batches over the usual."""
    whole = np.atleast_2d(np.asarray(keys, dtype=np.int64))
    over = np.log(np.broadcast_to(np.asarray(counts, dtype=float), len(whole)) / USUAL_COUNT)
    return whole, over


def _kernel(one: tuple[Any, Any], other: tuple[Any, Any], s: Spread) -> Any:
    (a, over_a), (b, over_b) = one, other
    tensor, pipeline = (a[:, None, i] == b[None, :, i] for i in (0, 1))
    own = (a[:, None, :] == b[None, :, :]).all(axis=2)
    octaves = np.abs(np.log2(a[:, None, 2] / b[None, :, 2]))
    pair = (tensor & pipeline) * np.exp(-octaves / s.octaves)
    return (
        s.common**2
        + s.tensor**2 * tensor
        + s.pipeline**2 * pipeline
        + s.pair**2 * pair
        + own * (s.own**2 + s.growth**2 * np.outer(over_a, over_b))
    )
