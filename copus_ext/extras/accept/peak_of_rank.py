"""Peak memory of one rank of a layout in torch's own allocator, without the other ranks.

    python -m copus_ext.extras.accept.peak_of_rank WORLD RANK FLAGS...

The process poses as one rank of WORLD, with process groups that send nothing, and takes three steps
of megatron-core's schedule and optimizer on its GPU. As no text is read, FLAGS need
--padded-vocab-size. Prints one line of JSON behind the word PEAK.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any


def main() -> None:
    """Prints the result, and leaves without closing groups that are none."""
    world, rank, *flags = sys.argv[1:]
    with one_rank(int(world), int(rank), flags) as take_step:
        print("PEAK " + json.dumps(peak_of(take_step)), flush=True)
    os._exit(0)


def peak_of(take_step: Callable[[], None]) -> dict[str, int]:
    """Bytes of the third step: `held` before it, `peak` allocated in it, `reserved` by then. The
    first one makes the state of the optimizer."""
    import torch

    for _ in range(2):
        take_step()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    take_step()
    return {
        "held": held,
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


@contextlib.contextmanager
def one_rank(world: int, rank: int, flags: list[str]) -> Iterator[Callable[[], None]]:
    """Builds model and optimizer of a rank.

    Args:
        world: number of ranks, this one and those that are not there.
        rank: of them.
        flags: of `pretrain_gpt.py`, with `--padded-vocab-size`.

    Yields:
        What takes a step of it.
    """
    own = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in own.items()})
    from megatron.trainer.resilience.env_checks import import_core, set_process_defaults

    set_process_defaults()
    import_core()
    from megatron.trainer.common.device import settle_memory, use_device
    from megatron.trainer.common.optional import abilities
    from megatron.trainer.config.arguments import parse_args, resolve
    from megatron.trainer.model.gpt import build_model
    from megatron.trainer.optim.optimizer import build_optimizer
    from megatron.trainer.train.build import groups_of

    config = resolve(parse_args(flags), world, **abilities())
    with use_device("cuda", local_rank=0) as device:
        _use_fake_groups(world, rank)
        groups = groups_of(config)
        model = build_model(config, groups, device, draw=False)
        if config.moe.num_experts:
            # A router draws its scores, which are small and real. Of the hidden states nothing may
            # be computed, and then all tokens would go to the same experts.
            core_config: Any = model.core_config
            core_config.moe_router_force_load_balancing = True
        settle_memory(device)
        optimizer: Any = build_optimizer(config, model, groups)
        optimizer.get_grad_norm = lambda: 1.0
        yield functools.partial(_take_step, config, model, optimizer, groups)


def _use_fake_groups(world: int, rank: int) -> None:
    """Joins a world of which there is one rank."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    new_group = dist.new_group
    dist.new_group = lambda *args, **named: new_group(*args, **{**named, "backend": "fake"})


def _take_step(config: Any, model: Any, optimizer: Any, groups: Any) -> None:
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from megatron.trainer.optim.optimizer import optimizer_step
    from megatron.trainer.train.step import language_model_loss

    micro, layout, seq = config.batch.micro_batch_size, config.layout, config.batch.seq_length
    shape = micro, seq // layout.cp

    def forward_step(_: Any, chunk: Any) -> Any:
        tokens = [torch.zeros(shape, dtype=torch.long, device="cuda") for _ in range(3)]
        mask = torch.ones(shape, device="cuda")
        output = chunk(*tokens[:2], None, labels=tokens[2], loss_mask=mask)
        return output, functools.partial(language_model_loss, mask)

    messages: dict[str, Any] = {}
    if layout.pp > 1:
        link = P2PCommunicator(groups.pp, model.core_config)
        messages = {"p2p_communicator": link, "pg_collection": groups}
    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    model.gather_ahead(forward_only=False)
    iterators = [iter(()) for _ in model.chunks]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=model.chunks,
        num_microbatches=config.batch.global_batch_size // micro // layout.dp,
        seq_length=seq,
        micro_batch_size=micro,
        forward_only=False,
        **messages,
    )
    optimizer_step(optimizer)


if __name__ == "__main__":
    main()
