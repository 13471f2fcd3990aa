"""Watches the loss after the batch has changed, whatever else changes meanwhile."""

from __future__ import annotations

import math
from dataclasses import dataclass

WATCHED_STEPS = 50
"""Steps after a change of the batch over which its losses are watched."""
SPIKE_NATS, SPIKE_SD = 0.5, 6.0
"""Rise of the loss over its mean before that counts as a spike, nats and standard deviations."""
_CALM_STEPS = 20
"""Steps without a spike after which a change that another one follows counts as calm."""


@dataclass(kw_only=True)
class LossWatch:
    """The losses after one change of the batch."""

    decision: int
    """Number of the decision."""
    from_batch: int
    """Global batch size before."""
    to_batch: int
    """Global batch size after."""
    loss_before: float | None
    """Mean loss of the last steps before, nats a token; None if no loss was finite."""
    loss_sd_before: float | None
    """Standard deviation of these losses."""
    steps: int = 0
    """Steps since."""
    has_spiked: bool = False
    """Whether the loss rose like a spike, or is not finite."""

    def add(self, loss: float) -> None:
        """Adds the loss of a step.

        The loss of a step scatters with the inverse root of its batch, so that after a shrink more
        of it is ordinary.
        """
        self.steps += 1
        if self.loss_before is None:
            return
        if not math.isfinite(loss):
            self.has_spiked = True
            return
        rise = loss - self.loss_before
        wider = math.sqrt(max(self.from_batch / self.to_batch, 1.0))
        sd = wider * (self.loss_sd_before or math.inf)
        is_far = rise > SPIKE_SD * sd and rise > SPIKE_NATS / 10
        self.has_spiked |= rise > SPIKE_NATS or is_far

    @property
    def grew(self) -> bool:
        """Whether the batch became larger."""
        return self.to_batch > self.from_batch

    @property
    def is_over(self) -> bool:
        """Whether enough steps were watched."""
        return self.steps >= WATCHED_STEPS

    @property
    def is_calm(self) -> bool:
        """Whether the change has passed without a spike for some time."""
        return self.steps >= _CALM_STEPS and not self.has_spiked
