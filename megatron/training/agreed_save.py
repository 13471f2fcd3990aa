"""Keeps the ranks of a save in step when rank 0 alone cannot write its small files.

megatron-core writes `common.pt` and `metadata.json` on rank 0 while the others go on into a
collective; were rank 0 to leave there with an error, they would wait for it until the timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import (
    StrategyAction,
    register_default_strategy,
)
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy

from megatron.training.agree import first_problem


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
    """Makes `AgreedCommonSave` the one megatron-core uses in this process."""
    register_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1, AgreedCommonSave("torch", 1))


def finish_in_step(request: AsyncRequest) -> None:
    """Makes an error of the last finalization, which marks the checkpoint on rank 0 and ends with a
    barrier, one that every rank raises."""
    request.finalize_fns[-1] = _in_step(request.finalize_fns[-1])


def _in_step(finalize: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        problem = None
        try:
            finalize()
        except OSError as error:
            problem = str(error)
            dist.barrier()  # the one the others wait in
        if problem := first_problem(problem):
            raise OSError(problem)

    return run
