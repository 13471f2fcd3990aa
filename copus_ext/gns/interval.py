"""The ratio of two averages and its interval.

Both averages are noisy, they are correlated, and few large directions of the gradient's noise make
them skewed. The interval is Fieller's (J. R. Stat. Soc. B 16, 1954), with a quantile for each end:
Student's, put through the transformation that removes skewness from a studentised mean (P. Hall,
J. R. Stat. Soc. B 54, 1992). Without that one end misses far more often than the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Z_95 = 1.959963984540054
"""Two-sided 95 % of a normal distribution."""


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
        quantile: of a statistic without skewness.
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
        var_v: variance of v.
        covariance: of the two.
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
