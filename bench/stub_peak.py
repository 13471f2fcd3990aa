"""Peak memory of one rank of a layout, in torch's own allocator, without a GPU.

    python tests/gpu_stub/on_stub.py bench/stub_peak.py WORLD RANK FLAGS...

On the stub of CUDA the process poses as one rank of WORLD, with process groups that send nothing,
and takes three steps of megatron-core's schedule and optimizer. Kernels do nothing, so that a model
of any size is quick. Prints one line of JSON.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from megatron.trainer.resilience.env_checks import import_core, set_process_defaults

set_process_defaults()
import_core()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from megatron.trainer.common.device import settle_memory, use_device  # noqa: E402
from megatron.trainer.config.arguments import parse_args, resolve  # noqa: E402
from megatron.trainer.model.gpt import build_model  # noqa: E402
from megatron.trainer.optim.optimizer import build_optimizer, optimizer_step  # noqa: E402
from megatron.trainer.train.build import groups_of  # noqa: E402
from megatron.trainer.train.step import language_model_loss  # noqa: E402

VOCAB_SIZE = 50176
"""Padded; it divides by every tensor parallel size."""


def set_environment(world: int, rank: int) -> None:
    """As a launcher would have."""
    own = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in own.items()})


def use_fake_groups(world: int, rank: int) -> None:
    """Joins a world of which there is one rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    new_group = dist.new_group
    dist.new_group = lambda *args, **named: new_group(*args, **{**named, "backend": "fake"})


def balance_experts(config: Any) -> None:
    """Lets a router draw its scores, which are small and real: of the hidden states nothing is
    computed, so that all tokens would go to the same experts."""
    config.moe_router_force_load_balancing = True


def peak_of(world: int, rank: int, flags: list[str]) -> dict[str, Any]:
    """Bytes of the third step: `held` before it, `peak` allocated in it, `reserved` by then; and
    what is `needed`."""
    config = resolve(parse_args(flags), world, cuda_available=True)
    config = config.replace(padded_vocab_size=VOCAB_SIZE)
    micro, layout, seq = config.batch.micro_batch_size, config.layout, config.batch.seq_length
    held = 0
    with use_device("cuda", local_rank=0) as device:
        use_fake_groups(world, rank)
        groups = groups_of(config)
        model = build_model(config, groups, device, draw=False)
        if config.moe.num_experts:
            balance_experts(model.core_config)
        settle_memory(device)
        optimizer: Any = build_optimizer(config, model, groups)
        optimizer.get_grad_norm = lambda: 1.0
        count = config.batch.global_batch_size // micro // layout.dp
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

        def take_step() -> None:
            for chunk in model.chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            model.gather_ahead(forward_only=False)
            iterators = [iter(()) for _ in model.chunks]
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=model.chunks,
                num_microbatches=count,
                seq_length=seq,
                micro_batch_size=micro,
                forward_only=False,
                **messages,
            )
            optimizer_step(optimizer)

        for step in range(3):
            if step == 2:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
            take_step()
        seen = {
            "held": held,
            "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }
        return {**seen, "needed": needed(take_step, seen["reserved"])}


def needed(take_step: Callable[[], None], reserved: int) -> int:
    """The smallest memory, in steps of 1 %, in which a step ends. Where it runs full, the allocator
    gives back what is cached, so that this is less than what it reserves with room to spare."""
    total = torch.cuda.get_device_properties(0).total_memory
    found = reserved
    for percent in range(99, 50, -1):
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(percent / 100 * reserved / total)
        try:
            take_step()
        except torch.OutOfMemoryError:
            break
        found = percent * reserved // 100
    return found


def main() -> None:
    """Prints the result, and leaves without closing groups that are none."""
    world, rank, *flags = sys.argv[1:]
    set_environment(int(world), int(rank))
    print("PEAK " + json.dumps(peak_of(int(world), int(rank), flags)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
