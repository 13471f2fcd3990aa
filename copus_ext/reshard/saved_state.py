"""What a rank keeps of a layout while the job changes to another, and how a new optimizer and model
get their state from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from copus_ext.reshard.transfer import gather_in_place
from megatron.training.config import Config
from megatron.training.model.gpt import Model
from megatron.training.model.shards import KINDS, Shards, parts_of
from megatron.training.train.job import Job

_PAGE_ELEMENTS = 1024
"""fp32 elements of a page."""
_MOSTLY = 0.9
"""Share of a buffer from which it is kept rather than copied out of."""


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """All that is not the same on every rank or that the optimizer alone knows."""

    config: Config
    """Of the old layout."""
    shards: Shards
    """Master weights and moments; read only."""
    step: int
    """Updates that Adam has made."""
    scalers: list[dict[str, Any] | None]
    """Loss scaler of each chained optimizer."""
    sums: dict[str, int] = field(default_factory=dict)
    """Checksums of the global state, once they are known."""


def extract(job: Job, shards: Shards) -> SavedState:
    """Takes what must outlive the old layout; the job, at a step boundary, is left as it is. Not
    collective.

    Args:
        job: under the old layout.
        shards: all of this rank's.
    """
    return SavedState(
        config=job.config,
        shards=Shards(records=shards.records, tensors=_alone(shards.tensors)),
        step=adam_steps(job.optimizer) or 0,
        scalers=[_scaler_state(part) for part in parts_of(job.optimizer)],
    )


def _alone(shards: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """The tensors without what else is in the buffers that they are views of; a buffer that they
    all but fill stays as it is."""
    used: dict[int, int] = {}
    for tensor in (t[kind] for t in shards for kind in KINDS):
        place = tensor.untyped_storage().data_ptr()
        used[place] = used.get(place, 0) + tensor.numel() * tensor.element_size()

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_full = used[storage.data_ptr()] >= _MOSTLY * storage.nbytes()
        return tensor if is_full else tensor.clone()

    return [{kind: kept(t[kind]) for kind in KINDS} for t in shards]


def adam_steps(optimizer: Any) -> int | None:
    """Updates that Adam has made; None where no group with parameters here counts them.

    Raises:
        ValueError: groups differ.
    """
    found = {
        int(group.get("step", 0))
        for part in parts_of(optimizer)
        if part.optimizer is not None
        for group in part.optimizer.param_groups
        # Not every Adam counts in a group that is empty on this rank.
        if group["params"]
    }
    if len(found) > 1:
        raise ValueError(f"the optimizer's groups count different steps: {sorted(found)}")
    return found.pop() if found else None


def _scaler_state(part: Any) -> dict[str, Any] | None:
    scaler = getattr(part, "grad_scaler", None)
    return None if scaler is None else scaler.state_dict()


def restore_counts(optimizer: Any, held: SavedState) -> None:
    """Gives a new optimizer the step count and the loss scale."""
    for part, scaler in zip(parts_of(optimizer), held.scalers, strict=True):
        if part.optimizer is not None and held.step:
            for group in part.optimizer.param_groups:
                group["step"] = held.step
        if scaler is not None:
            part.grad_scaler.load_state_dict(scaler)


@torch.no_grad()
def touch(shards: Shards) -> None:
    """Makes the system hand out the pages of new moments now: the first write to each would
    otherwise look like a slow network."""
    for tensors in shards.tensors:
        for kind in ("exp_avg", "exp_avg_sq"):
            if tensors[kind].device.type == "cpu":
                tensors[kind][::_PAGE_ELEMENTS].zero_()


@torch.no_grad()
def copy_all(source: Shards, target: Shards) -> None:
    """Copies shards into those of the same layout.

    Raises:
        ValueError: they are not of the same layout.
    """
    if source.records != target.records:
        raise ValueError("the layout is not the one that the shards are from")
    for old, new in zip(source.tensors, target.tensors, strict=True):
        for kind in KINDS:
            new[kind].copy_(old[kind])


@torch.no_grad()
def masters_to_weights(optimizer: Any) -> None:
    """Sets the weights whose masters are on this rank to the rounded masters. Not collective."""
    for part in parts_of(optimizer):
        copy = getattr(part, "_copy_main_params_to_model_params", None)
        if copy is not None:
            copy()


@torch.no_grad()
def share_weights(config: Config, model: Model, groups: Any, *, timeout_s: float) -> None:
    """Gives every replica all weights. Collective, after `masters_to_weights` on all ranks.

    Args:
        config: of the layout.
        model: this rank's chunks.
        groups: of the layout.
        timeout_s: for each message, where the backend does not keep the time itself.
    """
    if not config.parallel.use_distributed_optimizer or groups.dp_cp.size() == 1:
        return
    for chunk in model.chunks:
        if config.runtime.device == "cuda":
            chunk.start_param_sync(force_sync=True)
            continue
        # gloo's gather goes through a copy of everything and takes three times as long.
        for buckets in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            for bucket in buckets.buckets:
                gather_in_place(
                    bucket.param_data,
                    group=buckets.intra_distributed_optimizer_instance_group,
                    timeout_s=timeout_s,
                )
            # As after megatron-core's own: the next forward pass need not gather again.
            buckets.param_gather_dispatched = True
