"""`tools/profile_layouts.py` on ranks of which one runs out of memory in the middle of a step."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from copus_ext.extras.profile_layouts import command as profile_layouts

RANK, MICRO_BATCH_SIZE = int(sys.argv[1]), int(sys.argv[2])
"""Which rank, and in which layout."""


def time_steps(job: Any, args: Any) -> list[float]:
    """Takes the usual steps, but for one that a rank leaves."""
    if job.config.batch.micro_batch_size == MICRO_BATCH_SIZE:
        if dist.get_rank() == RANK:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        dist.all_reduce(torch.zeros(1))  # the other waits here
    return usual(job, args)


usual, profile_layouts.time_steps = profile_layouts.time_steps, time_steps
sys.exit(profile_layouts.main(sys.argv[3:]))
