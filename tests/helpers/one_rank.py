"""A world of this process alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def world_of_one() -> Iterator[None]:
    """A process group; those that are built in it go with it."""
    import torch.distributed as dist

    from megatron.trainer.distributed.process_groups import destroy_groups

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        destroy_groups()
        dist.destroy_process_group()


@contextlib.contextmanager
def cpu_of_one() -> Iterator[Any]:
    """The device of such a world, as the trainer opens it."""
    from megatron.trainer.common.device import use_device

    with use_device("cpu", backend="gloo") as device, world_of_one():
        yield device
