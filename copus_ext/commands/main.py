"""`copus NAME FLAGS`: all commands under one name. Only the one that is asked for is imported."""

from __future__ import annotations

import argparse
import importlib
import sys

from copus_ext import __version__
from copus_ext.program import running_as

COMMANDS = {
    "pretrain": "Pre-trains a GPT: Megatron-LM's flags, and --copus.",
    "launch": "Starts the ranks of a run on this node, and again when it asks for it or crashes.",
    "preprocess-data": "Text to an indexed data set, as megatron-core reads it.",
    "plan": "Plans a training run before it is launched: which layout, will it fit, how fast.",
    "profile-layouts": "Times layouts on the ranks it is started on, for the planner.",
    "probe-links": "Times the links between all pairs of nodes and writes a cluster file.",
    "status": "Shows how a run stands, from its directory alone.",
    "report": "Writes one HTML file about one or several runs.",
    "replay": "Decides again what a journal says was decided.",
    "trace": "Writes a run's decisions and changes of layout as a Chrome trace.",
    "simulate": "Runs policies on a virtual clock.",
    "generate": "Shows what a trained model writes: prompts in, text out.",
    "inspect-checkpoint": "Says what is inside a checkpoint, and whether it is complete.",
    "convert-checkpoint": "Converts a checkpoint: layout, vocabulary, number format, Hugging Face.",
}
"""Name -> what it does."""
_ELSEWHERE = {"launch": "copus_ext.launch.supervisor"}


def module_of(name: str) -> str:
    """The module whose `main` is a command."""
    return _ELSEWHERE.get(name, f"copus_ext.commands.{name.replace('-', '_')}")


def parser() -> argparse.ArgumentParser:
    """The command line up to the name of the command."""
    width = max(map(len, COMMANDS))
    p = argparse.ArgumentParser(
        prog="copus",
        usage="%(prog)s COMMAND [flags]",
        description="Pre-training on megatron-core that adapts batch and layout as it runs.",
        epilog="commands:\n"
        + "\n".join(f"  {name:{width}}  {what}" for name, what in COMMANDS.items())
        + "\n\n`copus COMMAND --help` shows the flags of one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("--version", action="version", version=f"copus {__version__}")
    p.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=argparse.SUPPRESS)
    return p


def main(argv: list[str] | None = None) -> int:
    """Runs the command that is named first with the words behind it; returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    name = parser().parse_args(words[:1]).command
    with running_as(f"copus {name}"):
        return importlib.import_module(module_of(name)).main(words[1:])


if __name__ == "__main__":
    sys.exit(main())
