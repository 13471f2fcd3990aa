"""The answer of a search of `copus plan`, as a table for people and as JSON for tools."""

from __future__ import annotations

import argparse
import io
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from copus_ext.planner.beside_megatron import flags_before, warnings_on
from copus_ext.planner.given_flags import flags_of_row, given_of, line_of, merged
from copus_ext.planner.request import (
    UsageProblem,
    constants_of,
    length_from,
    length_line,
)
from copus_ext.planner.sharing import runs_in
from copus_ext.planner.suited import software_flags

_FACTORS = {"across": "messages between nodes (of pp and dp)", "launch": "start of kernels"}
"""What factors of a step are called that are none of its parts."""


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What an answer says besides the ranking; None where there is nothing to say."""

    assumed: list[Any]
    """Of the software (`planner.software.Assumption`)."""
    otherwise: dict[str, Any] | None
    """See `planner.software.otherwise`."""
    better: list[str]
    """What the measured memory says of the software (`planner.software.fits_better`)."""
    present: Any
    """The layout of --from-command (`planner.from_command.Present`)."""
    first: tuple[str, dict[str, Any]] | None
    """The batch to begin with."""
    headroom: tuple[str, dict[str, Any]] | None
    """What adapting the batch can save."""
    decay: dict[str, Any] | None
    """Batch and timescale of the weight decay."""


def tell_json(
    args: argparse.Namespace, planner: Any, found: Any, beside: Beside, elapsed_s: float | None
) -> None:
    """Writes the answer as `docs/plan.schema.json` describes it."""
    from copus_ext.planner import report
    from copus_ext.planner.software import untimed

    record = report.to_json(
        planner.model,
        planner.cluster,
        found,
        constants=constants_of(args, planner),
        seq_length_from=length_from(args),
        assumed=[one.text for one in beside.assumed],
        otherwise=beside.otherwise,
        warnings=[
            *args.doubts,
            *warnings_on(args, planner),
            *untimed(args, planner),
            *beside.better,
        ],
    )
    for plan, told in zip(found.plans, record["plans"]):
        for name, some in (("ranked", plan.ranked), ("try_first", plan.tries)):
            say_whole(told.get(name, []), some, args, planner)
    more = {
        "present": beside.present and beside.present.to_json(),
        "headroom": beside.headroom and beside.headroom[1],
        "first_batch": beside.first and beside.first[1],
        "weight_decay": beside.decay,
        "elapsed_s": elapsed_s and round(elapsed_s, 3),
    }
    record |= {name: value for name, value in more.items() if value is not None}
    write_output(report.dump(record), args.output)


def say_whole(records: list[Any], some: list[Any], args: argparse.Namespace, planner: Any) -> None:
    """Lets the flags of JSON records win over the fields that the run's own flags set, and say the
    software."""
    given, model = given_of(args), planner.model
    software = flags_before(args, model, planner.cluster)
    for record, one in zip(records, some):
        c = one.configuration
        if record["flags"] == c.to_flags():
            record["flags"] = flags_of_row(c, model, given, software)


def tell_table(args: argparse.Namespace, planner: Any, found: Any, beside: Beside) -> None:
    """Prints the answer for people, or writes it."""
    from copus_ext.goodput.lr_scaling import decay_words
    from copus_ext.planner import report
    from copus_ext.planner.better_machine import what_would_help
    from copus_ext.planner.explain import help_line, timing_line
    from copus_ext.planner.software import assumed_lines, half_precision_line, untimed
    from copus_ext.planner.timed import instead_of_help

    text = io.StringIO()
    console = report.console_for(sys.stdout if args.output is None else text)

    def say(line: str) -> None:
        if line:
            console.print(line, highlight=False, markup=False)

    is_mixture = planner.model.num_experts is not None
    asked = "cp" in {**planner.limits.fixed, **planner.limits.largest}
    for line in (
        length_line(args, planner.model),
        report.machine_line(planner.cluster, planner.constants),
        half_precision_line(args, planner, found.plans[0]),
        report.peak_line(planner.cluster, planner.model.precision),
        *assumed_lines(beside.assumed, beside.otherwise),
        *untimed(args, planner),
        *beside.better,
        *([beside.present.line()] if beside.present is not None else []),
        *(f"warning: {line}" for line in warnings_on(args, planner)),
    ):
        say(line)
    now = None if beside.present is None else beside.present.configuration
    report.table(found, console, is_mixture=is_mixture, shows_cp=asked, now=now)
    say(runs_in(planner.model, planner.cluster) if report.shares_samples(found) else "")
    say(beside.first[0] if beside.first is not None else "")
    if beside.decay is not None:
        words = decay_words(beside.decay["timescale"])
        batch = f"{beside.decay['global_batch_size']:,}"
        say(f"weight decay: {words} at batch {batch}")
    if beside.headroom is not None:
        say(beside.headroom[0])
    elif any(plan.ranked for plan in found.plans):
        batch = next(plan.global_batch_size for plan in found.plans if plan.ranked)
        mapping = planner.limits.use_tp_pp_dp_mapping
        doubtful = instead_of_help(planner, args.timed)
        say(doubtful or help_line(what_would_help(planner, batch), use_tp_pp_dp_mapping=mapping))
    for run in args.timed:
        say(f"{run}; {run.shares()}")
    if factors := {n: x for n, x in planner.part_factors().items() if abs(x - 1) >= 0.05}:
        words = ", ".join(f"{_FACTORS.get(name, name)} x {x:.2f}" for name, x in factors.items())
        say(f"parts of a step in all rows, by the times measured over predicted: {words}")
    per_node = planner.cluster.gpus_per_node
    software = software_flags(args, planner.model, planner.cluster)
    yours = " ".join(["FLAGS OF YOUR RUN", *software])
    if args.launched is not None:
        yours = line_of(merged(shlex.split(args.megatron_args), software))
    shape = {"gpus_per_node": per_node, "is_mixture": is_mixture}
    say(timing_line(found.worth_timing, yours=yours, **shape))
    if args.output is not None:
        write_output(text.getvalue().rstrip("\n"), args.output)


def write_output(text: str, output: Path | None) -> None:
    """Prints an answer, or writes it where that is asked for."""
    if output is None:
        print(text)
        return
    try:
        output.write_text(text + "\n")
    except OSError as error:
        raise UsageProblem(f"--output {output}: {error}") from error
