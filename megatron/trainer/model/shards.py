"""The fp32 state of this rank: master weights and what the optimizer keeps of them, as flat shards,
with the rectangles of the global tensors that they hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron.trainer.distributed.sharding import Record, records_of_block

KINDS = ("param", "exp_avg", "exp_avg_sq")
"""Names of the tensors of a shard under Adam: fp32 master weight, first and second moment."""
ALL_KINDS = (*KINDS, "momentum_buffer")
"""Names of all tensors that a shard may have. Muon keeps a momentum in place of both moments."""


@dataclass(frozen=True, kw_only=True)
class Shards:
    records: list[Record]
    """Rectangles of global tensors; each names its shard."""
    tensors: list[dict[str, torch.Tensor]]
    """By shard: those of `ALL_KINDS` that it has, flat, fp32; the tensors of the live optimizer."""


_Held = tuple[torch.Tensor, int, int, dict[str, torch.Tensor], bool]


class HasChunks(Protocol):
    @property
    def chunks(self) -> list[Any]: ...


class UnknownState(ValueError):
    """The model holds state of a kind that is not known here."""


def is_expert(key: str) -> bool:
    """Whether a global tensor belongs to routed experts."""
    return ".mlp.experts." in key


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers that a chain is made of, or of chains of chains; else the one."""
    chained = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if chained is None else [x for part in chained for x in parts_of(part)]


def local_shards(
    model: HasChunks, optimizer: Any, groups: Any, *, with_the_rest: bool = False
) -> Shards:
    """This rank's shards of the live model; nothing is copied. Not collective.

    Args:
        with_the_rest: also buffers that are saved and frozen parameters, as shards with a `param`
            alone. Without it a buffer is an error, but for the biases of experts, which every rank
            of our trainer knows (`TrainState.expert_biases`).

    Raises:
        UnknownState: naming the tensor.
    """
    entries = _entries(model, {"dp_cp_group": groups.dp_cp}, with_the_rest=with_the_rest)
    records: list[Record] = []
    tensors: list[dict[str, torch.Tensor]] = []
    of_optimizer = list(_held(model, optimizer))
    rest = _rest(entries, of_optimizer) if with_the_rest else []
    for param, start, stop, held, is_sharded in (*of_optimizer, *rest):
        entry = entries.get(id(param))
        if entry is None:
            raise UnknownState(f"a parameter of shape {tuple(param.shape)} has no global name")
        for part, base in _pieces(entry):
            size = part.data.numel()
            a, b = max(start, base), min(stop, base + size)
            if a >= b:
                continue
            stage_copy, tp_copy, *dp_copy = part.replica_id
            is_first = not (stage_copy or tp_copy or (not is_sharded and any(dp_copy)))
            records += records_of_block(
                key=part.key,
                shape=tuple(part.global_shape),
                corner=tuple(part.global_offset),
                block=tuple(part.local_shape),
                start=a - base,
                stop=b - base,
                shard=len(tensors),
                offset=a - start,
                is_first=is_first,
            )
        tensors.append(held)
    return Shards(records=records, tensors=tensors)


def weights_of(model: HasChunks, groups: Any) -> Iterator[tuple[Record, torch.Tensor]]:
    """This rank's model parameters, each as the rectangle of a global tensor. Not collective."""
    entries = _entries(model, {"dp_cp_group": groups.dp_cp}, with_the_rest=True)
    params = {id(p) for chunk in model.chunks for p in chunk.parameters()}
    for entry in (entry for number, entry in entries.items() if number in params):
        for part, _ in _pieces(entry):
            size = part.data.numel()
            (record,) = records_of_block(
                key=part.key,
                shape=tuple(part.global_shape),
                corner=tuple(part.global_offset),
                block=tuple(part.local_shape),
                start=0,
                stop=size,
                shard=0,
                offset=0,
                is_first=not any(part.replica_id),
            )
            yield record, part.data.detach()


def _entries(model: HasChunks, metadata: dict[str, Any], *, with_the_rest: bool) -> dict[int, Any]:
    """The global name and place of every parameter, and of what else is saved, by its identity."""
    params = {id(p) for chunk in model.chunks for p in chunk.parameters()}
    entries: dict[int, Any] = {}
    for chunk in model.chunks:
        for value in nested_values(chunk.module.sharded_state_dict(metadata=metadata)):  # pyright: ignore[reportCallIssue]
            if isinstance(value, ShardedObject) and value.key.rpartition(".")[2] == "_extra_state":
                continue  # Transformer Engine's; holds nothing without fp8
            is_bias = getattr(value, "key", "").endswith(".router.expert_bias")
            if is_bias and not with_the_rest:
                continue
            if not isinstance(value, (ShardedTensor, ShardedTensorFactory)):
                raise UnknownState(f"state of type {type(value).__name__} is not known")
            if id(value.data) not in params and not with_the_rest:
                raise UnknownState(f"{value.key} is no parameter")
            entries[id(value.data)] = value
    return entries


def _pieces(entry: Any) -> list[tuple[Any, int]]:
    """The global tensors inside a parameter, with the first element of each in it. A gated MLP
    holds two: its gate and its up rows."""
    if isinstance(entry, ShardedTensorFactory):
        parts: Any = entry.build()
        base = entry.data.storage_offset()
        return [(p, p.data.storage_offset() - base) for p in parts]
    return [(entry, 0)]


def _held(model: HasChunks, optimizer: Any) -> Iterator[_Held]:
    """Parameter, first and one past the last of its elements whose state is here, that state, and
    whether replicas share the state out among them."""
    holders: dict[int, Any] = {}
    for part in parts_of(optimizer):
        if isinstance(part, DistributedOptimizer):
            for buckets in (b for ranges in part.gbuf_ranges for b in ranges.values()):
                for param, ranges in (x for bucket in buckets for x in bucket["param_map"].items()):
                    own = ranges["param"]
                    state = part._get_main_param_and_optimizer_states(param)
                    yield param, own.start, own.end, _flat(state), True
        elif part.optimizer is not None:
            groups = part.optimizer.param_groups
            holders |= {id(p): part.optimizer for group in groups for p in group["params"]}
    # Dense ones first, whichever optimizers hold them: the order of the plan of a change.
    params = [p for chunk in model.chunks for p in chunk.parameters()]
    for param in sorted(params, key=lambda p: not getattr(p, "allreduce", True)):
        main = getattr(param, "main_param", param)
        if (holder := holders.get(id(main))) is not None:
            yield param, 0, param.numel(), _flat({"param": main, **holder.state[main]}), False


def _rest(entries: dict[int, Any], held: list[_Held]) -> Iterator[_Held]:
    """What no optimizer changes. A parameter that other replicas hold the state of is no such.

    Raises:
        UnknownState: it is not fp32, in which state moves.
    """
    known = {id(param) for param, *_ in held}
    for number, entry in entries.items():
        tensor = entry.data
        if number in known or tensor.requires_grad:
            continue
        if tensor.dtype != torch.float32:
            raise UnknownState(f"{entry.key} is {tensor.dtype}, and no optimizer has it in fp32")
        yield tensor, 0, tensor.numel(), {"param": tensor.detach().view(-1)}, False


def _flat(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {kind: state[kind].detach().view(-1) for kind in ALL_KINDS if kind in state}
