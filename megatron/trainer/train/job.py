"""Everything a running job is made of, in one value that the loop works on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.trainer.checkpoint.save import Checkpointer
from megatron.trainer.checkpoint.save_errors import FailedSaves
from megatron.trainer.common.collectives import all_gather_object
from megatron.trainer.common.control import SAVE_FILE, Control
from megatron.trainer.common.device import Device
from megatron.trainer.common.signals import StopReason
from megatron.trainer.common.step_settings import StepInfo, StepSettings, set_rates
from megatron.trainer.common.trace import Trace
from megatron.trainer.common.train_state import TrainState
from megatron.trainer.config import Config
from megatron.trainer.config.batch_schedule import BatchSchedule, steps_for
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.layout_rules import batch_problems
from megatron.trainer.config.model_shape import ModelShape
from megatron.trainer.data.dataloader import BatchReader
from megatron.trainer.data.run_data import RunData
from megatron.trainer.data.sampler import micro_batch_sizes
from megatron.trainer.distributed.stragglers import RankTimes
from megatron.trainer.logging.tracker import NullTracker
from megatron.trainer.model.flops import training_flops_per_sample
from megatron.trainer.model.gpt import Model
from megatron.trainer.model.moe import Balance
from megatron.trainer.resilience.watchdog import Watchdog
from megatron.trainer.train.callbacks import CallbackContext, Callbacks
from megatron.trainer.train.step_feature import StepFeature


@dataclass(frozen=True, kw_only=True)
class RunServices:
    """What a job has to do with the world around its training."""

    tracker: NullTracker = field(default_factory=NullTracker)
    """Records; does nothing but on one rank."""
    control: Control = field(default_factory=Control)
    """Sees what is asked of the run by files."""
    watchdog: Watchdog = field(default_factory=Watchdog)
    trace: Trace = field(default_factory=Trace)
    """Told of all phases."""
    local_stop: Callable[[int], StopReason | None] = lambda iteration: None
    """Why this rank alone would leave after the given iteration."""

    def urgent_stop(self, iteration: int) -> StopReason | None:
        """Why all ranks leave without another step, or None. Collective over the world."""
        own = self.local_stop(iteration)
        codes = all_gather_object(own.code if own is not None and own.is_urgent else 0)
        return StopReason.from_code(max(codes))


@dataclass(kw_only=True)
class Job:
    """A job under one layout."""

    config: Config
    device: Device
    """Where this rank computes."""
    groups: ProcessGroupCollection
    model: Model
    """This rank's chunks."""
    optimizer: Any
    """megatron-core's optimizer."""
    scheduler: Any
    batch_schedule: BatchSchedule
    """Global batch size at each point of the run."""
    data: RunData
    """All samples of the run."""
    train_data: BatchReader
    """Training samples of the present segment, addressed by position."""
    valid_data: BatchReader | None
    """Validation samples, or None."""
    test_data: BatchReader | None
    """Test samples, or None."""
    checkpointer: Checkpointer | None
    """Saves into `--save`, if given."""
    state: TrainState
    services: RunServices
    """What it has to do with the world around."""
    callbacks: Callbacks
    """Who watches."""
    context: CallbackContext
    """What they are given."""
    failed_saves: FailedSaves = field(default_factory=FailedSaves)
    """Checkpoints that could not be written, whatever the layout."""
    rank_times: RankTimes = field(default_factory=RankTimes)
    """What each rank of the layout needs for its own part of a step."""
    balance: Balance | None = None
    """Of the load of experts; None for a dense model."""
    features: tuple[StepFeature, ...] = ()
    """What extras do in each step under the present layout."""
    _flops: dict[int, float] = field(default_factory=dict)
    """FLOPs of a sample by its tokens."""

    def fire(self, event: str, **values: Any) -> Any:
        """Sets values of the callbacks' context, fires an event and returns what is asked for."""
        for name, value in values.items():
            setattr(self.context, name, value)
        with self.trace.span(event):
            return self.callbacks.fire(event, self.context)

    @property
    def tracker(self) -> NullTracker:
        """Records; does nothing but on one rank."""
        return self.services.tracker

    @property
    def watchdog(self) -> Watchdog:
        return self.services.watchdog

    @property
    def trace(self) -> Trace:
        return self.services.trace

    def detach_hooks(self) -> None:
        """Cuts what would keep the model of the present layout alive. Not collective."""
        for feature in self.features:
            feature.remove_hooks()
        self.features = ()
        if self.model is not None:
            self.model.detach_hooks()

    @contextlib.contextmanager
    def phase(self, doing: str, *, patient: bool = False) -> Iterator[None]:
        """Does something else than training; watchdog and trace are told. See `Watchdog.phase`."""
        with self.watchdog.phase(doing, patient=patient), self.trace.span(doing):
            yield

    @property
    def save_is_due(self) -> bool:
        """Whether a checkpoint follows this step by `--save-interval`."""
        interval = self.config.checkpoint.save_interval
        return bool(interval) and self.state.iteration % interval == 0

    def save(self, *, must: bool, by_file: bool = False) -> bool:
        """Writes a checkpoint, if there is a `--save`. All ranks take part.

        Args:
            must: the run ends with it, or is lost without it.
            by_file: because it was asked for by a file: waits for it also where checkpoints are
                written while training goes on, and takes the file away.

        Returns:
            Whether it is there, or being written; a failure is told and counted.

        Raises:
            TrainingFailure: on every rank, when it failed and the run must not go on.
        """
        is_well = True
        if self.checkpointer is not None:
            for feature in self.features:
                feature.before_save(self)
            with self.phase("saving", patient=True):
                is_well = self.checkpointer.save(
                    self.model, self.optimizer, self.scheduler, self.state, must=must
                )
                if by_file:
                    is_well = self.checkpointer.finish() and is_well
        if by_file:
            if self.checkpointer is None and dist.get_rank() == 0:
                print(f"note: {SAVE_FILE} has no effect without --save", flush=True)
            self.services.control.save_obeyed()
        return is_well

    def poll(self) -> None:
        """Commits a checkpoint that has been written meanwhile. All ranks take part."""
        if self.checkpointer is not None:
            with self.watchdog.phase("saving", patient=True):
                self.checkpointer.poll()

    def finish_saving(self) -> None:
        """Waits for the checkpoint that the run ends with. All ranks take part.

        Raises:
            TrainingFailure: on every rank, when it failed.
        """
        if self.checkpointer is not None:
            with self.phase("saving", patient=True):
                self.checkpointer.finish(must=True)

    def move(self, move: Callable[[Job], str | None]) -> StopReason | None:
        """Lets a controller take the job to another layout.

        Returns:
            Why the run must be left instead, or None.
        """
        with self.phase("changing the layout", patient=True):
            why = move(self)
        self.watchdog.reset_step_times()
        return None if why is None else StopReason(kind="relayout", text=why)

    @property
    def seq_length(self) -> int:
        return self.config.segment.seq_length

    @property
    def flops_per_sample(self) -> float:
        """Model FLOPs of one sample of the present length, forward and backward."""
        length = self.seq_length
        if length not in self._flops:
            shape = ModelShape.of(self.config.flat())
            self._flops[length] = training_flops_per_sample(shape, length)
        return self._flops[length]

    def open_readers(self) -> None:
        """Reads the samples of the present segment from now on."""
        self.close_readers()
        readers = self.data.open(self.config)
        self.train_data, self.valid_data = readers.train, readers.valid
        self.test_data = readers.test

    def close_readers(self) -> None:
        for reader in (self.train_data, self.valid_data, self.test_data):
            if reader is not None:
                reader.close()

    @property
    def needs_data(self) -> bool:
        """Whether this rank holds the first or the last stage."""
        return any(chunk.pre_process or chunk.post_process for chunk in self.model.unwrapped)

    @property
    def micro_batch_size(self) -> int:
        """Samples of a micro-batch of the next step."""
        return self._sizes[1]

    @property
    def global_batch_size(self) -> int:
        return self._sizes[0]

    @property
    def micro_batch_sizes(self) -> list[int]:
        """Samples of every micro-batch of a replica in the next step; the last may be smaller."""
        batch, micro = self._sizes
        layout = self.config.layout
        if self.is_filled_up:
            return [1] * self.num_filled_up
        return micro_batch_sizes(batch // layout.dp, micro)

    @property
    def is_filled_up(self) -> bool:
        """Whether masked samples fill up the next step, whose samples do not divide over the
        layout. Only the last step of a segment can be one, where a controller or other flags have
        moved steps away from the boundary."""
        left, unit = self.samples_left_in_segment, self.config.layout.batch_unit
        return not self.config.segment.is_last and self.global_batch_size == left < unit

    @property
    def num_filled_up(self) -> int:
        """Micro-batches, of one sample, of every replica in a step that is filled up."""
        return self.config.layout.batch_unit // self.config.layout.dp

    @property
    def counted_samples(self) -> int:
        """What the next step adds to `consumed_samples`."""
        return self.global_batch_size * self.config.segment.ratio

    @property
    def samples_left_in_segment(self) -> int:
        """Samples of the present length that no step of the segment has read yet."""
        segment = self.config.segment
        return (segment.end - self.state.consumed_samples) // segment.ratio

    @property
    def _sizes(self) -> tuple[int, int]:
        """Samples of the next step and of its micro-batches. No step crosses the end of a segment.
        Where a controller sets them, the last step takes the most that is left, in smaller
        micro-batches if that takes more. The last step of a segment takes the rest in any case."""
        micro = self.state.settings.micro_batch_size or self.config.batch.micro_batch_size
        wanted, segment = self.state.settings.global_batch_size, self.config.segment
        left, layout = self.samples_left_in_segment, self.config.layout
        if wanted is None:
            wanted = self.batch_schedule.at(self.state.consumed_samples) // segment.ratio
            if segment.is_last:
                return wanted, micro
        if wanted <= left:
            return wanted, micro
        unit = layout.batch_unit
        sizes = [(left // (b * unit) * b * unit, b) for b in range(1, micro + 1)]
        most, b = max(sizes)
        if most:
            return most, b
        return (wanted, micro) if segment.is_last else (left, 1)

    @property
    def samples_left(self) -> int:
        """Training samples that no step has read yet, in samples of `--seq-length`."""
        return self.config.batch.train_samples - self.state.consumed_samples

    @property
    def next_batch_fits(self) -> bool:
        """Whether training is not skipped and the samples left are enough for the next step."""
        return not self.config.batch.skip_train and self.counted_samples <= self.samples_left

    @property
    def iterations_left(self) -> int:
        """Steps that are left if the batch stays as it is planned now."""
        wanted = self.state.settings.global_batch_size
        if wanted is not None:
            left = self.samples_left // self.config.segment.ratio
            return steps_for(left, wanted, least=self.config.layout.batch_unit)
        total = self.config.batch.train_samples
        return self.batch_schedule.iterations_left(self.state.consumed_samples, total)

    def evaluation_due(self, info: StepInfo) -> bool:
        """Whether a validation follows a step: every so many steps, and under a changing batch at
        the samples of so many steps of the first."""
        interval = self.config.batch.eval_interval
        if not interval:
            return False
        if self.state.settings.global_batch_size is None:
            return info.iteration % interval == 0
        before = info.consumed_samples - info.counted_samples
        done, earlier = map(self._steps_of_flags, (info.consumed_samples, before))
        return done // interval > earlier // interval

    def _steps_of_flags(self, samples: int) -> int:
        """Steps that the batches of the flags would have taken by then."""
        schedule, first = self.batch_schedule, self.config.batch.initial_global_batch_size
        is_constant = len(schedule.steps) == 1
        return samples // first if is_constant else schedule.iterations_left(0, samples)

    def adopt(self, settings: StepSettings) -> None:
        """Takes the following steps another way.

        Raises:
            ValueError: the layout cannot cut the batch into such micro-batches.
        """
        problems = self.cut_problems(settings, self.config.layout)
        if problems:
            raise ValueError("; ".join(problems))
        before, self.state.settings = self.state.settings, settings
        if settings.changes_rates or before.changes_rates:
            self.set_rates()

    def cut_problems(self, settings: StepSettings, layout: Layout) -> list[str]:
        """Lists why a layout cannot cut the steps that follow into micro-batches; empty if it can.

        Args:
            settings: of these steps. Where they name no batch, all of the segment count.
        """
        micro = settings.micro_batch_size or self.config.batch.micro_batch_size
        wanted, rules = settings.global_batch_size, self.config.batch_rules
        sizes = self._scheduled_sizes if wanted is None else (wanted,)
        return [p for n in dict.fromkeys(sizes) for p in batch_problems(layout, micro, n, **rules)]

    @property
    def _scheduled_sizes(self) -> tuple[int, ...]:
        """Samples of the steps of the present segment as the flags say."""
        return self.batch_schedule.sizes_in(self.config.segment)

    def set_rates(self) -> None:
        """Sets learning rate, weight decay and beta2 for the next step."""
        beta2 = self.config.optim.adam_beta2
        set_rates(self.optimizer, self.scheduler, self.state.settings, beta2=beta2)
