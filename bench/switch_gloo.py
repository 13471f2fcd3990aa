"""The bytes of a change of layout over bare gloo, for bench/switch_cost.py."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from copus_ext.reshard.plan import BYTES_PER_ELEMENT
from copus_ext.reshard.route import Route
from copus_ext.reshard.transfer import BUCKET_BYTES, WINDOW


def bytes_between(route: Route) -> list[list[int]]:
    """By sending and receiving rank, the bytes of a change."""
    world = len(route.source)
    table = [[0] * world for _ in range(world)]
    for piece in route.plan.pieces:
        if piece.source_rank != piece.target_rank:
            size = piece.numel * BYTES_PER_ELEMENT
            table[piece.source_rank][piece.target_rank] += size
    return table


def exchange(group: Any, table: list[list[int]]) -> float:
    """Sends so many bytes from one tensor to another in messages and windows of the size that a
    change has; seconds on this rank."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    bucket = BUCKET_BYTES[str(dist.get_backend(group))] // 4
    out = torch.ones(max(table[rank]) // 4)
    incoming = torch.ones(max(row[rank] for row in table) // 4)
    dist.barrier(group=group)
    begin = time.perf_counter()
    for shift in range(1, world):
        to, come_from = (rank + shift) % world, (rank - shift) % world
        sends = deque(out[: table[rank][to] // 4].split(bucket) if table[rank][to] else ())
        size = table[come_from][rank] // 4
        receives = deque(incoming[:size].split(bucket) if size else ())
        works: tuple[deque[Any], deque[Any]] = (deque(), deque())
        while sends or receives or any(works):
            while receives and len(works[0]) < WINDOW:
                works[0].append(dist.irecv(receives.popleft(), group=group, group_src=come_from))
            while sends and len(works[1]) < WINDOW:
                works[1].append(dist.isend(sends.popleft(), group=group, group_dst=to))
            for waiting in works:
                if waiting:
                    waiting.popleft().wait()
    return time.perf_counter() - begin
