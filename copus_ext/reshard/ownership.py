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
"""A bucket of it ends at a multiple of this and of the data-parallel size."""
LEAST_BUCKET = 40_000_000
"""Elements of a bucket by default, for small data-parallel sizes."""
BUCKET_PER_REPLICA = 1_000_000
"""The same for large ones, times the data-parallel size."""


class Place(NamedTuple):
    """Coordinates of a rank in a layout."""

    tp: int
    """Tensor-parallel rank."""
    pp: int
    """Pipeline stage."""
    dp: int
    """Data-parallel rank."""


def place_of(rank: int, layout: Layout, *, use_tp_pp_dp_mapping: bool = False) -> Place:
    """Coordinates of a rank: tensor parallelism turns fastest, then data, then pipeline, or
    pipeline before data.

    Raises:
        ValueError: the layout has no such rank.
    """
    if not 0 <= rank < layout.world_size:
        raise ValueError(f"{layout} has no rank {rank}, only 0 to {layout.world_size - 1}")
    outer, tp = divmod(rank, layout.tp)
    if use_tp_pp_dp_mapping:
        dp, pp = divmod(outer, layout.pp)
    else:
        pp, dp = divmod(outer, layout.dp)
    return Place(tp, pp, dp)


def rank_of(place: Place, layout: Layout, *, use_tp_pp_dp_mapping: bool = False) -> int:
    """Inverse of `place_of`."""
    if use_tp_pp_dp_mapping:
        return (place.dp * layout.pp + place.pp) * layout.tp + place.tp
    return (place.pp * layout.dp + place.dp) * layout.tp + place.tp


def of_layout(shape: ModelShape, layout: Layout, rank: int) -> list[Record]:
    """What one rank owns.

    Raises:
        ValueError: the model cannot be laid out this way, or the layout has no such rank.
    """
    check(shape, layout)
    place = place_of(rank, layout, use_tp_pp_dp_mapping=shape.use_tp_pp_dp_mapping)
    stage = _Stage(shape, layout, place.pp)
    return stage.records(place.tp, range(place.dp, place.dp + 1))[0]


def all_of_layout(shape: ModelShape, layout: Layout) -> list[list[Record]]:
    """What every rank owns, by rank.

    Raises:
        ValueError: the model cannot be laid out this way.
    """
    check(shape, layout)
    ranks: list[list[Record]] = [[] for _ in range(layout.world_size)]
    for pp in range(layout.pp):
        stage = _Stage(shape, layout, pp)
        for tp in range(layout.tp):
            for dp, records in enumerate(stage.records(tp, range(layout.dp))):
                place = Place(tp, pp, dp)
                rank = rank_of(place, layout, use_tp_pp_dp_mapping=shape.use_tp_pp_dp_mapping)
                ranks[rank] = records
    return ranks


class _Slot(NamedTuple):
    """A parameter in the gradient buffer of its chunk."""

    param: Parameter
    numel: int
    """Of this rank's part."""
    start: int
    """Of its first element, from that of the bucket."""
    share: int
    """Elements of the bucket that each data-parallel rank owns."""


class _Stage:
    """A pipeline stage: what its ranks have in common."""

    def __init__(self, shape: ModelShape, layout: Layout, stage: int) -> None:
        self._tp_size = layout.tp
        self._is_sharded = shape.use_distributed_optimizer
        self._chunks = chunks_of_stage(shape, layout, stage)
        self._slots: list[_Slot] = []
        if self._is_sharded:
            for number, chunk in enumerate(self._chunks):
                limit = _bucket_limit(shape, layout) if stage == number == 0 else None
                for bucket in _buckets(chunk, layout, limit):
                    self._slots += bucket

    def records(self, tp: int, replicas: range) -> list[list[Record]]:
        """Records of some consecutive data-parallel ranks of one tensor-parallel rank."""
        if self._is_sharded:
            return self._shares(tp, replicas)
        copies = {first: self._whole(tp, first) for first in {dp == 0 for dp in replicas}}
        return [list(copies[dp == 0]) for dp in replicas]

    def _shares(self, tp: int, replicas: range) -> list[list[Record]]:
        owned: list[list[Record]] = [[] for _ in replicas]
        shards = [0 for _ in replicas]
        for slot in self._slots:
            stop = slot.start + slot.numel
            first, last = slot.start // slot.share, (stop - 1) // slot.share
            for dp in range(max(first, replicas.start), min(last + 1, replicas.stop)):
                index, begin = dp - replicas.start, dp * slot.share
                a, b = max(slot.start, begin), min(stop, begin + slot.share)
                part = (a - slot.start, b - slot.start)
                owned[index] += _held(slot.param, self._tp_size, tp, *part, shards[index], True)
                shards[index] += 1
        return owned

    def _whole(self, tp: int, is_first: bool) -> list[Record]:
        records: list[Record] = []
        for shard, param in enumerate(p for chunk in self._chunks for p in chunk):
            stop = _local_numel(param, self._tp_size)
            records += _held(param, self._tp_size, tp, 0, stop, shard, is_first)
        return records


def _local_numel(param: Parameter, tp_size: int) -> int:
    return param.numel if param.cut is None else param.numel // tp_size


def _bucket_limit(shape: ModelShape, layout: Layout) -> int | None:
    if not shape.overlap_grad_reduce:
        return None
    if shape.ddp_bucket_size is not None:
        return shape.ddp_bucket_size
    return max(LEAST_BUCKET, BUCKET_PER_REPLICA * layout.dp)


def _buckets(params: list[Parameter], layout: Layout, limit: int | None) -> Iterator[list[_Slot]]:
    """Places the parameters of a chunk as the distributed optimizer's buffer does, in its order.

    Starts are relative to the bucket: buckets start at multiples of the parameters' alignment.
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


def _held(
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
        is_first: whether no other data-parallel rank's copy goes before this one.
    """
    block, corner = list(param.shape), [0] * len(param.shape)
    if param.cut is not None:
        block[param.cut] //= tp_size * param.pieces
        corner[param.cut] = tp * block[param.cut]
    elif tp:
        is_first = False
    size = math.prod(block)
    records: list[Record] = []
    for piece in range(param.pieces):
        base = piece * size
        a, b = max(start, base), min(stop, base + size)
        if a < b:
            # Each piece is cut over the ranks by itself: this one's rows follow those of all
            # ranks of the piece before.
            ahead = piece * tp_size * block[0]
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
