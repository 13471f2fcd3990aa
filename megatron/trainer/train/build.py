"""Puts a job together, takes it apart, and exchanges the part that belongs to a layout."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.trainer.checkpoint.files import little_room
from megatron.trainer.checkpoint.load import Stored, load_weights
from megatron.trainer.checkpoint.save import Checkpointer
from megatron.trainer.checkpoint.writer_process import end_writer_process
from megatron.trainer.common.collectives import broadcast_from_rank0
from megatron.trainer.common.device import Device, settle_memory
from megatron.trainer.common.errors import TrainingFailure, UsageError
from megatron.trainer.common.signals import StopAsked
from megatron.trainer.common.train_state import TrainState
from megatron.trainer.config import Config
from megatron.trainer.config.batch_schedule import BatchSchedule
from megatron.trainer.data.fingerprint import changes, identity_of
from megatron.trainer.data.run_data import RunData, build_run_data
from megatron.trainer.distributed.process_groups import build_groups, destroy_groups
from megatron.trainer.distributed.stragglers import RankTimes
from megatron.trainer.model.gpt import Model, build_model
from megatron.trainer.model.moe import Balance
from megatron.trainer.optim.optimizer import build_optimizer, build_scheduler
from megatron.trainer.train.callbacks import CallbackContext, Callbacks
from megatron.trainer.train.job import Job, RunServices
from megatron.trainer.train.step_feature import build_features


def build_job(
    config: Config,
    stored: Stored | None,
    state: TrainState,
    tokenizer: Any,
    device: Device,
    callbacks: Callbacks,
    services: RunServices,
) -> Job:
    """Builds groups, model, optimizer, data and checkpointer of one layout, with weights initial or
    loaded.

    All ranks take part. `tear_down` is its inverse.

    Raises:
        StopAsked: on every rank, before the data is built: groups are left to be destroyed.
    """
    tracker = services.tracker
    groups = groups_of(config)
    model = build_model(config, groups, device)
    settle_memory(device)
    optimizer = build_optimizer(config, model, groups)
    if stored is not None:
        load_weights(stored, config, model, optimizer, groups)
        log_rank_zero(f"loaded {stored.folder} (iteration {stored.iteration}) as {config.layout}")
    scheduler = build_scheduler(config, optimizer, lr_samples=state.lr_samples)
    # Loading took its time, and building the indices of the data may take longer.
    if reason := services.urgent_stop(state.iteration):
        raise StopAsked(reason)
    context = CallbackContext(
        model=model.chunks,
        optimizer=optimizer,
        scheduler=scheduler,
        groups=groups,
        config=config,
        state=state,
        run_dir=tracker.run_dir,
    )
    callbacks.fire("on_setup_start", context)
    callbacks.fire("on_data_init_start", context)
    data = _build_data(config, tokenizer, device)
    context.data_identity = _settle_data(config, stored, data)
    readers = data.open(config)
    job = Job(
        config=config,
        device=device,
        groups=groups,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batch_schedule=BatchSchedule.of(config),
        data=data,
        train_data=readers.train,
        valid_data=readers.valid,
        test_data=readers.test,
        checkpointer=None,
        state=state,
        services=services,
        callbacks=callbacks,
        context=context,
        balance=Balance.of(config),
        features=build_features(config, model, groups),
    )
    if job.balance is not None and not state.expert_biases:
        # Of a checkpoint that Megatron-LM wrote, which holds them with the weights.
        state.expert_biases = job.balance.biases_of(model.chunks, device.torch_device)
    elif job.balance is not None:
        job.balance.give_biases(model.chunks, state)
    job.checkpointer = _open_checkpointer(job)
    # A checkpoint's parameter groups bring the rates it was trained with.
    job.set_rates()
    return job


def groups_of(config: Config) -> ProcessGroupCollection:
    """Creates the process groups of a configuration's layout. All ranks take part."""
    return build_groups(
        config.layout,
        timeout_minutes=config.parallel.distributed_timeout_minutes,
        create_gloo_process_groups=config.parallel.enable_gloo_process_groups,
        use_tp_pp_dp_mapping=config.parallel.use_tp_pp_dp_mapping,
        context_levels=config.parallel.cp_exchange[1],
    )


def release_layout(job: Job) -> None:
    """Lets go of all that belongs to the job's layout, so that its groups can be destroyed; data,
    counters, record and callbacks stay. All ranks do it; collective only while a save is under way.

    `install_layout` puts another one in.
    """
    job.fire("on_relayout_start")
    if job.checkpointer is not None:
        job.checkpointer.finish()
    job.detach_hooks()
    for owner in (job, job.context):
        for name in ("model", "optimizer", "scheduler", "groups", "checkpointer"):
            if hasattr(owner, name):
                setattr(owner, name, None)


def install_layout(
    job: Job, config: Config, groups: ProcessGroupCollection, model: Model, optimizer: Any
) -> None:
    """Goes on with the job under another layout. All ranks do it; none waits for another.

    Nothing here can refuse the layout any more: `Job.cut_problems` tells before `release_layout`
    whether it can cut the batch. The schedule of batches is the same under every layout.

    Args:
        job: after `release_layout`; its state says how the next step is taken.
    """
    scheduler = build_scheduler(config, optimizer, lr_samples=job.state.lr_samples)
    job.config, job.groups, job.model = config, groups, model
    job.optimizer, job.scheduler = optimizer, scheduler
    job.rank_times, job.features = RankTimes(), build_features(config, model, groups)
    context = job.context
    context.config, context.groups, context.model = config, groups, model.chunks
    context.optimizer, context.scheduler = optimizer, scheduler
    if job.balance is not None:
        job.balance.give_biases(model.chunks, job.state)
    job.checkpointer = _open_checkpointer(job)
    job.set_rates()
    job.tracker.event(
        "layout",
        iteration=job.state.iteration,
        consumed_samples=job.state.consumed_samples,
        layout=str(config.layout),
    )
    job.fire("on_relayout_end")


def _build_data(config: Config, tokenizer: Any, device: Device) -> RunData:
    data = build_run_data(config, tokenizer, pin_memory=device.is_cuda)
    for note in data.notes:
        log_rank_zero(f"note: {note}")
    return data


def _settle_data(config: Config, stored: Stored | None, data: RunData) -> list[dict[str, Any]]:
    """Describes the data sets, and refuses others than those a run goes on with. All ranks.

    Raises:
        UsageError: on every rank, naming those that differ from those of a checkpoint.
        TrainingFailure: the same, where they have changed while the run was alive.
    """
    now, problem = [], None
    if dist.get_rank() == 0:
        try:
            now = identity_of(data.prefixes)
            if now:
                now += [{"order": data.order()}, {"use": dataclasses.asdict(data.use)}]
        except OSError as error:
            problem = f"a data set cannot be read: {error}; check --data-path"
    now, problem = broadcast_from_rank0((now, problem))
    if problem:
        raise UsageError(problem)
    if stored is None or config.checkpoint.finetune:
        return now
    if now and stored.data is None:
        log_rank_zero(
            f"note: {stored.folder} does not say what data it was trained on, so that the content "
            "of the data could not be compared"
        )
    if stored.data is None:
        return now
    if found := changes(stored.data, now):
        is_live = stored.restore is not None
        trained = "the run has" if is_live else f"{stored.folder} was"
        told = f"the data is not what {trained} trained on: {'; '.join(found)}"
        if not config.checkpoint.allow_changed_data:
            told += "; give the same data, or --allow-changed-data to go on with this"
            # A supervisor may start a live run again from nothing, and must not do it here.
            raise TrainingFailure(told) if is_live else UsageError(told)
        log_rank_zero(f"note: {told}")
    return now


def _open_checkpointer(job: Job) -> Checkpointer | None:
    config, context, tracker = job.config, job.context, job.tracker
    if config.checkpoint.save is None:
        return None
    root = Path(config.checkpoint.save)
    had_room = True

    def on_event(kind: str, iteration: int, fields: dict[str, Any]) -> None:
        nonlocal had_room
        where = {"consumed_samples": context.state.consumed_samples, **fields}
        tracker.event(f"checkpoint.{kind}", iteration=iteration, **where)
        if kind == "commit":
            log_rank_zero(
                f"saved iteration {iteration} to {config.checkpoint.save} "
                f"({fields['bytes'] / 1e6:.1f} MB, {fields['seconds']:.1f} s)"
            )
            sizes = {"stored": fields["bytes"], "free": fields["free_bytes"]}
            line = little_room(root, **sizes)
            if line is not None and had_room:
                tracker.event("alert", iteration=iteration, **where, alert="little room", line=line)
                log_rank_zero(f"ALERT: {line}")
            had_room = line is None
            context.checkpoint_iteration = iteration
            context.checkpoint_samples = fields["consumed_samples"]
            job.callbacks.fire("on_checkpoint_saved", context)
        if kind == "failed":
            tracker.event("alert", iteration=iteration, **where, alert="save failed")
            if fields["line"] is not None:
                log_rank_zero(f"ALERT: {fields['line']}")

    return Checkpointer(
        config, job.groups, on_event, failed=job.failed_saves, data=context.data_identity
    )


def tear_down(job: Job) -> None:
    """Ends a job in step on all ranks: no group, thread, process or tensor of it stays. The world
    remains."""
    if job.checkpointer is not None:
        job.checkpointer.finish()
    job.close_readers()
    job.detach_hooks()
    job.context.__dict__.clear()
    job.__dict__.clear()
    end_writer_process()
    destroy_groups()


def abandon(job: Job) -> None:
    """Lets go of a job that an error has ended: its processes end, and nothing of it keeps the
    groups. Not collective; the groups remain."""
    if job.checkpointer is not None and job.checkpointer.pending is not None:
        job.checkpointer.pending.write.end()
    job.close_readers()
    job.detach_hooks()
    if job.model is not None:
        _empty_autograd_queue()
    job.context.__dict__.clear()
    job.__dict__.clear()


def _empty_autograd_queue() -> None:
    """Drops what a backward pass that failed has left in autograd's queue, and with it the hooks of
    the model: the next pass does so."""
    device: Any = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # of a GPU that has failed
        torch.zeros(1, device=device, requires_grad=True).sum().backward()


def log_rank_zero(message: str) -> None:
    """Prints a line for the user on rank 0."""
    if dist.get_rank() == 0:
        print(message, flush=True)
