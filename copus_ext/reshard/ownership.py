"""Which rectangles of the global tensors each rank of a layout owns, without building a model.

These are the records that `megatron.trainer.model.shards.local_shards` reads from a live model.
The ranks compare digests of both before a change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from copus_ext.reshard.parameters import Parameter, check, chunks_of_stage
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.model_shape import ModelShape
from megatron.trainer.distributed.sharding import Record, records_of_block

PARAMETER_ALIGNMENT = 64
"""A parameter starts at a multiple of this in a buffer of the distributed optimizer."""
BUCKET_ALIGNMENT = 128
"""A bucket ends at a multiple of this and of the number of copies."""
MIN_BUCKET = 40_000_000
"""Default elements of a bucket for few copies."""
BUCKET_PER_REPLICA = 1_000_000
"""The same for many copies, times their number."""


def rank_of(
    tp: int, pp: int, copy: int, layout: Layout, *, use_tp_pp_dp_mapping: bool = False
) -> int:
    """The rank at a tensor-parallel rank, pipeline stage and copy of the weights.

    Copies are numbered over replicas, and inside each over the ranks that share its samples. The
    tensor-parallel rank turns fastest and the context-parallel rank follows. Then comes data
    parallelism, or pipeline parallelism under `use_tp_pp_dp_mapping`.
    """
    if use_tp_pp_dp_mapping:
        dp, cp = divmod(copy, layout.cp)
        return ((dp * layout.pp + pp) * layout.cp + cp) * layout.tp + tp
    return (pp * layout.copies + copy) * layout.tp + tp


def all_of_layout(shape: ModelShape, layout: Layout) -> list[list[Record]]:
    """The records of every rank.

    Raises:
        ValueError: the model cannot be laid out this way.
    """
    check(shape, layout)
    ranks: list[list[Record]] = [[] for _ in range(layout.world_size)]
    for pp in range(layout.pp):
        chunks = chunks_of_stage(shape, layout, pp)
        limits = [_bucket_limit(shape, layout, pp, number) for number in range(len(chunks))]
        for split in _splits(layout, has_experts=shape.experts is not None):
            own = [split.params_of(chunk, layout) for chunk in chunks]
            _add_records(ranks, shape, layout, split, own, limits, pp)
    return ranks


class _Split(NamedTuple):
    """Ranks of a stage that hold the same part of its dense parameters, or of its experts."""

    size: int
    """Ranks over which a tensor is cut: tensor parallel size, of experts or of the rest."""
    rank: int
    """Which of them these ranks are."""
    copies: list[tuple[int, int]]
    """Tensor-parallel rank and copy (see `rank_of`) of each of them, in the order in which they
    share out a buffer."""
    expert_parallel_rank: int | None
    """Which experts they hold; None: they hold dense parameters."""

    def params_of(self, chunk: list[Parameter], layout: Layout) -> list[Parameter]:
        """Those of a chunk's parameters that these ranks hold."""
        if (group := self.expert_parallel_rank) is None:
            return [p for p in chunk if not p.is_expert]
        return [
            p for p in chunk if p.is_expert and p.layer[-1] * layout.ep // p.layers[-1] == group
        ]


def _splits(layout: Layout, *, has_experts: bool) -> Iterator[_Split]:
    """Dense parameters first, as their optimizer comes first."""
    for tp in range(layout.tp):
        yield _Split(layout.tp, tp, [(tp, copy) for copy in range(layout.copies)], None)
    if not has_experts:
        return
    etp, ep = layout.expert_tensor_parallel_size, layout.ep
    # Ranks of a stage by number; those that share an expert are neighbours.
    stage = [(tp, copy) for copy in range(layout.copies) for tp in range(layout.tp)]
    for group in range(ep):
        for rank in range(etp):
            first = group * etp + rank
            yield _Split(etp, rank, stage[first :: ep * etp], group)


def _add_records(
    ranks: list[list[Record]],
    shape: ModelShape,
    layout: Layout,
    split: _Split,
    chunks: list[list[Parameter]],
    limits: list[int | None],
    pp: int,
) -> None:
    """Adds the records of one split of a stage to those of its ranks.

    Args:
        split: which ranks, and how tensors are cut over them.
        limits: elements after which a bucket closes, by chunk.
    """
    mapping = shape.use_tp_pp_dp_mapping
    numbers = [
        rank_of(tp, pp, copy, layout, use_tp_pp_dp_mapping=mapping) for tp, copy in split.copies
    ]
    starts = [1 + max((r.shard for r in ranks[n]), default=-1) for n in numbers]
    if shape.use_distributed_optimizer:
        slots = [
            slot
            for chunk, limit in zip(chunks, limits, strict=True)
            for bucket in _buckets(chunk, split, limit)
            for slot in bucket
        ]
        found = _shards_of_replicas(slots, split, starts)
    else:
        found = [_whole(chunks, split, start, is_first=k == 0) for k, start in enumerate(starts)]
    for number, records in zip(numbers, found, strict=True):
        ranks[number] += records


class _Slot(NamedTuple):
    """A parameter in the gradient buffer of its chunk."""

    param: Parameter
    numel: int
    """Of this rank's part."""
    start: int
    """First element, counted from the start of the bucket."""
    share: int
    """Elements of the bucket that each copy owns."""


def _shards_of_replicas(slots: list[_Slot], split: _Split, starts: list[int]) -> list[list[Record]]:
    """By copy, records of its shares of the buckets.

    Args:
        starts: by copy, the number of its next shard.
    """
    owned: list[list[Record]] = [[] for _ in split.copies]
    num_shards = list(starts)
    for slot in slots:
        stop = slot.start + slot.numel
        for copy in range(slot.start // slot.share, (stop - 1) // slot.share + 1):
            begin = copy * slot.share
            a, b = max(slot.start, begin), min(stop, begin + slot.share)
            part = (a - slot.start, b - slot.start)
            where = (split.size, split.rank)
            owned[copy] += _records(slot.param, *where, *part, num_shards[copy], True)
            num_shards[copy] += 1
    return owned


def _whole(
    chunks: list[list[Parameter]], split: _Split, start: int, *, is_first: bool
) -> list[Record]:
    """Records of a rank that holds the state of all its parameters; the first shard is `start`."""
    records: list[Record] = []
    for shard, param in enumerate((p for chunk in chunks for p in chunk), start=start):
        numel = _local_numel(param, split.size)
        records += _records(param, split.size, split.rank, 0, numel, shard, is_first)
    return records


def _local_numel(param: Parameter, tp_size: int) -> int:
    return param.numel if param.partition_dim is None else param.numel // tp_size


def _bucket_limit(shape: ModelShape, layout: Layout, stage: int, chunk: int) -> int | None:
    """Elements after which a bucket closes. Only the first chunk of the first stage has several."""
    if not shape.overlap_grad_reduce or stage or chunk:
        return None
    if shape.ddp_bucket_size is not None:
        return shape.ddp_bucket_size
    return max(MIN_BUCKET, BUCKET_PER_REPLICA * layout.copies)


def _buckets(params: list[Parameter], split: _Split, limit: int | None) -> Iterator[list[_Slot]]:
    """Places the parameters of a chunk as the distributed optimizer's buffer does, in its order.

    Starts count from the start of the bucket, which is a multiple of the parameters' alignment.
    """
    copies = len(split.copies)
    unit = math.lcm(copies, BUCKET_ALIGNMENT)

    def close(end: int) -> list[_Slot]:
        share = _round_up(end, unit) // copies
        return [slot._replace(share=share) for slot in slots]

    slots: list[_Slot] = []
    end = 0
    for param in reversed(params):
        start = _round_up(end, PARAMETER_ALIGNMENT)
        if param.is_shared and slots:
            yield close(start)
            slots, start = [], 0
        numel = _local_numel(param, split.size)
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
        stop: one past the last.
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
