"""The directory of a run: held by one run at a time, described, recorded in."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from megatron.trainer.checkpoint.files import write_atomically
from megatron.trainer.checkpoint.load import Stored
from megatron.trainer.common.collectives import broadcast_from_rank0
from megatron.trainer.common.control import remove_stale, supervised_launch
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.train_state import TrainState
from megatron.trainer.config import Config
from megatron.trainer.logging import metrics
from megatron.trainer.logging.sinks import open_sinks, sinks_of_extras
from megatron.trainer.logging.tracker import NullTracker, Tracker
from megatron.trainer.resilience.lock import Lock
from megatron.trainer.resilience.watchdog import EXIT_CODE, exit_immediately

logger = logging.getLogger(__name__)

_RUNS = Path("runs")
"""Where runs go whose flags name no directory."""


@dataclass(frozen=True, kw_only=True)
class RunDirectory:
    """A run directory that is ours; the same on every rank."""

    path: Path
    launch: str
    """Name of this launch; see `metrics.launch_id`."""


@contextlib.contextmanager
def hold_run(config: Config) -> Iterator[RunDirectory]:
    """Finds or makes the run directory and holds it, and that of `--save`, against other runs.
    Collective over the world.

    Raises:
        UsageError: on every rank, when it cannot be written or another run holds it.
    """
    problem, found = None, None
    with contextlib.ExitStack() as locks:
        if dist.get_rank() == 0:
            folder, named = _RUNS, "--run-dir"
            try:
                path, flag = folder, named = _directory_of(config, locks)
                now = datetime.now(timezone.utc)
                launch = metrics.launch_id(os.environ, now, metrics.previous_launches(path))
                for folder, named in _to_lock(config, path, flag):
                    locks.enter_context(_lock(folder, named, launch, config))
                if supervised_launch(os.environ) is None:
                    for name in remove_stale(path):
                        print(f"note: removed {path / name} of an earlier run", flush=True)
                found = RunDirectory(path=path, launch=launch)
            except UsageError as error:
                problem = str(error)
            except OSError as error:
                problem = f"{named} {folder} cannot be written ({error}); give another {named}"
        problem, found = broadcast_from_rank0((problem, found))
        if problem or found is None:
            raise UsageError(problem or "")
        yield found


def _directory_of(config: Config, stack: contextlib.ExitStack) -> tuple[Path, str]:
    """The run directory, made if no flag names it, and the flag that did or could name it."""
    path = config.runtime.run_dir
    if path:
        # By default it is one of these.
        of = {config.checkpoint.save: "--save", config.logging.tensorboard_dir: "--tensorboard-dir"}
        return Path(path), of.get(path, "--run-dir")
    return stack.enter_context(_new_directory()), "--run-dir"


@contextlib.contextmanager
def _new_directory() -> Iterator[Path]:
    """Makes a directory named after the time. Of two runs of one second only one can make it: the
    other appends -2 to the name, and so on. A directory that is left empty is removed."""
    first = _RUNS / f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}"
    _RUNS.mkdir(exist_ok=True)
    for number in itertools.count(1):
        path = first if number == 1 else first.with_name(f"{first.name}-{number}")
        try:
            path.mkdir()
            break
        except FileExistsError:
            continue
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.rmdir()


def _to_lock(config: Config, run_dir: Path, flag: str) -> list[tuple[Path, str]]:
    """Every directory that this run writes, with its flag."""
    save = config.checkpoint.save
    if save is None or config.batch.skip_train or Path(save).resolve() == run_dir.resolve():
        return [(run_dir, flag)]
    return [(run_dir, flag), (Path(save), "--save")]


def _lock(folder: Path, flag: str, launch: str, config: Config) -> Lock:
    return Lock(
        folder,
        flag=flag,
        launch=launch,
        is_supervised=supervised_launch(os.environ) is not None,
        force_unlock=config.runtime.force_unlock,
        on_lost=_leave,
    )


def _leave(line: str) -> None:
    """Two runs that write one checkpoint directory would spoil it."""
    print(f"copus: {line}: this run exits with {EXIT_CODE}", file=sys.stderr, flush=True)
    exit_immediately(EXIT_CODE)


def open_run(
    config: Config,
    run: RunDirectory,
    stored: Stored | None,
    state: TrainState,
    more_settings: dict[str, Any] | None = None,
    start_fields: Mapping[str, Any] = MappingProxyType({}),
) -> NullTracker:
    """Prints and saves the resolved configuration, and opens the record on rank 0.

    Args:
        stored: the checkpoint the run continues from, or None.
        more_settings: flags of the callbacks, printed and saved with the rest.
        start_fields: more fields of the record of the start.

    Raises:
        UsageError: on every rank, when the directory cannot be written.
    """
    problem = None
    settings = {**config.flat(), **(more_settings or {})}
    if dist.get_rank() == 0:
        try:
            write_atomically(run.path / "config.json", json.dumps(settings, indent=1))
        except OSError as error:
            problem = f"the run directory {run.path} cannot be written ({error}); set --run-dir"
    if problem := broadcast_from_rank0(problem):
        raise UsageError(problem)
    if dist.get_rank() != 0:
        return NullTracker()
    sinks = open_sinks(config.logging, run.path, config=settings)
    tracker = Tracker(
        run.path,
        launch=run.launch,
        sinks=[*sinks, *sinks_of_extras(config, run.path)],
        timers_to_sinks=config.logging.log_timers_to_tensorboard,
        ppl_to_sinks=config.logging.log_validation_ppl_to_tensorboard,
    )
    _print_configuration(config, settings, run.path)
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
        **start_fields,
    )
    for problem in stored.skipped if stored is not None else ():
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
