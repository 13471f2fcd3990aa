"""Stages of a model with branches, which run at the same time: which stage has which nodes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from copus_ext.cost_model.spec_file import SpecError
from copus_ext.extras.graph_stages.graph_file import lines, read_graph, to_json
from copus_ext.extras.graph_stages.search import best_graph_partition
from copus_ext.extras.layer_partition.layers import NoPartition
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.program import CommandParser, program_name, run_command, tell

_SCRIPT = "plan-graph"
NOTHING_FITS, CANNOT_BE_READ = 4, 5
"""Exit codes, those of `copus plan`."""


def parser() -> argparse.ArgumentParser:
    p = CommandParser(
        prog=program_name(_SCRIPT),
        description="Lay the nodes of a graph out over stages that run at the same time.",
        epilog="Exit codes: 0, 2 wrong flags or graph, 4 nothing fits, 5 a file cannot be read.",
    )
    p.add_argument("graph", type=Path, metavar="FILE.json", help="nodes and edges")
    p.add_argument("--stages", type=int, help="number of stages, in place of the file's")
    words = "micro-batches of a step, in place of the file's"
    p.add_argument("--num-microbatches", type=int, help=words)
    words = "memory that a stage may use, in place of the file's"
    p.add_argument("--memory-gib", type=float, help=words)
    p.add_argument("--json", action="store_true", help="answer in JSON, every pass with its times")
    p.add_argument("--output", type=Path, help="write the answer to this file")
    return p


def run(args: argparse.Namespace) -> int:
    """Reads a graph, searches its stages, and answers; returns the exit code.

    Raises:
        UsageError: the file does not describe a graph that can be planned.
    """
    try:
        problem = read_graph(
            args.graph,
            num_stages=args.stages,
            num_microbatches=args.num_microbatches,
            memory_gib=args.memory_gib,
        )
    except SpecError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        tell(_SCRIPT, f"error: {args.graph}: {error.strerror or error}")
        return CANNOT_BE_READ
    try:
        found = best_graph_partition(problem)
        plain = best_graph_partition(problem, is_sequential=True)
    except ValueError as error:
        raise UsageError(f"{args.graph}: {error}") from error
    if isinstance(found, NoPartition):
        tell(_SCRIPT, f"error: {found.detail}; {found.fix}")
        return NOTHING_FITS
    plain = None if isinstance(plain, NoPartition) else plain
    if args.json:
        text = json.dumps(to_json(problem, found, plain), indent=1)
    else:
        text = "\n".join(lines(problem, found, plain))
    if args.output is None:
        print(text)
        return 0
    try:
        args.output.write_text(text + "\n")
    except OSError as error:
        raise UsageError(f"--output {args.output}: {error.strerror or error}") from error
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(_SCRIPT, lambda: run(parser().parse_args(argv)))
