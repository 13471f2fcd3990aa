"""Times layouts on these ranks, for `copus plan` and the controller.

torchrun --nproc-per-node 2 tools/profile_layouts.py --store profile.jsonl -- FLAGS OF YOUR RUN

It times two counts of micro-batches for every layout and micro-batch. The two give every global
batch. It skips what is already in the store, so that an interrupted run goes on.

A layout that runs out of memory is recorded there too. One process goes on with the next. Several
end with 85, since the others wait for the one that ran out: start them again, or have torchrun do
so with --max-restarts 100.
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

from megatron.trainer.common.extras import step_period
from megatron.trainer.common.optional import abilities
from megatron.trainer.common.program import CommandParser, program_name, refused, tell

_AGAIN = 85
"""Exit code: start again, to go on after a configuration that ran out of memory."""
_LONGEST_PERIOD = 20
"""Steps after which their work repeats up to which whole periods are timed."""


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Own flags before `--`, the trainer's behind it."""
    at = argv.index("--") if "--" in argv else len(argv)
    p = CommandParser(
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
    words = "time also what ran out of memory before or is predicted not to fit"
    p.add_argument("--retry", action="store_true", help=words)
    args, flags = p.parse_args(argv[:at]), argv[at + 1 :]
    args.megatron_args = shlex.join(flags)
    args.use_tp_pp_dp_mapping = "--use-tp-pp-dp-mapping" in flags
    return args, flags


def lines(model: Any, args: argparse.Namespace, world: int) -> list[Any]:
    """One configuration per layout and micro-batch."""
    from copus_ext.planner.configuration import Configuration
    from copus_ext.planner.request import cp_comm_types_of_flags, megatron_flag, sizes
    from copus_ext.planner.space import LEGAL, Limits, enumerate_points, may_overlap

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
        overlap=not args.no_overlap and may_overlap(model),
        use_tp_pp_dp_mapping=args.use_tp_pp_dp_mapping,
        sequence_parallel=not args.no_sequence_parallel,
        use_distributed_optimizer=(not args.no_distributed_optimizer,),
        cp_comm_types=cp_comm_types_of_flags(args),
        logits_chunks=(megatron_flag(args, "logits_chunks") or 1,),
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
    """Seconds of some steps, after a warm-up, of whole periods of what repeats."""
    from megatron.trainer.train.step import train_step

    seconds: list[float] = []
    period = min(step_period(job.config.flat()), _LONGEST_PERIOD)
    steps = -(-args.steps // period) * period
    for number in range(args.warm_up + steps):
        job.fire("on_train_step_start", global_batch_size=job.global_batch_size)
        info, _ = train_step(job)
        if number >= args.warm_up:
            seconds.append(info.elapsed_s)
    return seconds


class RanOut(Exception):
    """A rank of several has no memory left for a configuration. The others may wait for it in the
    middle of a step, so that all of them have to end."""


def measure(
    c: Any, flags: list[str], args: argparse.Namespace, device: Any, store: Any, attempts: Any
) -> None:
    """Times one configuration at both counts, or records that it has not enough memory.

    Raises:
        RanOut: on the rank that has none left, and on those whose connection to it broke.
    """
    import torch.distributed as dist

    from copus_ext.controller.out_of_memory import is_out_of_memory
    from copus_ext.planner.attempts import BEGUN, DONE, DROPPED, OUT_OF_MEMORY
    from megatron.trainer.common.errors import UsageError
    from megatron.trainer.distributed.process_groups import destroy_groups
    from megatron.trainer.train.build import abandon, tear_down

    batches = schedules(c, flags, args)
    is_first = dist.get_rank() == 0
    if is_first:
        attempts.note(BEGUN, c)
    job = None
    try:
        job = build(c, flags, args, device)
        for count, schedule in batches.items():
            time_count(job, c.with_num_microbatches(count), schedule, args, store)
    except (UsageError, KeyboardInterrupt):
        if is_first:
            attempts.note(DROPPED, c)
        raise
    except Exception as error:
        is_known = attempts.has_run_out(c)
        if not is_known and not is_out_of_memory(error):
            raise
        # Another rank writes only to a file that it shares with the first, which has begun it.
        if not is_known and (is_first or store.path.exists()):
            attempts.note(OUT_OF_MEMORY, c)
        if dist.get_world_size() > 1:
            told = "" if is_known else f"{c}: out of memory on rank {dist.get_rank()}"
            raise RanOut(told) from None
        if job is not None:
            abandon(job)
    else:
        tear_down(job)
        if is_first:
            attempts.note(DONE, c)
        return
    # Once the exception is gone, and with it what it held of the model.
    destroy_groups()
    print(f"{c}: out of memory", flush=True)


def schedules(c: Any, flags: list[str], args: argparse.Namespace) -> dict[int, Any]:
    """The batches of a configuration by the number of micro-batches of each."""
    from megatron.trainer.config.batch_schedule import BatchSchedule

    return {n: BatchSchedule.of(config_of(c, n, flags)) for n in counts(c, args)}


def config_of(c: Any, count: int, flags: list[str]) -> Any:
    """The flags of the run, with those of a configuration of so many micro-batches."""
    import torch.distributed as dist

    from copus_ext.reshard.relaunch import without_cut
    from megatron.trainer.config.arguments import parse_args, resolve

    # A configuration does not name sizes of 1, and the flags of the run may have others.
    sizes = ["--context-parallel-size", str(c.layout.cp)]
    sizes += ["--expert-model-parallel-size", str(c.layout.ep)]
    own = [*without_cut(flags), *sizes, *c.with_num_microbatches(count).to_flags()]
    return resolve(parse_args(own), dist.get_world_size(), **abilities())


def build(c: Any, flags: list[str], args: argparse.Namespace, device: Any) -> Any:
    """The job of a configuration. It serves all of its batches."""
    from copus_ext.controller.peak_memory import forget_peaks
    from megatron.trainer.checkpoint.resume import merge_resume_config
    from megatron.trainer.common.train_state import TrainState
    from megatron.trainer.data.tokenizer import build_tokenizer
    from megatron.trainer.train.build import build_job
    from megatron.trainer.train.callbacks import Callbacks
    from megatron.trainer.train.job import RunServices
    from megatron.trainer.train.pretrain import tokenizer_flags

    config = config_of(c, counts(c, args)[0], flags)
    tokenizer = build_tokenizer(**tokenizer_flags(config))
    config = merge_resume_config(config, None, vocab_size=tokenizer.vocab_size)
    if device.is_cuda:
        forget_peaks()
    with contextlib.redirect_stdout(io.StringIO()):
        return build_job(
            config, None, TrainState(), tokenizer, device, Callbacks(()), RunServices()
        )


def time_count(job: Any, c: Any, schedule: Any, args: argparse.Namespace, store: Any) -> None:
    """Times a job with one number of micro-batches, and adds that to the store."""
    import torch.distributed as dist

    from copus_ext.controller.peak_memory import peak_bytes_here
    from copus_ext.goodput.step_records import usual_step_s
    from copus_ext.planner.profile import Timing

    job.batch_schedule = schedule
    job.state.consumed_samples = 0
    seconds = time_steps(job, args)
    peak = peak_bytes_here() if job.device.is_cuda else None
    middle = statistics.median(seconds)
    usual = usual_step_s(seconds, step_period(job.config.flat()))
    timing = Timing(
        configuration=c,
        step_s=usual,
        spread_s=statistics.median(abs(s - middle) for s in seconds),
        num_steps=len(seconds),
        peak_bytes=peak,
    )
    if dist.get_rank() == 0:
        store.add(timing)
        rate = c.global_batch_size / usual
        print(
            f"{c}, {c.num_microbatches} micro-batches: {usual:.4f} s, {rate:.2f} samples/s",
            flush=True,
        )


def machine(model: Any, world: int) -> dict[str, Any]:
    import platform

    import torch

    from copus_ext.controller.peak_memory import library_versions

    return {
        "model": model.to_json(),
        "world_size": world,
        "gpu": _gpu(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": library_versions(),
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
    from copus_ext.cost_model.megatron_flags import spec_of_flags
    from megatron.trainer.config.arguments import parse_args, resolve
    from megatron.trainer.data.tokenizer import build_tokenizer
    from megatron.trainer.train.pretrain import tokenizer_flags

    config = resolve(parse_args(flags), world, **abilities())
    tokenizer = build_tokenizer(**tokenizer_flags(config))
    spec = spec_of_flags(flags)
    if config.model.padded_vocab_size is not None:
        return spec
    return dataclasses.replace(spec, vocab_size=tokenizer.vocab_size)


def measure_all(
    model: Any, flags: list[str], args: argparse.Namespace, device: Any, world: int
) -> None:
    """Times every configuration that is not in the store.

    Raises:
        ForeignProfile: the store is of another model or machine.
        RanOut: as `measure`.
    """
    import torch
    import torch.distributed as dist

    from copus_ext.extras.profile_layouts.attempts import RecordedAttempts, by_memory
    from copus_ext.planner.profile import ProfileStore
    from megatron.trainer.common.collectives import broadcast_from_rank0

    store = ProfileStore(args.store, machine(model, world))
    done = {t.key for t in broadcast_from_rank0(store.read() if dist.get_rank() == 0 else None)}
    attempts = RecordedAttempts(store)
    if args.retry and dist.get_rank() == 0 and not _goes_on():
        attempts.forget()
    memory = torch.cuda.get_device_properties(0).total_memory if device.is_cuda else None
    wanted = {c: counts(c, args) for c in lines(model, args, world)}
    left = [
        c.with_num_microbatches(max(numbers))
        for c, numbers in wanted.items()
        if any((*c.line, n) not in done for n in numbers)
    ]
    # The first rank decides: another GPU may have another memory, and another node no store.
    for c, lack in broadcast_from_rank0(by_memory(model, left, memory)):
        why = None if args.retry else lack
        if why := broadcast_from_rank0(why or attempts.why_not(c)):
            if dist.get_rank() == 0:
                print(f"{c}: skipped, {why} (--retry times it)", flush=True)
        else:
            measure(c, flags, args, device, store, attempts)


def _goes_on() -> bool:
    """Whether a launcher has started the ranks again, to go on after one that ran out of memory.
    What they tried before is then part of the same run."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return restarts != "0" or "COPUS_PROFILE_GOES_ON" in os.environ


def main(argv: list[str] | None = None) -> int:
    """Measures everything that is not in the store.

    Returns:
        Exit code: 0 done, 2 wrong usage, 85 to be started again.
    """
    from copus_ext.cost_model.spec_file import SpecError
    from copus_ext.launch.rank_side import adopt_srun
    from copus_ext.planner.profile import ForeignProfile
    from megatron.trainer.common.errors import TrainingFailure, UsageError
    from megatron.trainer.common.gpus import check_torch_build
    from megatron.trainer.config.arguments import parse_args, resolve
    from megatron.trainer.resilience.env_checks import check_environment, set_process_defaults

    args, flags = parse(sys.argv[1:] if argv is None else argv)
    set_process_defaults()
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    try:
        adopt_srun()
        check_environment()
        check_torch_build(parse_args(flags).device)
        import torch.distributed as dist

        from megatron.trainer.common.device import use_device
        from megatron.trainer.distributed.process_groups import init_distributed
        from megatron.trainer.resilience.determinism import deterministic_algorithms, prepare

        world = int(os.environ.get("WORLD_SIZE", "1"))
        given = resolve(parse_args(flags), world, **abilities())
        config = prepare(given)
        if os.environ.get("RANK", "0") == "0":
            for note in config.runtime.notes[len(given.runtime.notes) :]:
                tell("profile_layouts.py", f"note: {note}")
        model = model_of(flags, world)
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
            os.environ.setdefault(name, value)
        os.environ.setdefault("MASTER_PORT", "0")
        kind = "cuda" if abilities()["cuda_available"] else "cpu"
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        with use_device(kind, local_rank=local_rank) as device, deterministic_algorithms(config):
            init_distributed(device, timeout_minutes=10)
            measure_all(model, flags, args, device, world)
            dist.destroy_process_group()
    except (UsageError, SpecError, ForeignProfile) as error:
        return refused("profile_layouts.py", str(error), 2)
    except TrainingFailure as error:
        return refused("profile_layouts.py", str(error), error.exit_code)
    except RanOut as error:
        if text := str(error):
            again = "start this again without --retry" if args.retry else "start this again"
            tell("profile_layouts.py", f"{text}; {again}, and it goes on with the others")
        sys.stdout.flush()
        # Closing the world would wait for ranks that wait for this one.
        os._exit(_AGAIN)
    return 0


if __name__ == "__main__":
    sys.exit(main())
