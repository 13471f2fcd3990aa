"""Where a run is: everything a checkpoint must hold beside weights and moments."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from megatron.trainer.common.step_settings import StepSettings


@dataclass(kw_only=True)
class TrainState:
    """Counters of a run; the same on every rank, and enough to find its place in data, schedule and
    random streams."""

    iteration: int = 0
    """Optimizer steps tried so far."""
    consumed_samples: int = 0
    """Training samples read so far, those of skipped steps included; the data position."""
    lr_samples: int = 0
    """Samples of the steps that updated the weights; the position in the learning-rate schedule."""
    skipped_samples: int = 0
    """Samples that `--iterations-to-skip` passed over; part of `consumed_samples`."""
    skipped_iterations: int = 0
    """Steps without an update: fp16 overflow or a gradient that is not finite."""
    nan_iterations: int = 0
    """Steps whose loss was NaN or inf."""
    floating_point_operations: float = 0.0
    """Model FLOPs spent so far."""
    settings: StepSettings = field(default_factory=StepSettings)
    """What a controller has changed."""
    expert_fractions: list[list[float]] = field(default_factory=list)
    """[layers with experts, experts] fractions in the balance loss of the next step
    (`model/moe.py`); empty before the first step and in a dense model."""
    expert_biases: list[list[float]] = field(default_factory=list)
    """[layers with experts, experts] biases of the router; empty without them."""
    callbacks: dict[str, Any] = field(default_factory=dict)
    """What callbacks keep in checkpoints, by a name of their own: plain JSON types, or dataclasses
    that become such when they are saved; the same on every rank."""

    def advance(self, *, samples: int, updated: bool, finite_loss: bool, flops: float) -> None:
        """Counts one step over `samples` samples."""
        self.iteration += 1
        self.consumed_samples += samples
        self.lr_samples += samples if updated else 0
        self.skipped_iterations += not updated
        self.nan_iterations += not finite_loss
        self.floating_point_operations += flops

    def skip_samples(self, samples: int) -> None:
        """Counts a step that `--iterations-to-skip` leaves out: its samples are consumed, nothing
        is trained."""
        self.iteration += 1
        self.consumed_samples += samples
        self.skipped_samples += samples

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TrainState:
        """Inverse of `to_json`.

        Raises:
            TypeError: for a counter or a setting that this version does not know.
        """
        settings = data.get("settings", {})
        for kind, found in ((cls, data), (StepSettings, settings)):
            unknown = sorted({*found} - {f.name for f in dataclasses.fields(kind)})
            if unknown:
                raise TypeError(
                    f"{', '.join(unknown)} is not known to this version of COPUS; resume with the "
                    "version that saved it"
                )
        return cls(**{**data, "settings": StepSettings(**settings)})
