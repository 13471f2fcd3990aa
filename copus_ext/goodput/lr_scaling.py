"""Learning rate, weight decay and beta2 that go with a batch.

The rule's rate at some place of a run is that of its schedule times a factor. The factor belongs to
the absolute batch over the one for which the rates were chosen, so that going back restores every
rate bit for bit. The schedule itself is the user's: its warm-up and its decay count samples, and no
batch moves them (docs/decisions/066-the-schedule-is-the-users.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

LrRule = Literal["sqrt", "linear", "none"]
PerTokenRule = Literal["tokens", "const"]
_EXPONENTS = {"sqrt": 0.5, "linear": 1.0, "none": 0.0}
MIN_BETA2, MAX_BETA2 = 0.9, 0.9999


@dataclass(frozen=True, kw_only=True)
class RateRules:
    """How rates go with the batch; fixed for a launch."""

    reference_batch: int
    """Batch for which the rates were chosen, samples."""
    beta2: float
    """Adam's second decay rate of the flags."""
    lr: LrRule
    """Of the learning rate."""
    weight_decay: PerTokenRule
    beta2_rule: PerTokenRule
    ramp_steps: int
    """Steps of the learning rate's way up."""
    max_ramp_samples: float
    """Most samples of that way; may be infinite."""

    def lr_factor(self, batch: int) -> float:
        """The learning rate's factor at a batch, at the end of its way: (B / B_ref)^(1/2) for Adam
        (eq. 9 of arXiv 2604.26687), or in proportion, or 1."""
        return (batch / self.reference_batch) ** _EXPONENTS[self.lr]

    def ramp(self, batch: int, *, iteration: int, start: float) -> Ramp:
        """The learning rate's way to a batch that is taken after so many steps."""
        steps, end = min(self.ramp_steps, self.max_ramp_samples // batch), self.lr_factor(batch)
        return Ramp(start_iteration=iteration, num_steps=int(steps), start=start, end=end)

    def at(self, batch: int, lr: float) -> dict[str, Any]:
        """Factors and beta2 of a step, as fields of the trainer's settings.

        Weight decay keeps the decay per token, lr x weight decay / B (arXiv 2505.13738). beta2
        keeps its half-life in tokens, beta2^(B / B_ref) (arXiv 2507.07101), between 0.9 and 0.9999
        or the flag's value beyond; None leaves it.

        Args:
            batch: of the step.
            lr: factor of the learning rate, from the ramp.
        """
        decay, beta2 = 1.0, None
        if self.weight_decay == "tokens":
            decay = batch / self.reference_batch / lr
        if self.beta2_rule == "tokens" and batch != self.reference_batch:
            least, most = min(MIN_BETA2, self.beta2), max(MAX_BETA2, self.beta2)
            beta2 = min(max(self.beta2 ** (batch / self.reference_batch), least), most)
        return {"lr_factor": lr, "weight_decay_factor": decay, "beta2": beta2}


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """The learning rate's way from one factor to a larger one, geometric over some steps."""

    start_iteration: int
    """Steps done when the batch grew."""
    num_steps: int
    """Steps of the way; 0 jumps."""
    start: float
    """Factor before."""
    end: float
    """Factor after."""

    def at(self, iteration: int) -> float:
        """The factor of the step after so many steps."""
        done = iteration - self.start_iteration + 1
        if done >= self.num_steps or self.end <= self.start:
            return self.end
        return self.start * (self.end / self.start) ** (done / self.num_steps)

    def is_over(self, iteration: int) -> bool:
        """Whether the step after so many steps has the last factor."""
        return iteration - self.start_iteration + 1 >= self.num_steps or self.end <= self.start


def decay_timescale(batch: float, *, lr: float, weight_decay: float, samples: float) -> float:
    """Share of a run whose updates the weights average at the peak learning rate, tau =
    B / (lr x weight decay x D); above 1 the decay does little (arXiv 2505.13738, 2405.13698).

    Args:
        batch: B, samples.
        lr: peak learning rate.
        weight_decay: of AdamW, decoupled.
        samples: D, of the run.

    Returns:
        The share, infinite without weight decay.
    """
    decay = lr * weight_decay * samples
    return batch / decay if decay > 0.0 else math.inf


def decay_words(tau: float) -> str:
    """The timescale in words."""
    if tau == math.inf:
        return "the weights average all updates of the run, as there is no weight decay"
    if tau < 1.0:
        share = f"{100 * tau:.{0 if tau >= 0.1 else 1}f}"
        what = f"the updates of the last {share} % of the run"
    else:
        times = f"{tau:.2g}" if tau < 10.0 else f"{tau:.0f}"
        what = f"all updates: decay would take {times} times as long as the run to forget one"
    return f"the weights average {what} (tau = B / (lr x weight decay x D))"


MAX_RAMP_STEPS = 100
MAX_RAMP_SHARE = 0.05
"""Of the learning rate's decay that the way up to a larger batch takes at most."""


def ramp_steps(beta2: float) -> int:
    """Steps after which Adam's second moment has mostly seen the new batch, 1 / (1 - beta2); at
    most 100, or a batch could not grow again for long."""
    return min(round(1.0 / (1.0 - beta2)), MAX_RAMP_STEPS) if beta2 < 1 else MAX_RAMP_STEPS
