"""Writes one HTML page about runs: what happened, what was changed, and why.

copus report runs/quickstart -o report.html
copus report runs/fixed runs/adaptive -o comparison.html
copus report runs/quickstart -o report.html --follow

The file needs no network. It may be made of a run that goes on, and of one that was killed. With
--follow it is written again and again, and an open page reloads itself. Exit codes: 0 done, 2 wrong
usage, 5 there is no run, or it cannot be read, or the file not be written.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.training.common.program import CommandParser, program_name, tell

if TYPE_CHECKING:
    from copus_ext.monitor.report import ReportData

_MAX_RUNS = 16
_EVERY_S = 30.0
_MIN_S = 1.0


def parser() -> argparse.ArgumentParser:
    p = CommandParser(
        prog=program_name("report.py"),
        description=(__doc__ or "").splitlines()[0],
    )
    p.add_argument(
        "runs",
        metavar="RUN",
        type=Path,
        nargs="+",
        help="--run-dir of a run, or its journal.jsonl if nothing else is left",
    )
    p.add_argument("-o", "--output", type=Path, required=True, help="the HTML file to write")
    p.add_argument(
        "--follow",
        type=float,
        nargs="?",
        const=_EVERY_S,
        metavar="SECONDS",
        help=f"write it again every SECONDS (default: {_EVERY_S:g}) until the runs are done",
    )
    return p


def main(argv: list[str] | None = None) -> int:
    """Reads the runs and writes the page; returns the exit code."""
    args = parser().parse_args(argv)
    if len(args.runs) > _MAX_RUNS:
        return _say(f"{len(args.runs)} RUNs are too many for a page; name at most {_MAX_RUNS}", 2)
    if args.follow is not None and not _MIN_S <= args.follow < float("inf"):
        return _say(f"--follow {args.follow:g} must be at least {_MIN_S:g} s", 2)
    from copus_ext.monitor.run_files import run_problem

    try:
        for problem in (run_problem(run, takes_journal=True) for run in args.runs):
            if problem:
                return _say(problem, 5)
    except OSError as error:
        return _say(f"a run cannot be read: {error}", 5)
    try:
        from copus_ext.monitor.report import ReportData, plotly_code

        plotly_code()
    except ImportError as error:
        return _say(f'{error.name} is missing; run: pip install -e ".[report]"', 5)
    data = ReportData(args.runs)
    try:
        data.refresh()
        for run in data.empty_runs:
            tell("report.py", f"note: {run} holds no record of a run yet")
        goes_on = write(data, args.output, reload_s=args.follow)
        size = args.output.stat().st_size / 1e6
        print(f"{args.output}: {size:.1f} MB{', Ctrl-C ends it' if goes_on else ''}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while args.follow is not None and goes_on:
                time.sleep(args.follow)
                data.refresh()
                goes_on = write(data, args.output, reload_s=args.follow)
    except OSError as error:
        is_output = str(error.filename).startswith(str(args.output))
        what = f"-o {args.output} cannot be written" if is_output else "a run cannot be read"
        return _say(f"{what}: {error}", 5)
    return 0


def write(data: ReportData, output: Path, *, reload_s: float | None) -> bool:
    """Writes the page, whole or not at all: a browser may have it open.

    Returns:
        Whether the page reloads itself, because a run goes on.

    Raises:
        OSError: it cannot be written.
    """
    from copus_ext.monitor.report import render

    payload = data.payload(reload_s=reload_s)
    unfinished = output.with_name(f"{output.name}.unfinished")
    unfinished.write_text(render(payload), encoding="utf-8")
    unfinished.replace(output)
    return payload["reload_s"] is not None


def _say(line: str, code: int) -> int:
    tell("report.py", f"error: {line}")
    return code


if __name__ == "__main__":
    sys.exit(main())
