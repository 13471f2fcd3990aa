"""Stages of a model with branches: `copus plan partition --graph FILE.json`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NoReturn

from copus_ext.planner.request import InputProblem, UsageProblem
from megatron.training.common.program import program_name, with_hint

FLAG = "--graph"


class Parser(argparse.ArgumentParser):
    """Raises `UsageProblem` for what it cannot read."""

    def error(self, message: str) -> NoReturn:
        raise UsageProblem(with_hint(self, message))


def is_asked(argv: list[str]) -> bool:
    """Whether a command line asks for stages of a graph."""
    flags = [word.split("=")[0] for word in argv]
    return argv[:1] == ["partition"] and FLAG in flags


def add_flag(group: argparse._ArgumentGroup) -> None:
    """Names the flag in the help of `partition`, whose other flags do not go with it."""
    words = "a model with branches: its stages and times; see docs/graph-stages.md"
    group.add_argument(FLAG, type=Path, metavar="FILE.json", help=words, default=argparse.SUPPRESS)


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog=f"{program_name('plan.py')} partition",
        description="Lay the nodes of a graph out over stages that run at the same time.",
        allow_abbrev=False,
    )
    p.add_argument(FLAG, type=Path, required=True, metavar="FILE.json", help="nodes and edges")
    p.add_argument("--stages", type=int, help="number of stages, in place of the file's")
    words = "micro-batches of a step, in place of the file's"
    p.add_argument("--num-microbatches", type=int, help=words)
    words = "memory that a stage may use, in place of the file's"
    p.add_argument("--memory-gib", type=float, help=words)
    p.add_argument("--format", choices=("table", "json"), default="table", help="of the answer")
    words = "the same as --format json"
    p.add_argument("--json", action="store_const", const="json", dest="format", help=words)
    p.add_argument("--output", type=Path, help="write the answer to this file")
    return p


def answer(argv: list[str]) -> tuple[str, Path | None, str | None]:
    """Reads the graph and searches its stages.

    Args:
        argv: behind `partition`.

    Returns:
        The answer, where it is to be written, and what went wrong where nothing fits.

    Raises:
        UsageProblem: wrong flags.
        InputProblem: the file cannot be read.
        SpecError: the file does not say a graph that can be planned.
    """
    from copus_ext.cost_model.spec_file import SpecError
    from copus_ext.planner.partition.graph import best_graph_partition
    from copus_ext.planner.partition.graph_file import lines, read_graph, to_json
    from copus_ext.planner.partition.layers import NoPartition

    args = parser().parse_args(argv)
    try:
        problem = read_graph(
            args.graph,
            num_stages=args.stages,
            num_microbatches=args.num_microbatches,
            memory_gib=args.memory_gib,
        )
    except OSError as error:
        raise InputProblem(f"{FLAG} {args.graph}: {error.strerror}") from error
    try:
        found = best_graph_partition(problem)
        plain = best_graph_partition(problem, is_sequential=True)
    except ValueError as error:
        raise SpecError(f"{args.graph}: {error}") from error
    if isinstance(found, NoPartition):
        return "", None, f"{found.detail}; {found.fix}"
    plain = None if isinstance(plain, NoPartition) else plain
    if args.format == "json":
        return json.dumps(to_json(problem, found, plain), indent=1), args.output, None
    return "\n".join(lines(problem, found, plain)), args.output, None
