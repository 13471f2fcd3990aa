"""Plans the layouts of a run whose samples or batches grow.

    copus plan-phases --model llama-3-70b --cluster h100-80g:512 --global-batch-size 2048 \
        --seq-length-schedule "0:8192 95%:32768 99%:131072" --train-tokens 2e12
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from copus_ext.commands.plan import (
    add_answer,
    add_inputs,
    exit_code_of,
    new_parser,
    planner_of,
    write_output,
)
from copus_ext.commands.plan_run import TOKENS_A_PARAMETER
from copus_ext.planner.request import UsageProblem, length_line, megatron_flag
from megatron.trainer.common.errors import UsageError, counted
from megatron.trainer.common.program import program_name, tell
from megatron.trainer.config.batch_schedule import make_schedule
from megatron.trainer.extras.phases.schedule import parse_lengths

_SCRIPT = "plan-phases"
SCHEMA = "copus.phases/1"
_HOUR_S = 3600.0
_COLUMNS = ("from", "s", "B", "layout", "b", "M", "recompute", "steps", "step,s", "hours")
_COLUMNS += ("tokens/s/GPU", "MFU,%", "move,s")


def parser() -> argparse.ArgumentParser:
    p = new_parser(
        prog=program_name(_SCRIPT),
        usage="%(prog)s --model MODEL --cluster CLUSTER --global-batch-size SIZE [flags]",
        description="The layouts of a run whose samples or batches grow, made ahead.",
        epilog="Exit codes: 0, 2 wrong flags, 4 a phase fits in no layout, 5 a file is not usable.",
    )
    add_inputs(p)
    add_answer(p, ["table", "json"])
    run = p.add_argument_group("run")
    words = "tokens of a sample over the run, such as '0:4096 90%%:16384 97%%:65536'"
    run.add_argument("--seq-length-schedule", metavar="TEXT", help=words)
    words = "global batch over the run, such as '0:16 2.4B:320'; positions in tokens"
    run.add_argument("--step-batch-size-schedule", metavar="TEXT", help=words)
    names = ("START", "INCREMENT", "SAMPLES")
    words = "global batch that grows from START, in samples of the first length"
    run.add_argument("--rampup-batch-size", type=int, nargs=3, metavar=names, help=words)
    words = "length of the run (default: that of --megatron-args, or 20 a parameter)"
    run.add_argument("--train-tokens", type=float, metavar="TOKENS", help=words)
    return p


@dataclass(frozen=True, kw_only=True)
class Run:
    """The run that is planned, as its flags describe it."""

    lengths: str
    """The schedule of lengths, written as in its flag, or one length."""
    batch: list[str]
    """The flags of the global batch and of its schedule."""
    stages: list[Any]
    """The parts of the run that have one length and one batch, in order."""


def run_asked(args: argparse.Namespace, model: Any) -> Run:
    """Returns the run that the flags describe.

    Raises:
        UsageProblem: no batch, or several.
    """
    from copus_ext.extras.phase_plan.search import stages_of
    from copus_ext.planner.request import batches

    given = functools.partial(megatron_flag, args)
    text = args.seq_length_schedule or given("seq_length_schedule") or str(model.seq_length)
    steps = args.step_batch_size_schedule or given("step_batch_size_schedule")
    ramp = args.rampup_batch_size or given("rampup_batch_size")
    if args.global_batch_size is not None:
        sizes = batches(args.global_batch_size)
    else:
        last = steps and steps.split()[-1].rpartition(":")[2]
        size = given("global_batch_size") or (int(last) if last and last.isdecimal() else None)
        sizes = [size] if size else []
    if len(sizes) != 1:
        raise UsageProblem("plan-phases needs one --global-batch-size, of the first length")
    first = parse_lengths(text if ":" in text else f"0:{text}")[0][1]
    tokens, ramp = args.train_tokens, tuple(ramp) if ramp else None
    if tokens is None and (samples := given("train_samples")):
        tokens = samples * first
    if tokens is None and (iterations := given("train_iters")):
        schedule = make_schedule(
            global_batch_size=sizes[0],
            rampup_batch_size=ramp,
            step_batch_size_schedule=steps,
            seq_length=first,
        )
        tokens = schedule.samples_after(iterations) * first
    stages = stages_of(
        seq_length_schedule=text,
        train_tokens=tokens or TOKENS_A_PARAMETER * float(model.num_active_parameters),
        global_batch_size=sizes[0],
        step_batch_size_schedule=steps,
        rampup_batch_size=ramp,
    )
    batch = ["--global-batch-size", str(sizes[0])]
    batch += ["--step-batch-size-schedule", steps] if steps else []
    batch += ["--rampup-batch-size", *map(str, ramp)] if ramp else []
    return Run(lengths=text, batch=batch, stages=stages)


def _held_by(planner: Any) -> Callable[[Any], int]:
    """Returns a function that says how many bytes of state the rank that holds most has under a
    layout."""
    from copus_ext.cost_model.memory import (
        owned_parameters,
        stage_parameters,
        stage_routed_parameters,
    )
    from copus_ext.planner.configuration import Configuration
    from copus_ext.planner.space import points_of, to_config_batch
    from copus_ext.reshard.plan import BYTES_PER_ELEMENT

    @functools.cache
    def held(layout: Any) -> int:
        c = Configuration(layout=layout, micro_batch_size=1, global_batch_size=layout.dp)
        rows = to_config_batch(planner.model, planner.cluster, points_of([c])).full()
        own = owned_parameters(rows, stage_parameters(rows), stage_routed_parameters(rows))
        return int(BYTES_PER_ELEMENT * own.max())

    return held


def pauses_on(planner: Any) -> Callable[[Any, Any], float]:
    """Returns a function that predicts the seconds of a change between two layouts on the cluster
    of the planner."""
    from copus_ext.cost_model.model_spec import divisors
    from copus_ext.goodput.costs import Machine, MovedBytes, pause_s
    from copus_ext.reshard.pause import MAX_COUNTED, predictor_of, shape_for

    cluster, model = planner.cluster, planner.model
    machine, world = Machine.of(cluster), cluster.world_size
    sizes = [tp for tp in divisors(world) if tp <= cluster.gpus_per_node]
    counted = predictor_of(shape_for(model, tp_sizes=sizes, sharded=True), machine)
    held = _held_by(planner)

    @functools.cache
    def pause(before: Any, after: Any) -> float:
        if before == after:
            return 0.0
        if world <= MAX_COUNTED:
            return counted.seconds(before, after)
        # Counting what many ranks have in common takes long: all of it moves, unless samples are
        # shared by other ranks and nothing else changes.
        most = max(held(before), held(after))
        is_same = all(getattr(before, n) == getattr(after, n) for n in ("tp", "pp", "vpp", "etp"))
        far = 0 if is_same and before.ep == after.ep else machine.ranks_per_node * most
        return pause_s(MovedBytes(held=most, within=0, across=far), machine)

    return pause


def planned(planner: Any, run: Run) -> tuple[Any, Any, list[Any]]:
    """Returns the plan, the plan that keeps one layout, and the stages that nothing can run.

    A run has its logits in one number of parts. So where the best plan has several, all of it is
    planned again with as many as any stage needs, and with the fewest.

    Raises:
        UsageProblem: nothing to look at.
    """
    found = _planned(planner, run, planner.limits.logits_chunks)
    if found[0] is None or len(planner.limits.logits_chunks) == 1:
        return found
    plans = filter(None, found[:2])
    used = {s.choice.configuration.logits_chunks for some in plans for s in some.stages}
    fewest = planner.limits.logits_chunks[0]
    if used == {fewest}:
        return found
    kept = [_planned(planner, run, (chunks,)) for chunks in (fewest, max(used))]
    able = [some for some in kept if some[0] is not None]
    return min(able, key=lambda some: some[0].seconds) if able else kept[-1]


def _planned(planner: Any, run: Run, chunks: tuple[int, ...]) -> tuple[Any, Any, list[Any]]:
    """Returns the same with logits in some numbers of parts."""
    from copus_ext.extras.phase_plan.search import choices_of, plan_stages
    from copus_ext.planner.search import Planner

    stages = run.stages
    ways = [r for r in planner.limits.recompute if r != "block"]
    if not ways:
        raise UsageProblem("`phases` takes --recompute none, selective and full; give some")
    timed = {planner.model.seq_length: planner.timings}
    found: dict[tuple[int, int], Any] = {}
    for stage in stages:
        key = stage.seq_length, stage.global_batch_size
        if key in found:
            continue
        found[key] = {}
        for way in ways:
            own = Planner(
                planner.model.with_seq_length(stage.seq_length),
                planner.cluster,
                constants=planner.constants,
                limits=dataclasses.replace(planner.limits, recompute=(way,), logits_chunks=chunks),
                memory_margin=planner.memory_margin,
                # Times of another length say nothing of this one.
                timings=timed.get(stage.seq_length, ()),
            )
            own.set_peaks(planner.peaks)
            found[key] |= choices_of(*own.every(stage.global_batch_size))
    choices = [found[s.seq_length, s.global_batch_size] for s in stages]
    lacking = [s for s, some in zip(stages, choices) if not some]
    if lacking:
        return None, None, lacking
    best, single = plan_stages(stages, choices, pauses_on(planner))
    return best, single, []


def answer(args: argparse.Namespace) -> int:
    """Plans, prints and writes; returns the exit code."""
    from copus_ext.planner import report
    from copus_ext.planner.software import assumed_lines, assumptions, untimed
    from copus_ext.planner.suited import software_flags

    started, planner = time.monotonic(), planner_of(args)
    try:
        run = run_asked(args, planner.model)
        best, single, lacking = planned(planner, run)
    except UsageError as error:
        raise UsageProblem(str(error)) from error
    if best is None:
        for stage in lacking:
            tell(
                _SCRIPT,
                f"error: no configuration runs {stage.global_batch_size} samples of "
                f"{stage.seq_length} tokens; use more GPUs or memory, or another batch",
            )
        if not lacking:
            tell(_SCRIPT, "error: no way of recomputation fits every phase; allow others")
        return 4
    own = software_flags(args, planner.model, planner.cluster)
    if args.format == "json":
        record = to_json(planner, run, best, single, own)
        if not args.output:
            record["elapsed_s"] = round(time.monotonic() - started, 3)
        write_output(report.dump(record), args.output)
    elif args.output is None:
        table(planner, run, best, single, report.console_for(sys.stdout), own)
    else:
        buffer = io.StringIO()
        table(planner, run, best, single, report.console_for(buffer), own)
        write_output(buffer.getvalue().rstrip("\n"), args.output)
    if not (args.seq_length_schedule or megatron_flag(args, "seq_length_schedule")):
        tell(_SCRIPT, f"note: {length_line(args, planner.model)}")
    for line in (*assumed_lines(assumptions(args, planner), None), *untimed(args, planner)):
        tell(_SCRIPT, f"note: {line}")
    return 0


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    return exit_code_of(_SCRIPT, lambda: answer(parser().parse_args(argv)))


def cost_of_one(best: Any, single: Any) -> float | None:
    """Returns how much longer a run in one layout takes, as a share of the time of the plan. None
    where no layout can run all phases."""
    return None if single is None else single.seconds / best.seconds - 1


def one_line(best: Any, single: Any) -> str:
    """Says in words what one layout for all phases costs."""
    share = cost_of_one(best, single)
    if share is None:
        return "no layout can run all phases"
    layout = single.stages[0].choice.configuration.layout
    return f"one layout for all phases costs {100 * share:.1f} % more ({layout})"


def _of_stage(planner: Any, part: Any) -> dict[str, float]:
    from copus_ext.planner.arithmetic import flops_per_sample

    model = planner.model.with_seq_length(part.stage.seq_length)
    world = planner.cluster.world_size
    rate = part.stage.tokens / part.seconds / world
    per_token = flops_per_sample(model) / model.seq_length
    peak = planner.cluster.gpu.peak(model.precision)
    return {"tokens_per_s_per_gpu": rate, "mfu": rate * per_token / peak}


def to_json(planner: Any, run: Run, best: Any, single: Any, own: Sequence[str]) -> dict[str, Any]:
    """Returns the answer as plain JSON types. Flags of the software come first."""
    from copus_ext import __version__
    from copus_ext.extras.phase_plan.search import with_own_flags

    def of(plan: Any) -> list[dict[str, Any]]:
        return [
            {
                "phase": part.stage.phase,
                "start_tokens": part.stage.start_tokens,
                "tokens": part.stage.tokens,
                "seq_length": part.stage.seq_length,
                "num_steps": part.stage.num_steps,
                "configuration": part.choice.configuration.to_json(),
                "step_s": part.choice.step_s,
                "seconds": part.seconds,
                "pause_s": part.pause_s,
                **_of_stage(planner, part),
            }
            for part in plan.stages
        ]

    return {
        "schema": SCHEMA,
        "version": __version__,
        "inputs": {"model": planner.model.to_json(), "cluster": planner.cluster.to_json()},
        "stages": of(best),
        "seconds": best.seconds,
        "pause_s": sum(part.pause_s for part in best.stages),
        "flags": [*own, *with_own_flags(best, run.lengths, run.batch)],
        "one_layout": None
        if single is None
        else {
            "layout": str(single.stages[0].choice.configuration.layout),
            "costs_more": cost_of_one(best, single),
            "seconds": single.seconds,
            "stages": of(single),
        },
    }


def table(planner: Any, run: Run, best: Any, single: Any, console: Any, own: Sequence[str]) -> None:
    """Prints a line for each stage, what one layout would cost, and the flags of the plan, those of
    the software first."""
    from rich.table import Table

    from copus_ext.extras.phase_plan.search import with_own_flags
    from copus_ext.monitor.explain import amount

    shown = Table(box=None, header_style="bold", pad_edge=False)
    for name in _COLUMNS:
        shown.add_column(name, justify="right", no_wrap=True)
    for part in best.stages:
        c, rates = part.choice.configuration, _of_stage(planner, part)
        form = f" {c.cp_comm_type}" if c.cp_comm_type else ""
        shown.add_row(
            amount(part.stage.start_tokens),
            str(part.stage.seq_length),
            str(c.global_batch_size),
            f"{c.layout}{form}",
            str(c.micro_batch_size),
            str(c.num_microbatches),
            c.recomputation,
            str(part.stage.num_steps),
            f"{part.choice.step_s:.4g}",
            f"{part.seconds / _HOUR_S:.4g}",
            f"{rates['tokens_per_s_per_gpu']:.0f}",
            f"{100 * rates['mfu']:.1f}",
            f"{part.pause_s:.3g}",
        )
    console.print(shown)
    moves = [part.pause_s for part in best.stages if part.pause_s]
    lines = [
        f"the run takes {best.seconds / _HOUR_S:.4g} hours, with "
        f"{counted(len(moves), 'change')} of layout ({sum(moves):.3g} s)",
        one_line(best, single),
        "flags: " + shlex.join([*own, *with_own_flags(best, run.lengths, run.batch)]),
    ]
    if note := numbers_note(best, run.lengths):
        lines.insert(-1, note)
    for line in lines:
        console.print(line, highlight=False, markup=False)


def numbers_note(best: Any, lengths: str) -> str | None:
    """Says with which numbers of phases the lengths begin where phases that change the layout or
    the micro-batch alone stand between them; None where the lengths count as they are given."""
    from copus_ext.extras.phase_plan.search import first_phases

    numbers = first_phases(best, lengths)
    if numbers == list(range(len(numbers))):
        return None
    return (
        f"note: the lengths now begin with phases {', '.join(map(str, numbers))}, since layouts or "
        "micro-batches change between them; use these numbers in --phase-data-path"
    )
