"""Small agreements between all ranks: one decides for all, or all decide together."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def broadcast_from_rank0(value: Any) -> Any:
    """Rank 0's value on every rank. Collective over the world."""
    if dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def all_gather_object(value: Any) -> list[Any]:
    """Every rank's value, by rank. Collective over the world."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def first_problem(problem: str | None) -> str | None:
    """The problem of the lowest rank that has one, on every rank. Collective over the world."""
    return next((p for p in all_gather_object(problem) if p), None)
