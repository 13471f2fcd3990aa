"""Which rectangles of the global tensors each rank of a layout owns, without building a model.

These are the records that `megatron.training.model.shards.own_shards` reads from a live model. The
ranks compare digests of both before a change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from copus_ext.reshard.model_shape import ModelShape, Parameter, check, chunks_of_stage
from megatron.training.config.layout import Layout
from megatron.training.distributed.sharding import Record, records_of_block

PARAMETER_ALIGNMENT = 64
"""A parameter starts at a multiple of this in a buffer of the distributed optimizer."""
BUCKET_ALIGNMENT = 128
"""A bucket ends at a multiple of this and of the data-parallel size."""
LEAST_BUCKET = 40_000_000
"""Default elements of a bucket for small data-parallel sizes."""
BUCKET_PER_REPLICA = 1_000_000
"""The same for large ones, times the data-parallel size."""


def rank_of(
    tp: int, pp: int, dp: int, layout: Layout, *, use_tp_pp_dp_mapping: bool = False
) -> int:
    """The rank at a tensor-parallel rank, pipeline stage and data-parallel rank. The first turns
    fastest. Data parallelism follows, or pipeline parallelism under `use_tp_pp_dp_mapping`."""
    if use_tp_pp_dp_mapping:
        return (dp * layout.pp + pp) * layout.tp + tp
    return (pp * layout.dp + dp) * layout.tp + tp


def all_of_layout(shape: ModelShape, layout: Layout) -> list[list[Record]]:
    """The records of every rank.

    Raises:
        ValueError: the model cannot be laid out this way.
    """
    check(shape, layout)
    mapping = shape.use_tp_pp_dp_mapping
    ranks: list[list[Record]] = [[] for _ in range(layout.world_size)]
    for pp in range(layout.pp):
        chunks = chunks_of_stage(shape, layout, pp)
        slots = [
            slot
            for number, chunk in enumerate(chunks)
            for bucket in _buckets(chunk, layout, _bucket_limit(shape, layout, pp, number))
            for slot in bucket
        ]
        for tp in range(layout.tp):
            if shape.use_distributed_optimizer:
                replicas = _shards_of_replicas(slots, layout, tp)
            else:
                first, copy = (_whole(chunks, layout, tp, is_first=x) for x in (True, False))
                replicas = [first, *[copy] * (layout.dp - 1)]
            for dp, records in enumerate(replicas):
                ranks[rank_of(tp, pp, dp, layout, use_tp_pp_dp_mapping=mapping)] = records
    return ranks


class _Slot(NamedTuple):
    """A parameter in the gradient buffer of its chunk."""

    param: Parameter
    numel: int
    """Of this rank's part."""
    start: int
    """First element, counted from the start of the bucket."""
    share: int
    """Elements of the bucket that each data-parallel rank owns."""


def _shards_of_replicas(slots: list[_Slot], layout: Layout, tp: int) -> list[list[Record]]:
    """By data-parallel rank, records of its shares of the buckets."""
    owned: list[list[Record]] = [[] for _ in range(layout.dp)]
    num_shards = [0] * layout.dp
    for slot in slots:
        stop = slot.start + slot.numel
        for dp in range(slot.start // slot.share, (stop - 1) // slot.share + 1):
            begin = dp * slot.share
            a, b = max(slot.start, begin), min(stop, begin + slot.share)
            part = (a - slot.start, b - slot.start)
            owned[dp] += _records(slot.param, layout.tp, tp, *part, num_shards[dp], True)
            num_shards[dp] += 1
    return owned


def _whole(
    chunks: list[list[Parameter]], layout: Layout, tp: int, *, is_first: bool
) -> list[Record]:
    """Records of a rank that holds the state of all its parameters."""
    records: list[Record] = []
    for shard, param in enumerate(p for chunk in chunks for p in chunk):
        records += _records(
            param, layout.tp, tp, 0, _local_numel(param, layout.tp), shard, is_first
        )
    return records


def _local_numel(param: Parameter, tp_size: int) -> int:
    return param.numel if param.partition_dim is None else param.numel // tp_size


def _bucket_limit(shape: ModelShape, layout: Layout, stage: int, chunk: int) -> int | None:
    """Elements after which a bucket closes. Only the first chunk of the first stage has several."""
    if not shape.overlap_grad_reduce or stage or chunk:
        return None
    if shape.ddp_bucket_size is not None:
        return shape.ddp_bucket_size
    return max(LEAST_BUCKET, BUCKET_PER_REPLICA * layout.dp)


def _buckets(params: list[Parameter], layout: Layout, limit: int | None) -> Iterator[list[_Slot]]:
    """Places the parameters of a chunk as the distributed optimizer's buffer does, in its order.

    Starts count from the start of the bucket, which is a multiple of the parameters' alignment.
    """
    unit = math.lcm(layout.dp, BUCKET_ALIGNMENT)

    def close(end: int) -> list[_Slot]:
        share = _round_up(end, unit) // layout.dp
        return [slot._replace(share=share) for slot in slots]

    slots: list[_Slot] = []
    end = 0
    for param in reversed(params):
        start = _round_up(end, PARAMETER_ALIGNMENT)
        if param.is_shared and slots:
            yield close(start)
            slots, start = [], 0
        numel = _local_numel(param, layout.tp)
        slots.append(_Slot(param, numel, start, 0))
        end = start + numel
        if param.is_shared or (limit is not None and end >= limit):
            yield close(end)
            slots, end = [], 0
    if slots:
        yield close(end)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _records(
    param: Parameter, tp_size: int, tp: int, start: int, stop: int, shard: int, is_first: bool
) -> list[Record]:
    """Records of a range of a rank's part of a parameter; the range is a shard of its own.

    Args:
        param: of the stage.
        tp_size: tensor-parallel size.
        tp: tensor-parallel rank.
        start: first element of the flattened part.
        stop: one past the last.
        shard: its number.
        is_first: no copy of another data-parallel rank takes precedence.
    """
    block, corner = list(param.shape), [0] * len(param.shape)
    dim = param.partition_dim
    if dim is not None:
        block[dim] //= tp_size * param.num_blocks
        corner[dim] = tp * block[dim]
    elif tp:
        is_first = False
    size = math.prod(block)
    records: list[Record] = []
    for number in range(param.num_blocks):
        base = number * size
        a, b = max(start, base), min(stop, base + size)
        if a < b:
            # Each block is cut over the ranks by itself: this rank's rows of it come after the rows
            # of all ranks of the blocks before.
            ahead = number * tp_size * block[0]
            records += records_of_block(
                key=param.key,
                shape=(*param.layers, *param.shape),
                corner=(*param.layer, corner[0] + ahead, *corner[1:]),
                block=tuple(block),
                start=a - base,
                stop=b - base,
                shard=shard,
                offset=a - start,
                is_first=is_first and not param.is_copy,
            )
    return records
