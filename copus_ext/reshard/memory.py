"""Whether the old state and the new layout fit into memory side by side; asked before anything is
taken down."""

from __future__ import annotations

import os

import psutil
import torch
import torch.distributed as dist

from copus_ext.reshard.plan import BYTES_PER_ELEMENT
from copus_ext.reshard.route import Route
from copus_ext.reshard.transfer import BUCKET_BYTES, BUFFERS
from megatron.training.config import Config
from megatron.training.train.job import Job

_WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class TooLarge(MemoryError):
    """The change would not fit."""


def check(job: Job, route: Route, config: Config) -> None:
    """Compares what this rank needs for a change with what is free.

    While the old master weights and moments are kept, the new layout needs its weights, its
    gradients, its own masters and moments, and the buffers of the messages; the old weights and
    gradients are gone by then. In fp32 weights are masters.

    Args:
        job: under the old layout.
        route: to the new one.
        config: of the new one.

    Raises:
        TooLarge: with both numbers.
    """
    rank = dist.get_rank()
    per_weight = _WEIGHT_BYTES[config.precision.params_dtype]
    per_gradient = 4 if config.precision.accumulate_allreduce_grads_in_fp32 else per_weight
    own = sum(record.numel for record in route.target[rank])
    # The shares of a model's replicas are about equal.
    held = own * (config.layout.dp if config.parallel.use_distributed_optimizer else 1)
    both = 4 if config.precision.params_dtype == "fp32" else 0
    needed = held * (per_weight + per_gradient) + own * (BYTES_PER_ELEMENT - both)
    needed += 2 * BUFFERS * BUCKET_BYTES.get(str(dist.get_backend()), 0)
    released = sum(
        p.numel() * (p.element_size() + per_gradient)
        for chunk in job.model.chunks
        for p in chunk.parameters()
    )
    released -= both * sum(record.numel for record in route.source[rank])
    free = free_bytes(job)
    if needed > free + released:
        raise TooLarge(
            f"{needed / 1e9:.2f} GB are needed beside the old state and "
            f"{(free + released) / 1e9:.2f} GB are free"
        )


def free_bytes(job: Job) -> float:
    """Bytes that this rank may still take."""
    if job.device.is_cuda:
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", str(dist.get_world_size())))
    return psutil.virtual_memory().available / ranks
