"""A training on a noisy quadratic, where learning rate, length and annealing count.

Normalised gradient descent, a proxy of Adam, moves x <- x - eta (lambda x + noise / sqrt(B)) / r
in independent directions, with r^2 = |G|^2 + tr(Sigma) / B. The noise has a covariance in
proportion to the curvature (as in arXiv 1907.04164), so that a constant rate ends at a floor. Only
mean squares are kept, and they are exact while rate, r and batch stand still. Critical batch size
and rules for the learning rate come out; nobody puts them in.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from copus_ext.extras.simulate.training_dynamics import RateSchedule

CHUNK = 0.01
"""Most of a run over which r and the rate stand still."""
GROWTH = 0.2
"""Most of the samples so far over which they do."""
FIRST = 1e-4
"""Share of the run from which that counts."""
_MAX_LOG = 60.0
_MIN_GAIN = 1e-12
_STIFF = 0.5
"""Gain times the sharpest curvature from which r is solved for."""
_IMPLICIT = 0.6
"""Weight of r at the end of steps then; above a half, so that errors die out."""
_HALVINGS = 10
_TINY = 1e-300


@dataclass(frozen=True, kw_only=True)
class NoisyQuadratic:
    """The problem. Its directions have curvature i^-a, and lambda m goes as i^-b at the start."""

    noise_trace: float = 40.0
    """tr(Sigma) of a sample, in units of |gradient|^2 where the loss above the floor is 1 at the
    start."""
    curvature_exponent: float = 1.5
    """a."""
    signal_exponent: float = 1.2
    """b: how the loss at the start is spread over the directions."""
    num_directions: int = 80
    loss_floor: float = 0.0
    """Loss at the optimum, nats per token."""
    loss_scale: float = 1.0
    """Loss above it at the start, nats per token."""

    @cached_property
    def curvatures(self) -> Any:
        """[directions] lambda."""
        return np.arange(1.0, self.num_directions + 1) ** -self.curvature_exponent

    @cached_property
    def start(self) -> Any:
        """[directions] mean squares of x before the first step."""
        parts = np.arange(1.0, self.num_directions + 1) ** -self.signal_exponent
        return 2.0 * parts / parts.sum() / self.curvatures

    @cached_property
    def noise(self) -> Any:
        """[directions] variances of a sample's gradient."""
        return self.noise_trace * self.curvatures / self.curvatures.sum()

    def loss(self, squares: Any) -> Any:
        """Nats per token at [..., directions] mean squares of x."""
        return self.loss_floor + self.loss_scale * (squares @ self.curvatures) / 2.0

    def grad_norm_sq(self, squares: Any) -> Any:
        return squares @ self.curvatures**2

    def norm(self, squares: Any, batch: Any, *, start: int = 0) -> Any:
        """Root mean square r of a batch's gradient there; of directions from a first one on, with
        the noise of all."""
        signal = squares @ self.curvatures[start:] ** 2
        return np.sqrt(signal + self.noise_trace / batch)

    def moved(self, squares: Any, gain: Any, steps: Any, batch: Any) -> Any:
        """[..., directions] mean squares after steps of a gain eta / r; they need not be whole."""
        gain, steps, batch = (np.asarray(x, dtype=float)[..., None] for x in (gain, steps, batch))
        return self._moved(squares, gain * self.curvatures, gain**2 * self.noise / batch, steps)

    def _moved(self, squares: Any, drop: Any, added: Any, steps: Any) -> Any:
        """After steps of x' = (1 - drop) x + noise of variance `added`."""
        logs = 2.0 * steps * np.log(np.maximum(np.abs(1.0 - drop), _TINY))
        kept = np.exp(np.minimum(logs, _MAX_LOG))  # Much faster than a power.
        gap = drop * (2.0 - drop)
        near = np.abs(gap) < _MIN_GAIN
        terms = np.where(near, steps, (1.0 - kept) / np.where(near, 1.0, gap))
        return kept * squares + added * terms

    def advanced(self, squares: Any, rate: Any, steps: Any, batch: Any) -> Any:
        """Mean squares after steps of one learning rate. Their gain is eta / r.

        r is the mean of both ends. A large batch raises the gain until x grows in the sharpest
        direction and r with it, so that r has to be solved for there. See `moved`.
        """
        before, sharpest = self.norm(squares, batch), self.curvatures[0]
        first = np.minimum(rate / before, 1.0 / sharpest)
        moved = self.moved(squares, first, steps, batch)
        gain = np.maximum(2.0 * rate / (before + self.norm(moved, batch)), _MIN_GAIN)
        stiff = rate * sharpest > _STIFF * before
        if np.any(stiff):
            rest = self.norm(moved[..., 1:], batch, start=1)
            gain = np.array(gain)
            few = [
                np.broadcast_to(x, gain.shape)[stiff]
                for x in (gain, squares[..., 0], rest, before, rate, steps, batch)
            ]
            gain[stiff] = self._stiff_gain(*few)
        return self.moved(squares, gain, steps, batch)

    def _stiff_gain(
        self, gain: Any, first: Any, rest: Any, before: Any, rate: Any, steps: Any, batch: Any
    ) -> Any:
        """The gain whose steps end at the r that belongs to it, by bisection and a last line; where
        the sharpest direction is far from unstable, the gain as it is. `first` is the mean square
        in the sharpest direction, `rest` the r of all others at the end."""
        sharpest = self.curvatures[0]

        def excess(gain: Any) -> Any:
            end = self._moved(first, gain * sharpest, gain**2 * self.noise[0] / batch, steps)
            after = np.sqrt(rest**2 + sharpest**2 * end)
            return gain * ((1.0 - _IMPLICIT) * before + _IMPLICIT * after) - rate

        low = np.full_like(before, _STIFF / sharpest)
        high = np.maximum(rate / ((1.0 - _IMPLICIT) * before), low)
        is_stiff = excess(low) < 0
        for _ in range(_HALVINGS):
            between = (low + high) / 2.0
            is_below = excess(between) < 0
            low, high = np.where(is_below, between, low), np.where(is_below, high, between)
        below, above = excess(low), excess(high)
        share = np.clip(-below / np.maximum(above - below, _TINY), 0.0, 1.0)
        return np.where(is_stiff, low + share * (high - low), gain)


class QuadraticTraining:
    """A run on a noisy quadratic: a `Training` whose targets are losses."""

    def __init__(self, problem: NoisyQuadratic, schedule: RateSchedule, *, peak: float) -> None:
        self.problem, self.schedule, self.peak = problem, schedule, peak
        self.samples, self._squares = 0, problem.start
        self._losses = (self.loss(), self.loss())

    @property
    def progress(self) -> float:
        return self.loss()

    def train(self, batch: int, steps: int = 1, *, lr_factor: float = 1.0) -> None:
        """See `Training`. Many steps go in chunks, a single one by itself."""
        before = self._losses[1]
        total = self.schedule.total_samples
        while steps > 0 and self.samples < total:
            room = max(min(CHUNK * total, GROWTH * max(self.samples, FIRST * total)), batch)
            chunk = min(steps, int(room // batch), -(-(total - self.samples) // batch))
            self._advance(batch, chunk, lr_factor)
            steps -= chunk
        self._losses = (before, self.loss())

    def _advance(self, batch: int, steps: int, lr_factor: float) -> None:
        end = min(self.samples + batch * steps, self.schedule.total_samples)
        rate = self.peak * self.schedule.rate_of((self.samples + end) / 2, lr_factor)
        self._squares = self.problem.advanced(self._squares, rate, steps, batch)
        self.samples = end

    def passed(self, target: float) -> float | None:
        """See `Training`; between its ends the loss of the last `train` is a line."""
        before, after = self._losses
        if before <= target:
            return 0.0
        return (before - target) / (before - after) if after <= target else None

    def loss(self) -> float:
        return float(self.problem.loss(self._squares))

    def noise_scale(self) -> float:
        return self.problem.noise_trace / float(self.problem.grad_norm_sq(self._squares))
