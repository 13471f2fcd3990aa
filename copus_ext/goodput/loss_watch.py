"""Watches the loss after the batch has changed, whatever else changes meanwhile."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

WATCHED_STEPS = 50
"""Steps after a change of the batch over which its losses are watched."""
SPIKE_STEPS = 8
"""Steps whose mean loss tells a spike. The losses of small batches have long tails, so that one of
them alone tells little."""
SPIKE_SD = 5.0
"""Rise of that mean that counts as a spike, in its standard deviations."""
SPIKE_NATS = 0.05
"""Least rise of that mean that counts as a spike, nats a token."""
ENOUGH_LOSSES, FEW_NATS = 8, 0.5
"""Fewer losses before the change tell little of their scatter; the rise must then be this many nats
at least."""
_CALM_STEPS = 20
"""Steps without a spike after which a change that another one follows counts as calm."""


@dataclass(kw_only=True)
class LossWatch:
    """The losses after one change of the batch."""

    decision: int
    from_batch: int
    """Global batch size before."""
    to_batch: int
    """Global batch size after."""
    loss_before: float | None
    """Mean loss of the last steps before, nats a token; None if no loss was finite."""
    loss_sd_before: float | None
    """Standard deviation of these losses."""
    num_losses_before: int
    """How many they are."""
    rises: list[float] = field(default_factory=list)
    """By how much the last losses were larger than before, nats; `SPIKE_STEPS` at most."""
    steps: int = 0
    """Steps since."""
    has_spiked: bool = False
    """Whether the loss rose like a spike, or was not finite where one before the change was."""

    def add(self, loss: float) -> None:
        """Adds the loss of a step.

        A spike is a rise of the mean of `SPIKE_STEPS` losses that stands out from their scatter.
        The first steps count as if the loss before had gone on, so that a large rise is seen at
        once. The loss of a step scatters with the inverse root of its batch: after a shrink more of
        it is ordinary.
        """
        self.steps += 1
        if self.loss_before is None:
            return
        if not math.isfinite(loss):
            self.has_spiked = True
            return
        self.rises = [*self.rises, loss - self.loss_before][-SPIKE_STEPS:]
        wider = max(self.from_batch / self.to_batch, 1.0)
        variances = wider / SPIKE_STEPS + 1 / self.num_losses_before
        sd = (self.loss_sd_before or 0.0) * math.sqrt(variances)
        least = SPIKE_NATS if self.num_losses_before >= ENOUGH_LOSSES else FEW_NATS
        rise = sum(self.rises) / SPIKE_STEPS
        self.has_spiked |= rise > max(SPIKE_SD * sd, least)

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
