"""Small agreements between all ranks: one decides for all, or all decide together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron.trainer.common.errors import TrainingFailure, UsageError

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


def barrier() -> None:
    """Waits for all ranks. NCCL does so with a collective on a GPU, which it would otherwise guess
    from the number of the rank."""
    is_nccl = dist.get_backend() == "nccl"
    dist.barrier(device_ids=[torch.cuda.current_device()] if is_nccl else None)


def broadcast_from_rank0(value: Any) -> Any:
    """Rank 0's value on every rank. Collective over the world."""
    if dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def on_rank0(doing: str, act: Callable[[], Result]) -> Result:
    """The result on every rank of a call that only rank 0 makes. Collective over the world.

    An error of the call ends all ranks. Else rank 0 would leave alone, and the others would wait
    for it until their time is up.

    Args:
        doing: what the call is for; begins the message of an unexpected error.
        act: the call; its result can be pickled.

    Raises:
        UsageError: on every rank, with the text of the call's own, or of a file that it cannot read
            or write.
        TrainingFailure: on every rank, if the call raises anything else.
    """
    result: Any = None
    failure: tuple[type[Exception], str] | None = None
    if dist.get_rank() == 0:
        try:
            result = act()
        except (UsageError, OSError) as error:
            failure = UsageError, str(error)
        except Exception as error:
            logger.exception("%s failed", doing)
            failure = TrainingFailure, f"{doing} failed: {type(error).__name__}: {error}"
    result, failure = broadcast_from_rank0((result, failure))
    if failure is not None:
        kind, text = failure
        raise kind(text)
    return result


def all_gather_object(value: Any) -> list[Any]:
    """Every rank's value, by rank. Collective over the world."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def first_problem(problem: str | None) -> str | None:
    """The problem of the lowest rank that has one, on every rank. Collective over the world."""
    return next((p for p in all_gather_object(problem) if p), None)


def gather_numbers(own: torch.Tensor, *, iteration: int) -> torch.Tensor:
    """Every rank's numbers. Collective over the world; one message, and one wait for it.

    Where a world is aborted under a collective, NCCL's ends as if it had come: what it should have
    filled holds what it held before, in memory used again the numbers of the step before.

    Args:
        own: [n] of this rank, fp64, where the backend sends from.
        iteration: steps done, the same on all ranks, at least 0.

    Returns:
        [ranks, n] in memory of the host.

    Raises:
        RuntimeError: a rank's numbers have not come.
    """
    size = dist.get_world_size()  # an aborted world has none
    message = torch.cat([own.new_full((1,), iteration), own])
    room = own.new_full((size * len(message),), -1.0)
    dist.all_gather_into_tensor(room, message)
    found = room.cpu().view(size, -1)
    if (found[:, 0] != iteration).any():
        raise RuntimeError("the process group has lost a member: its numbers have not come")
    return found[:, 1:]
