"""A training that a runner steps: what every simulated truth and every small real run offers.

`ProgressTraining` is the first of them. A sample makes some progress, and the loss is a known
function of the progress.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from copus_ext.extras.simulate.training_dynamics import RateSchedule, TrainingDynamics

_EXPONENT = 0.2
"""Of a loss curve that no targets tell."""
_MIN = 1e-4
"""Progress below which it stands still, over that of the last target."""


class Training(Protocol):
    """One run. The schedule of the learning rate is its own; it follows the samples."""

    @property
    def samples(self) -> int:
        """Samples trained; the last step of a run is cut at its length."""
        ...

    @property
    def progress(self) -> float:
        """How far it is, in the measure that its targets are stated in."""
        ...

    def train(self, batch: int, steps: int = 1, *, lr_factor: float = 1.0) -> None:
        """Trains some steps. The factor is of the learning rate, beside the schedule: 1 at the
        batch for which the rate was chosen."""
        ...

    def passed(self, target: float) -> float | None:
        """Share of the last `train` after which a target was reached: at most 0 if it was reached
        before, None if it was not reached."""
        ...

    def loss(self) -> float:
        """Loss of the weights, nats per token."""
        ...

    def noise_scale(self) -> float:
        """tr(Sigma) / |G|^2 of the weights, samples. A real run returns a noisy sample."""
        ...


@dataclass(frozen=True, kw_only=True)
class LossCurve:
    """A power law of the progress: scale progress^-exponent."""

    scale: float
    """Loss at a progress of one sample, nats per token."""
    exponent: float
    least: float
    """Progress below which the loss stands still, samples."""

    def loss(self, progress: float) -> float:
        return self.scale * max(progress, self.least) ** -self.exponent


def loss_curve(targets: dict[str, float]) -> LossCurve:
    """The power law closest to losses at some progress. A floor below it would fit those of the
    presets no better.

    Args:
        targets: progress by the loss. Names that are no losses, or a single one, give a curve of
            exponent 0.2 that ends at 1.
    """
    last = max(targets.values())
    try:
        logs = np.log([float(name) for name in targets])
    except ValueError:
        logs = np.array([])
    if len(logs) < 2:
        return LossCurve(scale=last**_EXPONENT, exponent=_EXPONENT, least=_MIN * last)
    slope, at_one = np.polyfit(np.log(list(targets.values())), logs, 1).tolist()
    return LossCurve(scale=math.exp(at_one), exponent=-slope, least=_MIN * last)


class ProgressTraining:
    """A run whose samples make the progress that `TrainingDynamics` says. Targets are progress in
    samples. The learning rate's factor counts for nothing: the truth holds its effect."""

    def __init__(
        self, dynamics: TrainingDynamics, schedule: RateSchedule, curve: LossCurve
    ) -> None:
        self.dynamics, self.schedule, self.curve = dynamics, schedule, curve
        self.samples, self.progress = 0, 0.0
        self._before, self._batch, self._worth = 0.0, 1, 1.0

    def train(self, batch: int, steps: int = 1, *, lr_factor: float = 1.0) -> None:
        samples = min(self.samples + batch * steps, self.schedule.total_samples)
        self._worth = self.schedule.worth(samples) - self.schedule.worth(self.samples)
        self._before, self._batch = self.progress, batch
        self.progress = self.dynamics.advance(batch, self.progress, self._worth)
        self.samples = samples

    def passed(self, target: float) -> float | None:
        if target > self.progress:
            return None
        needed = self.dynamics.samples(self._batch, target)
        done = needed - self.dynamics.samples(self._batch, self._before)
        return done / self._worth if self._worth else 0.0

    def loss(self) -> float:
        return self.curve.loss(self.progress)

    def noise_scale(self) -> float:
        return self.dynamics.phi(self.progress)
