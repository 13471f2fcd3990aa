"""Batches and batch schedules on a noisy quadratic, each with its best learning rate and length.

A schedule of the learning rate is stretched with the length of the run. So a batch schedule has
seconds per sample of its own, and the time to a loss is those times the least number of samples
that ends at this loss, over all peaks of the learning rate.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from copus_ext.simulate.noisy_quadratic import CHUNK, FIRST, GROWTH, NoisyQuadratic
from copus_ext.simulate.training_dynamics import RateSchedule

COARSE, FINE = 2.0, 2.0**0.25
"""Factors between the peaks that are tried, first and near the best."""
PEAKS = tuple((COARSE ** np.arange(-7, 3)).tolist())
_SPAN = 64.0
"""A length is sought up to this factor from that of the schedule."""
_PRECISION = 1e-3
"""Of its logarithm."""


@dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """The batch over a run, and how the learning rate follows it."""

    pieces: tuple[tuple[float, float], ...]
    """(share of the samples from which it holds, batch), ascending, the first from 0."""
    decay: float = 0.0
    """After the warm-up the batch is divided by this power of the scheduled rate over its peak."""
    rate_exponent: float = 0.5
    """The learning rate goes with this power of the batch over the first one."""
    choices: tuple[int, ...] = ()
    """Batches that a machine has; the nearest by ratio is taken. Empty: any."""

    @property
    def first(self) -> float:
        """Batch that the peak of the learning rate is of."""
        return self.pieces[0][1]

    def batches(self, shares: Any, rates: Any, warmup: float) -> Any:
        """Batches at shares of the run.

        Args:
            shares: [...] of the samples, trained.
            rates: [...] of the schedule over the peak.
            warmup: share of the samples.
        """
        starts, sizes = np.array(self.pieces, dtype=float).T
        found = sizes[np.searchsorted(starts, shares, side="right") - 1]
        found = found * np.where(shares > warmup, rates, 1.0) ** -self.decay
        if not self.choices:
            return found
        logs = np.log(np.array(self.choices, dtype=float))
        near = np.abs(np.log(found)[..., None] - logs).argmin(axis=-1)
        return np.array(self.choices, dtype=float)[near]


def static(batch: float) -> BatchSchedule:
    """One batch."""
    return BatchSchedule(pieces=((0.0, batch),))


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A batch schedule with the learning rate and the length that reach a loss soonest."""

    batches: BatchSchedule
    peak: float
    """Of the learning rate, at the first batch."""
    samples: float
    """Infinite if no length reaches the loss."""
    steps: float
    """Optimizer steps."""
    noise_scale: float
    """At the end, samples."""
    seconds: float
    """With the step times of the asker; `steps` times one second without."""


class Tuner:
    """Runs of many columns at once: each has its batches, its peak and its length.

    Args:
        problem: the quadratic.
        schedule: of the learning rate. A run of other length has the same shares of it.
        parts: chunks per chunk of `noisy_quadratic`.
    """

    def __init__(self, problem: NoisyQuadratic, schedule: RateSchedule, *, parts: int = 1) -> None:
        self.problem, self.schedule, self.parts = problem, schedule, parts

    @cached_property
    def edges(self) -> Any:
        """[chunks + 1] shares of a run between which rate and batch stand still."""
        edges = [0.0, FIRST]
        while edges[-1] < 1.0:
            edges.append(min(edges[-1] + min(CHUNK, GROWTH * edges[-1]), 1.0))
        fine = [np.linspace(a, b, self.parts + 1)[:-1] for a, b in itertools.pairwise(edges)]
        return np.append(np.concatenate(fine), 1.0)

    @cached_property
    def _chunks(self) -> tuple[Any, Any, Any]:
        """[chunks] widths, shares of their middles, and rates there."""
        middles = (self.edges[1:] + self.edges[:-1]) / 2
        rates = self.schedule.rate(middles * self.schedule.total_samples)
        return np.diff(self.edges), middles, np.asarray(rates)

    def sizes(self, batches: BatchSchedule) -> Any:
        """[chunks] batches of a schedule."""
        _, middles, rates = self._chunks
        warmup = self.schedule.warmup_samples / self.schedule.total_samples
        return batches.batches(middles, rates, warmup)

    def _columns(self, batches: Sequence[BatchSchedule], peaks: Any) -> tuple[Any, Any]:
        """[chunks, columns] batches and learning rates of [schedules, peaks], a column each."""
        sizes = np.stack([self.sizes(one) for one in batches], axis=1)
        powers = [one.rate_exponent for one in batches]
        rates = self._chunks[2][:, None] * (sizes / sizes[0]) ** powers
        peaks = np.broadcast_to(peaks, (len(batches), np.shape(peaks)[-1]))
        count = peaks.shape[1]
        return np.repeat(sizes, count, axis=1), np.repeat(rates, count, axis=1) * peaks.ravel()

    def _ends(self, columns: tuple[Any, Any], lengths: Any) -> Any:
        """[columns, directions] mean squares at the end of runs of [columns] samples."""
        problem = self.problem
        squares = np.broadcast_to(problem.start, (len(lengths), problem.num_directions))
        with np.errstate(over="ignore", invalid="ignore"):
            for width, batch, rate in zip(self._chunks[0], *columns):
                squares = problem.advanced(squares, rate, lengths * width / batch, batch)
        return squares

    def final_losses(self, batches: Sequence[BatchSchedule], peaks: Any, lengths: Any) -> Any:
        """[schedules, peaks] losses at the end of runs.

        Args:
            batches: [schedules].
            peaks: [peaks], or [schedules, peaks].
            lengths: samples of a run, in a form that broadcasts to [schedules, peaks].
        """
        shape = len(batches), np.shape(peaks)[-1]
        many = np.broadcast_to(np.asarray(lengths, dtype=float), shape).ravel()
        return self.problem.loss(self._ends(self._columns(batches, peaks), many)).reshape(shape)

    def shortest(
        self, batches: Sequence[BatchSchedule], peaks: Any, goal: float, *, low: Any, high: Any
    ) -> Any:
        """[schedules, peaks] least samples of runs that end at a loss; infinite where none does.

        Args:
            batches: [schedules].
            peaks: [peaks], or [schedules, peaks].
            goal: loss, nats per token.
            low: [schedules] samples that do not suffice.
            high: [schedules] most samples to try.
        """
        columns = self._columns(batches, peaks)
        count = len(columns[0][0]) // len(batches)
        low, high = (np.repeat(np.log(np.asarray(x, dtype=float)), count) for x in (low, high))
        most = high
        for _ in range(int(np.ceil(np.log2(np.max(high - low) / _PRECISION)))):
            between = (low + high) / 2
            reached = self.problem.loss(self._ends(columns, np.exp(between))) <= goal
            low, high = np.where(reached, low, between), np.where(reached, between, high)
        return np.where(high < most, np.exp(high), np.inf).reshape(len(batches), count)

    def tuned(
        self,
        batches: Sequence[BatchSchedule],
        goal: float,
        *,
        step_seconds: Callable[[float], float] | None = None,
        peaks: Sequence[float] = PEAKS,
    ) -> list[Tuned]:
        """Every schedule at its best: peaks by factors of 2, then by 2^(1/4) around the best.

        Args:
            batches: schedules.
            goal: loss, nats per token.
            step_seconds: of a batch; None: one second a step.
            peaks: coarse ones, ascending.
        """
        usual, many = float(self.schedule.total_samples), np.ones(len(batches))
        wide = {"low": many * usual / _SPAN, "high": many * usual * _SPAN}
        samples = self.shortest(batches, peaks, goal, **wide)
        near, coarse = samples.min(axis=1), np.array(peaks)[samples.argmin(axis=1)]
        near = np.where(np.isfinite(near), near, usual * _SPAN)
        fine = coarse[:, None] * FINE ** np.arange(-3, 4)
        samples = self.shortest(batches, fine, goal, low=near / 2, high=near * 1.1)
        rows, at = np.arange(len(batches)), samples.argmin(axis=1)
        peak, least = fine[rows, at], samples[rows, at]
        columns = self._columns(batches, peak[:, None])
        ends = self._ends(columns, np.minimum(least, usual * _SPAN))
        scales = self.problem.noise_trace / self.problem.grad_norm_sq(ends)
        sizes = columns[0]
        found = []
        for i, one in enumerate(batches):
            steps = least[i] * float(np.sum(self._chunks[0] / sizes[:, i]))
            seconds = steps
            if step_seconds is not None:
                each = [step_seconds(size) / size for size in sizes[:, i].tolist()]
                seconds = least[i] * float(np.dot(self._chunks[0], each))
            found.append(
                Tuned(
                    batches=one,
                    peak=float(peak[i]),
                    samples=float(least[i]),
                    steps=float(steps),
                    noise_scale=float(scales[i]),
                    seconds=float(seconds),
                )
            )
        return found
