"""Corrects predictions of configurations not measured by those that were.

The logarithm of measured over predicted is a common factor, plus one for the tensor and one for
the pipeline size, plus one for their pair that changes slowly with the micro-batch, plus one for
each (tensor, pipeline, micro-batch), plus noise: independent Gaussians with mean zero. Their
posterior is one small linear solve, the same in whatever order data come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Standard deviations of the parts of ln(measured / predicted)."""

    common: float = 0.10
    """Of the factor that all configurations share."""
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
    noise: float = 0.01
    """Of a measurement."""

    @property
    def variance(self) -> float:
        """Of the logarithm of a factor before anything was measured."""
        parts = (self.common, self.tensor, self.pipeline, self.pair, self.own)
        return sum(part**2 for part in parts)


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What measurements say about predictions."""

    factor: Any
    """[n]: multiply the predicted seconds by this."""
    relative_sd: Any
    """[n]: uncertainty of the corrected seconds, without the noise of a measurement."""


def correct(
    keys: Any,
    measured_keys: Any,
    log_ratios: Sequence[float],
    *,
    spread: Spread | None = None,
    noise: Sequence[float] | None = None,
) -> Correction:
    """The posterior of the factors of some configurations.

    Args:
        keys: [n, 3] configurations to correct: tensor, pipeline, micro-batch size.
        measured_keys: [m, 3] configurations measured, repeats allowed.
        log_ratios: [m] ln(measured / predicted).
        spread: of the parts.
        noise: [m] standard deviation of each measurement, instead of the spread's.

    Returns:
        Factor 1 and the prior's deviation where nothing was measured.
    """
    s = spread or Spread()
    ask = np.asarray(keys, dtype=np.int64).reshape(-1, 3)
    prior = s.variance
    if not len(measured_keys):
        ones = np.ones(len(ask))
        return Correction(factor=ones, relative_sd=ones * np.sqrt(prior))
    known = np.asarray(measured_keys, dtype=np.int64).reshape(-1, 3)
    sd = np.full(len(known), s.noise) if noise is None else np.asarray(noise, dtype=float)
    inner = _kernel(known, known, s) + np.diag(sd**2)
    cross = _kernel(ask, known, s)
    weights = np.linalg.solve(inner, cross.T).T
    mean = weights @ np.asarray(log_ratios, dtype=float)
    variance = prior - np.einsum("ij,ij->i", weights, cross)
    return Correction(factor=np.exp(mean), relative_sd=np.sqrt(np.maximum(variance, 0.0)))


def _kernel(a: Any, b: Any, s: Spread) -> Any:
    same = a[:, None, :] == b[None, :, :]
    tensor, pipeline = same[..., 0], same[..., 1]
    own = same.all(axis=2)
    octaves = np.abs(np.log2(a[:, None, 2] / b[None, :, 2]))
    pair = (tensor & pipeline) * np.exp(-octaves / s.octaves)
    return (
        s.common**2
        + s.tensor**2 * tensor
        + s.pipeline**2 * pipeline
        + s.pair**2 * pair
        + s.own**2 * own
    )
