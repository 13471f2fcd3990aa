"""Writes one HTML file about one or several runs: what happened, what was changed, and why.

python tools/report.py runs/quickstart -o report.html
python tools/report.py runs/fixed runs/adaptive -o comparison.html

The file needs no network. It may be made while a run goes on, and of a run that was killed. Exit
codes: 0 done, 2 wrong usage, 5 a run cannot be read or the file not be written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron.training.common.program import program_name, tell

_MOST_RUNS = 16


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog=program_name("report.py"),
        description=(__doc__ or "").splitlines()[0],
        allow_abbrev=False,
    )
    p.add_argument(
        "runs",
        metavar="RUN",
        type=Path,
        nargs="+",
        help="--run-dir of a run, or its journal.jsonl if nothing else is left",
    )
    p.add_argument("-o", "--output", type=Path, required=True, help="the HTML file to write")
    return p


def main(argv: list[str] | None = None) -> int:
    """Reads the runs and writes the page; returns the exit code."""
    args = parser().parse_args(argv)
    if len(args.runs) > _MOST_RUNS:
        return _say(f"{len(args.runs)} RUNs are too many for a page; name at most {_MOST_RUNS}", 2)
    try:
        from copus_ext.monitor.page import ReportData, plotly_code, render

        plotly_code()
    except ImportError as error:
        return _say(f'{error.name} is missing; run: pip install -e ".[report]"', 5)
    try:
        book = ReportData(args.runs)
    except ValueError as error:
        return _say(str(error), 2)
    try:
        book.refresh()
        for run in book.empty_runs:
            tell("report.py", f"note: {run} holds no record of a run yet")
        page = render(book.payload())
    except OSError as error:
        return _say(f"a run cannot be read: {error}", 5)
    try:
        # Whole or not at all: a browser may have the file open.
        unfinished = args.output.with_name(f"{args.output.name}.unfinished")
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(args.output)
    except OSError as error:
        return _say(f"-o {args.output} cannot be written: {error}", 5)
    print(f"{args.output}: {len(page) / 1e6:.1f} MB")
    return 0


def _say(line: str, code: int) -> int:
    tell("report.py", f"error: {line}")
    return code


if __name__ == "__main__":
    sys.exit(main())
