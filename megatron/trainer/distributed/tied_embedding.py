"""The gradient of an embedding that the first and the last stage both hold, exchanged by shards.

With the distributed optimizer a rank uses one shard of it. megatron-core 0.16.1 exchanges all of it
after the reduction has made that shard, and no other, valid (the idea is that of arXiv 2301.09830).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist


class _Alone:
    """Stands for a group of this rank alone, over which megatron-core exchanges nothing."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def exchanging_own_shard(
    finalize: Callable[..., None], chunks: Sequence[Any], groups: Any
) -> Callable[..., None]:
    """megatron-core's last act on the gradients, with the tied embedding exchanged by shards.

    Args:
        finalize: `finalize_model_grads`, or what wraps it.
        chunks: data-parallel wrappers of this rank, with the distributed optimizer.

    Returns:
        The same function where no embedding is tied over stages; else one that leaves other bytes
        than the own shard of its gradient undefined.
    """
    shards = list(_local_shards(chunks, groups))
    if groups.pp.size() == 1 or not shards:
        return finalize

    def finalized(*args: Any, pg_collection: Any = None, **more: Any) -> None:
        others = copy.copy(pg_collection or groups)
        others.embd = _Alone()
        finalize(*args, pg_collection=others, **more)
        for shard in shards:
            dist.all_reduce(shard, group=groups.embd)

    return finalized


def _local_shards(chunks: Sequence[Any], groups: Any) -> Iterator[torch.Tensor]:
    """This rank's shard of the gradient of each tied embedding that it holds, which has a bucket of
    its own."""
    for chunk in chunks:
        model = chunk
        while hasattr(model, "module"):
            model = model.module
        is_end = model.pre_process or model.post_process
        is_tied = model.share_embeddings_and_output_weights or model.config.mtp_num_layers
        if not (is_end and is_tied):
            continue
        weight = model.shared_embedding_or_output_weight()
        for buffer in chunk.buffers:
            if weight in buffer.param_index_map:
                gradient = buffer.buckets[buffer.param_index_map[weight][2]].grad_data
                size, rank = groups.dp_cp.size(), groups.dp_cp.rank()
                yield gradient.chunk(size)[rank]
