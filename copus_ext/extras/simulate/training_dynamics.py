"""The ground truth of a simulation: the progress of a step at any point of the training.

A sample of a batch B is worth 1 / (1 + B / B_crit) samples of small batches: the form of E(B) =
E_min (1 + B / B_crit), arXiv 1812.06162, which published runs keep to 3 %. Progress is cut into
intervals of constant noise scale. So seconds and samples are sums without error, and an optimum
over all switches between intervals is one over all switches.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

_MIN = 1e-4
"""Lower bound of the progress of a sample."""
_INTERVALS = 600
_SCHEDULE_POINTS = 8192
_FIRST = 1e-4
"""End of the first interval over that of the last."""


@dataclass(frozen=True, kw_only=True)
class GroundTruth:
    """The progress of a sample; the controller may assume another."""

    noise_scale_multiplier: float = 2.0
    """The critical batch size over the measured noise scale."""
    rate_exponent: float = 0.0
    """A sample is worth this power of the scheduled learning rate (`RateSchedule`); `per_sample`
    leaves it out."""

    def per_sample(self, batch: Any, phi: Any) -> Any:
        """Progress of one sample.

        Args:
            batch: it is part of, samples.
            phi: noise scale as measured, samples.
        """
        noise = self.noise_scale_multiplier * np.asarray(phi, dtype=float)
        return np.maximum(noise / (noise + batch), _MIN)


@dataclass(kw_only=True)
class TrainingDynamics:
    """Samples that batches need from anywhere to anywhere.

    Args:
        phi_at: noise scale as measured at a progress, samples.
        truth: what a sample is worth.
        end: progress up to which phi is looked up; beyond it stands still.
    """

    phi_at: Callable[[Any], Any]
    truth: GroundTruth
    end: float
    num_intervals: int = _INTERVALS
    _spent: dict[int, tuple[list[float], list[float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        inner = np.geomspace(_FIRST, 1.0, self.num_intervals) * self.end
        self.edges: list[float] = [0.0, *inner.tolist()]
        middle = (np.array(self.edges[1:]) + np.array(self.edges[:-1])) / 2
        self.phis: list[float] = np.asarray(self.phi_at(middle), dtype=float).tolist()

    def rates(self, batch: int) -> Any:
        """[intervals] progress per sample of a batch."""
        return np.asarray(self.truth.per_sample(batch, np.array(self.phis)))

    def _sums(self, batch: int) -> tuple[list[float], list[float]]:
        """Samples up to every edge, and progress per sample behind it."""
        if batch not in self._spent:
            rates = self.rates(batch)
            spent = np.cumsum(np.diff(self.edges) / rates)
            self._spent[batch] = [0.0, *spent.tolist()], [*rates.tolist(), float(rates[-1])]
        return self._spent[batch]

    def interval(self, progress: float) -> int:
        return min(bisect.bisect_right(self.edges, progress), len(self.phis)) - 1

    def phi(self, progress: float) -> float:
        return self.phis[self.interval(progress)]

    def samples(self, batch: int, progress: float) -> float:
        """Samples that a batch needs from the start up to there."""
        spent, rates = self._sums(batch)
        i = bisect.bisect_right(self.edges, progress) - 1
        return spent[i] + (progress - self.edges[i]) / rates[i]

    def advance(self, batch: int, progress: float, samples: float) -> float:
        """The progress after some more samples of a batch."""
        spent, rates = self._sums(batch)
        wanted = self.samples(batch, progress) + samples
        i = bisect.bisect_right(spent, wanted) - 1
        return self.edges[i] + (wanted - spent[i]) * rates[i]


ScheduleKind = Literal["cosine", "constant"]


@dataclass(frozen=True, kw_only=True)
class RateSchedule:
    """Linear warm-up, then a schedule to a part of the peak, and its effect on a sample.

    To first order, progress is proportional to the learning rate, and less than that near the best
    rate. Both phases are counted in samples, so that the worth of a sample depends only on the
    number of samples before it.
    """

    warmup_samples: int
    """Samples until the peak."""
    total_samples: int
    """Samples of the run: the schedule ends there."""
    end_part: float
    """Rate at the end over that at the peak; of no account if it is constant."""
    kind: ScheduleKind = "cosine"
    exponent: float = 0.0
    """A sample is worth this power of the rate over its peak; 0: the same at every rate."""

    def rate(self, samples: Any) -> Any:
        """Rate over its peak after so many samples."""
        n = np.asarray(samples, dtype=float)
        warm = np.minimum(n / max(self.warmup_samples, 1), 1.0)
        if self.kind == "constant":
            return warm
        decaying = max(self.total_samples - self.warmup_samples, 1)
        done = np.clip((n - self.warmup_samples) / decaying, 0.0, 1.0)
        return warm * (self.end_part + (1 - self.end_part) * (1 + np.cos(np.pi * done)) / 2)

    def rate_of(self, samples: float, factor: float) -> float:
        """The same times a factor of the controller. As in a run, one below 1 takes no rate below
        that at the end, or during the warm-up below as much less as the peak is ahead."""
        rate = float(self.rate(samples))
        if factor >= 1.0 or self.kind == "constant":
            return factor * rate
        least = self.end_part * min(samples / max(self.warmup_samples, 1), 1.0)
        return max(factor * rate, min(least, rate))

    @cached_property
    def _sums(self) -> tuple[Any, Any]:
        """Samples, and the worth of all up to there."""
        edges = np.linspace(0.0, self.total_samples, _SCHEDULE_POINTS + 1)
        middle = (edges[1:] + edges[:-1]) / 2
        parts = np.diff(edges) * self.rate(middle) ** self.exponent
        return edges, np.concatenate(([0.0], np.cumsum(parts)))

    def worth(self, samples: Any) -> Any:
        """The worth of the first so many samples of the run, in samples at the peak rate; those
        beyond its end are worth nothing."""
        if not self.exponent:
            return samples
        return np.interp(samples, *self._sums)

    def samples(self, worth: float) -> float:
        """The number of first samples of that worth; infinity if all of the run are worth less."""
        if not self.exponent:
            return worth
        edges, sums = self._sums
        return float(np.interp(worth, sums, edges, right=np.inf))
