"""What a rank keeps of a layout while the job changes to another: whether it fits beside the new
state, how it is taken, and how a new optimizer and model get their state from it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist

from copus_ext.reshard.plan import ReshardPlan
from copus_ext.reshard.transfer import BUCKET_BYTES, BUFFERS, gather_in_place
from megatron.trainer.model.shards import HasChunks, Shards, is_expert, parts_of

if TYPE_CHECKING:
    from megatron.trainer.config import Config
    from megatron.trainer.config.layout import Layout
    from megatron.trainer.train.job import Job

_PAGE_ELEMENTS = 1024
"""fp32 elements of a page."""
_MOSTLY = 0.9
"""A buffer is kept, not copied out of, if the shards fill this share of it."""
_COMMUNICATOR_BYTES = {"nccl": 0.69e9}
"""Of one in GPU memory by backend: 0.54 GB of 2 A100 with NVLink, 0.69 GB of 3 or 4
(github.com/NVIDIA/nccl/issues/964). Not measured here. The planner, which says what is likely,
takes 0.3 GB. A change without enough memory may end a run, so the most that was reported counts."""
_WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """The state that differs between ranks or that only the optimizer has."""

    target: Any
    """The old layout as the trainer configures it."""
    shards: Shards
    """Master weights and moments; read only."""
    step: int
    """Updates of Adam."""
    scaler: dict[str, Any] | None
    """Loss scaler; a mixture of experts, which has several optimizers, has none."""
    sums: dict[str, int] = field(default_factory=dict)
    """Checksums of the global state, once all ranks have added them up."""


class TooLarge(MemoryError):
    """The change would not fit."""


def check_memory(job: Job, plan: ReshardPlan, config: Config) -> None:
    """Compares the memory that this rank needs for a change with what is free.

    The new layout needs its weights, gradients, masters and moments, and buffers for the messages
    and for NCCL, which may keep those of the old layout. The old masters and moments stay beside
    them; the old weights and gradients are gone by then. In fp32 weights are masters. Extras say
    what they need and give up.

    Raises:
        TooLarge: with both figures.
    """
    rank = dist.get_rank()
    per_weight = _WEIGHT_BYTES[config.precision.params_dtype]
    per_gradient = 4 if config.precision.accumulate_allreduce_grads_in_fp32 else per_weight
    own = sum(record.numel for record in plan.target[rank])
    experts = sum(record.numel for record in plan.target[rank] if is_expert(record.key))
    held = own
    if config.parallel.use_distributed_optimizer:
        # The shares of the copies of a weight are about equal.
        of_expert = config.layout.expert_data_parallel_size
        held = (own - experts) * config.layout.copies + experts * of_expert
    both = 4 if config.precision.params_dtype == "fp32" else 0
    needed = held * (per_weight + per_gradient) + plan.target_bytes[rank] - own * both
    needed += buffer_bytes(config.layout)
    released = sum(
        p.numel() * (p.element_size() + per_gradient)
        for chunk in job.model.chunks
        for p in chunk.parameters()
    )
    for feature in job.features:
        more, less = feature.relayout_bytes(config, held)
        needed, released = needed + more, released + less
    released -= both * sum(record.numel for record in plan.source[rank])
    require_memory(needed, free_bytes(is_cuda=job.device.is_cuda) + released)


def require_memory(needed: float, free: float) -> None:
    """Compares bytes.

    Raises:
        TooLarge: with both figures.
    """
    if needed > free:
        what = f"{needed / 1e9:.2f} GB are needed beside the old state"
        raise TooLarge(f"{what} and {free / 1e9:.2f} GB are free")


def buffer_bytes(layout: Layout) -> float:
    """Bytes of messages between two layouts, and of the communicators of the new one."""
    backend = str(dist.get_backend())
    messages = 2 * BUFFERS * BUCKET_BYTES.get(backend, 0)
    return messages + _COMMUNICATOR_BYTES.get(backend, 0) * num_communicators(layout)


def num_communicators(layout: Layout) -> int:
    """Kinds of groups in which a rank of a layout talks to others: one for each size above 1, and
    one of all ranks for the norm of the gradient."""
    sizes = layout.tp, layout.pp, layout.cp, layout.copies, layout.ep, layout.world_size
    return sum(size > 1 for size in sizes)


def free_bytes(*, is_cuda: bool) -> float:
    """Bytes that this rank may still take. What torch's allocator holds in part counts as taken:
    tensors of a new layout need not fit into the holes."""
    if is_cuda:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]
    return psutil.virtual_memory().available / local_ranks()


def local_ranks() -> int:
    """Ranks that share the memory of this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(dist.get_world_size())))


def extract(target: Any, optimizer: Any, shards: Shards) -> SavedState:
    """Takes what must outlive the old layout and leaves the job as it is. At a step boundary; not
    collective.

    Args:
        target: the old layout as the trainer configures it.
    """
    return SavedState(
        target=target,
        shards=Shards(records=shards.records, tensors=_alone(shards.tensors)),
        step=adam_steps(optimizer) or 0,
        scaler=scaler_state(optimizer),
    )


def _alone(shards: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """The tensors without the rest of the buffers that they are views of. A buffer that they nearly
    fill stays as it is."""
    used: dict[int, int] = {}
    for tensor in (tensor for t in shards for tensor in t.values()):
        place = tensor.untyped_storage().data_ptr()
        used[place] = used.get(place, 0) + tensor.numel() * tensor.element_size()

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_full = used[storage.data_ptr()] >= _MOSTLY * storage.nbytes()
        return tensor if is_full else tensor.clone()

    return [{kind: kept(tensor) for kind, tensor in t.items()} for t in shards]


def adam_steps(optimizer: Any) -> int | None:
    """Updates of Adam; None if nothing with parameters on this rank counts them.

    Raises:
        ValueError: groups differ.
    """
    found: set[int] = set()
    for part in parts_of(optimizer):
        if part.optimizer is None:
            continue
        for group in part.optimizer.param_groups:
            # Muon does not count, and not every Adam does in a group that is empty on this rank.
            if not group["params"] or "betas" not in group:
                continue
            if _counts_by_weight(part.optimizer):
                states = (part.optimizer.state[p] for p in group["params"])
                found |= {int(state.get("step", 0)) for state in states}
            else:
                found.add(int(group.get("step", 0)))
    if len(found) > 1:
        raise ValueError(f"the optimizer's groups count different steps: {sorted(found)}")
    return found.pop() if found else None


def _counts_by_weight(optimizer: Any) -> bool:
    """Whether an Adam is torch's own, which counts in the state of each weight, and which cannot
    start without a count where the moments exist."""
    return isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))


def scaler_state(optimizer: Any) -> dict[str, Any] | None:
    """Of the loss scaler; None without one."""
    scalers = [getattr(part, "grad_scaler", None) for part in parts_of(optimizer)]
    return next((scaler.state_dict() for scaler in scalers if scaler is not None), None)


def restore_counts(optimizer: Any, *, step: int, scaler: dict[str, Any] | None) -> None:
    """Gives a new optimizer the step count and the loss scale.

    Args:
        scaler: state of the loss scaler; None without one.
    """
    for part in parts_of(optimizer):
        own = part.optimizer
        state = getattr(own, "state", {})
        for group in getattr(own, "param_groups", ()):
            if "betas" in group and _counts_by_weight(own):
                for weight in group["params"]:
                    state[weight]["step"] = torch.tensor(float(step))
            elif "betas" in group and step:
                group["step"] = step
        if scaler is not None:
            part.grad_scaler.load_state_dict(scaler)


@torch.no_grad()
def prefault(shards: Shards) -> None:
    """Writes to every page of new moments, so that page faults do not slow down the messages."""
    for tensors in shards.tensors:
        for kind, tensor in tensors.items():
            if kind != "param" and tensor.device.type == "cpu":
                tensor[::_PAGE_ELEMENTS].zero_()


@torch.no_grad()
def copy_all(source: Shards, target: Shards) -> None:
    """Copies shards into those of the same layout.

    Raises:
        ValueError: they are not of the same layout.
    """
    if source.records != target.records:
        raise ValueError("the layout is not the one that the shards are from")
    for old, new in zip(source.tensors, target.tensors, strict=True):
        for kind, tensor in old.items():
            new[kind].copy_(tensor)


@torch.no_grad()
def masters_to_weights(optimizer: Any) -> None:
    """Sets the weights whose masters are on this rank to the rounded masters. Not collective."""
    for part in parts_of(optimizer):
        copy = getattr(part, "_copy_main_params_to_model_params", None)
        if copy is not None:
            copy()


@torch.no_grad()
def share_weights(config: Any, model: HasChunks, *, timeout_s: float) -> None:
    """Gives every replica all weights. Collective, after `masters_to_weights` on all ranks.

    Args:
        timeout_s: for each message, where the backend does not keep the time itself.
    """
    if not config.parallel.use_distributed_optimizer:
        return
    for chunk in model.chunks:
        if config.runtime.device == "cuda":
            chunk.start_param_sync(force_sync=True)
            continue
        # gloo's gather goes through a copy of everything and takes three times as long.
        for buckets in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group = buckets.intra_distributed_optimizer_instance_group
            for bucket in buckets.buckets if group.size() > 1 else ():
                gather_in_place(bucket.param_data, group=group, timeout_s=timeout_s)
            # As after megatron-core's own: the next forward pass need not gather again.
            buckets.param_gather_dispatched = True
