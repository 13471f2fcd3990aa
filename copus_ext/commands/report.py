"""Writes one HTML page about a run: what happened, what was changed, and why.

copus report runs/quickstart -o report.html
copus report runs/quickstart -o report.html --follow

The file has no script and needs no network. It may be made of a run that goes on, and of one that
was killed. With --follow it is written again and again, and an open page reloads itself. Exit
codes: 0 done, 2 wrong usage, 5 there is no run, or it cannot be read, or the file not be written.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

from copus_ext.monitor.report import render, report_of
from copus_ext.monitor.run_files import RunReader, run_problem
from megatron.trainer.common.output_file import write_output
from megatron.trainer.common.program import CommandParser, about, refused, tell

_EVERY_S = 30.0
_MIN_S = 1.0


def parser() -> argparse.ArgumentParser:
    p = CommandParser(**about("report.py", __doc__))
    p.add_argument(
        "run",
        metavar="RUN",
        type=Path,
        help="--run-dir of a run, or its journal.jsonl if nothing else is left",
    )
    p.add_argument("-o", "--output", type=Path, required=True, help="the HTML file to write")
    p.add_argument(
        "--follow",
        type=float,
        nargs="?",
        const=_EVERY_S,
        metavar="SECONDS",
        help=f"write it again every SECONDS (default: {_EVERY_S:g}) until the run is over",
    )
    return p


def main(argv: list[str] | None = None) -> int:
    """Reads the run and writes the page; returns the exit code."""
    args = parser().parse_args(argv)
    if args.follow is not None and not _MIN_S <= args.follow < float("inf"):
        return refused("report.py", f"--follow {args.follow:g} must be at least {_MIN_S:g} s", 2)
    try:
        if problem := run_problem(args.run, takes_journal=True):
            return refused("report.py", problem, 5)
        reader = RunReader(args.run)
        num_bytes, goes_on = write(reader, args.output, reload_s=args.follow)
        if reader.is_empty:
            tell("report.py", f"note: {args.run} holds no record of a run yet")
        size = f"{num_bytes / 1e3:.0f} kB"
        print(f"{args.output}: {size}{', Ctrl-C ends it' if goes_on else ''}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while goes_on and args.follow is not None:
                time.sleep(args.follow)
                _, goes_on = write(reader, args.output, reload_s=args.follow)
    except OSError as error:
        is_output = error.filename == str(args.output)
        what = f"-o {args.output} cannot be written" if is_output else "a run cannot be read"
        return refused("report.py", f"{what}: {error}", 5)
    return 0


def write(reader: RunReader, output: Path, *, reload_s: float | None) -> tuple[int, bool]:
    """Writes the page, whole or not at all: a browser may have it open.

    Returns:
        Its bytes, and whether the page reloads itself, because the run goes on.

    Raises:
        OSError: a file of the run cannot be read, or the page not be written.
    """
    report = report_of(reader, reload_s=reload_s)
    return write_output(output, render(report)), report.reload_s is not None


if __name__ == "__main__":
    sys.exit(main())
