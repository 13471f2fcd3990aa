"""What an extra does in each step: the hooks that `step.py` and `job.py` call, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.trainer.common.extras import extras_with

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron.trainer.common.step_settings import Request, StepInfo
    from megatron.trainer.config import Config
    from megatron.trainer.model.gpt import Model
    from megatron.trainer.train.job import Job


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One run of megatron-core's pipeline schedule that is about to begin."""

    num_microbatches: int
    """Of a replica."""
    micro_batch_size: int
    """Samples of each."""
    forward_only: bool
    """Whether it has no backward pass: an evaluation, or a pass that only counts."""
    is_exact: bool
    """Whether nothing may be approximated: forward passes, and steps whose noise is measured."""


class StepFeature:
    """A part that an extra has in every step, made anew for every layout.

    All hooks do nothing here. All ranks call them alike, so that they may be collective.
    """

    sample_block: int | None = None
    """Samples in a row that a replica must read together; None: any number."""

    def begin_schedule(self, job: Job, schedule: Schedule) -> Mapping[str, Any]:
        """Forward passes, and backward passes if it is a training step, are about to run.

        Returns:
            Keyword arguments for the function of megatron-core that runs the schedule.
        """
        return {}

    def before_optimizer(self, job: Job) -> None:
        """Gradients are reduced, and neither clipped nor applied."""

    def after_step(self, job: Job, info: StepInfo) -> None:
        """The step has been counted: `job.state` is that after it, where the hooks before the
        optimizer have seen that before it. `job.context.scalars[TAG] = value` records a number."""

    def between_steps(self, job: Job) -> Request | None:
        """The step is recorded, or left out, and what is asked of the run comes next. Here an extra
        may take the run to its next segment.

        Returns:
            What is asked for besides; its settings hold already.
        """
        return None

    def before_save(self, job: Job) -> None:
        """A checkpoint is about to be written from the present state."""

    def relayout_bytes(self, config: Config, held: int) -> tuple[float, float]:
        """What a change of layout in the running processes must find room for. Not collective.

        Args:
            held: parameters that this rank holds under it.

        Returns:
            Bytes that the part needs on this rank under the new layout, and those that it gives up
            before that is built.
        """
        return 0.0, 0.0

    def remove_hooks(self) -> None:
        """The layout ends: lets go of the model, so that its memory can be freed."""


def build_features(
    config: Config, model: Model, groups: ProcessGroupCollection
) -> tuple[StepFeature, ...]:
    """The parts that the extras of a run have in its steps. All ranks take part.

    Args:
        config: resolved configuration, its layout that of `groups`.
    """
    made = [make(config, model, groups) for _, make in extras_with("feature")]
    return tuple(feature for feature in made if feature is not None)
