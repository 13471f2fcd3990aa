"""Averages the one-step estimates over tokens, with the interval of their ratio.

Numerator and denominator are averaged apart and divided when read, never clamped before: with the
usual spread a quarter of the one-step signals is negative, and cutting those off would make the
noise scale a fifth too small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from copus_ext.gns.estimators import Estimate
from copus_ext.gns.interval import (
    Z_95,
    Interval,
    ratio_interval,
    skewed_bounds,
    student_quantile,
)

MIN_HALF_LIFE_TOKENS = 0.44e6
"""What the paper's factor 0.95 per step amounts to at its first batch (16 x 2,048 tokens)."""
HALF_LIFE_FRACTION = 0.05
MAX_HALF_LIFE_FRACTION = 0.25
"""Of the run so far: more would never forget its first steps, whose gradients are the largest."""
MIN_HALF_LIFE_STEPS = 16
ENOUGH_MEASUREMENTS, LARGEST_INTERVAL = 64, 16
"""In a half-life, if every step is not measured; and the most steps from one to the next."""
ENOUGH_FOR_AN_INTERVAL = 4.0
"""Measurements that an average must be worth before their scatter says anything."""
_BLIND_DRIFT = 0.05
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
        if not self.weight:
            sums = {"sum_g2": a * new.g2, "sum_v": a * new.v}
            near = {"near_g2": new.g2, "near_v": new.v}
            return Smoothed(**sums, **near, weight=a, weight2=a**2, weight3=a**3)
        old = self._scaled(1 - a)
        weight = old.weight + a
        sum_g2, sum_v = old.sum_g2 + a * new.g2, old.sum_v + a * new.v
        g_old, g_new = new.g2 - self.g2, new.g2 - sum_g2 / weight
        v_old, v_new = new.v - self.v, new.v - sum_v / weight
        # Off what came just before: what changes slowly is no scatter, and would look skewed.
        g, v = new.g2 - self.near_g2, new.v - self.near_v
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

    @property
    def ratio(self) -> float | None:
        """V over |G|^2; None while that is not positive."""
        return max(self.v, 0.0) / self.g2 if self.weight and self.g2 > 0 else None

    def read(self, z: float = Z_95) -> Interval:
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
            self.g2, self.v, self.p_gg / w2, self.p_vv / w2, self.p_gv / w2, bounds=bounds
        )

    def _skewness(self) -> float:
        """Skewness of the average of V - r |G|^2 at the measured ratio r; without one, of -|G|^2,
        which is all that counts where r is large.

        That of single measurements, times what averaging leaves of it.
        """
        x, y = (self.v, self.g2) if self.g2 > 0 else (1.0, 0.0)
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
        """Inverse of `to_json`; a record of before knows nothing of the last few measurements."""
        state = cls(**data)
        if state.weight and "near_g2" not in data:
            state = replace(state, near_g2=state.g2, near_v=state.v)
        return state
