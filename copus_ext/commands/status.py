"""Shows a running or finished run, reading only its directory.

copus status runs/quickstart --follow

Exit codes: 0 shown; 2 wrong usage; 5 there is no run in the directory, or a file cannot be read.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from copus_ext.monitor.run_files import END_BYTES, RunReader, run_problem
from copus_ext.monitor.run_status import status_of
from copus_ext.monitor.terminal import screen
from megatron.trainer.common.program import CommandParser, about, refused
from megatron.trainer.logging.metrics import encode

_EVERY_S = 2.0
_MIN_S = 0.1


def parser() -> argparse.ArgumentParser:
    p = CommandParser(**about("status.py", __doc__))
    p.add_argument("run", type=Path, metavar="RUN", help="directory of the run (--run-dir)")
    p.add_argument("--json", action="store_true", help="print a line of JSON instead of a screen")
    p.add_argument(
        "--follow",
        type=float,
        nargs="?",
        const=_EVERY_S,
        metavar="SECONDS",
        help=f"show it again every SECONDS (default: {_EVERY_S:g}) until the run is over",
    )
    return p


def main(argv: list[str] | None = None) -> int:
    """Shows the run; returns the exit code, which is 0 when the user has enough."""
    p = parser()
    args = p.parse_args(argv)
    if args.follow is not None and not args.follow >= _MIN_S:
        p.error(f"--follow {args.follow:g} must be at least {_MIN_S:g} s")
    try:
        if problem := run_problem(args.run):
            return refused("status.py", problem, 5)
        show(RunReader(args.run, max_bytes=END_BYTES), args.follow, as_json=args.json)
    except KeyboardInterrupt:
        if args.follow is None:
            raise
        return 0
    except OSError as error:
        return refused("status.py", f"{args.run} cannot be read: {error}", 5)
    return 0


def show(reader: RunReader, every_s: float | None, *, as_json: bool) -> None:
    """Prints the status, once or until the run is over.

    On a terminal the screen stays in place; in a pipe one follows the other.

    Raises:
        OSError: a file of the run cannot be read.
    """
    console, status = Console(highlight=False), status_of(reader)
    if every_s is not None and console.is_terminal and not as_json:
        with Live(screen(status), console=console, auto_refresh=False) as live:
            while not status.is_over:
                time.sleep(every_s)
                status = status_of(reader)
                live.update(screen(status), refresh=True)
        return
    while True:
        if as_json:
            print(encode(dataclasses.asdict(status)), flush=True)
        else:
            console.print(screen(status))
        if every_s is None or status.is_over:
            return
        time.sleep(every_s)
        status = status_of(reader)
        if not as_json:
            console.print()


if __name__ == "__main__":
    sys.exit(main())
