"""Collectives of torch on the stub of NCCL against what a CPU computes; see
`test_collectives.py`."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

KINDS = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int64,
    torch.uint8,
]


def values(rank: int, count: int, kind: torch.dtype) -> torch.Tensor:
    """Small whole numbers, exact in every kind."""
    return ((torch.arange(count) * 7 + rank * 3) % 11 + 1).to(kind)


def check(name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    found = found.cpu()
    assert torch.equal(found, wanted.to(found.dtype)), (name, found[:8], wanted[:8])


def check_reductions(kind: torch.dtype, count: int) -> None:
    """All-reduce and reduce by every operation."""
    rank, n = dist.get_rank(), dist.get_world_size()
    each = torch.stack([values(r, count, kind) for r in range(n)])
    wide = each.to(torch.float64)
    wanted = {"SUM": wide.sum(0), "MAX": wide.amax(0), "MIN": wide.amin(0)}
    if kind.is_floating_point:
        wanted["AVG"] = wide.mean(0)
    for op, result in wanted.items():
        one, all_of_them = each[rank].cuda(), each[rank].cuda()
        dist.all_reduce(all_of_them, getattr(dist.ReduceOp, op))
        check(f"all-reduce {op} {kind}", all_of_them, result.to(kind))
        dist.reduce(one, n - 1, getattr(dist.ReduceOp, op))
        if rank == n - 1:
            check(f"reduce {op} {kind}", one, result.to(kind))


def check_exchanges(kind: torch.dtype, count: int) -> None:
    """Collectives that move parts, into one tensor and into a list."""
    rank, n = dist.get_rank(), dist.get_world_size()
    each = torch.stack([values(r, count, kind) for r in range(n)])
    one = each[rank].cuda()
    dist.broadcast(one, n - 1)
    check("broadcast", one, each[n - 1])
    out = torch.zeros(n * count, dtype=kind).cuda()
    dist.all_gather_into_tensor(out, each[rank].cuda())
    check("all-gather", out, each.flatten())
    outs = [torch.zeros(count, dtype=kind).cuda() for _ in range(n)]
    dist.all_gather(outs, each[rank].cuda())
    for r in range(n):
        check("all-gather to a list", outs[r], each[r])
    parts = torch.stack([values(r, n * count, kind) for r in range(n)]).view(n, n, count)
    out = torch.zeros(count, dtype=kind).cuda()
    dist.reduce_scatter_tensor(out, parts[rank].flatten().cuda())
    check("reduce-scatter", out, parts[:, rank].to(torch.float64).sum(0).to(kind))
    out = torch.zeros(n * count, dtype=kind).cuda()
    dist.all_to_all_single(out, parts[rank].flatten().cuda())
    check("all-to-all", out, parts[:, rank].flatten())


def check_messages(kind: torch.dtype, count: int) -> None:
    """A ring of two messages each in one group, then one message between two ranks."""
    rank, n = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % n, (rank + 1) % n
    a, b = torch.zeros(count, dtype=kind).cuda(), torch.zeros(count, dtype=kind).cuda()
    first, second = values(rank, count, kind).cuda(), values(rank + 5, count, kind).cuda()
    ring = [(dist.isend, first, right), (dist.isend, second, right)]
    ring += [(dist.irecv, a, left), (dist.irecv, b, left)]
    for work in dist.batch_isend_irecv([dist.P2POp(*message) for message in ring]):
        work.wait()
    check("first of the ring", a, values(left, count, kind))
    check("second of the ring", b, values(left + 5, count, kind))
    if rank == 0:
        dist.send(first, n - 1)
    if rank == n - 1:
        dist.recv(a, 0)
        check("message", a, values(0, count, kind))


def check_uneven() -> None:
    """An all-to-all whose parts differ in length."""
    rank, n = dist.get_rank(), dist.get_world_size()
    sizes = [r + 1 for r in range(n)]
    got = torch.zeros((rank + 1) * n).cuda()
    dist.all_to_all_single(
        got, torch.full((sum(sizes),), float(rank)).cuda(), [rank + 1] * n, sizes
    )
    check("uneven all-to-all", got, torch.arange(n).repeat_interleave(rank + 1).float())


def check_groups(device: torch.device) -> None:
    """Coalesced collectives, a group of two ranks, objects."""
    rank, n = dist.get_rank(), dist.get_world_size()
    own = [values(rank + i, 50, torch.float32).cuda() for i in range(3)]
    outs = [torch.zeros(50 * n).cuda() for _ in own]
    coalescing: Any = dist._coalescing_manager(device=device, async_ops=True)
    with coalescing as works:
        for out, part in zip(outs, own):
            dist.all_gather_into_tensor(out, part)
    works.wait()
    for i, out in enumerate(outs):
        check("coalesced", out, torch.cat([values(r + i, 50, torch.float32) for r in range(n)]))
    pairs = [dist.new_group([i, i + 1]) for i in range(0, n, 2)]
    one = torch.full((3,), float(rank)).cuda()
    dist.all_reduce(one, group=pairs[rank // 2])
    check("pair", one, torch.full((3,), float(rank // 2 * 4 + 1)))
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(n)], objects


def check_is_asynchronous(device: torch.device) -> None:
    """The caller goes on, and has the value once it waits for it."""
    rank, n = dist.get_rank(), dist.get_world_size()
    one = torch.ones(4).cuda()
    if rank == 0:
        time.sleep(0.5)
    work: Any = dist.all_reduce(one, async_op=True)
    early = one.tolist()  # on another stream, which does not wait
    work.wait()
    check("late", one, torch.full((4,), float(n)))
    if rank != 0:
        assert early == [1.0] * 4, early
    dist.barrier(device_ids=[device.index])


def main() -> None:
    """One rank. With the argument `bound` the groups are split from a bound world, as torch does
    where it is told the device."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device if sys.argv[1:] == ["bound"] else None)
    for kind in KINDS:
        for count in (1, 1000, 40000):
            check_reductions(kind, count)
            check_exchanges(kind, count)
            check_messages(kind, count)
    check_uneven()
    check_groups(device)
    check_is_asynchronous(device)
    dist.destroy_process_group()
    print("all right", flush=True)


if __name__ == "__main__":
    main()
