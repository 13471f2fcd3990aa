"""Plans a run before its launch: which layouts fit, and how fast they are.

    copus plan --model gpt3-175b --cluster a100-80g:1024 --global-batch-size 1536
    copus plan explain tp8.pp8.dp16,micro_batch=1 --model gpt3-175b ...

The word behind `plan` says what to find; without one it ranks all configurations (`search`).
Exit codes: 0 every batch has a configuration, 2 wrong flags, 3 some batch has no legal one, 4 some
batch has legal ones but none fits, 5 an input file cannot be used.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from copus_ext import __version__
from copus_ext.commands.main import names
from copus_ext.commands.plan_answer import Beside, say_whole, tell_json, tell_table, write_output
from copus_ext.commands.plan_jobs import FIRST_ROW, rows_of, tell_rows
from copus_ext.commands.plan_run import decay_of, first_batch_of, headroom_of, ranked
from copus_ext.planner.beside_megatron import flags_before, mask_line
from copus_ext.planner.commands import command_of, helps
from copus_ext.planner.fixed import is_whole, kept
from copus_ext.planner.from_command import (
    FLAG,
    completed,
    fill_in,
    inherited,
    notes,
    present,
    present_of,
    take_apart,
)
from copus_ext.planner.given_flags import flags_of_row, given_of
from copus_ext.planner.request import (
    GPUS_PER_NODE,
    OPTIONS,
    InputProblem,
    UsageProblem,
    add_model_flags,
    batch_of_flags,
    batches,
    cluster_of,
    configuration_of,
    constants_of,
    cp_comm_types_of_flags,
    length_from,
    length_line,
    logits_chunks_of,
    megatron_flag,
    model_of,
    reason_of,
    sizes,
    uses_tp_pp_dp_mapping,
)
from copus_ext.planner.run_flags import notes_on
from copus_ext.planner.sharing import runs_in
from copus_ext.planner.suited import suited
from megatron.trainer.common.program import (
    ending_at_interrupts,
    nearest,
    other_command,
    program_name,
    tell,
    with_hint,
)

COMMANDS = {
    "search": "rank all configurations (also without a command)",
    "explain": "price one configuration part by part, or say why it is none",
}
_WEIGHED = 64
"""Configurations of a batch that rows of the table are made of, and that the headroom looks at."""
_TRIES = 2
"""Of a batch, how many that may not fit are shown."""
_HINTED = 4
"""Of many batches, how many are told with a better one nearby."""
CERTAIN = 0.2
"""Probability not to fit from which on a configuration that was named comes with a note."""
AUTO = "auto"
"""In place of batches: the one to begin the run with."""


def commands() -> dict[str, str]:
    """All commands with a line on each, those of the core first."""
    return {**COMMANDS, **helps()}


class _Parser(argparse.ArgumentParser):
    """Raises `UsageProblem` for what it cannot read."""

    def error(self, message: str) -> NoReturn:
        wrong = re.fullmatch(r"argument (\S+): invalid (int|float) value: '(.*)'", message)
        if wrong is not None:
            kind = "whole number" if wrong[2] == "int" else "number such as 0.5 or 15e12"
            message = f"{wrong[1]} {wrong[3]}: write a {kind}, without a unit"
        raise UsageProblem(with_hint(self, message))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = super().parse_known_args(args, namespace)
        if not rest:
            take_apart(found)
        return found, rest


def parser(command: str = "search") -> argparse.ArgumentParser:
    """The flags of one of `commands`."""
    name = program_name("plan.py")
    own, known = command_of(command), commands()
    usage = {"search": "[COMMAND] ", "explain": "explain CONFIG "}.get(command, f"{command} ")
    usage += "[CONFIG] " if own.takes_configuration else ""
    others = [f"  {word:{max(map(len, known))}}  {text}" for word, text in known.items()]
    p = new_parser(
        prog=name,
        usage=f"%(prog)s {usage}--model MODEL --cluster CLUSTER --global-batch-size SIZES [flags]",
        description=known[command][0].upper() + known[command][1:] + ".",
        epilog="\n".join([f"commands ({name} COMMAND --help):", *others]),
    )
    if command == "explain" or own.takes_configuration:
        words = "for example tp2.pp4.dp8,micro_batch=1 or tp=2,pp=4"
        words += f"; with {FLAG} what it leaves out is the command's" * (command == "explain")
        p.add_argument("explain", metavar="CONFIG", nargs="?", help=words)
    add_inputs(p)
    out = add_answer(p, ["table", "json", *(FIRST_ROW if command == "search" else [])])
    if command != "explain":
        out.add_argument("--top", type=int, default=10, help="how many to show per batch")
    own.add_flags(out)
    if command == "search":
        words = "name every rejected configuration"
        out.add_argument("--rejected", action="store_true", help=words)
        words = "length of the run, for what another batch can save (default: 20 a parameter)"
        out.add_argument("--train-tokens", type=float, metavar="TOKENS", help=words)
    return p


def new_parser(**about: Any) -> argparse.ArgumentParser:
    """A parser whose arguments `planner_of` takes once it has the flags of `add_inputs`.

    Args:
        about: `prog`, `usage`, `description` and `epilog` of argparse.
    """
    p = _Parser(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **about)
    p.set_defaults(train_tokens=None, explain=None, rejected=False, command="search")
    p.set_defaults(
        launched=None, absent=(), from_command=None, timed=[], doubts=[], reported=[], top=10
    )
    return p


def add_answer(p: argparse.ArgumentParser, formats: list[str]) -> Any:
    """Flags of the form of an answer; returns their group."""
    out = p.add_argument_group("answer")
    out.add_argument("--format", choices=formats, default="table", help="form of the answer")
    words = "the same as --format json"
    out.add_argument("--json", action="store_const", const="json", dest="format", help=words)
    out.add_argument("--output", type=Path, help="write the answer to this file")
    return out


def add_inputs(p: argparse.ArgumentParser) -> None:
    """Flags that every command has: model, cluster, and what to search."""
    model = p.add_argument_group("model")
    add_model_flags(model)
    words = "'torchrun ... pretrain_gpt.py FLAGS': model, software, batch and the layout of now"
    model.add_argument(FLAG, action="append", metavar="COMMAND", help=words)
    where = p.add_argument_group("cluster")
    where.add_argument("--cluster", help="KIND:GPUS, for example h100-80g:64; a JSON file; or here")
    where.add_argument("--nodes", type=int, help="number of nodes, with --gpu")
    words = f"GPUs of a node, with --nodes (default: {GPUS_PER_NODE})"
    where.add_argument("--gpus-per-node", type=int, help=words)
    where.add_argument("--gpu", help="for example H100-80GB")
    where.add_argument("--nic", help="network of a node, one direction, for example 400GB/s")
    words = "--nic was measured, and is not a number of a data sheet"
    where.add_argument("--nic-is-measured", action="store_true", help=words)
    where.add_argument("--intra", help="link of a GPU inside its node, for example 450GB/s")
    search = p.add_argument_group("search")
    words = "512, or 64,128, or 64:4096:x2, or 64:256:+64, or auto for the first batch of a run"
    search.add_argument("--global-batch-size", help=words)
    words = "sizes to keep, for example tp=4,pp=2, or a CONFIG as an answer prints it"
    search.add_argument("--fix", default="", help=words)
    search.add_argument("--max", default="", help="largest sizes, for example tp=8,micro_batch=16")
    search.add_argument(
        "--recompute", default="none,selective,full,block", help="kinds of recomputation to try"
    )
    words = "exchanges of keys and values to try with cp (default: p2p,a2a; CPU: all_gather,a2a)"
    search.add_argument("--cp-comm-type", metavar="TYPES", help=words)
    words = "parts of the tokens for the logits to try, as few as fit (default: 1,2,4,8,16,32)"
    search.add_argument("--logits-chunks", metavar="NUMBERS", help=words)
    search.add_argument(
        "--decrease-batch-size-if-needed",
        action="store_true",
        help="let a layout that cannot split the batch take the next smaller one",
    )
    search.add_argument(
        "--no-overlap",
        action="store_true",
        help="gradients and weights do not travel while passes compute",
    )
    words = "activations are whole on every tensor parallel rank"
    search.add_argument("--no-sequence-parallel", action="store_true", help=words)
    search.add_argument(
        "--use-tp-pp-dp-mapping",
        action="store_true",
        help="number the ranks tensor, pipeline, data over the nodes",
    )
    search.add_argument(
        "--allow-cross-node-tp", action="store_true", help="let tensor parallelism span nodes"
    )
    words = "share of the memory to leave free"
    search.add_argument("--memory-margin", type=float, default=0.04, help=words)
    words = f"times from {other_command('profile_layouts.py')}, of this model or of others"
    options: dict[str, Any] = {"type": Path, "action": "extend", "nargs": "+", "default": []}
    search.add_argument("--profile", metavar="FILE", **options, help=words)
    words = "a run of the first batch: 'CONFIG: 18.2 s' (or 310 TFLOP/s, or 45 %%), "
    words += f"'CONFIG: 18.2 s, 62 GiB' or 'CONFIG: oom'; without CONFIG that of {FLAG}"
    search.add_argument("--measured", action="append", default=[], metavar="TEXT", help=words)
    search.add_argument("--constants", type=Path, help="JSON with fitted constants")


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags of the command that is named first, or of a search.

    Raises:
        UsageProblem: wrong flags, or flags that exclude each other.
    """
    known = commands()
    if argv and not argv[0].startswith("-") and argv[0] not in known:
        own = f"plan-{argv[0]}"
        hint = f"; use copus {own}" if own in names() else nearest(argv[0], known)
        raise UsageProblem(f"there is no command {argv[0]}{hint}")
    command = argv[0] if argv and argv[0] in known else "search"
    args = parser(command).parse_args(argv[1:] if argv and argv[0] in known else argv)
    args.command = command
    if (args.explain or "").strip() == "" and (command == "explain" or args.explain is not None):
        if args.explain is not None or args.launched is None:
            more = f", or {FLAG}" if args.explain is None else ""
            raise UsageProblem(f"CONFIG is missing; write it, for example tp2.pp4{more}")
        args.explain = ""
    if args.global_batch_size is None:
        if (batch := batch_of_flags(args)) is None:
            raise UsageProblem("give --global-batch-size, for example 512, or auto")
        args.global_batch_size = str(batch)
    if args.format in FIRST_ROW and args.rejected:
        raise UsageProblem(f"--format {args.format} has no room for --rejected; use --json")
    return args


def runs_of(args: argparse.Namespace, model: Any, cluster: Any, limits: Any) -> tuple[Any, Any]:
    """What `--measured` says that ran, and what ran out of memory."""
    from copus_ext.planner.known_runs import measured_of, taken_for, with_text

    if not args.measured:
        return [], []
    if args.global_batch_size in (None, AUTO):
        raise UsageProblem("--measured goes with a batch; give --global-batch-size a number")
    batch = batches(args.global_batch_size)[0]
    now = None if args.launched is None else partial(present, args, batch, cluster.world_size)
    ran, lacked = measured_of(args.measured, batch, model, cluster, limits, now)
    args.reported = with_text(args.measured, ran, lacked)
    if told := taken_for(args.reported):
        tell("plan.py", f"note: {told}")
    return ran, lacked


def planner_of(args: argparse.Namespace) -> Any:
    from copus_ext.cost_model.constants import Constants
    from copus_ext.cost_model.models import STAND_INS
    from copus_ext.planner.configuration import RECOMPUTE
    from copus_ext.planner.known_runs import profiles_of
    from copus_ext.planner.search import Planner
    from copus_ext.planner.space import Limits, may_overlap
    from copus_ext.planner.timed import doubts_of, timed

    kinds = tuple(args.recompute.split(","))
    if not set(kinds) <= set(RECOMPUTE):
        raise UsageProblem(f"--recompute {args.recompute}: use some of {', '.join(RECOMPUTE)}")
    if not 0 <= args.memory_margin < 1:
        raise UsageProblem(f"--memory-margin {args.memory_margin} must be from 0 to below 1")
    if args.train_tokens is not None and not 0 < args.train_tokens < 1e18:
        raise UsageProblem(f"--train-tokens {args.train_tokens:g} must be from 0 to 1e18")
    if args.top < 1:
        raise UsageProblem(f"--top {args.top} must be at least 1")
    constants = None
    if args.constants is not None:
        try:
            constants = Constants.load(args.constants)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputProblem(f"--constants {args.constants}: {reason_of(error)}") from error
    fill_in(args)
    model = model_of(args)
    if lacks := STAND_INS.get(args.model):
        tell("plan.py", f"note: {model.name} has {lacks}")
    if args.megatron_args is not None:
        priced = args.launched is not None
        for note in notes_on(args.megatron_args, no_overlap=args.no_overlap, priced=priced):
            tell("plan.py", f"note: {note}")
    limits = Limits(
        largest=sizes("--max", args.max),
        recompute=kinds,
        cross_node_tp=args.allow_cross_node_tp,
        round_down=args.decrease_batch_size_if_needed,
        overlap=not args.no_overlap and may_overlap(model),
        use_tp_pp_dp_mapping=uses_tp_pp_dp_mapping(args),
        sequence_parallel=not args.no_sequence_parallel,
        cp_comm_types=cp_comm_types_of_flags(args),
        logits_chunks=logits_chunks_of(args, model),
    )
    limits = kept(args.fix, limits)
    if args.no_sequence_parallel:
        model.check_dense("--no-sequence-parallel")
        if megatron_flag(args, "sequence_parallel"):
            raise UsageProblem("--megatron-args has --sequence-parallel; drop it or the --no- flag")
    cluster = cluster_of(args)
    model = suited(args, model, cluster)
    command_of(args.command).check(args, model, cluster)
    for told in notes(args, cluster.world_size):
        tell("plan.py", f"note: {told}")
    own, too_large, others = profiles_of(args.profile, model, cluster)
    if too_large:
        what = f"{len(too_large)} configuration{'s' * (len(too_large) > 1)} ran out of memory"
        tell("plan.py", f"note: {what} in the profile, which corrects what others need")
    for theirs, timings in others:
        what = f"times of {theirs.name} with samples of {theirs.seq_length} tokens"
        tell("plan.py", f"note: {len(timings)} {what} correct those of this model")
    ran, lacked = runs_of(args, model, cluster, limits)
    planner = Planner(
        model,
        cluster,
        timings=[*own, *ran],
        of_others=others,
        too_large=[*too_large, *lacked],
        constants=constants,
        limits=limits,
        memory_margin=args.memory_margin,
    )
    args.timed = timed(planner, ran)
    args.doubts = doubts_of(planner, args.timed, ran)
    for told in args.doubts:
        tell("plan.py", f"warning: {told}")
    return planner


def explained(args: argparse.Namespace, planner: Any, batch: int, text: str) -> tuple[Any, int]:
    """What the configuration of a text gives, or why it is none; and the exit code."""
    from copus_ext.planner.plan import Ranked
    from copus_ext.planner.timed import as_measured

    world_size = planner.cluster.world_size
    found = planner.explain(
        configuration_of(
            text,
            global_batch_size=batch,
            world_size=world_size,
            overlap=planner.limits.overlap,
            use_tp_pp_dp_mapping=uses_tp_pp_dp_mapping(args),
            sequence_parallel=planner.limits.sequence_parallel,
        )
    )
    if isinstance(found, Ranked):
        return as_measured(planner, found), 0
    return found, 4 if found.code == "memory" else 3


def explain(args: argparse.Namespace, planner: Any, wanted: list[int]) -> int:
    """Prices the configuration asked for at every batch."""
    from copus_ext.planner import report
    from copus_ext.planner.software import assumed_lines, assumptions, untimed

    text = args.explain if args.launched is None else completed(args, args.explain)
    if told := inherited(args, args.explain):
        tell("plan.py", f"note: {told}")
    if planner.model.num_experts is None and sizes("CONFIG", text, OPTIONS).get("ep", 1) > 1:
        raise UsageProblem(f"{text}: {planner.model.name} has no experts; drop ep and etp")
    answers = [explained(args, planner, batch, text) for batch in wanted]
    answers = [(with_change(planner, a), code) for a, code in answers]
    answers = [
        (with_addition(args, planner, a), code) if code == 0 else (a, code) for a, code in answers
    ]
    finish(args, [a.addition for a, code in answers if code == 0])
    if args.format == "json":
        records = [a.to_json(1) if code == 0 else a.to_json() for a, code in answers]
        for told, (a, code) in zip(records, answers):
            if code == 0:
                say_whole([told], [a], args, planner)
        inputs = {
            "model": planner.model.to_json(),
            "seq_length_from": length_from(args),
            "cluster": planner.cluster.to_json(),
            "constants": constants_of(args, planner),
        }
        record = {"schema": report.EXPLAINED, "version": __version__, "inputs": inputs}
        record["explained"] = records
        write_output(report.dump(record), args.output)
    else:
        machine = report.machine_line(planner.cluster, planner.constants)
        peak = report.peak_line(planner.cluster, planner.model.precision)
        told = [*assumed_lines(assumptions(args, planner), None), *untimed(args, planner)]
        masks = mask_line(args, planner.model, planner.cluster)
        told += [f"warning: {masks}"] if masks else []
        head = "\n".join(filter(None, [length_line(args, planner.model), machine, peak, *told]))
        texts, software = [], flags_before(args, planner.model, planner.cluster)
        for (a, code), batch in zip(answers, wanted):
            c = a.configuration if code == 0 else a.example
            flags = flags_of_row(c, planner.model, given_of(args), software)
            common = common_doubt(planner, batch) if code in (0, 4) else None
            whole = report.breakdown(a, flags, common) if code == 0 else None
            told = [whole or report.refusal(a, batch, planner, flags, common)]
            told += (
                [runs_in(planner.model, planner.cluster)] if code != 3 and c.layout.cp > 1 else []
            )
            texts.append("\n".join(told))
        write_output("\n\n".join([head, *texts]), args.output)
    return max(code for _, code in answers)


def as_named(args: argparse.Namespace, planner: Any, wanted: list[int]) -> list[Any]:
    """A plan for every batch with the configuration that `--fix` says whole alone, and a note on
    one that may not fit.

    Raises:
        UsageProblem: one that is not legal.
    """
    from copus_ext.planner.known_peaks import WORDS
    from copus_ext.planner.plan import Plan, Ranked
    from copus_ext.planner.timed import as_measured

    found = []
    for batch in wanted:
        one, _ = explained(args, planner, batch, args.fix)
        if not isinstance(one, Ranked):
            if one.code not in ("memory", "dominated"):
                raise UsageProblem(f"--fix {args.fix}: {one.detail}; {one.fix}")
            one = as_measured(planner, planner.priced(one.example))
        p = one.prediction
        if p.fit_probability < 1 - CERTAIN:
            fits = WORDS[p.peak_source] or f"it fits with probability {p.fit_probability:.2f}"
            tell("plan.py", f"note: {one.configuration} may not fit: {fits}")
        found.append(Plan(global_batch_size=batch, ranked=[one], num_ranked=1, rejected=[]))
    return found


def common_doubt(planner: Any, batch: int) -> float | None:
    """What all ranked times of a batch may be off together, as `doubted` has it; None where nothing
    fits."""
    ranked = planner.rank([batch], top=_WEIGHED, reasons=False)[0].ranked
    return planner.doubts([one.configuration for one in ranked])[0] if ranked else None


def with_change(planner: Any, found: Any) -> Any:
    """What does not fit with the cheapest change that does, in place of more GPUs."""
    from copus_ext.planner.nearest_fit import cheapest_change
    from copus_ext.planner.plan import Rejected

    if not isinstance(found, Rejected) or found.code != "memory":
        return found
    if (change := cheapest_change(planner, found.example)) is None:
        return found
    words, other = change
    much = found.fix.partition(";")[0]
    now, then = (x.prediction.step_s for x in (planner.priced(found.example), other))
    cost = f"{then:.4g} s a step in place of {now:.4g} s"
    fix = f"{much}; the cheapest change that fits is {words}, with {cost}"
    return dataclasses.replace(found, fix=fix)


def with_addition(args: argparse.Namespace, planner: Any, found: Any) -> Any:
    """The same answer with what the command of an extra says about it."""
    addition = command_of(args.command).of_configuration(planner, found)
    return dataclasses.replace(found, addition=addition)


def finish(args: argparse.Namespace, found: list[Any]) -> None:
    """Lets the command of an extra write its files."""
    command_of(args.command).finish(args, [one for one in found if one is not None and one.fits])


def search(args: argparse.Namespace, planner: Any, wanted: list[int]) -> tuple[Any, list[Any]]:
    """What was asked for, and the plans with all that the headroom looks at."""
    from copus_ext.planner.nearest_batch import better_batch
    from copus_ext.planner.report import Answer
    from copus_ext.planner.timed import plan_as_measured

    weighed = ranked(args, planner, wanted, top=max(args.top, _WEIGHED), tries=_TRIES)
    plans = [doubted(planner, p, args.top) for p in weighed]
    if args.command == "search":
        # Other commands compare rows with what no run has timed.
        plans = [plan_as_measured(planner, p) for p in plans]
    plans[:_HINTED] = [
        dataclasses.replace(p, better_batch=better_batch(planner, p)) for p in plans[:_HINTED]
    ]
    for plan in plans:
        plan.ranked[:1] = [with_addition(args, planner, first) for first in plan.ranked[:1]]
    own = command_of(args.command)
    additions = [own.of_batch(planner, plan, top=args.top) for plan in plans]
    worth_timing = [planner.worth_timing(plan) for plan in plans]
    return Answer(plans=plans, worth_timing=worth_timing, additions=additions), weighed


def doubted(planner: Any, plan: Any, top: int) -> Any:
    """A plan as the rows that are shown, what all times may be off together, however many are
    shown, and each row over the first."""
    from copus_ext.planner.equals import grouped

    if not plan.ranked:
        return plan
    rows = grouped(plan.ranked, top)
    common, _ = planner.doubts([one.configuration for one in plan.ranked[:_WEIGHED]])
    some = [*rows, *plan.tries]
    _, over = planner.doubts([one.configuration for one in some])
    some = [dataclasses.replace(one, over_first_sd=sd) for one, sd in zip(some, over)]
    return dataclasses.replace(
        plan, ranked=some[: len(rows)], tries=some[len(rows) :], common_sd=common
    )


def answer(args: argparse.Namespace) -> int:
    """Searches, prints and writes; returns the exit code."""
    from copus_ext.planner.failure import failure, with_fix
    from copus_ext.planner.software import assumptions, fits_better, otherwise

    started = time.monotonic()
    planner = planner_of(args)
    if args.explain is not None:
        return explain(args, planner, batches(args.global_batch_size))
    is_auto = args.global_batch_size == AUTO
    first = first_batch_of(args, planner) if is_auto else None
    if is_auto and first is None:
        raise UsageProblem("--global-batch-size auto: no batch fits; give one to see why")
    wanted = [first[1]["global_batch_size"]] if first else batches(args.global_batch_size)
    if args.format in FIRST_ROW and is_whole(args.fix):
        write_output(rows_of(args, planner, as_named(args, planner, wanted)), args.output)
        return 0
    found, weighed = search(args, planner, wanted)
    fits = [one is not None and one.fits for one in found.additions or ()]
    plans = [p if also else with_fix(planner, p) for p, also in zip(found.plans, fits)]
    found = dataclasses.replace(found, plans=plans)
    failed = [p for p, also in zip(plans, fits) if p.status != "ok" and not also]
    firsts = [plan.ranked[0] for plan in found.plans if plan.ranked]
    finish(args, [*(one.addition for one in firsts), *(found.additions or ())])
    if args.format in FIRST_ROW:
        tell_rows(args, planner, found.plans)
    else:
        if not is_auto and len(found.plans) == len(wanted):
            first = first_batch_of(args, planner)
        beside = Beside(
            assumed=(assumed := assumptions(args, planner)),
            otherwise=otherwise(planner, found.plans[0], assumed),
            better=fits_better(args, planner, assumed),
            present=present_of(args, planner, found.plans[0]),
            first=first,
            headroom=headroom_of(args, planner, weighed),
            decay=decay_of(args, planner.model, wanted[0]),
        )
        if args.format == "json":
            elapsed_s = None if args.output else time.monotonic() - started
            tell_json(args, planner, found, beside, elapsed_s)
        else:
            tell_table(args, planner, found, beside)
    for plan in failed:
        tell("plan.py", f"error: {failure(plan)}")
    if len(found.plans) < len(wanted):
        return 130
    if any(plan.status == "no_legal" for plan in failed):
        return 3
    return 4 if failed else 0


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    return exit_code_of("plan.py", lambda: answer(parse(argv)))


def exit_code_of(script: str, work: Callable[[], int]) -> int:
    """Runs a command of the planner, and turns problems into one line and an exit code."""
    from copus_ext.cost_model.spec_file import SpecError
    from megatron.trainer.common.errors import UsageError

    def told() -> int:
        try:
            return work()
        except (UsageProblem, SpecError, UsageError) as error:
            tell(script, f"error: {error}")
            return 2
        except InputProblem as error:
            tell(script, f"error: {error}")
            return 5

    return ending_at_interrupts(script, told)


if __name__ == "__main__":
    sys.exit(main())
