"""From one phase to the next: longer samples in the same process."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from megatron.trainer.common.errors import TrainingFailure
from megatron.trainer.common.step_settings import Request, StepSettings
from megatron.trainer.config import Config
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.layout_rules import batch_problems
from megatron.trainer.extras.phases.flags import Phase, in_phase, phase_of, phases_of
from megatron.trainer.extras.phases.rotary import set_rotary_base
from megatron.trainer.train.job import Job
from megatron.trainer.train.step_feature import StepFeature


class Phases(StepFeature):
    """Takes the run from one phase to the next."""

    def between_steps(self, job: Job) -> Request | None:
        return enter_next_phase(job)


def phases_of_job(config: Config, model: object, groups: object) -> Phases | None:
    """See `Extra.feature`."""
    return Phases() if phases_of(config) else None


def enter_next_phase(job: Job) -> Request | None:
    """Goes on with the next phase if the present one has no sample left. All ranks, after a step.

    Weights, moments and counters stay. Data, rotary tables, batch and micro-batch change; the batch
    stays the same in tokens.

    Returns:
        What callbacks ask for, such as another layout. Their settings hold already.

    Raises:
        TrainingFailure: on every rank, if the present layout cannot cut the batch.
        ValueError: on every rank, if it cannot cut the batch that a callback asks for.
    """
    config, state, old = job.config, job.state, phase_of(job.config)
    if state.consumed_samples < old.end or old.is_last:
        return None
    new = phases_of(config)[old.number + 1]
    with job.phase(f"entering phase {new.number}"):
        job.config = job.context.config = in_phase(config, new.number)
        if job.checkpointer is not None:
            job.checkpointer.config = job.config
        if new.rotary_base != old.rotary_base:
            set_rotary_base(job.model, new.rotary_base)
        job.open_readers()
        state.settings = settings_in(new, old, state.settings, config)
        job.tracker.event(
            "phase",
            iteration=state.iteration,
            consumed_samples=state.consumed_samples,
            phase=new.number,
            seq_length=new.seq_length,
            rotary_base=new.rotary_base,
            global_batch_size=job.global_batch_size,
            micro_batch_size=job.micro_batch_size,
        )
        if dist.get_rank() == 0:
            print(
                f"phase {new.number} begins after iteration {state.iteration}: samples of "
                f"{new.seq_length} tokens, batch {job.global_batch_size} in micro-batches of "
                f"{job.micro_batch_size}",
                flush=True,
            )
    job.watchdog.reset_step_times()
    request = job.fire("on_segment_start")
    if request is not None and request.settings is not None:
        job.adopt(request.settings)
    if request is None or request.move is None:
        stays = new.layout is not None and new.layout != str(job.config.layout)
        if stays and dist.get_rank() == 0:
            print(
                f"ALERT: nothing here takes the run to {new.layout}; the layout stays", flush=True
            )
        check_batch(job)
    return request


def check_batch(job: Job) -> None:
    """Checks that the layout can cut the next batch of a phase that has just begun.

    Raises:
        TrainingFailure: on every rank, if not.
    """
    batch, micro = job.global_batch_size, job.micro_batch_size
    problems = batch_problems(job.config.layout, micro, batch, **job.config.batch_rules)
    if problems and not job.is_filled_up:
        raise TrainingFailure(
            f"phase {phase_of(job.config).number} cannot go on as {job.config.layout}: "
            f"{problems[0]}; start again with --load, and a layout that can"
        )


def settings_in(new: Phase, old: Phase, settings: StepSettings, config: Config) -> StepSettings:
    """The settings that a controller has made, in samples of the next phase. Batch and micro-batch
    keep their tokens as far as the layout of the phase can cut them.
    """
    batch, micro = settings.global_batch_size, settings.micro_batch_size
    if micro is not None:
        micro = max(micro * old.ratio // new.ratio, 1)
    if batch is not None:
        layout = config.layout if new.layout is None else Layout.from_text(new.layout)
        tokens, unit = batch * old.ratio, layout.batch_unit
        batch = max(round(tokens / new.ratio / unit) * unit, unit)
        sizes = range(micro or new.micro_batch_size, 0, -1)
        micro = next(b for b in sizes if not batch_problems(layout, b, batch, **config.batch_rules))
    return replace(settings, global_batch_size=batch, micro_batch_size=micro)
