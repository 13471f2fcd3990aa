"""Moves made-up state between all pairs of layouts of four ranks, with messages of all kinds."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

SHAPE = {
    "num_layers": 4,
    "hidden_size": 24,
    "ffn_hidden_size": 72,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "kv_channels": 6,
    "padded_vocab_size": 128,
    "gated": True,
    "linear_bias": False,
    "normalization": "RMSNorm",
    "tied": False,
    "ddp_bucket_size": 5000,
    "overlap_grad_reduce": True,
}
LAYOUTS = [(1, 1, 1), (4, 1, 1), (1, 2, 2), (2, 2, 1)]
WAYS = {
    # Bytes of the largest message, of the smallest that goes alone, and whether they start together
    # (over gloo in the order of NCCL's batches, but one after the other)
    "packed": (1 << 20, 1 << 20, False),
    "small packed": (600, 1 << 20, False),
    "alone": (2000, 64, False),
    "many": (100, 4, False),
    "batched": (2000, 64, True),
    "batched packed": (600, 1 << 20, True),
}


def state_of(records: list[Any], keys: list[str]) -> Any:
    """Shards in which every element is a number that only its kind, tensor and place have."""
    import torch

    from copus_ext.reshard.transfer import view_of
    from megatron.trainer.model.shards import KINDS, Shards

    sizes = [0] * (1 + max((r.shard for r in records), default=-1))
    for r in records:
        sizes[r.shard] = max(sizes[r.shard], r.offset + r.numel)
    tensors = [{kind: torch.full((n,), -1.0) for kind in KINDS} for n in sizes]
    for r in records:
        assert math.prod(r.shape) <= 1 << 15 and len(keys) <= 1 << 6  # exact in fp32
        places = torch.arange(math.prod(r.shape)).view(r.shape)
        for axis, (a, b) in enumerate(zip(r.lo, r.hi)):
            places = places.narrow(axis, a, b - a)
        for number, kind in enumerate(KINDS):
            first = (number * len(keys) + keys.index(r.key)) << 15
            view_of(tensors[r.shard][kind], r, (r.lo, r.hi)).copy_(places + first)
    return Shards(records=records, tensors=tensors)


def gathers() -> list[dict[str, Any]]:
    """Buffers of which every rank has its part, among all ranks and among some of them."""
    import torch
    import torch.distributed as dist

    from copus_ext.reshard import transfer

    rank, rows = dist.get_rank(), []
    uneven: list[Any] = [dist.new_group(some) for some in ([0, 2, 3], [1])]
    transfer.BUCKET_BYTES = {"gloo": 64}
    for group in (dist.group.WORLD, uneven[rank == 1]):
        for dtype, per_rank in itertools.product((torch.float32, torch.bfloat16), (1, 5, 700)):
            size = per_rank * dist.get_world_size(group)
            whole = torch.arange(1, size + 1).remainder(200).to(dtype)
            own = dist.get_rank(group)
            mine = slice(own * per_rank, (own + 1) * per_rank)
            buffer = torch.zeros_like(whole)
            buffer[mine] = whole[mine]
            transfer.gather_in_place(buffer, group=group, timeout_s=60)
            rows.append({"way": "gather", "is_equal": torch.equal(buffer, whole)})
    return rows


def main(output: Path) -> Any:
    import torch
    import torch.distributed as dist

    from copus_ext.reshard import transfer
    from copus_ext.reshard.ownership import all_of_layout
    from copus_ext.reshard.plan import make_plan
    from megatron.trainer.config.layout import Layout
    from megatron.trainer.config.model_shape import ModelShape

    rank, rows = dist.get_rank(), []
    layouts = [Layout(tp=t, pp=p, vpp=v, dp=4 // (t * p)) for t, p, v in LAYOUTS]
    under_way: list[int] = []
    finish_one = transfer._Channel.finish_one

    def finish(self: Any, timeout: Any) -> None:
        under_way.append(len(self.under_way))
        finish_one(self, timeout)

    transfer._Channel.finish_one = finish
    for (name, way), sharded in itertools.product(WAYS.items(), (True, False)):
        shape = ModelShape(**SHAPE, use_distributed_optimizer=sharded)
        bucket, transfer.ALONE_BYTES, is_batched = way
        some = layouts[:3] if name == "many" else layouts
        for before, after in itertools.permutations(some, 2):
            source, target = (all_of_layout(shape, x) for x in (before, after))
            keys = sorted({r.key for own in source for r in own})
            held, wanted, got = (state_of(own[rank], keys) for own in (source, target, target))
            for tensors in got.tensors:
                for tensor in tensors.values():
                    # What no record covers is not touched.
                    tensor.masked_fill_(tensor >= 0, -2)
            under_way.clear()
            change = transfer.Transfer(
                make_plan(source, target),
                source=held,
                target=got,
                group=dist.group.WORLD,
                timeout_s=60,
                bucket_bytes=bucket,
                is_batched=is_batched,
            )
            change.copy_own()
            change.exchange()
            untouched = state_of(source[rank], keys)
            is_equal = all(
                torch.equal(one[kind], other[kind])
                for old, new in ((got, wanted), (held, untouched))
                for one, other in zip(old.tensors, new.tensors, strict=True)
                for kind in other
            )
            rows.append(
                {
                    "way": name,
                    "pair": f"{before} -> {after}",
                    "is_equal": is_equal,
                    "num_messages": change.num_messages,
                    "most_under_way": max(under_way, default=0),
                }
            )
    rows += gathers()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, rows)
    return every
