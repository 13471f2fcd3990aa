"""How fast links and ranks of a run are, timed when it starts and when its steps change."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from copus_ext.cost_model.conditions import Timings
from megatron.trainer.common.collectives import all_gather_object

if TYPE_CHECKING:
    from megatron.trainer.config import Config

_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
"""Of a message that a network of that kind carries at its full speed."""
_PRODUCT = {"cpu": (384, 2, torch.float32), "cuda": (4096, 16, torch.bfloat16)}
"""Rows and columns of a matrix product, how often it is done, and its numbers."""
_MIN_TRIES, _MAX_TRIES = 3, 100
_TIMED_S = 0.2
"""Seconds for which something short is timed again and again: its shortest time scatters less."""


def ranks_of_a_node(world_size: int) -> int:
    """Ranks that the launcher put on this node; all of them where it does not say."""
    return min(int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))), world_size)


@dataclass(frozen=True, kw_only=True)
class Link:
    bytes_per_s: float
    """Of the slowest node, one direction, in a ring through all ranks."""


def time_machine(device: str) -> Timings:
    """Times a message round all ranks, and a matrix product on the slowest of them. The same on
    every rank. Collective. Nothing is timed where a rank has no memory left for it.

    Args:
        device: `cpu` or `cuda`.
    """
    world_size, room = dist.get_world_size(), _room(device)
    every = all_gather_object((ranks_of_a_node(world_size), room is not None))
    is_one_node = max(ranks for ranks, _ in every) == world_size
    if room is None or not all(has_room for _, has_room in every):
        return Timings(is_one_node=is_one_node)
    message, a, out = room
    compute_s = _product_s(device, a, out)
    ring_s = _ring_s(device, message) if world_size > 1 else 0.0
    slowest = torch.tensor([compute_s, ring_s], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    compute_s, ring_s = slowest.tolist()
    return Timings(ring_s=ring_s or None, compute_s=compute_s or None, is_one_node=is_one_node)


def _room(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """The message, and the factor and the result of the product; None if they do not fit."""
    size, _, kind = _PRODUCT[device]
    try:
        message = torch.zeros(_BYTES[device], dtype=torch.uint8, device=device)
        a = torch.ones(size, size, dtype=kind, device=device)
        return message, a, torch.empty_like(a)
    except RuntimeError:  # torch.OutOfMemoryError is one
        return None


def link_of(timings: Timings, config: Config) -> Link | None:
    """The network between the nodes; None on one node.

    Args:
        timings: of the machine; the same on every rank.
        config: of the run.
    """
    world_size = config.layout.world_size
    if timings.is_one_node or timings.ring_s is None:
        return None
    num_bytes = 2 * (world_size - 1) / world_size * _BYTES[config.runtime.device]
    return Link(bytes_per_s=num_bytes / timings.ring_s)


def _ring_s(device: str, message: torch.Tensor) -> float:
    dist.all_reduce(message[:1024])  # connects

    def send() -> None:
        dist.all_reduce(message)

    best_s = torch.tensor(_best_s(device, send, _MIN_TRIES), dtype=torch.float64, device=device)
    dist.all_reduce(best_s, op=dist.ReduceOp.MAX)  # so that all ranks go on as often
    more = _tries(best_s.item()) - _MIN_TRIES
    return min(best_s.item(), _best_s(device, send, more)) if more else best_s.item()


def _product_s(device: str, a: torch.Tensor, out: torch.Tensor) -> float:
    def multiply() -> None:
        for _ in range(_PRODUCT[device][1]):
            torch.mm(a, a, out=out)

    multiply()  # loads the kernel
    return _best_s(device, multiply, _tries(_best_s(device, multiply, 1)))


def _tries(once_s: float) -> int:
    """How often something is timed that takes so many seconds."""
    return min(max(int(_TIMED_S / max(once_s, 1e-9)), _MIN_TRIES), _MAX_TRIES)


def _best_s(device: str, run: Callable[[], Any], tries: int) -> float:
    best_s = float("inf")
    for _ in range(tries):
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        best_s = min(best_s, time.perf_counter() - began)
    return best_s


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
