"""One belief about the critical batch size along a run: a published law as prior, the measured
noise scale as evidence.

With x = ln(D / N), D the samples trained and N those of the run,

    ln B_crit(x) = level + exponent x + wander(x)        ln phi = ln B_crit - ln c + error

Laws were measured at the ends of runs (arXiv 2505.13738), so that the level is that of the end. The
exponent wanders as one goes back from there, which leaves the early part of a run open. c, the
critical batch size over the noise scale, is a further unknown. All of it is Gaussian, so that the
belief after some looks at the noise scale has a closed form.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from copus_ext.gns.observer import NoiseScale

_LEVEL_TOKENS, _LEVEL_AT_TOKENS, _LEVEL_EXPONENT = 5e6, 1.4e10, 0.462
"""Critical batch size of a run of that many tokens, and its power of the length (2505.13738); the
middle of what was measured, such as 4.4e7 tokens on GPT-3 175B (MLPerf)."""
_LEAST_TOKENS = 1e8
"""No law was measured in shorter runs. Models of 0.1M parameters have 8e3 tokens at the end of 2e6,
which is what this gives there if it falls in proportion to the length."""
LEVEL_SD = math.log(4.0)
"""Of ln B_crit at the end of a run, given the law: published levels differ by so much."""
EXPONENT, EXPONENT_SD = 0.46, 0.2
"""Power of the samples trained with which B_crit grows (arXiv 2505.13738), and its doubt."""
WANDER_SD = 0.3
"""Change of the exponent over a factor e of samples, going back from the end."""
MULTIPLIER_SD = math.log(3.0)
"""Of ln c."""
LOOK_SD = 0.1
"""Of ln phi beyond the error of its average: what the model leaves out."""
APART, APART_OF_RUN, MIN_STEPS = 2.0, 0.05, 10.0
"""Between two looks: half-lives of the noise scale's average, and part of the samples trained,
which bounds their number where an average forgets fast. Measured steps of the first look."""
EARLIEST = 0.003
"""Share of the run that counts as trained from the start on."""
_AGREES = 2.0
"""Factor within which the noise scale is said to agree with the law."""
_Z = 1.96
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(7)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


def published_critical_batch_size(samples: float, tokens_per_sample: float) -> float:
    """Critical batch size, samples, at the end of a run by published laws; good to a factor."""
    tokens = samples * tokens_per_sample
    known = max(tokens, _LEAST_TOKENS)
    level = _LEVEL_TOKENS * (known / _LEVEL_AT_TOKENS) ** _LEVEL_EXPONENT
    return level * tokens / known / tokens_per_sample


@dataclass(frozen=True, kw_only=True)
class Look:
    """A noise scale that was measured."""

    samples: float
    """Trained by then."""
    noise_scale: float
    """Samples."""
    log_variance: float
    """Of its logarithm."""


@dataclass(frozen=True, kw_only=True)
class Belief:
    """What is believed of the critical batch size over a run, all of it in samples.

    Args:
        law: critical batch size at the end of the run by the published law.
        end: samples of the whole run.
        multiplier: critical batch size over the noise scale, as far as is known beforehand.
        looks: at the noise scale, as far apart as they are independent.
    """

    law: float
    end: float
    multiplier: float
    looks: tuple[Look, ...] = ()

    def _x(self, samples: Any) -> Any:
        return np.log(np.maximum(samples, EARLIEST * self.end) / self.end)

    def _covariance(self, x: Any, y: Any) -> Any:
        """[x, y] of ln B_crit before any look."""
        x, y = np.atleast_1d(x)[:, None], np.atleast_1d(y)[None, :]
        low, high = np.minimum(-x, -y), np.maximum(-x, -y)
        wander = WANDER_SD**2 * low * low * (3.0 * high - low) / 6.0  # an integrated random walk
        return LEVEL_SD**2 + EXPONENT_SD**2 * x * y + wander

    @functools.cached_property
    def _solved(self) -> tuple[Any, Any, Any]:
        """Where the looks are, the inverse of their covariance, and their weights."""
        x = self._x(np.array([look.samples for look in self.looks]))
        y = np.log([look.noise_scale for look in self.looks])
        own = np.diag([look.log_variance + LOOK_SD**2 for look in self.looks])
        inverse = np.linalg.inv(self._covariance(x, x) + MULTIPLIER_SD**2 + own)
        expected = math.log(self.law / self.multiplier) + EXPONENT * x
        return x, inverse, inverse @ (y - expected)

    def log_critical_batch_size(self, samples: Any) -> tuple[Any, Any]:
        """Mean and standard deviation of ln B_crit after some samples.

        Args:
            samples: [points] trained.
        """
        at = np.atleast_1d(self._x(np.asarray(samples, dtype=float)))
        mean = math.log(self.law) + EXPONENT * at
        variance = np.diag(self._covariance(at, at))
        if self.looks:
            x, inverse, weights = self._solved
            known = self._covariance(at, x)
            mean = mean + known @ weights
            variance = variance - np.einsum("ij,jk,ik->i", known, inverse, known)
        return mean, np.sqrt(np.maximum(variance, 0.0))

    def interval(self, samples: float) -> tuple[float, float, float]:
        """Critical batch size after some samples: median, and one standard deviation down and
        up."""
        mean, sd = (float(x[0]) for x in self.log_critical_batch_size(samples))
        return math.exp(mean), math.exp(mean - sd), math.exp(mean + sd)

    def words(self, samples: float) -> str:
        """The belief in a line, as the log and the report put it."""
        likely, low, high = self.interval(samples)
        span = f"{amount_words(low)} to {amount_words(high)}"
        head = f"critical batch size about {amount_words(likely)} samples ({span})"
        if not self.looks:
            return f"{head}, by the published law alone"
        law = self.law * math.exp(EXPONENT * float(self._x(self.looks[-1].samples)))
        ratio = self.multiplier * self.looks[-1].noise_scale / law
        says = "which is larger" if ratio > _AGREES else "which agrees with it"
        says = "which is smaller" if ratio < 1 / _AGREES else says
        scale = f"{self.multiplier:g} times the measured noise scale"
        return f"{head}, by the published law and {scale}, {says}"

    def log_samples(self, batches: Sequence[int], samples: Any) -> Any:
        """[batches, points] ln of the samples that a unit of progress takes, E ln(1 + B / B_crit).

        The mean of the logarithm asks by what factor a batch loses, and leaves out how hard the
        rest of the run is, which no choice changes.

        Args:
            batches: B.
            samples: [points] trained.
        """
        mean, sd = self.log_critical_batch_size(samples)
        critical = np.exp(mean[:, None] + sd[:, None] * _NODES)
        sizes = np.asarray(batches, dtype=float)[:, None, None]
        return np.log1p(sizes / critical) @ _WEIGHTS


def take_look(
    looks: Sequence[Look], noise: NoiseScale, *, samples: float, half_life: float
) -> Look | None:
    """A further look at the noise scale, or None while it would tell nothing new.

    An interval without an end is taken to be as wide there as on the other side.

    Args:
        looks: so far.
        noise: as measured.
        samples: trained.
        half_life: of its average, samples.
    """
    if looks and samples - looks[-1].samples < max(APART * half_life, APART_OF_RUN * samples):
        return None
    low, phi, high = noise.low_samples, noise.phi_samples, noise.high_samples
    if not phi or phi <= 0 or noise.effective_steps < MIN_STEPS:
        return None
    ends = [*([phi / low] if low else []), *([high / phi] if high else [])]
    if not ends:
        return None
    sd = statistics.fmean(map(math.log, ends)) / _Z
    return Look(samples=samples, noise_scale=phi, log_variance=sd**2)


def amount_words(samples: float) -> str:
    """A number of samples as lines show it."""
    return f"{samples:.0f}" if samples >= 9.5 else f"{samples:.1f}"
