"""A world that is aborted while its groups are there, as one of NCCL is when a rank is lost."""

from __future__ import annotations

import datetime
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from copus_ext.extras.elastic.membership import Membership
from copus_ext.extras.elastic.messages import Member
from megatron.trainer.config.layout import Layout
from megatron.trainer.distributed import process_groups

_MINUTES = 1.0
_SOCKETS = socket.socketpair()
"""With a launcher that says nothing: a rank ends where the connection does."""


def _threads() -> int:
    """Threads of this process that serve groups of gloo."""
    names = (path.read_text() for path in Path("/proc/self/task").glob("*/comm"))
    return sum("gloo" in name for name in names)


def _abort() -> None:
    """`abort_world`, with a world that says that it is of NCCL."""
    of_group = dist.get_backend
    dist.get_backend = lambda group=None: of_group(group) if group is not None else "nccl"
    try:
        process_groups.abort_world()
    finally:
        dist.get_backend = of_group


def _meet(store: Any, name: str, rank: int, size: int) -> float:
    """Enters a world, builds its groups and adds up the ranks' numbers over one of them."""
    limit = datetime.timedelta(minutes=_MINUTES)
    named = dist.PrefixStore(name, store)
    dist.init_process_group("gloo", store=named, rank=rank, world_size=size, timeout=limit)
    groups = process_groups.build_groups(Layout(dp=size), timeout_minutes=_MINUTES)
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total, group=groups.dp)
    return total.item()


def main(output: Path) -> Any:
    """Returns what rank 0 sees of two worlds and between them."""
    store: Any = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    membership = Membership(_SOCKETS[0], Member(0, rank), "launch")
    seen: dict[str, Any] = {"sums": [_meet(store, "first", rank, size)]}
    seen["threads"] = [_threads()]
    _abort()
    seen["known"] = dist.is_initialized(), parallel_state.model_parallel_is_initialized()
    membership.leave(wait=False)
    seen["left"] = dist.is_initialized(), parallel_state.model_parallel_is_initialized()
    seen["threads"].append(_threads())
    seen["sums"].append(_meet(store, "second", rank, size))
    return seen
