"""Keeps the ranks of a save in step when rank 0 alone cannot write its small files.

megatron-core writes `common.pt`, `.metadata` and `metadata.json` on rank 0 while the others go on
into a collective; were rank 0 to leave there with an error, they would wait for it until the
timeout.
"""

from __future__ import annotations

from collections.abc import Callable
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

from megatron.training.checkpoint.async_writer import WriteResults
from megatron.training.checkpoint.save_errors import root_cause
from megatron.training.common.collectives import first_problem


class AgreedCommonSave(TorchCommonSaveStrategy):
    """Writes `common.pt` as megatron-core does; an error is raised on every rank."""

    def save_common(self, common_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Collective over the world.

        Raises:
            OSError: on every rank, when rank 0 could not write.
        """
        problem = None
        try:
            super().save_common(common_state_dict, checkpoint_dir)
        except (OSError, RuntimeError) as error:  # torch's zip writer raises RuntimeError
            problem = str(error)
        if problem := first_problem(problem):
            raise OSError(problem)


def register() -> None:
    """Makes `AgreedCommonSave` the one megatron-core uses in this process, and has its writers hand
    over by `WriteResults`. Its own queue needs a process beside each rank, which outlives a rank
    that is killed."""
    register_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1, AgreedCommonSave("torch", 1))
    filesystem_async._get_write_results_queue = WriteResults


def finish_in_step(request: AsyncRequest) -> None:
    """Makes an error of a finalization on rank 0 one that every rank raises: of the first, which
    gathers what was written, writes the index and tells the others, and of the last, which marks
    the checkpoint and ends with a barrier."""
    request.finalize_fns[0] = _in_step(request.finalize_fns[0], _tell_of_a_failure)
    request.finalize_fns[-1] = _in_step(request.finalize_fns[-1], dist.barrier)


def _tell_of_a_failure() -> None:
    """The broadcast that the others wait in."""
    dist.broadcast(torch.ones(1, dtype=torch.int, device=torch.cuda.current_device()), src=0)


def _in_step(finalize: Callable[[], None], meet: Callable[[], object]) -> Callable[[], None]:
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
