"""The optimizer's part of a checkpoint, written as the rectangles that each rank holds.

megatron-core's own writer for this format gathers a replica's buckets and cuts the parameters out
again. It ignores the padding between buckets and so stores shifted state without an error
(docs/decisions/015). This writer gathers nothing. The stored tensors are the same, and
megatron-core loads them.
"""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron.trainer.distributed.sharding import Record
from megatron.trainer.model.gpt import Model
from megatron.trainer.model.shards import KINDS, local_shards, parts_of

_TYPE = "fully_reshardable"


def sharded_optimizer_state(
    optimizer: Any,
    model: Model,
    groups: Any,
    *,
    model_state: dict[str, Any],
    metadata: dict[str, Any],
) -> dict[Any, Any]:
    """The optimizer's state for `dist_checkpointing.save`.

    Raises:
        shards.UnknownState: state of a kind that is not known.
    """
    parts = parts_of(optimizer)
    if not all(isinstance(part, DistributedOptimizer) for part in parts):
        return optimizer.sharded_state_dict(model_state, is_loading=False, metadata=metadata)
    # One dictionary for all parts: the loader looks tensors up by their keys.
    states = [part.state_dict() for part in parts]
    for number, state in enumerate(states):
        state["param_state"] = _tensors(model, optimizer, groups) if number == 0 else {}
        state["param_state_sharding_type"] = _TYPE
    return states[0] if len(states) == 1 else dict(enumerate(states))


def _tensors(model: Model, optimizer: Any, groups: Any) -> dict[str, ShardedTensor]:
    shards = local_shards(model, optimizer, groups)
    return {
        f"{kind}.{number}": _tensor(record, kind, shards.tensors[record.shard][kind])
        for number, record in enumerate(shards.records)
        for kind in KINDS
    }


def _tensor(record: Record, kind: str, shard: Any) -> ShardedTensor:
    shape = tuple(b - a for a, b in zip(record.lo, record.hi))
    data = shard[record.offset : record.offset + record.numel].view(shape)
    return ShardedTensor(
        key=f"optimizer.state.{kind}.{record.key}",
        data=data,
        dtype=data.dtype,
        local_shape=shape,
        global_shape=record.shape,
        global_offset=record.lo,
        axis_fragmentations=None,
        replica_id=(0, 0 if record.is_first else 1, 0),
        prepend_axis_num=0,
    )
