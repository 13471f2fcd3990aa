"""How steps are taken where it is no longer as the flags say."""

from __future__ import annotations

from dataclasses import dataclass


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
