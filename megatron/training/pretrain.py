"""Assembly: from a resolved configuration to a trained, saved and closed run."""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import logging
import os
import platform
import time
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.training import metrics
from megatron.training.agree import from_rank_zero
from megatron.training.build import build_job, log_rank_zero, tear_down
from megatron.training.callbacks import Callback, Callbacks
from megatron.training.checkpoint_files import write_atomically
from megatron.training.config import Config
from megatron.training.device import Device, use_device
from megatron.training.errors import TrainingFailure, UsageError
from megatron.training.guard import check_environment
from megatron.training.loop import train
from megatron.training.parallel import init_distributed
from megatron.training.restore import Stored, read_stored
from megatron.training.settle import settle, settle_settings
from megatron.training.signals import STOP_SIGNALS, StopSignals, stop_reason
from megatron.training.sinks import open_sinks
from megatron.training.state import TrainState
from megatron.training.tokenizer import build_tokenizer
from megatron.training.tracker import NullTracker, Tracker

logger = logging.getLogger(__name__)


def pretrain(config: Config, callbacks: Iterable[Callback] = ()) -> TrainState:
    """Trains a GPT as configured. Every rank of the world calls it.

    Joins the process group that torchrun describes in the environment, unless the caller has;
    leaves groups, signals and torch as they were unless training fails.

    Args:
        config: from `arguments.resolve`.
        callbacks: told of every event, on every rank.

    Returns:
        The counters at the end.

    Raises:
        UsageError: flags, data or environment are wrong (exit code 2).
        TrainingFailure: training cannot go on (exit code 1).
    """
    started = time.monotonic()
    check_environment()
    _set_logging(config)
    names = [*STOP_SIGNALS, config.batch.exit_signal]
    device = use_device(
        config.runtime.device,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        backend=config.parallel.distributed_backend,
    )
    with device as opened, StopSignals(names) as signals:
        joined = dist.is_initialized()
        for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
            os.environ.setdefault(name, value)
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
            os.environ.setdefault(name, value)
        init_distributed(opened, timeout_minutes=config.parallel.distributed_timeout_minutes)
        state = _run(config, Callbacks(callbacks), opened, signals, started)
        # After an error the world goes with the process: closing it here would end the other ranks
        # with an error of theirs before this one can say what happened.
        if not joined:
            dist.destroy_process_group()
        return state


def _run(
    config: Config, callbacks: Callbacks, device: Device, signals: StopSignals, started: float
) -> TrainState:
    tokenizer = build_tokenizer(**tokenizer_flags(config))
    stored = _find_checkpoint(config)
    config = settle(config, stored, vocab_size=tokenizer.vocab_size)
    state = TrainState()
    if stored is not None and not config.checkpoint.finetune:
        state = stored.state
        keep = callbacks.keep_settings
        state.settings, notes = settle_settings(state.settings, config, keep=keep)
        for note in notes:
            log_rank_zero(f"note: {note}")
    with _imports_at_rest(), open_run(config, stored, state, callbacks.settings()) as tracker:
        job = build_job(config, stored, state, tokenizer, device, callbacks, tracker)
        job.local_stop = lambda iteration: stop_reason(
            iteration=iteration,
            elapsed_s=time.monotonic() - started,
            exit_interval=config.batch.exit_interval,
            exit_duration_in_mins=config.batch.exit_duration_in_mins,
            received=signals.received,
        )
        with _garbage_collection(automatic=not config.runtime.manual_gc):
            why = train(job)
        if why is None and 0 < job.samples_left < config.batch.train_samples:
            log_rank_zero(f"{job.samples_left} samples are left over, too few for a step")
        if why is not None:
            log_rank_zero(f"stopped after iteration {state.iteration}: {why}")
        tracker.event(
            "run.end",
            iteration=state.iteration,
            consumed_samples=state.consumed_samples,
            why=why or "done",
        )
        tear_down(job)
    return state


@contextlib.contextmanager
def _imports_at_rest() -> Iterator[None]:
    """Spares every collection the hundreds of thousands of objects that imports have made; taking a
    layout down collects, and a job waits for it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


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
    )
    if stored is None:
        message = f"--load {config.checkpoint.load} holds no checkpoint"
        if config.checkpoint.exit_on_missing_checkpoint:
            raise TrainingFailure(message)
        log_rank_zero(f"{message}: starting from scratch")
    elif stored.passed_over:
        log_rank_zero(
            f"ALERT: {stored.passed_over[0]}; going on from iteration {stored.iteration} instead "
            "(--no-ckpt-fallback refuses)"
        )
    return stored


def open_run(
    config: Config,
    stored: Stored | None,
    state: TrainState,
    more_settings: dict[str, Any] | None = None,
) -> NullTracker:
    """Makes the run directory, prints and saves the resolved configuration, and opens the record on
    rank 0.

    Args:
        config: resolved.
        stored: the checkpoint the run continues from, or None.
        state: counters at the start.
        more_settings: flags of the callbacks, printed and saved with the rest.

    Raises:
        UsageError: on every rank, when the directory cannot be written.
    """
    run_dir, launch, problem = None, "", None
    settings = {**config.flat(), **(more_settings or {})}
    if dist.get_rank() == 0:
        now = datetime.now(timezone.utc)
        run_dir = Path(
            config.runtime.run_dir
            or config.checkpoint.save
            or config.logging.tensorboard_dir
            or f"runs/{now:%Y%m%d-%H%M%S}"
        )
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            launch = metrics.launch_id(os.environ, now, metrics.previous_launches(run_dir))
            write_atomically(run_dir / "config.json", json.dumps(settings, indent=1))
        except OSError as error:
            problem = f"the run directory {run_dir} cannot be written ({error}); set --run-dir"
    if problem := from_rank_zero(problem):
        raise UsageError(problem)
    if run_dir is None:
        return NullTracker()
    tracker = Tracker(
        run_dir,
        launch=launch,
        sinks=open_sinks(config.logging, run_dir, config=settings),
        timers_to_sinks=config.logging.log_timers_to_tensorboard,
        ppl_to_sinks=config.logging.log_validation_ppl_to_tensorboard,
    )
    _print_configuration(config, settings, run_dir)
    tracker.event(
        "run.start",
        iteration=state.iteration,
        consumed_samples=state.consumed_samples,
        config=settings,
        layout=str(config.layout),
        loaded=str(stored.folder) if stored else None,
        versions=_versions(),
        rank_environment={
            name: os.environ.get(name)
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR")
        },
        host=platform.node(),
        pid=os.getpid(),
    )
    for problem in stored.passed_over if stored is not None else ():
        where = state.iteration, state.consumed_samples
        tracker.event("fault", *where, fault="checkpoint passed over", line=problem, durable=True)
    return tracker


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    names = ("torch", "numpy", "megatron-core")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def _print_configuration(config: Config, settings: dict[str, Any], run_dir: Path) -> None:
    print("------------------------ arguments ------------------------", flush=True)
    for name, value in sorted(settings.items()):
        print(f"  {name} {'.' * max(2, 48 - len(name))} {value}")
    print("-------------------- end of arguments ---------------------")
    for note in config.runtime.notes:
        print(f"note: {note}")
    print(f"layout {config.layout}, run directory {run_dir}", flush=True)


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
