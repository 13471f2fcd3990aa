"""Assembly: from a resolved configuration to a trained, saved and closed run."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from megatron.trainer.checkpoint.formats import format_of
from megatron.trainer.checkpoint.load import Stored, read_stored
from megatron.trainer.checkpoint.resume import (
    kept_sizes,
    merge_resume_config,
    resume_step_settings,
    vocabulary_line,
)
from megatron.trainer.common.control import Control
from megatron.trainer.common.device import Device, use_device
from megatron.trainer.common.errors import TrainingFailure, UsageError
from megatron.trainer.common.program import held_back, other_command
from megatron.trainer.common.signals import (
    STOP_SIGNALS,
    StopAsked,
    StopReason,
    StopSignals,
    stop_reason,
)
from megatron.trainer.common.trace import Trace
from megatron.trainer.common.train_state import TrainState
from megatron.trainer.config import Config
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.lengths import warmup_note
from megatron.trainer.data.tokenizer import build_tokenizer
from megatron.trainer.distributed.process_groups import destroy_groups, init_distributed
from megatron.trainer.logging.profiler import open_trace
from megatron.trainer.logging.tracker import NullTracker
from megatron.trainer.resilience.determinism import deterministic_algorithms, prepare
from megatron.trainer.resilience.env_checks import check_environment
from megatron.trainer.resilience.exit_status import RunOutcome
from megatron.trainer.resilience.watchdog import Watchdog, WatchdogLimits
from megatron.trainer.train.build import abandon, build_job, log_rank_zero, tear_down
from megatron.trainer.train.callbacks import Callback, Callbacks
from megatron.trainer.train.job import Job, RunServices
from megatron.trainer.train.loop import train
from megatron.trainer.train.run_directory import RunDirectory, hold_run, open_run

logger = logging.getLogger(__name__)


def pretrain(
    config: Config,
    callbacks: Iterable[Callback] = (),
    on_exit: Callable[[RunOutcome], None] = lambda outcome: None,
    *,
    stored: Stored | None = None,
    start_fields: Mapping[str, Any] = MappingProxyType({}),
    started_s: float | None = None,
) -> RunOutcome:
    """Trains a GPT as configured. Every rank of the world calls it.

    Joins the process group that torchrun describes in the environment, unless the caller has;
    leaves groups, signals and torch as they were unless training fails.

    Args:
        config: from `arguments.resolve`.
        callbacks: told of every event, on every rank.
        on_exit: told on every rank how the run ended, also when it failed, while its directory is
            still held and the file that asked it to stop still there.
        stored: where to go on from; None as the flags say.
        start_fields: more fields of the record of the start.
        started_s: when the process started, on the monotonic clock; None: now.

    Returns:
        How it ended.

    Raises:
        UsageError: flags, data or environment are wrong (exit code 2).
        TrainingFailure: training cannot go on (exit code 1).
    """
    started_s = time.monotonic() if started_s is None else started_s
    check_environment()
    config = prepare(config)
    _set_logging(config)
    names = [*STOP_SIGNALS, config.batch.exit_signal]
    signals = StopSignals(names, is_told=os.environ.get("RANK", "0") == "0")
    device = use_device(
        config.runtime.device,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        backend=config.parallel.distributed_backend,
    )
    with deterministic_algorithms(config), device as opened, signals:
        joined = dist.is_initialized()
        for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
            os.environ.setdefault(name, value)
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
            os.environ.setdefault(name, value)
        signals.defers = joined
        init_distributed(opened, timeout_minutes=config.parallel.distributed_timeout_minutes)
        signals.defers = True
        start = functools.partial(_run, stored=stored, start_fields=start_fields)
        outcome = start(config, Callbacks(callbacks), opened, signals, started_s, on_exit)
        # After an error the world goes with the process: closing it here would end the other ranks
        # with an error of theirs before this one can say what happened.
        if not joined:
            dist.destroy_process_group()
        return outcome


def _run(
    config: Config,
    callbacks: Callbacks,
    device: Device,
    signals: StopSignals,
    started_s: float,
    on_exit: Callable[[RunOutcome], None],
    *,
    stored: Stored | None,
    start_fields: Mapping[str, Any],
) -> RunOutcome:
    limits = WatchdogLimits.of(
        os.environ, timeout_minutes=config.parallel.distributed_timeout_minutes
    )
    tokenizer = build_tokenizer(**tokenizer_flags(config))
    with held_back(UsageError, TrainingFailure) as let_go, hold_run(config) as run:
        control = Control(run.path, sees_save=dist.get_rank() == 0)
        local_stop = functools.partial(_local_stop, config, started_s, signals, control)
        outcome = RunOutcome(
            state=TrainState(), run_dir=run.path, layout=config.layout, save=config.checkpoint.save
        )
        try:
            stored = stored or _find_checkpoint(config)
            config = merge_resume_config(
                config,
                stored,
                vocab_size=tokenizer.vocab_size,
                tensor_parallel_sizes=callbacks.tensor_parallel_sizes(config),
            )
            log_rank_zero(vocabulary_line(config, stored, vocab_size=tokenizer.vocab_size))
            state = _state_at_start(config, stored, callbacks)
            outcome = replace(outcome, state=state)
            if stored is None and (note := warmup_note(config)):
                log_rank_zero(f"note: {note}")
            with (
                open_run(config, run, stored, state, callbacks.settings(), start_fields) as tracker,
                _watch(run, limits, state, tracker) as watchdog,
                _trace(config, run, device, watchdog) as trace,
            ):
                services = RunServices(
                    tracker=tracker,
                    control=control,
                    watchdog=watchdog,
                    trace=trace,
                    local_stop=local_stop,
                )
                build = functools.partial(
                    build_job, config, stored, state, tokenizer, device, callbacks, services
                )
                reason, layout = _train(config, state, tracker, build, let_go)
                outcome = replace(outcome, reason=reason, layout=layout)
                # Before the sinks are closed: one that uploads may take longer than a launcher
                # waits once another rank has left.
                on_exit(outcome)
        except TrainingFailure as failure:
            on_exit(replace(outcome, failure=failure))
            raise
        # One that came too late for a run that is started again is for its next launch.
        if dist.get_rank() == 0 and (reason is None or reason.kind != "relayout"):
            control.stop_obeyed()
    return outcome


def _train(
    config: Config,
    state: TrainState,
    tracker: NullTracker,
    build: Callable[[], Job],
    is_built: Callable[[], None],
) -> tuple[StopReason | None, Layout]:
    """From a job's groups to its end; `is_built` is called between.

    Returns:
        Why it ended early, and the layout that it had then.
    """
    job, reason, layout = None, None, config.layout
    try:
        job = build()
    except StopAsked as asked:
        reason = asked.reason
    is_built()
    if job is None:
        # Once the exception is gone, and with it what it held of the model.
        destroy_groups()
    else:
        try:
            with _garbage_collection(automatic=not config.runtime.manual_gc):
                reason = train(job)
        except BaseException as error:
            job.callbacks.tell_error(job.context, error)
            abandon(job)
            raise
        if reason is None and 0 < job.samples_left < config.batch.train_samples:
            log_rank_zero(f"{job.samples_left} samples are left over, too few for a step")
    if reason is not None:
        log_rank_zero(f"stopped after iteration {state.iteration}: {reason}")
    tracker.event(
        "run.end",
        iteration=state.iteration,
        consumed_samples=state.consumed_samples,
        why="done" if reason is None else str(reason),
    )
    if job is not None:
        layout = job.config.layout
        tear_down(job)
    return reason, layout


def _local_stop(
    config: Config, started_s: float, signals: StopSignals, control: Control, iteration: int
) -> StopReason | None:
    """Why this rank alone would leave after an iteration."""
    return stop_reason(
        iteration=iteration,
        elapsed_s=time.monotonic() - started_s,
        exit_interval=config.batch.exit_interval,
        exit_duration_in_mins=config.batch.exit_duration_in_mins,
        received=signals.received,
        stop_file=control.stop_asked(),
    )


def _state_at_start(config: Config, stored: Stored | None, callbacks: Callbacks) -> TrainState:
    if stored is None or config.checkpoint.finetune:
        return TrainState()
    state = stored.state
    state.settings, notes = resume_step_settings(
        state.settings, config, keep=callbacks.keep_settings
    )
    if callbacks.keep_settings:
        notes += kept_sizes(state.settings, config, stored.arguments)
    for note in notes:
        log_rank_zero(f"note: {note}")
    return state


def _watch(
    run: RunDirectory, limits: WatchdogLimits, state: TrainState, tracker: NullTracker
) -> Watchdog:
    def note(kind: str, **fields: Any) -> None:
        where = {"iteration": state.iteration, "consumed_samples": state.consumed_samples}
        tracker.event(kind, **where, **fields)

    watchdog = Watchdog(
        run.path,
        launch=run.launch,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        limits=limits,
        note=note,
    )
    watchdog.iteration = state.iteration
    return watchdog


def _trace(config: Config, run: RunDirectory, device: Device, watchdog: Watchdog) -> Trace:
    return open_trace(
        config.logging,
        run.path,
        launch=run.launch,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        is_cuda=device.is_cuda,
        busy=functools.partial(watchdog.phase, "writing a trace", patient=True),
        meet=dist.barrier,
    )


@contextlib.contextmanager
def _garbage_collection(*, automatic: bool) -> Iterator[None]:
    """Leaves collection to the loop if it is not automatic: ranks that collect at different times
    wait for each other."""
    was_enabled = gc.isenabled()
    if not automatic:
        gc.collect()
        gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def tokenizer_flags(config: Config) -> dict[str, Any]:
    """What `build_tokenizer` is given."""
    names = inspect.signature(build_tokenizer).parameters
    flat = config.flat()
    return {name: flat[name] for name in names}


def _find_checkpoint(config: Config) -> Stored | None:
    if config.checkpoint.load is None:
        return None
    stored = read_stored(
        Path(config.checkpoint.load),
        step=config.checkpoint.ckpt_step,
        verify=config.checkpoint.verify_checkpoint,
        fallback=config.checkpoint.ckpt_fallback,
        trust_unverified=config.checkpoint.ckpt_trust_unverified,
    )
    if stored is None:
        if (model := format_of(Path(config.checkpoint.load))) is not None:
            make = f"make one with {other_command('convert_checkpoint.py')}"
            raise UsageError(
                f"--load {config.checkpoint.load} is {model.title}, no checkpoint; {make}"
            )
        message = f"--load {config.checkpoint.load} holds no checkpoint"
        if config.checkpoint.exit_on_missing_checkpoint:
            raise TrainingFailure(f"{message}; correct it or remove --exit-on-missing-checkpoint")
        log_rank_zero(f"{message}: starting from scratch")
    elif stored.skipped:
        log_rank_zero(
            f"ALERT: {stored.skipped[0]}; going on from iteration {stored.iteration} instead "
            "(--no-ckpt-fallback refuses)"
        )
    return stored


def _set_logging(config: Config) -> None:
    level = config.logging.logging_level
    logging.getLogger().setLevel(logging.INFO if level is None else level)
    if not logging.getLogger().handlers:
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    if level is None:
        # megatron-core tells every detail of every group and bucket at INFO.
        logging.getLogger("megatron.core").setLevel(logging.WARNING)
    if config.data.mock_data:
        # It warns for each split that invented samples have no index cache.
        logging.getLogger("megatron.core.datasets").setLevel(logging.ERROR)
