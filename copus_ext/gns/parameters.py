"""Which gradients a rank measures, in which group, and which of them it counts for all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

GROUPS = ("embedding", "attention", "mlp", "vectors", "head")
"""Parameter groups, kept apart: word and position embedding; weight matrices of attention and MLP,
those of further tokens among them; norms and biases, and with them the compressing layers of
multi-latent attention; the output layer if it is not the word embedding."""

CONTROL_SET = ("attention", "mlp")
"""What decisions are made on: the same parameters, whole before the reduction, under every
layout."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One parameter of this rank whose gradient is measured."""

    param: torch.nn.Parameter
    """The parameter; its gradient accumulates in `main_grad`."""
    group: int
    """Index into `GROUPS`."""
    reduced: torch.Tensor | None
    """The part of `main_grad` that this rank counts after the reduction; None if none."""


def unavailable_groups(
    *, tp: int, pp: int, sequence_parallel: bool, qk_layernorm: bool, shared_embeddings: bool
) -> frozenset[str]:
    """Groups whose gradients are sums over ranks only after the data-parallel reduction: the square
    of a part is no part of the square.

    Under sequence parallelism every rank sees part of the tokens of norms and of row-parallel
    biases, and norms of queries and keys see part of the heads. An embedding that is also the
    output layer, or that further tokens go through, has a part on the first and on the last stage.
    """
    partial = set()
    if tp > 1 and (sequence_parallel or qk_layernorm):
        partial.add("vectors")
    if shared_embeddings and pp > 1:
        partial.add("embedding")
    return frozenset(partial)


def group_of(name: str, param: torch.Tensor) -> str:
    """The group of a parameter of megatron-core's GPTModel, by its name."""
    if name.startswith("embedding."):
        return "embedding"
    if name.startswith("output_layer.") and param.ndim > 1:
        return "head"
    if param.ndim == 1:
        return "vectors"
    if ".linear_q_down_proj." in name or ".linear_kv_down_proj." in name:
        # Every tensor-parallel rank has a copy, and under sequence parallelism a part of the
        # gradient, as with a norm.
        return "vectors"
    if ".self_attention." in name:
        return "attention"
    if ".mlp." in name or ".eh_proj." in name:
        return "mlp"
    raise ValueError(f"the noise scale does not know where the parameter {name} belongs")


def measured_parameters(chunks: list[Any], groups: Any) -> list[Measured]:
    """The parameters of this rank that count once over tensor and pipeline parallel ranks.

    Args:
        chunks: megatron-core's data-parallel wrappers.
        groups: process groups of the layout.
    """
    found = []
    for chunk in chunks:
        reduced = dict(_reduced_views(chunk, groups))
        for name, param in _named_parameters(chunk):
            if not (param_is_not_tensor_parallel_duplicate(param) and param_is_not_shared(param)):
                continue
            index = GROUPS.index(group_of(name, param))
            found.append(Measured(param=param, group=index, reduced=reduced.get(param)))
    return found


def _named_parameters(chunk: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk.named_parameters()


def _reduced_views(chunk: Any, groups: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """The part of each gradient that this data-parallel rank counts once it is reduced.

    With the distributed optimizer that is its shard of the bucket, the rest being stale; else all
    ranks hold everything and each takes an equal part.
    """
    rank, size = groups.dp_cp.rank(), groups.dp_cp.size()
    sharded = chunk.ddp_config.use_distributed_optimizer
    for buffer in chunk.buffers:
        for param, (start, end, bucket_id) in buffer.param_index_map.items():
            flat = param.main_grad.view(-1)
            if sharded:
                bucket = buffer.buckets[bucket_id]
                length = bucket.grad_data.numel() // size
                low = max(start, bucket.offset + rank * length) - start
                high = min(end, bucket.offset + (rank + 1) * length) - start
            else:
                low, high = (flat.numel() * r // size for r in (rank, rank + 1))
            if low < high:
                yield param, flat[low:high]
