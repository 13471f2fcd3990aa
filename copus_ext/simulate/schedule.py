"""What the schedule of the learning rate makes of a sample.

While the rate warms up a sample gets less far, whatever its batch: to first order a step goes in
proportion to the rate, and less than that where the rate is near its best. The warm-up and the
decay are counted in samples, so that the worth of a sample depends on how many came before it and
on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

_POINTS = 8192


@dataclass(frozen=True, kw_only=True)
class RateSchedule:
    """Linear warm-up, then a cosine to a part of the peak."""

    warmup_samples: int
    """Samples until the peak."""
    total_samples: int
    """Samples of the run: the cosine ends there."""
    end_part: float
    """Rate at the end over that at the peak."""
    exponent: float = 0.0
    """A sample is worth this power of the rate over its peak; 0: the same at every rate."""

    def rate(self, samples: Any) -> Any:
        """Rate over its peak after so many samples."""
        n = np.asarray(samples, dtype=float)
        decaying = max(self.total_samples - self.warmup_samples, 1)
        done = np.clip((n - self.warmup_samples) / decaying, 0.0, 1.0)
        decayed = self.end_part + (1 - self.end_part) * (1 + np.cos(np.pi * done)) / 2
        return np.minimum(n / max(self.warmup_samples, 1), 1.0) * decayed

    @cached_property
    def _sums(self) -> tuple[Any, Any]:
        """Samples, and what all up to there are worth."""
        edges = np.linspace(0.0, self.total_samples, _POINTS + 1)
        middle = (edges[1:] + edges[:-1]) / 2
        parts = np.diff(edges) * self.rate(middle) ** self.exponent
        return edges, np.concatenate(([0.0], np.cumsum(parts)))

    def worth(self, samples: Any) -> Any:
        """How many samples at the peak of the rate the first so many of the run are worth; those
        beyond its end are worth nothing."""
        if not self.exponent:
            return samples
        return np.interp(samples, *self._sums)

    def samples(self, worth: float) -> float:
        """How many of the first samples are worth so much; infinity if all of the run are not."""
        if not self.exponent:
            return worth
        edges, sums = self._sums
        return float(np.interp(worth, sums, edges, right=np.inf))
