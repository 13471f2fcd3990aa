"""A copy of a job's whole state in memory, to go back to under the same layout, and the average of
its weights over some steps.

Weights are not copied: they are the rounded masters, and the way back rounds and gathers them as
after any step. Random streams are set anew for each step from the position in the data, and are
copied all the same.

Copies lie on the device if they fit beside what a step needs there, else in page-locked memory of
the host. That was not run on a GPU; on a CPU both are the same.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import Any

import psutil
import torch
from megatron.core import tensor_parallel

from copus_ext.reshard.saved_state import (
    TooLarge,
    copy_all,
    free_bytes,
    local_ranks,
    masters_to_weights,
)
from megatron.training.common.train_state import TrainState
from megatron.training.model.kfac import KfacState
from megatron.training.model.shards import KINDS, Shards, own_shards, parts_of
from megatron.training.train.job import Job


@dataclass(frozen=True, kw_only=True)
class RandomState:
    """The random streams of this process."""

    default: torch.Tensor
    """Of the CPU."""
    device: torch.Tensor | None
    """Of the GPU."""
    streams: dict[str, Any]
    """megatron-core's, by name."""

    @classmethod
    def now(cls, *, is_cuda: bool) -> RandomState:
        """As they are."""
        states = _tracker().get_states()
        return cls(
            default=torch.get_rng_state(),
            device=torch.cuda.get_rng_state() if is_cuda else None,
            streams={name: state.clone() for name, state in states.items()},
        )

    def put_back(self) -> None:
        """Sets them."""
        torch.set_rng_state(self.default)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device)
        _tracker().set_states({name: state.clone() for name, state in self.streams.items()})


def _tracker() -> Any:
    return tensor_parallel.get_cuda_rng_tracker()


@dataclass(frozen=True, kw_only=True)
class KeptState:
    """The state of one rank at a step boundary."""

    shards: Shards
    """Copies of the master weights and moments."""
    groups: list[dict[str, Any]]
    """Of each parameter group all but its parameters: rates and Adam's step count."""
    scalers: list[dict[str, Any] | None]
    """Loss scaler of each chained optimizer."""
    lr_samples: int
    """Where the learning-rate schedule is."""
    counters: dict[str, Any]
    """Fields of the `TrainState` but what callbacks keep there."""
    random: RandomState
    """Random streams."""
    kfac: KfacState | None
    """Of `--kfac`, if it is on."""


def keep_state(job: Job, live: Shards, *, on_host: bool) -> KeptState:
    """Copies the state of a job at a step boundary. Not collective.

    Args:
        job: to copy from.
        live: all shards of this rank.
        on_host: put the copies into memory of the host.
    """
    parts = parts_of(job.optimizer)
    scalers = [getattr(part, "grad_scaler", None) for part in parts]
    return KeptState(
        shards=Shards(
            records=list(live.records),
            tensors=[
                {kind: _copied(t[kind], on_host=on_host) for kind in KINDS} for t in live.tensors
            ],
        ),
        groups=[_without_params(group) for group in job.optimizer.param_groups],
        # A scaler replaces its tensors and changes none in place.
        scalers=[None if scaler is None else dict(scaler.state_dict()) for scaler in scalers],
        lr_samples=job.scheduler.num_steps,
        counters={name: getattr(job.state, name) for name in _COUNTERS},
        random=RandomState.now(is_cuda=job.device.is_cuda),
        kfac=None if job.model.kfac is None else job.model.kfac.keep(),
    )


_COUNTERS = tuple(f.name for f in fields(TrainState) if f.name != "callbacks")


def _without_params(group: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(x) for name, x in group.items() if name != "params"}


@torch.no_grad()
def _copied(tensor: torch.Tensor, *, on_host: bool) -> torch.Tensor:
    if not on_host:
        return tensor.clone()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)


def put_back(job: Job, live: Shards, kept: KeptState) -> None:
    """Gives a job the state that was kept, but for the weights whose masters other ranks hold. Not
    collective; `saved_state.share_weights` on all ranks completes it.

    Args:
        job: the layout must be the one that the state was kept under.
        live: all shards of this rank.
        kept: stays as it is.

    Raises:
        ValueError: it is not of the same layout.
    """
    copy_all(kept.shards, live)
    for part, scaler in zip(parts_of(job.optimizer), kept.scalers, strict=True):
        if scaler is not None:
            part.grad_scaler.load_state_dict(dict(scaler))
    for name, value in kept.counters.items():
        setattr(job.state, name, value)
    job.scheduler.num_steps = kept.lr_samples
    for group, values in zip(job.optimizer.param_groups, kept.groups, strict=True):
        for name in set(group) - {"params", *values}:
            del group[name]
        group.update(copy.deepcopy(values))
    kept.random.put_back()
    if job.model.kfac is not None and kept.kfac is not None:
        job.model.kfac.put_back(kept.kfac)
    masters_to_weights(job.optimizer)
    if job.balance is not None:
        job.balance.give_biases(job.model.chunks, job.state)


@torch.no_grad()
def settle(job: Job) -> None:
    """Ends what an error has left under way in a step. Not collective: the messages that it waits
    for have been started on all ranks."""
    for chunk in job.model.chunks:
        chunk.train()
        for buckets in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            for name in ("grad_reduce_handle", "param_gather_handle"):
                if (handle := getattr(buckets, name)) is not None:
                    handle.wait()
                    setattr(buckets, name, None)
            buckets.reset()


class WeightAverage:
    """The mean of a rank's master weights over some steps.

    Args:
        live: all shards of this rank.
        on_host: keep it in memory of the host.
    """

    def __init__(self, live: Shards, *, on_host: bool) -> None:
        self._mean = [_copied(t["param"], on_host=on_host) for t in live.tensors]
        self.count = 0
        """Weights in the mean."""

    @torch.no_grad()
    def add(self, live: Shards) -> None:
        """Adds the present weights. Not collective."""
        self.count += 1
        for mean, tensors in zip(self._mean, live.tensors, strict=True):
            mean.lerp_(tensors["param"].to(mean.device), 1.0 / self.count)

    @torch.no_grad()
    def put_into(self, job: Job, live: Shards) -> None:
        """Makes the mean the weights of a job; all else stays. Not collective, see `put_back`."""
        for mean, tensors in zip(self._mean, live.tensors, strict=True):
            tensors["param"].copy_(mean)
        masters_to_weights(job.optimizer)


def live_shards(job: Job) -> Shards:
    """All that a copy must hold of this rank.

    Raises:
        ValueError: the model has state of another kind.
    """
    if job.config.precision.fp8:
        raise ValueError("the scales of 8-bit products cannot be copied")
    return own_shards(job.model, job.optimizer, job.groups)


def goes_to_host(
    job: Job, live: Shards, *, states: int, micro_batch_size: int, step_bytes: float
) -> bool:
    """Decides where copies lie, from what is free on this rank. Not collective.

    Args:
        job: at a step boundary.
        live: all shards of this rank.
        states: copies of the whole state, besides one average of the weights.
        micro_batch_size: the largest of the steps to come; a step needs memory in proportion.
        step_bytes: memory of the GPU that a step needs now.

    Raises:
        TooLarge: with the bytes needed and those that are free.
    """
    copies = [t[kind].nbytes for t in live.tensors for kind in (*KINDS * states, "param")]
    needed, free = sum(copies), free_bytes(job)
    if not job.device.is_cuda:
        _check_fits(needed, free)
        return False
    if needed + step_bytes * max(micro_batch_size / job.micro_batch_size, 1.0) <= free:
        return False
    needed = sum(_page_locked_bytes(size) for size in copies)
    _check_fits(needed, psutil.virtual_memory().available / local_ranks())
    return True


def _page_locked_bytes(size: int) -> int:
    """What torch takes for a page-locked tensor: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def empty_host_cache() -> None:
    """Gives page-locked memory that no tensor uses back to the system; torch would keep it. Does
    nothing in a torch for CPUs."""
    if (empty := getattr(torch._C, "_host_emptyCache", None)) is not None:
        empty()


def _check_fits(needed: float, free: float) -> None:
    if needed > free:
        raise TooLarge(
            f"{needed / 1e9:.2f} GB are needed for copies of the state and {free / 1e9:.2f} GB "
            "are free"
        )
