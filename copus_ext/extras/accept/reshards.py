"""The arithmetic of changes of layout on one device: shards of all ranks lie in one process, and
what would be a message is a copy through a buffer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from copus_ext.reshard.ownership import all_of_layout
from copus_ext.reshard.parameters import shape_of
from copus_ext.reshard.plan import TransferOp, make_plan
from copus_ext.reshard.transfer import small_enough, view_of
from copus_ext.reshard.verify import local_sums, sums_of
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.model_shape import ModelShape
from megatron.trainer.distributed.sharding import Record, volume
from megatron.trainer.model.shards import Shards

_MESSAGE = 1 << 16
"""Most elements of a message. Larger rectangles are cut, as in a change of a large model."""
_Ranks = Sequence[Shards]


@torch.no_grad()
def compared(config: Any, live: Shards, walk: Iterable[str]) -> dict[str, bool]:
    """Takes the state of one rank through layouts, on its device and again on the CPU.

    Args:
        config: of the run.
        live: all of its state; it is only read.
        walk: layouts, of any number of ranks.

    Returns:
        `as_before`: every sum over bits stayed; `as_on_cpu`: all are those of the CPU.

    Raises:
        Mismatch: copies of a tensor on two ranks differ.
    """
    there = [{kind: part.cpu() for kind, part in row.items()} for row in live.tensors]
    shape, layouts = shape_of(config), [Layout.from_text(text) for text in walk]
    first, *own = _sums_along(shape, live, layouts)
    of_cpu = _sums_along(shape, replace(live, tensors=there), layouts)
    return {
        "as_before": all(sums == first for sums in own),
        "as_on_cpu": [first, *own] == of_cpu,
    }


def _sums_along(shape: ModelShape, live: Shards, walk: Iterable[Layout]) -> list[dict[str, int]]:
    keys = sorted({record.key for record in live.records})
    ranks: _Ranks = [live]
    found = [_sums(ranks, keys)]
    for layout in walk:
        ranks = moved(ranks, all_of_layout(shape, layout), shape)
        found.append(_sums(ranks, keys))
    return found


def _sums(ranks: _Ranks, keys: Sequence[str]) -> dict[str, int]:
    own = [local_sums(shards, keys) for shards in ranks if shards.records]
    return sums_of(torch.stack(own).sum(0), keys)


def moved(ranks: _Ranks, records: Sequence[list[Record]], shape: ModelShape) -> list[Shards]:
    """The shards of all ranks after a change.

    Args:
        ranks: by rank, its shards before.
        records: by rank, what it holds after.
        shape: of the model.
    """
    nothing = Shards(records=[], tensors=[])
    num = max(len(ranks), len(records))
    source = [*ranks, *[nothing] * (num - len(ranks))]
    wanted = [*records, *[[]] * (num - len(records))]
    plan = make_plan([shards.records for shards in source], wanted, shape=shape)
    target = [_unfilled(own, ranks[0].tensors[0]) for own in wanted]
    for op in plan.ops:
        _carry_out(op, source[op.source_rank], target[op.target_rank])
    return target[: len(records)]


def _unfilled(records: list[Record], like: dict[str, torch.Tensor]) -> Shards:
    """Shards of no numbers, so that an element that nobody fills is found."""
    sizes: dict[int, int] = {}
    for record in records:
        end = record.offset + record.numel
        sizes[record.shard] = max(sizes.get(record.shard, 0), end)
    tensors = [
        {kind: part.new_full((sizes[shard],), torch.nan) for kind, part in like.items()}
        for shard in sorted(sizes)
    ]
    return Shards(records=records, tensors=tensors)


def _carry_out(op: TransferOp, source: Shards, target: Shards) -> None:
    """Copies what stays on a rank; packs and unpacks what leaves it."""
    start, end = source.records[op.source], target.records[op.target]
    is_sent = op.source_rank != op.target_rank
    for box in small_enough((op.lo, op.hi), _MESSAGE if is_sent else op.numel):
        for kind, shard in source.tensors[start.shard].items():
            found = view_of(shard, start, box)
            if is_sent:
                buffer = shard.new_empty(volume(*box))
                found = buffer.view(found.shape).copy_(found)
            view_of(target.tensors[end.shard][kind], end, box).copy_(found)
