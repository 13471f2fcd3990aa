"""Writes decisions and changes of layout as a Chrome trace, for https://ui.perfetto.dev.

copus trace runs/quickstart                    # runs/quickstart/traces/decisions.json
copus trace runs/quickstart -o whole.json.gz   # one file with the steps of --profile

The run may go on, or have been stopped or killed. Exit codes: 0 done, 2 wrong usage, 5 there is no
run, or a file cannot be read or written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from copus_ext.extras.trace.timeline import (
    FILE,
    folder_of,
    timeline,
    traces_of,
    with_steps,
    write_trace,
)
from copus_ext.monitor.run_files import run_problem
from megatron.trainer.common.output_file import replace_file, write_output
from megatron.trainer.common.program import CommandParser, about, refused, tell


def parser() -> argparse.ArgumentParser:
    p = CommandParser(**about("trace.py", __doc__))
    p.add_argument("run", metavar="RUN", type=Path, help="directory of the run (--run-dir)")
    p.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write one FILE (.json or .json.gz) that also holds the steps of --profile",
    )
    return p


def main(argv: list[str] | None = None) -> int:
    """Writes the trace; returns the exit code."""
    args = parser().parse_args(argv)
    try:
        if problem := run_problem(args.run):
            return refused("trace.py", problem, 5)
        trace, paths = timeline(args.run), traces_of(args.run)
        output = args.output or folder_of(args.run) / FILE
    except OSError as error:
        return refused("trace.py", f"the run cannot be read: {error}", 5)
    if trace is None:
        return refused("trace.py", f"{args.run} holds no record of a run", 5)
    if args.output is not None:
        trace, problems = with_steps(trace, paths)
        for line in problems:
            tell("trace.py", f"note: {line}")
    try:
        write_trace(output, trace, replace_file if args.output is None else write_output)
    except OSError as error:
        return refused(
            "trace.py", f"{output} cannot be written: {error}; name another file with -o", 5
        )
    print(f"{output}: {len(trace['traceEvents'])} events")
    return 0


if __name__ == "__main__":
    sys.exit(main())
