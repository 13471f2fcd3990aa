"""What is known of one-step estimates of the noise scale, to compare measurements with."""

from __future__ import annotations

from dataclasses import dataclass

from copus_ext.gns.estimators import Weights


def equal_weights(samples_per_group: float, num_groups: int = 1) -> Weights:
    """Weights of gradients that are plain means over equally many samples each."""
    return Weights(signal=num_groups, noise=num_groups / samples_per_group)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Variances of a one-step estimate."""

    grad_norm_sq: float
    """Var(|G|^2 estimate)."""
    grad_variance_trace: float
    """Var(V estimate)."""
    covariance: float
    """Cov of the two."""


def predicted_spread(
    *,
    v: float,
    along_gradient: float,
    effective_dimension: float,
    batch: float,
    group: float,
    num_groups: int,
    excess: float = 0.0,
) -> Spread:
    """Variances of a one-step estimate from what is known about the noise, for planning.

    Args:
        v: tr(Sigma).
        along_gradient: G' Sigma G.
        effective_dimension: tr(Sigma)^2 / tr(Sigma^2).
        batch: samples B of the step.
        group: samples of a small group.
        num_groups: n; n x group may be less than the batch (`half`).
        excess: k4 = Var(squared norm of a sample's noise) - 2 tr(Sigma^2).

    Returns:
        Exact for Gaussian noise (excess 0), up to k4/B^3 otherwise.
    """
    b, g, n, line = batch, group, num_groups, along_gradient
    square = v * v / effective_dimension
    var_big = 4 * line / b + 2 * square / b**2
    gap = 1 / (n * g) - 1 / b
    spread = 1 / (n * g * g) - 1 / b**2
    heavy = n * g * spread**2 + (b - n * g) / b**4
    var_v = (g * b / (b - g)) ** 2 * (4 * line * gap + 2 * square * spread + excess * heavy)
    pure = var_v if excess == 0 else (g * b / (b - g)) ** 2 * (4 * line * gap + 2 * square * spread)
    var_g2 = var_big + pure / b**2 + excess * gap / (b - g) ** 2
    return Spread(grad_norm_sq=var_g2, grad_variance_trace=var_v, covariance=-pure / b)
