"""Static batches on a noisy quadratic, each with its best learning rate and length.

A schedule of the learning rate is stretched with the length of the run. So the time to a loss is
the seconds per sample times the least number of samples that ends at this loss, over all peaks of
the learning rate.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from copus_ext.extras.simulate.noisy_quadratic import CHUNK, FIRST, GROWTH, NoisyQuadratic
from copus_ext.extras.simulate.training_dynamics import RateSchedule

COARSE, FINE = 2.0, 2.0**0.25
"""Factors between the peaks that are tried, first and near the best."""
PEAKS = tuple((COARSE ** np.arange(-7, 3)).tolist())
_SPAN = 64.0
"""A length is sought up to this factor from that of the schedule."""
_PRECISION = 1e-3
"""Of its logarithm."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A batch with the learning rate and the length that reach a loss soonest."""

    batch: int
    peak: float
    samples: float
    """Infinite if no length reaches the loss."""
    noise_scale: float
    """At the end, samples."""


class Tuner:
    """Runs of many columns at once: each has its batch, its peak and its length.

    Args:
        problem: the quadratic.
        schedule: of the learning rate. A run of other length has the same shares of it.
        parts: chunks per chunk of `noisy_quadratic`.
    """

    def __init__(self, problem: NoisyQuadratic, schedule: RateSchedule, *, parts: int = 1) -> None:
        self.problem, self.schedule, self.parts = problem, schedule, parts

    @cached_property
    def _chunks(self) -> tuple[Any, Any]:
        """[chunks] shares of a run in which the rate stands still, and the rates."""
        edges = [0.0, FIRST]
        while edges[-1] < 1.0:
            edges.append(min(edges[-1] + min(CHUNK, GROWTH * edges[-1]), 1.0))
        fine = [np.linspace(*pair, self.parts + 1)[:-1] for pair in itertools.pairwise(edges)]
        found = np.append(np.concatenate(fine), 1.0)
        middles = (found[1:] + found[:-1]) / 2
        return np.diff(found), np.asarray(self.schedule.rate(middles * self.schedule.total_samples))

    def _ends(self, batches: Any, peaks: Any, lengths: Any) -> Any:
        """[columns, directions] mean squares at the end of runs; arguments are [columns]."""
        problem = self.problem
        squares = np.broadcast_to(problem.start, (len(lengths), problem.num_directions))
        with np.errstate(over="ignore", invalid="ignore"):
            for width, rate in zip(*self._chunks):
                steps = lengths * width / batches
                squares = problem.advanced(squares, rate * peaks, steps, batches)
        return squares

    def final_losses(self, batches: Sequence[int], peaks: Any, lengths: Any) -> Any:
        """[batches, peaks] losses at the end of runs.

        Args:
            batches: [batches] samples.
            peaks: [peaks], or [batches, peaks].
            lengths: samples of a run, in a form that broadcasts to [batches, peaks].
        """
        shape = len(batches), np.shape(peaks)[-1]
        sizes = np.asarray(batches, dtype=float)[:, None]
        columns = (np.broadcast_to(x, shape).ravel() for x in (sizes, peaks, lengths))
        return self.problem.loss(self._ends(*columns)).reshape(shape)

    def shortest(
        self, batches: Sequence[int], peaks: Any, goal: float, *, low: Any, high: Any
    ) -> Any:
        """[batches, peaks] least samples of runs that end at a loss; infinite where none does.

        Args:
            batches: [batches] samples.
            peaks: [peaks], or [batches, peaks].
            goal: loss, nats per token.
            low: [batches] samples that do not suffice.
            high: [batches] most samples to try.
        """
        shape = len(batches), np.shape(peaks)[-1]
        low, high = (
            np.broadcast_to(np.log(np.asarray(x, dtype=float))[:, None], shape) for x in (low, high)
        )
        most = high
        for _ in range(int(np.ceil(np.log2(np.max(high - low) / _PRECISION)))):
            between = (low + high) / 2
            reached = self.final_losses(batches, peaks, np.exp(between)) <= goal
            low, high = np.where(reached, low, between), np.where(reached, between, high)
        return np.where(high < most, np.exp(high), np.inf)

    def tuned(
        self, batches: Sequence[int], goal: float, *, peaks: Sequence[float] = PEAKS
    ) -> list[Tuned]:
        """Every batch at its best for a loss, in nats per token: peaks by factors of 2, then by
        2^(1/4) around the best."""
        usual, many = float(self.schedule.total_samples), np.ones(len(batches))
        wide = {"low": many * usual / _SPAN, "high": many * usual * _SPAN}
        samples = self.shortest(batches, peaks, goal, **wide)
        near, coarse = samples.min(axis=1), np.array(peaks)[samples.argmin(axis=1)]
        near = np.where(np.isfinite(near), near, usual * _SPAN)
        fine = coarse[:, None] * FINE ** np.arange(-3, 4)
        samples = self.shortest(batches, fine, goal, low=near / 2, high=near * 1.1)
        rows, at = np.arange(len(batches)), samples.argmin(axis=1)
        peak, least = fine[rows, at], samples[rows, at]
        sizes = np.asarray(batches, dtype=float)
        ends = self._ends(sizes, peak, np.minimum(least, usual * _SPAN))
        scales = self.problem.noise_trace / self.problem.grad_norm_sq(ends)
        columns = zip(batches, peak.tolist(), least.tolist(), scales.tolist())
        return [Tuned(batch=b, peak=p, samples=n, noise_scale=x) for b, p, n, x in columns]
