"""Corrects predictions of configurations not measured by those that were.

The logarithm of measured over predicted is a common factor, plus one for the tensor and one for the
pipeline size, plus one for each (tensor, pipeline, micro-batch), plus noise: independent Gaussians
with mean zero. Their posterior is one small linear solve, the same in whatever order data come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Key = tuple[int, int, int]
"""Tensor size, pipeline size, micro-batch size."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Standard deviations of the parts of ln(measured / predicted)."""

    common: float = 0.10
    """Of the factor that all configurations share."""
    tensor: float = 0.05
    """Of that of a tensor size."""
    pipeline: float = 0.05
    """Of that of a pipeline size."""
    own: float = 0.04
    """Of that of a configuration, whatever its global batch."""
    noise: float = 0.01
    """Of a measurement."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What measurements say about predictions."""

    factor: Any
    """[n]: multiply the predicted seconds by this."""
    relative_sd: Any
    """[n]: uncertainty of the corrected seconds, without the noise of a measurement."""


def correct(
    keys: Sequence[Key],
    measured_keys: Sequence[Key],
    log_ratios: Sequence[float],
    *,
    spread: Spread | None = None,
    noise: Sequence[float] | None = None,
) -> Correction:
    """The posterior of the factors of some configurations.

    Args:
        keys: [n] configurations to correct.
        measured_keys: [m] configurations measured, repeats allowed.
        log_ratios: [m] ln(measured / predicted).
        spread: of the parts.
        noise: [m] standard deviation of each measurement, instead of the spread's.

    Returns:
        Factor 1 and the prior's deviation where nothing was measured.
    """
    s = spread or Spread()
    ask = np.asarray(keys, dtype=np.int64).reshape(-1, 3)
    prior = s.common**2 + s.tensor**2 + s.pipeline**2 + s.own**2
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
    return s.common**2 + s.tensor**2 * tensor + s.pipeline**2 * pipeline + s.own**2 * own
