"""Averages the one-step estimates over tokens, with the interval of their ratio.

Numerator and denominator are averaged apart, divided when read, and never clamped before. With the
usual scatter a quarter of the one-step signals is negative; without them the noise scale would come
out a fifth too small.

Both averages are noisy and correlated, and the few large directions of the gradient's noise make
them skewed. The interval is Fieller's (J. R. Stat. Soc. B 16, 1954), with a quantile for each end:
Student's, after the transformation that removes skewness from a studentised mean (P. Hall, J. R.
Stat. Soc. B 54, 1992). Without that one end misses far more often than the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from copus_ext.gns.estimators import Estimate

MIN_HALF_LIFE_TOKENS = 0.44e6
"""What the paper's factor 0.95 per step amounts to at its first batch (16 x 2,048 tokens)."""
HALF_LIFE_FRACTION = 0.05
MAX_HALF_LIFE_FRACTION = 0.25
"""Of the run so far: more would never forget its first steps, whose gradients are the largest."""
MIN_HALF_LIFE_STEPS = 16
ENOUGH_MEASUREMENTS, LARGEST_INTERVAL = 32, 16
"""In a half-life, if every step is not measured; and the most steps from one to the next."""
Z_95 = 1.959963984540054
"""Two-sided 95 % of a normal distribution."""
ENOUGH_FOR_AN_INTERVAL = 4.0
"""Measurements that an average must be worth before their scatter says anything."""
_UNMEASURED_DRIFT = 0.05
_NEAR_SHARE = 0.25
"""Of the newest measurement in the average of the last few."""
_OFF_NEAR = (2 / (2 - _NEAR_SHARE)) ** 1.5
"""Skewness of a measurement over that of its distance from the average of the few before it. That
average adds to the variance, and nearly nothing to the third moment."""
_MAX_SKEWNESS = math.sqrt(8.0)
"""Of a squared norm under Gaussian noise: that of noise in one direction."""


def half_life_tokens(consumed_tokens: float, tokens_per_measurement: float) -> float:
    """Default half-life: 0.44M tokens or a twentieth of the run so far, whichever is more, but not
    more than a quarter of the run so far and not less than 16 measurements."""
    wanted = max(HALF_LIFE_FRACTION * consumed_tokens, MIN_HALF_LIFE_TOKENS)
    young = min(wanted, MAX_HALF_LIFE_FRACTION * consumed_tokens)
    return max(young, MIN_HALF_LIFE_STEPS * tokens_per_measurement)


def measuring_interval(half_life: float, tokens_per_step: float) -> int:
    """Steps from one measurement to the next, a power of two: as many as leave 32 measurements in a
    half-life, at most 16. Their average is then known to some 12 % of what one of them scatters by,
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


def student_quantile(z: float, freedom: float) -> float:
    """Student's quantile at the level of the normal quantile `z`, by its expansion in 1/freedom.

    Good to 1 % from 2 degrees of freedom on.
    """
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**k for k, term in enumerate(terms, start=1))


def skewed_bounds(quantile: float, skewness: float) -> tuple[float, float]:
    """The values of a studentised mean that stand for -quantile and +quantile.

    Solves Hall's t + s t^2/3 + s^2 t^3/27 + s/6 = +-quantile for t, with s the skewness.

    Args:
        skewness: of the mean, not of what it averages.
    """
    if abs(skewness) < 1e-9:
        return -quantile, quantile
    least, most = (1 + skewness * (end - skewness / 6) for end in (-quantile, quantile))
    return 3 * (_cube_root(least) - 1) / skewness, 3 * (_cube_root(most) - 1) / skewness


def _cube_root(x: float) -> float:
    return math.copysign(abs(x) ** (1 / 3), x)


def ratio_interval(
    g2: float,
    v: float,
    var_g2: float,
    var_v: float,
    covariance: float,
    *,
    bounds: tuple[float, float],
) -> Interval:
    """Fieller's interval of v/g2: all ratios r for which v - r g2 lies within the bounds.

    Args:
        g2: estimate of |G|^2, which may be negative.
        v: estimate of V; a negative one counts as 0.
        var_g2: variance of g2.
        bounds: the least (negative) and the most (positive) that v - r g2 may be, in standard
            deviations. The upper end is unbounded where g2 is not above 0 by the least.
    """
    v = max(v, 0.0)
    least, most = bounds
    ratio = v / g2 if g2 > 0 else None
    # (v - r g2)^2 = z^2 (var_v - 2 r cov + r^2 var_g2) is p r^2 - 2 q r + s = 0.
    zz = most * most
    q, s = g2 * v - zz * covariance, v * v - zz * var_v
    root = q * q - (g2 * g2 - zz * var_g2) * s
    if g2 > 0:  # the ratio itself lies within: below 0 is rounding
        root = max(root, 0.0)
    low = 0.0
    if s > 0 and root >= 0 and q + math.sqrt(root) > 0:
        low = s / (q + math.sqrt(root))
    zz = least * least
    p, q, s = g2 * g2 - zz * var_g2, g2 * v - zz * covariance, v * v - zz * var_v
    if g2 <= 0 or p <= 0:
        return Interval(ratio=ratio, low=low, high=None)
    high = (q + math.sqrt(max(q * q - p * s, 0.0))) / p
    return Interval(ratio=ratio, low=low, high=high)


@dataclass(frozen=True, kw_only=True)
class Smoothed:
    """Exponential averages of |G|^2 and V, the covariance of these averages, and how skewed the
    single measurements are.

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
    weight3: float = 0.0
    """Sum of the cubed weights."""
    p_gg: float = 0.0
    """Weighted scatter of |G|^2 around the average."""
    p_vv: float = 0.0
    """Weighted scatter of V."""
    p_gv: float = 0.0
    """Mixed scatter."""
    near_g2: float = 0.0
    """Average of |G|^2 over the last few measurements."""
    near_v: float = 0.0
    """Average of V over them."""
    m_gg: float = 0.0
    """Weighted sum of the squared distance of |G|^2 from `near_g2` as it was before. In the sums
    below the letters say which distances are multiplied."""
    m_gv: float = 0.0
    """See `m_gg`."""
    m_vv: float = 0.0
    """See `m_gg`."""
    m_ggg: float = 0.0
    """See `m_gg`."""
    m_ggv: float = 0.0
    """See `m_gg`."""
    m_gvv: float = 0.0
    """See `m_gg`."""
    m_vvv: float = 0.0
    """See `m_gg`."""

    @property
    def grad_norm_sq(self) -> float:
        """Bias-corrected average of |G|^2."""
        return self.sum_g2 / self.weight

    @property
    def grad_variance_trace(self) -> float:
        """Bias-corrected average of V."""
        return self.sum_v / self.weight

    @property
    def effective_steps(self) -> float:
        """Number of equally weighted measurements of the same precision; 0 when empty."""
        return self.weight**2 / self.weight2 if self.weight2 else 0.0

    def update(self, new: Estimate, *, tokens: float, half_life: float) -> Smoothed:
        """Takes in a measurement that stands for `tokens` tokens.

        Args:
            tokens: trained since the measurement before.
            half_life: tokens after which a measurement counts half.
        """
        a = -math.expm1(-tokens / half_life * math.log(2))
        if not self.weight:
            sums = {"sum_g2": a * new.grad_norm_sq, "sum_v": a * new.grad_variance_trace}
            near = {"near_g2": new.grad_norm_sq, "near_v": new.grad_variance_trace}
            return Smoothed(**sums, **near, weight=a, weight2=a**2, weight3=a**3)
        old = self._scaled(1 - a)
        weight = old.weight + a
        sum_g2, sum_v = old.sum_g2 + a * new.grad_norm_sq, old.sum_v + a * new.grad_variance_trace
        g_old, g_new = new.grad_norm_sq - self.grad_norm_sq, new.grad_norm_sq - sum_g2 / weight
        v_old, v_new = (
            new.grad_variance_trace - self.grad_variance_trace,
            new.grad_variance_trace - sum_v / weight,
        )
        # Off what came just before: what changes slowly is no scatter, and would look skewed.
        g, v = new.grad_norm_sq - self.near_g2, new.grad_variance_trace - self.near_v
        share = max(_NEAR_SHARE, 1 / (1 + self.effective_steps))
        return Smoothed(
            sum_g2=sum_g2,
            sum_v=sum_v,
            weight=weight,
            weight2=old.weight2 + a**2,
            weight3=old.weight3 + a**3,
            p_gg=old.p_gg + a**2 * g_old * g_new,
            p_vv=old.p_vv + a**2 * v_old * v_new,
            p_gv=old.p_gv + a**2 * (g_old * v_new + v_old * g_new) / 2,
            near_g2=self.near_g2 + share * g,
            near_v=self.near_v + share * v,
            m_gg=old.m_gg + a * g * g,
            m_gv=old.m_gv + a * g * v,
            m_vv=old.m_vv + a * v * v,
            m_ggg=old.m_ggg + a * g**3,
            m_ggv=old.m_ggv + a * g**2 * v,
            m_gvv=old.m_gvv + a * g * v**2,
            m_vvv=old.m_vvv + a * v**3,
        )

    def _scaled(self, k: float) -> Smoothed:
        """All weights times `k`."""
        powers = {"near_g2": 0, "near_v": 0, "weight3": 3}
        powers |= dict.fromkeys(("weight2", "p_gg", "p_vv", "p_gv"), 2)
        return Smoothed(**{n: k ** powers.get(n, 1) * x for n, x in vars(self).items()})

    def decay(self, *, tokens: float, half_life: float) -> Smoothed:
        """Ages what is known by tokens that nothing was measured in; the value stays, its weight
        against what comes does not."""
        return self._scaled(2.0 ** (-tokens / half_life))

    def inflate_variance(self, factor: float) -> Smoothed:
        """Widens the covariance: by 2 after a change of batch or learning rate, by 4 after one of
        the data."""
        return replace(
            self, p_gg=self.p_gg * factor, p_vv=self.p_vv * factor, p_gv=self.p_gv * factor
        )

    def add_drift_variance(self, *, tokens: float, half_life: float) -> Smoothed:
        """Widens the covariance for tokens trained without a measurement."""
        if not self.weight:
            return self
        grow = tokens / half_life * _UNMEASURED_DRIFT**2 * self.weight**2
        return replace(
            self,
            p_gg=self.p_gg + grow * self.grad_norm_sq**2,
            p_vv=self.p_vv + grow * self.grad_variance_trace**2,
        )

    @property
    def ratio(self) -> float | None:
        """V over |G|^2; None while that is not positive."""
        return (
            max(self.grad_variance_trace, 0.0) / self.grad_norm_sq
            if self.weight and self.grad_norm_sq > 0
            else None
        )

    def interval(self, z: float = Z_95) -> Interval:
        """The ratio with its interval, whose ends miss as often as a normal tail beyond `z`.

        Unbounded above when |G|^2 is not known to be positive. The scatter of few measurements is
        itself uncertain: the quantile is Student's. Squared weights, with which it is summed, are
        worth half as many measurements as the average is.
        """
        if not self.weight:
            return Interval(ratio=None, low=None, high=None)
        n = self.effective_steps
        if n < ENOUGH_FOR_AN_INTERVAL:
            return Interval(ratio=self.ratio, low=0.0, high=None)
        # Scatter over weight^2 expects (n-1)/n of the variance.
        w2 = self.weight**2 * (n - 1) / n
        bounds = skewed_bounds(student_quantile(z, n / 2), self._skewness())
        return ratio_interval(
            self.grad_norm_sq,
            self.grad_variance_trace,
            self.p_gg / w2,
            self.p_vv / w2,
            self.p_gv / w2,
            bounds=bounds,
        )

    def _skewness(self) -> float:
        """Skewness of the average of V - r |G|^2 at the measured ratio r; without one, of -|G|^2,
        which is all that counts where r is large.

        That of single measurements, times what averaging leaves of it.
        """
        x, y = (
            (self.grad_variance_trace, self.grad_norm_sq) if self.grad_norm_sq > 0 else (1.0, 0.0)
        )
        square = y * y * self.m_vv - 2 * x * y * self.m_gv + x * x * self.m_gg
        if not square > 0:
            return 0.0
        cube = y**3 * self.m_vvv - 3 * x * y * y * self.m_gvv
        cube += 3 * x * x * y * self.m_ggv - x**3 * self.m_ggg
        single = _OFF_NEAR * cube / square**1.5 * math.sqrt(self.weight)
        single = min(max(single, -_MAX_SKEWNESS), _MAX_SKEWNESS)
        return single * self.weight3 / self.weight2**1.5

    def to_json(self) -> dict[str, float]:
        """Plain JSON types; floats survive exactly."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Smoothed:
        return cls(**data)
