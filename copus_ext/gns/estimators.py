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
from typing import Literal

Estimator = Literal["micro", "rank", "half"]
ESTIMATORS: tuple[Estimator, ...] = ("micro", "rank", "half")
"""Small gradients to compare with the whole batch's: of each micro-batch, of each data-parallel
rank, or of half of the micro-batches; the one of least variance first."""


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


def unavailable(
    estimator: Estimator,
    *,
    dp: int,
    num_microbatches: int,
    fused_accumulation: bool,
    cp: int = 1,
) -> str | None:
    """Why an estimator cannot measure a step, or None if it can."""
    if estimator == "micro":
        if cp > 1:
            return "ranks that share a sample each see a part of a micro-batch's gradient"
        if fused_accumulation:
            return "--gradient-accumulation-fusion adds up gradients where no hook sees them"
        if num_microbatches < 2:
            return "there is one micro-batch per replica, for which `rank` does the same"
    if estimator == "rank" and dp < 2:
        return "there is one replica"
    if estimator == "half" and num_microbatches < 2:
        return "there is one micro-batch per replica, which cannot be halved"
    return None


def choose(
    wanted: str, *, dp: int, num_microbatches: int, fused_accumulation: bool, cp: int = 1
) -> Estimator | None:
    """The estimator of a step: the one wanted, or with `auto` the one of least variance that can.

    None when the step cannot be measured.
    """
    if wanted == "micro" and num_microbatches == 1 and dp > 1:
        wanted = "rank"  # the same gradients, seen a moment later
    for estimator in ESTIMATORS if wanted == "auto" else (wanted,):
        assert estimator in ESTIMATORS
        if not unavailable(
            estimator,
            dp=dp,
            num_microbatches=num_microbatches,
            fused_accumulation=fused_accumulation,
            cp=cp,
        ):
            return estimator
    return None
