"""How fast the network between the nodes of a run is, timed when it starts."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.training.common.collectives import all_gather_object

_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
"""Of a message that a network of that kind carries at its full speed."""
_TRIES = 3


def ranks_of_a_node(world_size: int) -> int:
    """Ranks that the launcher put on this node; all of them where it does not say."""
    return min(int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))), world_size)


@dataclass(frozen=True, kw_only=True)
class Link:
    """The network of a node."""

    bytes_per_s: float
    """Of the slowest node, one direction, in a ring through all ranks."""
    ranks: int
    """Ranks that share it."""

    @property
    def of_a_rank(self) -> float:
        """A rank's part of it while all of them send."""
        return self.bytes_per_s / self.ranks


def time_link(device: str) -> Link | None:
    """Times the network between the nodes; None on one node. The same on every rank. Collective.

    Args:
        device: `cpu` or `cuda`.
    """
    world_size = dist.get_world_size()
    ranks = max(all_gather_object(ranks_of_a_node(world_size)))
    if ranks == world_size:
        return None
    message = torch.zeros(_BYTES[device], dtype=torch.uint8, device=device)
    dist.all_reduce(message[:1024])  # connects
    best_s = float("inf")
    for _ in range(_TRIES):
        _wait(device)
        began = time.perf_counter()
        dist.all_reduce(message)
        _wait(device)
        best_s = min(best_s, time.perf_counter() - began)
    seconds = torch.tensor([best_s], dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    num_bytes = 2 * (world_size - 1) / world_size * _BYTES[device]
    return Link(bytes_per_s=num_bytes / float(seconds.item()), ranks=ranks)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
