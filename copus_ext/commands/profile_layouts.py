"""Times layouts on these ranks, for `copus plan` and the controller.

torchrun --nproc-per-node 2 tools/profile_layouts.py --store profile.jsonl -- FLAGS OF YOUR RUN

It times two counts of micro-batches for every layout and micro-batch. The two give every global
batch. It skips what is already in the store, so that an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import logging
import os
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

from megatron.training.common.program import program_name, tell

_LONGEST_INTERVAL = 20
"""Steps between covariances of K-FAC up to which whole intervals are timed."""


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Own flags before `--`, the trainer's behind it."""
    at = argv.index("--") if "--" in argv else len(argv)
    p = argparse.ArgumentParser(
        prog=program_name("profile_layouts.py"),
        usage="%(prog)s --store FILE [options] -- FLAGS OF YOUR RUN",
        description=(__doc__ or "").splitlines()[0],
    )
    p.add_argument("--store", type=Path, required=True, help="JSON-lines file, appended to")
    p.add_argument("--max-micro-batch", type=int, default=8, help="largest micro-batch to time")
    p.add_argument("--recompute", default="none", help="some of none, selective, full, block")
    p.add_argument("--steps", type=int, default=5, help="timed steps of each count")
    p.add_argument("--warm-up", type=int, default=2, help="steps before them")
    p.add_argument("--global-batch-size", type=int, default=64, help="largest batch of interest")
    p.add_argument("--batches", default="", help="time these batches instead, such as 8,16")
    p.add_argument("--fix", default="", help="sizes to keep, such as tp=2,pp=1")
    words = "exchanges of keys and values to time with cp, such as all_gather,a2a"
    p.add_argument("--cp-comm-type", metavar="TYPES", help=words)
    p.add_argument("--no-overlap", action="store_true", help="without overlap of communication")
    words = "with whole activations on every tensor parallel rank"
    p.add_argument("--no-sequence-parallel", action="store_true", help=words)
    words = "with the optimizer's state on every replica"
    p.add_argument("--no-distributed-optimizer", action="store_true", help=words)
    p.add_argument("--largest", default="", help="largest sizes, such as vpp=1")
    args, flags = p.parse_args(argv[:at]), argv[at + 1 :]
    args.megatron_args = shlex.join(flags)
    args.use_tp_pp_dp_mapping = "--use-tp-pp-dp-mapping" in flags
    return args, flags


def lines(model: Any, args: argparse.Namespace, world: int) -> list[Any]:
    """One configuration per layout and micro-batch, largest throughput expected first."""
    from copus_ext.planner.configuration import Configuration
    from copus_ext.planner.request import cp_comm_types_of_flags, megatron_flag, sizes
    from copus_ext.planner.space import LEGAL, Limits, enumerate_points

    fixed, largest = sizes("--fix", args.fix), sizes("--largest", args.largest)
    if "cp" not in {**fixed, **largest}:
        # Samples are shared only where that is asked for: it would double what is timed.
        fixed["cp"] = 1
    limits = Limits(
        fixed=fixed,
        largest=largest,
        recompute=tuple(args.recompute.split(",")),
        max_micro_batch=args.max_micro_batch,
        cross_node_tp=True,
        cross_node_ep=True,
        narrow_experts=True,
        overlap=not args.no_overlap and model.clip_group_size is None,
        use_tp_pp_dp_mapping=args.use_tp_pp_dp_mapping,
        sequence_parallel=not args.no_sequence_parallel,
        use_distributed_optimizer=(not args.no_distributed_optimizer,),
        cp_comm_types=cp_comm_types_of_flags(args),
        logits_chunks=(megatron_flag(args, "logits_chunks") or 1,),
        pipeline_message_bits=megatron_flag(args, "pipeline_message_bits"),
    )
    points = enumerate_points(model, _cluster(world), args.global_batch_size, limits)
    found: dict[Any, Configuration] = {}
    for i in range(len(points)):
        if points.code[i] == LEGAL:
            c = points.configuration(i)
            found[c.line] = c
    return list(found.values())


def _cluster(world: int) -> Any:
    """One node of all ranks: any layout may be measured."""
    from copus_ext.cost_model.cluster_spec import of_gpu

    return of_gpu("CPU-rank", nodes=1, gpus_per_node=world)


def counts(c: Any, args: argparse.Namespace) -> list[int]:
    """Two numbers of micro-batches: the least of the steady schedule, and twice that; or those of
    the batches asked for."""
    layout, unit = c.layout, c.layout.dp * c.micro_batch_size
    if args.batches:
        asked = [int(b) for b in args.batches.split(",")]
        fit = [b // unit for b in asked if b % unit == 0]
        return [n for n in fit if layout.vpp == 1 or n % layout.pp == 0]
    first = max(layout.pp, 2)
    if layout.vpp > 1:
        first = -(-first // layout.pp) * layout.pp
    most = args.global_batch_size // unit
    return [n for n in (first, 2 * first) if n <= most] or ([most] if most else [])


def time_steps(job: Any, args: argparse.Namespace) -> list[float]:
    """Seconds of some steps, after a warm-up; with K-FAC of whole intervals of covariances."""
    from megatron.training.train.step import train_step

    seconds, optim = [], job.config.optim
    interval = min(optim.kfac_interval, _LONGEST_INTERVAL) if optim.kfac else 1
    steps = -(-args.steps // interval) * interval
    for number in range(args.warm_up + steps):
        job.fire("on_train_step_start", global_batch_size=job.global_batch_size)
        info, _ = train_step(job)
        if number >= args.warm_up:
            seconds.append(info.elapsed_s)
    return seconds


def measure(c: Any, flags: list[str], args: argparse.Namespace, device: Any, store: Any) -> None:
    """Times one configuration at both counts; the job is built once."""
    import torch.distributed as dist

    from copus_ext.controller.peak_memory import forget_peaks, peak_bytes_here
    from copus_ext.cost_model.kfac import usual_step_s
    from copus_ext.planner.profile import Timing
    from copus_ext.reshard.relaunch import without_cut
    from megatron.training.checkpoint.resume import merge_resume_config
    from megatron.training.common.train_state import TrainState
    from megatron.training.config.arguments import parse_args, resolve
    from megatron.training.config.batch_schedule import BatchSchedule
    from megatron.training.data.tokenizer import build_tokenizer
    from megatron.training.train.build import build_job, tear_down
    from megatron.training.train.callbacks import Callbacks
    from megatron.training.train.job import RunServices
    from megatron.training.train.pretrain import tokenizer_flags

    def config_of(count: int) -> Any:
        # A configuration does not name sizes of 1, and the flags of the run may have others.
        sizes = ["--context-parallel-size", str(c.layout.cp)]
        sizes += ["--expert-model-parallel-size", str(c.layout.ep)]
        own = [*without_cut(flags), *sizes, *c.with_num_microbatches(count).to_flags()]
        return resolve(parse_args(own), dist.get_world_size(), **_environment())

    wanted = counts(c, args)
    config = config_of(wanted[0])
    tokenizer = build_tokenizer(**tokenizer_flags(config))
    config = merge_resume_config(config, None, vocab_size=tokenizer.vocab_size)
    state = TrainState()
    if device.is_cuda:
        forget_peaks()
    with contextlib.redirect_stdout(io.StringIO()):
        job = build_job(config, None, state, tokenizer, device, Callbacks(()), RunServices())
    for count in wanted:
        job.batch_schedule = BatchSchedule.of(config_of(count))
        state.consumed_samples = 0
        seconds = time_steps(job, args)
        peak = peak_bytes_here() if device.is_cuda else None
        middle = statistics.median(seconds)
        optim = config.optim
        usual = usual_step_s(seconds, optim.kfac_interval if optim.kfac else 1)
        timing = Timing(
            configuration=c.with_num_microbatches(count),
            step_s=usual,
            spread_s=statistics.median(abs(s - middle) for s in seconds),
            num_steps=len(seconds),
            peak_bytes=peak,
        )
        if dist.get_rank() == 0:
            store.add(timing)
            rate = timing.configuration.global_batch_size / usual
            print(f"{c}, {count} micro-batches: {usual:.4f} s, {rate:.2f} samples/s", flush=True)
    tear_down(job)


def _environment() -> dict[str, bool]:
    import torch

    from megatron.training.common import optional

    return {
        "cuda_available": torch.cuda.is_available(),
        "transformer_engine_available": optional.have_transformer_engine(),
        "apex_available": optional.have_nvidia_apex(),
    }


def machine(model: Any, world: int) -> dict[str, Any]:
    """What the times belong to."""
    import platform
    from importlib.metadata import version

    import torch

    return {
        "model": model.to_json(),
        "world_size": world,
        "gpu": _gpu(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("torch", "megatron-core")},
    }


def _gpu() -> str:
    """The name that the planner's presets give to what a rank runs on."""
    import torch

    from copus_ext.cost_model.cluster_spec import kind_of, preset
    from copus_ext.cost_model.spec_file import SpecError

    if not torch.cuda.is_available():
        return "CPU-rank"
    found = torch.cuda.get_device_properties(0)
    try:
        return preset(f"{kind_of(found.name, found.total_memory / 2**20)}:1").gpu.name
    except SpecError:
        return found.name


def model_of(flags: list[str], world: int) -> Any:
    """The model of some flags, with the vocabulary of its tokenizer."""
    from copus_ext.cost_model.model_spec import ModelSpec
    from megatron.training.config.arguments import parse_args, resolve
    from megatron.training.data.tokenizer import build_tokenizer
    from megatron.training.train.pretrain import tokenizer_flags

    config = resolve(parse_args(flags), world, **_environment())
    tokenizer = build_tokenizer(**tokenizer_flags(config))
    spec = ModelSpec.from_megatron_flags(flags)
    if config.model.padded_vocab_size is not None:
        return spec
    return dataclasses.replace(spec, vocab_size=tokenizer.vocab_size)


def main(argv: list[str] | None = None) -> int:
    """Measures everything that is not in the store."""
    from copus_ext.cost_model.spec_file import SpecError
    from copus_ext.launch.rank_side import adopt_srun
    from copus_ext.planner.profile import ForeignProfile, ProfileStore
    from megatron.training.common.errors import UsageError
    from megatron.training.resilience.env_checks import check_environment, set_process_defaults

    args, flags = parse(sys.argv[1:] if argv is None else argv)
    set_process_defaults()
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    try:
        adopt_srun()
        check_environment()
        import torch.distributed as dist

        from megatron.training.common.device import use_device
        from megatron.training.distributed.process_groups import init_distributed

        world = int(os.environ.get("WORLD_SIZE", "1"))
        model = model_of(flags, world)
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
            os.environ.setdefault(name, value)
        os.environ.setdefault("MASTER_PORT", "0")
        kind = "cuda" if _environment()["cuda_available"] else "cpu"
        with use_device(kind, local_rank=int(os.environ.get("LOCAL_RANK", "0"))) as device:
            init_distributed(device, timeout_minutes=10)
            store = ProfileStore(args.store, machine(model, world))
            known: list[Any] = [store.read() if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(known, src=0)
            done = {t.key for t in known[0]}
            for c in lines(model, args, world):
                if any((*c.line, n) not in done for n in counts(c, args)):
                    measure(c, flags, args, device, store)
            dist.destroy_process_group()
    except (UsageError, SpecError, ForeignProfile) as error:
        tell("profile_layouts.py", f"error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
