"""The ground truth of a simulation: how far a step gets at a point of the training.

A sample of a batch B gets as far as 1 / (1 + B/Phi) samples of small batches: the form of E(B) =
E_min (1 + B/B_c), arXiv 1812.06162, which published runs keep to 3 % (bench/efficiency_curve.py).
Progress is cut into intervals within which Phi stands still, so that seconds and samples are sums
without error, and an optimum over all switches between intervals is one over all switches.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from copus_ext.goodput import objectives

_LEAST = 1e-4
"""Progress of a sample where a truth says that there is none, or that it goes back."""
_INTERVALS = 600
_FIRST = 1e-4
"""End of the first interval over that of the last."""


@dataclass(frozen=True, kw_only=True)
class GroundTruth:
    """What a sample is worth; the controller may believe something else."""

    objective: str = "goodput"
    """`goodput`: the learning rate is at its best at every batch. `lr_model`: it is so at the
    reference batch, and goes with sqrt(B) from there (arXiv 2405.14578). `copus`: progress is in
    proportion to the learning rate, too (eq. 8 of arXiv 2604.26687)."""
    calibration: float = 2.0
    """c: Phi is this times the noise scale that is measured."""
    reference_batch: float = 1.0
    """Batch for which the learning rate was chosen, samples."""
    rate_exponent: float = 0.0
    """A sample is worth this power of what the schedule leaves of the learning rate
    (`schedule.RateSchedule`); `per_sample` does not count it."""

    def per_sample(self, batch: Any, phi: Any) -> Any:
        """Progress of one sample.

        Args:
            batch: it is part of, samples.
            phi: noise scale as measured, samples.
        """
        noise = self.calibration * np.asarray(phi, dtype=float)
        worth = objectives.goodput(
            self.objective, 1.0, batch, noise, reference_batch=self.reference_batch
        )
        if self.objective == "copus":
            worth = worth / np.sqrt(self.reference_batch)
        return np.maximum(worth * noise, _LEAST)


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
        """The interval that a progress lies in."""
        return min(bisect.bisect_right(self.edges, progress), len(self.phis)) - 1

    def phi(self, progress: float) -> float:
        """Noise scale as measured there, samples."""
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
