"""A rank of an elastic run: it trains in one generation after another until the run ends."""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from copus_ext.controller.flags import CopusConfig
from copus_ext.extras.elastic import environment as named
from copus_ext.extras.elastic.choice import choose
from copus_ext.extras.elastic.copies import HeldCopies, PeerCopies, check_state
from copus_ext.extras.elastic.membership import AGREE_S, FIRST_S, Membership, WorldChanged
from copus_ext.extras.elastic.messages import Generation
from copus_ext.extras.elastic.recover import find, stored_in_memory
from copus_ext.launch.launchers import Start, Train
from copus_ext.launch.layout_fit import LayoutFit, NoFit
from copus_ext.reshard.relaunch import LAUNCH_VARIABLE, report_exit, resumed, value_of
from megatron.trainer.checkpoint.load import read_arguments
from megatron.trainer.common.collectives import all_gather_object, broadcast_from_rank0
from megatron.trainer.common.errors import Relaunch, TrainingFailure, UsageError
from megatron.trainer.config.arguments import parse_args
from megatron.trainer.resilience.exit_status import RunOutcome
from megatron.trainer.resilience.watchdog import exit_immediately

_REPLACED = "elastic_replaced_batch"  # in the common state of a copy: see `Choice.replaced`
_MAX_FRUITLESS = 5
"""So many generations in a row may end before a copy of the state was begun."""
_TIMEOUT_MINUTES = 10.0


def run_elastic(flags: Sequence[str], train: Train) -> int:
    """Trains with whoever is there, until the run ends.

    Raises:
        UsageError: as `pretrain`.
        TrainingFailure: as `pretrain`, and where the launchers agree on nothing.
    """
    membership = Membership.of(
        os.environ, variable=named.PIPE_VARIABLE, launch=os.environ.get(LAUNCH_VARIABLE, "launch")
    )
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        # Between generations; the supervisor has also written the file that asks to stop.
        signal.signal(number, lambda number, frame: None)
    importlib.import_module("megatron.trainer.train.pretrain")  # before this rank is ready
    gc.collect()
    gc.freeze()  # what imports have made; taking down a world collects
    membership.ready()
    held, fruitless, left_s = HeldCopies(), 0, 0.0
    generation = membership.wait_newer(FIRST_S)
    while True:
        newest = max(held.sets, default=None)
        is_join = False
        try:
            code = _train_in(membership, generation, held, flags, train, left_s)
            membership.leaving()
            if generation.number > 1:
                # Groups of broken worlds may still be closing, and would end this with an error.
                sys.stdout.flush()
                exit_immediately(code)
            return code
        except Exception as error:
            is_join = isinstance(error, WorldChanged) and not membership.has_lost
            if not is_join and not membership.after_error(error):
                if isinstance(error, (UsageError, TrainingFailure)):
                    membership.failing()
                raise
            _say(f"generation {generation.number} is over: {_line(error)}")
        # The exception is gone, and with it what it held of the model.
        began_s = time.monotonic()
        membership.leave(wait=is_join)
        left_s = time.monotonic() - began_s
        if membership.is_released:
            membership.leaving(released=True)
            sys.stdout.flush()
            exit_immediately(0)
        fruitless = fruitless + 1 if max(held.sets, default=None) == newest else 0
        if fruitless >= _MAX_FRUITLESS:
            raise Relaunch(f"{fruitless} generations in a row have ended before their first step")
        generation = membership.wait_newer(AGREE_S)


def trains_on_gpu(flags: Sequence[str]) -> bool:
    """Whether the run is on GPUs: there are some, and its flags do not ask for the CPU."""
    return value_of(flags, "--device") != "cpu" and torch.cuda.is_available()


def _train_in(
    membership: Membership,
    generation: Generation,
    held: HeldCopies,
    flags: Sequence[str],
    train: Train,
    left_s: float,
) -> int:
    """Trains in one generation; returns when the run ends."""
    times_s = [time.monotonic()]
    has_gpu = trains_on_gpu(flags)
    backend = "nccl" if has_gpu else "gloo"
    membership.enter(generation, backend=backend, timeout_minutes=_TIMEOUT_MINUTES)
    times_s.append(time.monotonic())
    start, replaced = _start(generation, held, flags, has_gpu=has_gpu)
    # Before a model is built.
    args = parse_args([*start.flags], {"copus controller": CopusConfig})
    check_state(args.fp8, args.optimizer)
    times_s.append(time.monotonic())
    interval = int(os.environ.get(named.COPY_INTERVAL_VARIABLE) or named.COPY_INTERVAL)
    marks = {_REPLACED: replaced}
    copies = PeerCopies(held, membership, generation, interval=interval, marks=marks)
    start = dataclasses.replace(
        start,
        callbacks=[copies],
        on_exit=functools.partial(_tell, membership),
        fields={
            **start.fields,
            "leaving_s": left_s,
            "meeting_s": times_s[1] - times_s[0],
            "choosing_s": times_s[2] - times_s[1],
        },
    )
    try:
        return train(start)
    finally:
        copies.close()


def _start(
    generation: Generation, held: HeldCopies, flags: Sequence[str], *, has_gpu: bool
) -> tuple[Start, tuple[int, int] | None]:
    """What this generation goes on from, and `Choice.replaced`. Collective over the world.

    Raises:
        Relaunch: on every rank, where no layout is legal.
    """
    had_copies = bool(held.sets)
    found = find(held) if generation.number > 1 else None
    fields: dict[str, Any] = {
        "generation": generation.number,
        "members": [list(member) for member in generation.members],
        "lost": [list(member) for member in generation.lost],
        "why": generation.kind,
    }
    if found is None:
        if generation.number > 1:
            flags = _flags_without_copies(flags, had_copies=had_copies, has_gpu=has_gpu)
        return Start(flags=flags, fields=fields), None
    stored = stored_in_memory(found, held)
    choice, problem = None, ""
    if dist.get_rank() == 0:
        try:
            choice = choose(
                flags,
                stored.arguments,
                dist.get_world_size(),
                has_gpu=has_gpu,
                why=f"{generation.kind} of ranks",
                replaced=found.common.get(_REPLACED),
            )
        except (NoFit, ValueError) as error:
            problem = str(error)
    told = None if choice is None else (choice.flags, choice.note, choice.replaced)
    told, problem = broadcast_from_rank0((told, problem))
    if problem:
        raise Relaunch(problem)
    words, note, replaced = told
    if note:
        _say(f"ALERT: {note}, since no layout of {dist.get_world_size()} ranks fits as well")
    return Start(flags=words, stored=stored, fields=fields), replaced


def _flags_without_copies(flags: Sequence[str], *, had_copies: bool, has_gpu: bool) -> list[str]:
    """Flags to go on with from the latest checkpoint, or from the start. Collective."""
    words, problem = resumed(flags), ""
    were_there = any(all_gather_object(had_copies))
    why = "both copies of some shard are lost" if were_there else "no copies were complete yet"
    _say(f"{why}: the run goes on from its checkpoint, or from the start without one")
    if dist.get_rank() == 0:
        try:
            fit = LayoutFit(words, stored=_stored_flags, has_gpu=has_gpu)
            words, line = fit.first_flags(dist.get_world_size())
            if line:
                _say(line)
        except NoFit as error:
            problem = str(error)
    words, problem = broadcast_from_rank0((words, problem))
    if problem:
        raise Relaunch(problem)
    return words


def _stored_flags(load: Path) -> dict[str, Any]:
    """The flags of the latest checkpoint in a folder."""
    try:
        return read_arguments(load, step=None)
    except TrainingFailure as error:
        raise ValueError(str(error)) from error


def _tell(membership: Membership, outcome: RunOutcome) -> None:
    """Reports how the run ends, unless only a generation does."""
    if outcome.failure is None or not membership.after_error(outcome.failure):
        report_exit(outcome)


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
