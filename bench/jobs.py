"""A job of the trainer that a benchmark steps by hand, inside one process per rank."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import Any


def parse(flags: list[str], world_size: int = 1) -> Any:
    """The resolved configuration of some flags."""
    from megatron.training.config.arguments import parse_args, resolve

    return resolve(parse_args(flags), world_size)


@contextlib.contextmanager
def open_job(flags: list[str]) -> Iterator[Any]:
    """A job with record and data, as `pretrain` makes it, without callbacks."""
    from megatron.training.resilience.env_checks import check_environment, set_process_defaults

    set_process_defaults()
    check_environment()
    import torch

    from megatron.training.checkpoint.settle import settle
    from megatron.training.common.device import use_device
    from megatron.training.common.train_state import TrainState
    from megatron.training.data.tokenizer import build_tokenizer
    from megatron.training.distributed.process_groups import init_distributed
    from megatron.training.train.build import build_job, tear_down
    from megatron.training.train.callbacks import Callbacks
    from megatron.training.train.job import RunServices
    from megatron.training.train.pretrain import tokenizer_flags
    from megatron.training.train.run_directory import hold_run, open_run

    torch.set_num_threads(1)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    config = parse(flags, int(os.environ["WORLD_SIZE"]))
    with use_device(
        config.runtime.device,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        backend=config.parallel.distributed_backend,
    ) as device:
        init_distributed(device, timeout_minutes=10)
        tokenizer = build_tokenizer(**tokenizer_flags(config))
        config = settle(config, None, vocab_size=tokenizer.vocab_size)
        state = TrainState()
        with hold_run(config) as run, open_run(config, run, None, state) as tracker:
            outside = RunServices(tracker=tracker)
            job = build_job(config, None, state, tokenizer, device, Callbacks(()), outside)
            yield job
            tear_down(job)
        torch.distributed.destroy_process_group()


def step_of_loop(job: Any, reporter: Any) -> None:
    """One step as `loop.train` takes it, without evaluation and saving."""
    from megatron.training.train.step import train_step

    sizes = {"global_batch_size": job.global_batch_size, "micro_batch_size": job.micro_batch_size}
    job.fire("on_train_step_start", **sizes)
    info, _ = train_step(job)
    job.fire(
        "on_train_step_end",
        step=info,
        loss_dict={"lm loss": info.loss},
        grad_norm=info.grad_norm,
        skipped_iter=not info.updated,
    )
    reporter.record(info)


def batch_flags(args: argparse.Namespace) -> list[str]:
    """The batch sizes of a benchmark's command line as flags of the trainer."""
    sizes = ["--micro-batch-size", args.micro_batch_size, "--global-batch-size", args.batch_size]
    return [str(x) for x in sizes]
