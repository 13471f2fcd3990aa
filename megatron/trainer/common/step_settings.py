"""How steps are taken where it is no longer as the flags say, what one did, and what to do next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What a controller may change between two steps; the same on every rank, and part of every
    checkpoint."""

    global_batch_size: int | None = None
    """Samples of a step; None as the flags say."""
    micro_batch_size: int | None = None
    """Samples of a micro-batch; None as the flags say."""
    lr_factor: float = 1.0
    """Multiplies the learning rate of the schedule."""
    weight_decay_factor: float = 1.0
    """Multiplies the weight decay of the schedule."""
    beta2: float | None = None
    """Adam's second decay rate; None as the flags say."""

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "micro_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} {value} must be at least 1")
        if not (self.lr_factor > 0 and self.weight_decay_factor >= 0):
            raise ValueError(f"factors must be positive: {self}")
        if self.beta2 is not None and not 0 <= self.beta2 < 1:
            raise ValueError(f"beta2 {self.beta2} must be from 0 to below 1")

    @property
    def changes_rates(self) -> bool:
        """Whether the optimizer's rates differ from those of the schedule."""
        return (self.lr_factor, self.weight_decay_factor, self.beta2) != (1.0, 1.0, None)


@dataclass(frozen=True, kw_only=True)
class StepInfo:
    """One finished step; the same on every rank."""

    iteration: int
    """Number of the step, from 1."""
    consumed_samples: int
    """Samples consumed when the step ended."""
    global_batch_size: int
    """Samples of this step."""
    micro_batch_size: int
    """Samples of one micro-batch."""
    num_microbatches: int
    """Micro-batches per replica."""
    loss: float
    """Mean language-modelling loss per token, in nats."""
    grad_norm: float | None
    """L2 norm before clipping; None after an fp16 overflow."""
    num_zeros: int | None
    """Zeros in the gradient, where counted."""
    learning_rate: float
    """Rate after the step, which is that of the next one; what Megatron-LM logs."""
    updated: bool
    """Whether the weights changed."""
    elapsed_s: float
    """Wall time of the step on the slowest rank, seconds."""
    end_s: float | None = None
    """Of it, seconds that follow the last backward pass of all ranks; None: not measured."""
    seq_length: int | None = None
    """Tokens per sample; None where the trainer does not say."""
    length_ratio: int = 1
    """Samples of `--seq-length` tokens that one sample of this step counts as in
    `consumed_samples`."""
    further_losses: tuple[float, ...] = ()
    """Mean loss of each further token of `--mtp-num-layers`, in nats."""
    load_balancing_loss: float | None = None
    """Mean over the layers with experts of the loss `aux_loss` of this global batch with
    coefficient 1; 1 is an even load. None in a dense model."""
    max_expert_load: float | None = None
    """Tokens of the busiest expert over the mean, in the layer where that is largest."""

    @property
    def counted_samples(self) -> int:
        """Samples that the step added to `consumed_samples`."""
        return self.global_batch_size * self.length_ratio

    @property
    def losses(self) -> dict[str, float]:
        further = {f"mtp_{i} loss": loss for i, loss in enumerate(self.further_losses, start=1)}
        balance = self.load_balancing_loss
        further |= {} if balance is None else {"load_balancing_loss": balance}
        return {"lm loss": self.loss, **further}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a callback asks for at the step boundary: `Job.adopt` carries it out.

    All ranks must ask for the same.
    """

    kind: Literal["change", "save", "stop"]
    """`change` takes `settings` on; `save` also writes a checkpoint; `stop` also leaves."""
    reason: str
    """One line for the log."""
    settings: StepSettings | None = None
    """How the following steps are taken; None leaves it."""
    move: Callable[[Any], str | None] | None = None
    """Called with the job once all else at the boundary is done, if training goes on: takes it to
    another layout, or returns why the run must be saved and left instead."""
    leaves: bool = False
    """The move will say to leave: what is due to be saved is saved after it, not before."""


def set_rates(optimizer: Any, scheduler: Any, settings: StepSettings, *, beta2: float) -> None:
    """Sets rates as the schedule and a controller say. Idempotent: the schedule stays where it is
    and its own values are never edited, so that a factor of 1 restores them bit for bit.

    A factor below 1 takes no learning rate below the schedule's least one. The weight decay is then
    so much less that the decay of a step, their product, is the one that the settings ask for.

    Args:
        optimizer: whose groups are set.
        scheduler: placed where the run is.
    """
    scheduler.step(increment=0)
    for group in optimizer.param_groups:
        rate = group["lr"] * settings.lr_factor
        least = _min_lr(group, scheduler) if settings.lr_factor < 1.0 else 0.0
        group["lr"] = max(rate, least)
        group["weight_decay"] *= settings.weight_decay_factor
        if rate < least:
            group["weight_decay"] *= rate / least
        if "betas" in group:  # Muon's have none
            second = beta2 if settings.beta2 is None else settings.beta2
            group["betas"] = (group["betas"][0], second)


def _min_lr(group: dict[str, Any], scheduler: Any) -> float:
    """The least learning rate of a group whose rate is the schedule's, and never above that. After
    the warm-up this is `--min-lr`; before, it is below that as the schedule is below its peak."""
    peak = float(group.get("max_lr", scheduler.max_lr))
    least = float(group.get("min_lr", scheduler.min_lr))
    is_warming_up = scheduler.num_steps < scheduler.lr_warmup_steps
    least = least * (group["lr"] / peak) if is_warming_up and peak else least
    return min(least, group["lr"])  # which a group's own multiplier may take below --min-lr


def learning_rate(optimizer: Any) -> float:
    return float(optimizer.param_groups[0]["lr"]) if optimizer.param_groups else 0.0
