"""How a run ended, for whoever started it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron.trainer.common.errors import TrainingFailure
from megatron.trainer.common.signals import StopReason
from megatron.trainer.common.train_state import TrainState
from megatron.trainer.config.layout import Layout


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """The end of a run; the same on every rank, but for a failure of one rank alone."""

    state: TrainState
    """Counters at the end."""
    run_dir: Path
    layout: Layout
    """Layout at the end."""
    save: str | None
    """`--save`: where all of it is committed, or None where nothing is kept."""
    reason: StopReason | None = None
    """Why it ended early; None after the last sample, and after a failure."""
    failure: TrainingFailure | None = None
    """Why it could not go on."""

    @property
    def line(self) -> str:
        if self.failure is not None:
            return str(self.failure)
        return "training is complete" if self.reason is None else f"stopped: {self.reason}"
