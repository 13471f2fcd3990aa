"""From squared gradient norms of a step to the gradient's signal and noise.

With G the expected gradient and V the trace of one sample's gradient covariance, a gradient that
averages tokens or samples with weights u_i has the expected squared norm

    W^2 |G|^2 + A V,   W = sum u_i,   A = sum u_i^2.

Two different averages of one step therefore give both unknowns, without bias for any fixed weights:
arXiv 1812.06162 (appendix A), and Algorithm 1 of arXiv 2604.26687 as the case of equal groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What averaging did to signal and noise, summed over the gradients that were measured."""

    signal: float
    """Sum over the gradients of W^2."""
    noise: float
    """Sum over the gradients of A, in 1/samples."""

    def __add__(self, other: Weights) -> Weights:
        return Weights(signal=self.signal + other.signal, noise=self.noise + other.noise)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Signal and noise of one step's gradient. Single steps are noisy, and the signal may be
    negative: average before use."""

    grad_norm_sq: float
    """|G|^2, squared norm of the expected gradient."""
    grad_variance_trace: float
    """V = tr(Sigma), trace of the covariance of one sample's gradient, in |gradient|^2 samples."""


class NoiseNotIdentifiable(ValueError):
    """Small and big gradient average the same samples, or one of them none: fewer equations than
    unknowns."""


def estimate_gns(
    small_squares: float, small: Weights, big_squares: float, big: Weights
) -> Estimate:
    """Signal and noise from the squared norms of small groups and of the whole batch.

    Args:
        small_squares: sum over the small groups of the squared norm of their gradient.
        small: the groups' weights, summed likewise.
        big_squares: squared norm of the whole batch's gradient.
        big: its weights.

    Raises:
        NoiseNotIdentifiable: the two averages do not differ, or one of them is empty.
    """
    if not (small.signal > 0 and big.signal > 0):
        raise NoiseNotIdentifiable("one side holds no loss tokens")
    q_small, a_small = small_squares / small.signal, small.noise / small.signal
    q_big, a_big = big_squares / big.signal, big.noise / big.signal
    if not a_small > a_big * (1 + 1e-9):
        raise NoiseNotIdentifiable("the small groups hold the whole batch")
    v = (q_small - q_big) / (a_small - a_big)
    return Estimate(grad_norm_sq=q_big - a_big * v, grad_variance_trace=v)


def equal_weights(samples_per_group: float, num_groups: int = 1) -> Weights:
    """Weights of gradients that are plain means over equally many samples each."""
    return Weights(signal=num_groups, noise=num_groups / samples_per_group)


def group_weights(
    tokens: Sequence[float],
    *,
    divisor: float,
    per_token: bool,
    tokens_per_sample: float,
    shares: Sequence[float] | None = None,
) -> Weights:
    """Weights of one gradient as megatron-core's buffers hold it.

    Args:
        tokens: loss tokens of each micro-batch that is in it; those with none count for nothing.
        divisor: by default each micro-batch's mean is divided by this number, the micro-batches of
            the step; with `per_token` the whole sum is.
        per_token: `--calculate-per-token-loss`: the buffers hold sums over tokens.
        tokens_per_sample: loss tokens of a sample, which turns 1/tokens into 1/samples.
        shares: what each micro-batch's mean is multiplied by instead of being divided, where
            micro-batches differ in size; without effect with `per_token`.
    """
    if shares is not None and not per_token:
        known = [(share, n) for share, n in zip(shares, tokens, strict=True) if n > 0]
        return Weights(
            signal=sum(share for share, _ in known) ** 2,
            noise=sum(share**2 / n for share, n in known) * tokens_per_sample,
        )
    present = [n for n in tokens if n > 0]
    if per_token:
        total = sum(present)
        return Weights(signal=(total / divisor) ** 2, noise=total / divisor**2 * tokens_per_sample)
    return Weights(
        signal=(len(present) / divisor) ** 2,
        noise=sum(1 / n for n in present) / divisor**2 * tokens_per_sample,
    )


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
