"""Averages the one-step estimates over tokens, with the interval of their ratio.

Numerator and denominator are averaged apart and divided when read, never clamped before: with the
usual spread a quarter of the one-step signals is negative, and cutting those off would make the
noise scale a fifth too small.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from copus_ext.noise.estimators import Estimate

MIN_HALF_LIFE_TOKENS = 0.44e6
"""What the paper's factor 0.95 per step amounts to at its first batch (16 x 2,048 tokens)."""
HALF_LIFE_FRACTION = 0.05
MAX_HALF_LIFE_FRACTION = 0.25
"""Of the run so far: more would never forget its first steps, whose gradients are the largest."""
MIN_HALF_LIFE_STEPS = 16
ENOUGH_MEASUREMENTS, LARGEST_INTERVAL = 64, 16
"""In a half-life, if every step is not measured; and the most steps from one to the next."""
Z_95 = 1.959963984540054
"""Two-sided 95 % of a normal distribution."""
_BLIND_DRIFT = 0.05


def half_life_tokens(consumed_tokens: float, tokens_per_measurement: float) -> float:
    """Default half-life: 0.44M tokens or a twentieth of the run so far, whichever is more, but not
    more than a quarter of the run so far and not less than 16 measurements."""
    wanted = max(HALF_LIFE_FRACTION * consumed_tokens, MIN_HALF_LIFE_TOKENS)
    young = min(wanted, MAX_HALF_LIFE_FRACTION * consumed_tokens)
    return max(young, MIN_HALF_LIFE_STEPS * tokens_per_measurement)


def measuring_interval(half_life: float, tokens_per_step: float) -> int:
    """Steps from one measurement to the next, a power of two: as many as leave 64 measurements in a
    half-life, at most 16. Their average is then known to some 8 % of what one of them scatters by,
    and measuring costs a sixteenth of what it costs in every step."""
    spare = half_life / (ENOUGH_MEASUREMENTS * tokens_per_step)
    return min(1 << max(int(spare).bit_length() - 1, 0), LARGEST_INTERVAL)


def half_life_of_factor(alpha: float, tokens_per_step: float) -> float:
    """The half-life in tokens of an average `x <- alpha x + (1 - alpha) new` per step (the paper's
    form)."""
    return tokens_per_step * math.log(0.5) / math.log(alpha)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The ratio V/|G|^2 and how well it is known."""

    ratio: float | None
    """Smoothed V over smoothed |G|^2; None when that is not positive."""
    low: float | None
    """Lower end; None when nothing was measured."""
    high: float | None
    """Upper end; None when unbounded."""
    log_variance: float | None
    """Variance of ln(ratio) by the delta method; None where there is no ratio."""


@dataclass(frozen=True, kw_only=True)
class Smoothed:
    """Exponential averages of |G|^2 and V and the covariance of these averages.

    Belongs to parameters and data: valid across changes of batch and layout as it is.
    """

    sum_g2: float = 0.0
    """Weighted sum of |G|^2."""
    sum_v: float = 0.0
    """Weighted sum of V."""
    weight: float = 0.0
    """Sum of the weights, below 1 until the average is warm."""
    weight2: float = 0.0
    """Sum of the squared weights."""
    p_gg: float = 0.0
    """Weighted scatter of |G|^2 around the average."""
    p_vv: float = 0.0
    """Weighted scatter of V."""
    p_gv: float = 0.0
    """Mixed scatter."""

    @property
    def g2(self) -> float:
        """Bias-corrected average of |G|^2."""
        return self.sum_g2 / self.weight

    @property
    def v(self) -> float:
        """Bias-corrected average of V."""
        return self.sum_v / self.weight

    @property
    def effective_steps(self) -> float:
        """Number of equally weighted measurements of the same precision; 0 when empty."""
        return self.weight**2 / self.weight2 if self.weight2 else 0.0

    def update(self, new: Estimate, *, tokens: float, half_life: float) -> Smoothed:
        """Takes in a measurement that stands for `tokens` tokens.

        Args:
            new: one-step estimate, negative values kept.
            tokens: trained since the measurement before.
            half_life: tokens after which a measurement counts half.
        """
        a = -math.expm1(-tokens / half_life * math.log(2))
        keep = 1 - a
        weight = keep * self.weight + a
        sum_g2 = keep * self.sum_g2 + a * new.g2
        sum_v = keep * self.sum_v + a * new.v
        p_gg, p_vv, p_gv = self.p_gg, self.p_vv, self.p_gv
        if self.weight:
            g_old, g_new = new.g2 - self.g2, new.g2 - sum_g2 / weight
            v_old, v_new = new.v - self.v, new.v - sum_v / weight
            p_gg = keep**2 * p_gg + a**2 * g_old * g_new
            p_vv = keep**2 * p_vv + a**2 * v_old * v_new
            p_gv = keep**2 * p_gv + a**2 * (g_old * v_new + v_old * g_new) / 2
        return Smoothed(
            sum_g2=sum_g2,
            sum_v=sum_v,
            weight=weight,
            weight2=keep**2 * self.weight2 + a**2,
            p_gg=p_gg,
            p_vv=p_vv,
            p_gv=p_gv,
        )

    def decay(self, *, tokens: float, half_life: float) -> Smoothed:
        """Ages what is known by tokens that nothing was measured in; the value stays, its weight
        against what comes does not."""
        k = 2.0 ** (-tokens / half_life)
        return Smoothed(
            sum_g2=k * self.sum_g2,
            sum_v=k * self.sum_v,
            weight=k * self.weight,
            weight2=k * k * self.weight2,
            p_gg=k * k * self.p_gg,
            p_vv=k * k * self.p_vv,
            p_gv=k * k * self.p_gv,
        )

    def doubt(self, factor: float) -> Smoothed:
        """Widens the covariance: by 2 after a change of batch or learning rate, by 4 after one of
        the data."""
        return replace(
            self, p_gg=self.p_gg * factor, p_vv=self.p_vv * factor, p_gv=self.p_gv * factor
        )

    def drift(self, *, tokens: float, half_life: float) -> Smoothed:
        """Widens the covariance for tokens trained without a measurement."""
        if not self.weight:
            return self
        grow = tokens / half_life * _BLIND_DRIFT**2 * self.weight**2
        return replace(self, p_gg=self.p_gg + grow * self.g2**2, p_vv=self.p_vv + grow * self.v**2)

    def read(self, z: float = Z_95) -> Interval:
        """The ratio with Fieller's interval at `z` standard deviations.

        Unbounded above when |G|^2 is not known to be positive. Few measurements say little about
        their own spread: their scatter is corrected for that, and the quantile is Student's.
        """
        if not self.weight:
            return Interval(ratio=None, low=None, high=None, log_variance=None)
        freedom = self.effective_steps - 1
        if freedom < 1e-6:
            ratio = max(self.v, 0.0) / self.g2 if self.g2 > 0 else None
            return Interval(ratio=ratio, low=0.0, high=None, log_variance=None)
        # Scatter over weight^2 expects (n-1)/n of the variance; Cornish-Fisher for the quantile.
        w2 = self.weight**2 * freedom / (freedom + 1)
        z *= 1 + (z * z + 1) / (4 * freedom)
        return ratio_interval(self.g2, self.v, self.p_gg / w2, self.p_vv / w2, self.p_gv / w2, z=z)

    def to_json(self) -> dict[str, float]:
        """Plain JSON types; floats survive exactly."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Smoothed:
        """Inverse of `to_json`."""
        return cls(**data)


def ratio_interval(
    g2: float, v: float, var_g2: float, var_v: float, covariance: float, *, z: float
) -> Interval:
    """Fieller's interval of v/g2: all ratios r for which v - r g2 is within z deviations of 0."""
    v = max(v, 0.0)
    # (v - r g2)^2 <= z^2 (var_v - 2 r cov + r^2 var_g2), a quadratic p r^2 - 2 q r + s <= 0.
    zz = z * z
    p = g2 * g2 - zz * var_g2
    q = g2 * v - zz * covariance
    s = v * v - zz * var_v
    root = q * q - p * s
    if g2 <= 0 or p <= 0:
        # The set reaches to infinity: what is left of it below is its other end.
        low = 0.0 if root < 0 or s <= 0 else _lower_end(p, q, s, root)
        ratio = v / g2 if g2 > 0 else None
        return Interval(ratio=ratio, low=low, high=None, log_variance=None)
    width = math.sqrt(max(root, 0.0))
    variance = None
    if v > 0:
        variance = var_v / v**2 + var_g2 / g2**2 - 2 * covariance / (v * g2)
    return Interval(
        ratio=v / g2, low=max((q - width) / p, 0.0), high=(q + width) / p, log_variance=variance
    )


def _lower_end(p: float, q: float, s: float, root: float) -> float:
    """The positive end of an unbounded Fieller set that contains large ratios."""
    if p == 0:
        return max(s / (2 * q), 0.0) if q > 0 else 0.0
    ends = sorted(((q - math.sqrt(root)) / p, (q + math.sqrt(root)) / p))
    return max(ends[1], 0.0)
