"""`copus NAME FLAGS`: all commands under one name. Only the one that is asked for is imported."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import NoReturn

from copus_ext import __version__
from megatron.trainer.common.extras import extras, left_out
from megatron.trainer.common.program import (
    CommandParser,
    ending_at_interrupts,
    nearest,
    running_as,
    with_output,
)

COMMANDS = (
    "pretrain",
    "launch",
    "preprocess-data",
    "plan",
    "status",
    "report",
    "replay",
)
_ELSEWHERE = {"launch": "copus_ext.launch.supervisor"}

_JOBS = ("pretrain", "launch")
"""Commands whose exit code tells a supervisor what became of a job, whoever reads along."""


def of_extras() -> dict[str, str]:
    """Commands of the extras that are there -> their modules; none replaces one of the core."""
    return {
        name: f"{extra.package}.{module}"
        for extra in extras()
        for name, module in extra.commands.items()
        if name not in COMMANDS
    }


def names() -> tuple[str, ...]:
    return *COMMANDS, *of_extras()


def module_of(name: str) -> str:
    """The module whose `main` is a command."""
    others = _ELSEWHERE | of_extras()
    return others.get(name, f"copus_ext.commands.{name.replace('-', '_')}")


def first_line(name: str) -> str:
    """What a command does: the first line of its module, which is not imported."""
    spec = importlib.util.find_spec(module_of(name))
    assert spec is not None and spec.origin is not None, name
    with Path(spec.origin).open(encoding="utf-8") as file:
        return file.readline().strip().strip('"')


def _known(word: str) -> str:
    """The name of a command.

    Raises:
        argparse.ArgumentTypeError: there is none of this name.
    """
    if word not in names():
        for extra, needs in left_out():
            if word in extra.commands:
                lacks = f"{word} needs the extra {', '.join(needs)}, which is absent"
                raise argparse.ArgumentTypeError(lacks)
        hint = nearest(word, names()) or "; `copus --help` lists them"
        raise argparse.ArgumentTypeError(f"there is no command {word}{hint}")
    return word


class _Parser(CommandParser):
    def error(self, message: str) -> NoReturn:
        super().error(message.removeprefix("argument COMMAND: "))


def parser() -> argparse.ArgumentParser:
    """The command line up to the name of the command."""
    width = max(map(len, names()))
    p = _Parser(
        prog="copus",
        usage="%(prog)s COMMAND [flags]",
        description="Pre-training on megatron-core that adapts batch and layout as it runs.",
        epilog="commands:\n"
        + "\n".join(f"  {name:{width}}  {first_line(name)}" for name in names())
        + "\n\n`copus COMMAND --help` shows the flags of one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--version", action="version", version=f"copus {__version__}")
    p.add_argument("command", metavar="COMMAND", type=_known, help=argparse.SUPPRESS)
    return p


def main(argv: list[str] | None = None) -> int:
    """Runs the command that is named first with the words behind it; returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in _JOBS:
        return _run(words)
    return with_output("copus", lambda: _run(words))


def _run(words: list[str]) -> int:
    name = parser().parse_args(words[:1]).command

    def run() -> int:
        code = importlib.import_module(module_of(name)).main(words[1:])
        if name not in _JOBS:
            sys.stdout.flush()  # an error of it bears the name of the command
        return code

    with running_as(f"copus {name}"):
        return run() if name in _JOBS else ending_at_interrupts("copus", run)


def run_tool(file: str) -> int:
    """Runs the command that a script in `tools/` bears the name of, with the words of this process;
    returns its exit code. A line says so where the extra of the command is absent."""
    script = Path(file).name
    name = parser().parse_args([script.removesuffix(".py").replace("_", "-")]).command
    return with_output(script, importlib.import_module(module_of(name)).main)


if __name__ == "__main__":
    sys.exit(main())
