"""Errors of a save: raised on every rank together, counted, and put into words.

megatron-core writes `common.pt`, `.metadata` and `metadata.json` on rank 0 while the others go on
into a collective. They would wait there until the timeout if rank 0 alone left with an error.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import (
    StrategyAction,
    register_default_strategy,
)
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from torch.distributed.checkpoint.api import CheckpointException

from megatron.training.checkpoint import files
from megatron.training.checkpoint.file_threads import answer_of
from megatron.training.common.collectives import first_problem

MAX_IN_A_ROW = 3
"""Failed saves one after another that end a run, unless `--on-save-failure continue`."""


@dataclass(kw_only=True)
class FailedSaves:
    """Outlives the checkpointer of a layout; the same on every rank."""

    in_a_row: int = 0
    """Saves that failed since the last that did not."""

    def ends_the_run(self, on_failure: str) -> bool:
        """Whether the run must not go on after the last failure.

        Args:
            on_failure: `--on-save-failure`.
        """
        return on_failure == "stop" and self.in_a_row >= MAX_IN_A_ROW

    def times(self) -> str:
        return f"{self.in_a_row} times in a row" if self.in_a_row > 1 else "once"


def what_is_left(root: Path) -> str:
    """Says which checkpoint a run can go on from."""
    try:
        latest = answer_of(lambda _: files.read_latest(root))
    except TimeoutError as error:
        return str(error)
    except (OSError, ValueError):
        latest = None
    if latest is None:
        return "none is saved"
    return f"the last complete checkpoint is iteration {latest}"


def way_out(problem: str) -> str:
    """What to do before the next try, where the file system is to blame."""
    is_storage = any(word in problem for word in ("Errno", " are free ", "disk full"))
    return "make room or name another --save and " if is_storage else ""


def root_cause(error: BaseException) -> str:
    """One line about the first error of a chain, which is the one worth showing."""
    while error.__cause__ is not None:
        error = error.__cause__
    nested = getattr(error, "failures", None)
    if isinstance(nested, dict) and nested:
        first = next(iter(nested.values()))
        error = first[0] if isinstance(first, tuple) else first
    text = " ".join(str(error).split())
    if "unexpected pos" in text:
        text = (
            "a file could not be written to its end; is the disk full, or a quota or limit reached?"
        )
    return f"{type(error).__name__}: {text[:300]}"


class AgreedCommonSave(TorchCommonSaveStrategy):
    """Writes `common.pt` as megatron-core does; an error is raised on every rank."""

    def save_common(self, common_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Collective over the world.

        Raises:
            OSError: on every rank, when rank 0 could not write.
        """
        problem = None
        try:
            save = super().save_common
            answer_of(lambda _: save(common_state_dict, checkpoint_dir))
        except Exception as error:  # the others wait; torch's zip writer raises RuntimeError
            problem = str(error) or repr(error)
        if problem := first_problem(problem):
            raise OSError(problem)


def use_agreed_saves() -> None:
    """Makes megatron-core use `AgreedCommonSave`, and a queue of results in this process. Its own
    queue needs another process beside each rank, which outlives a rank that is killed."""
    register_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1, AgreedCommonSave("torch", 1))
    filesystem_async._results_queue = queue.SimpleQueue()


def agree_on_finalization(request: AsyncRequest) -> None:
    """Makes every rank raise an error that a finalization meets on rank 0 alone.

    Two can: the first, which writes the index and broadcasts, and the last, which marks the
    checkpoint and ends with a barrier.
    """
    request.finalize_fns[0] = _agreed(request.finalize_fns[0], _join_broadcast)
    request.finalize_fns[-1] = _agreed(request.finalize_fns[-1], dist.barrier)


def _join_broadcast() -> None:
    dist.broadcast(torch.ones(1, dtype=torch.int, device=torch.cuda.current_device()), src=0)


def _agreed(finalize: Callable[[], None], meet: Callable[[], object]) -> Callable[[], None]:
    """A finalization that fails on every rank when it fails on rank 0.

    Args:
        finalize: may fail on rank 0 alone.
        meet: takes part in what the others then wait in.
    """

    def run() -> None:
        problem = None
        try:
            finalize()
        except CheckpointException as error:  # raised on every rank already
            problem = root_cause(error)
        except Exception as error:
            problem = root_cause(error)
            meet()
        if problem := first_problem(problem):
            raise OSError(problem)

    return run
