"""Everything a running job is made of, in one value that the loop works on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.training.batch_schedule import BatchSchedule
from megatron.training.callbacks import CallbackContext, Callbacks
from megatron.training.checkpoint import Checkpointer
from megatron.training.config import Config
from megatron.training.device import Device
from megatron.training.model import Model
from megatron.training.reader import BatchReader
from megatron.training.signals import StopReason
from megatron.training.state import TrainState
from megatron.training.tracker import NullTracker


@dataclass(kw_only=True)
class Job:
    """A job under one layout."""

    config: Config
    """Resolved configuration."""
    device: Device
    """Where this rank computes."""
    groups: ProcessGroupCollection
    """Process groups of the layout."""
    model: Model
    """This rank's chunks."""
    optimizer: Any
    """megatron-core's optimizer."""
    scheduler: Any
    """Learning-rate and weight-decay schedule."""
    batch_schedule: BatchSchedule
    """Global batch size at each point of the run."""
    train_data: BatchReader
    """Training samples, addressed by position."""
    valid_data: BatchReader | None
    """Validation samples, or None."""
    test_data: BatchReader | None
    """Test samples, or None."""
    checkpointer: Checkpointer | None
    """Saves into `--save`, if given."""
    state: TrainState
    """Counters."""
    tracker: NullTracker
    """Records; does nothing but on one rank."""
    callbacks: Callbacks
    """Who watches."""
    context: CallbackContext
    """What they are given."""
    local_stop: Callable[[int], StopReason | None]
    """Why this rank alone would leave after the given iteration."""
    flops_per_sample: float
    """Model FLOPs of one sample, forward and backward."""

    def fire(self, event: str, **values: Any) -> Any:
        """Sets values of the callbacks' context, fires an event and returns what is asked for."""
        for name, value in values.items():
            setattr(self.context, name, value)
        return self.callbacks.fire(event, self.context)

    @property
    def needs_data(self) -> bool:
        """Whether this rank holds the first or the last stage."""
        return any(chunk.pre_process or chunk.post_process for chunk in self.model.unwrapped)

    @property
    def next_batch_fits(self) -> bool:
        """Whether training is not skipped and the samples left are enough for the next step."""
        if self.config.batch.skip_train:
            return False
        left = self.config.batch.train_samples - self.state.consumed_samples
        return self.batch_schedule.at(self.state.consumed_samples) <= left
