"""Shows how a run stands, from its directory alone: while it trains and after, from any machine.

python tools/status.py runs/quickstart --follow

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

from copus_ext.controller.decision_log import NAME as JOURNAL
from copus_ext.monitor.now import RunStatus, read_now
from copus_ext.monitor.screen import screen
from megatron.training.common.program import program_name, tell
from megatron.training.logging.metrics import METRICS_FILE, encode
from megatron.training.logging.tail_reader import open_plain

_EVERY_S = 2.0
_LEAST_S = 0.1
_FILES = (METRICS_FILE, JOURNAL, "config.json", "control")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog=program_name("status.py"),
        description=(__doc__ or "").splitlines()[0],
        allow_abbrev=False,
    )
    p.add_argument("run", type=Path, metavar="RUN", help="directory of the run (--run-dir)")
    p.add_argument("--json", action="store_true", help="print a line of JSON instead of a screen")
    p.add_argument(
        "--follow",
        type=float,
        nargs="?",
        const=_EVERY_S,
        metavar="SECONDS",
        help=f"show it again every so many seconds (default: {_EVERY_S:g}), until it is done",
    )
    p.add_argument("--serve", action="store_true", help="show a page that goes on updating")
    p.add_argument("--address", default="127.0.0.1", help="of --serve (default: %(default)s)")
    p.add_argument("--port", type=int, default=8642, help="of --serve (default: %(default)s)")
    token = p.add_mutually_exclusive_group()
    token.add_argument(
        "--token",
        action="store_true",
        help="of --serve: make a token and show the link with it; without it nothing is answered. "
        "Other addresses than this need one",
    )
    token.add_argument(
        "--token-file", type=Path, metavar="FILE", help="the same with the first line of FILE"
    )
    return p


def problem_of(run: Path) -> str:
    """Why a directory is no run; empty if it is."""
    if not run.is_dir():
        return f"{run} is no directory; give the --run-dir (or --save) of the run"
    try:
        is_run = any((run / name).exists() for name in _FILES)
    except OSError as error:
        return f"{run} cannot be read: {error.strerror or error}"
    for name in (METRICS_FILE, JOURNAL):
        try:
            open_plain(run / name).close()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{run / name} cannot be read: {error.strerror or error}"
    return "" if is_run else f"{run} holds no run: neither {METRICS_FILE} nor {JOURNAL} is there"


def main(argv: list[str] | None = None) -> int:
    """Shows the run; returns the exit code, which is 0 when the reader or the user has enough."""
    try:
        return answer(argv)
    except (BrokenPipeError, KeyboardInterrupt):
        return 0


def answer(argv: list[str] | None) -> int:
    """Shows what the flags ask for."""
    p = parser()
    args = p.parse_args(argv)
    if args.follow is not None and not args.follow >= _LEAST_S:
        p.error(f"--follow {args.follow:g} must be at least {_LEAST_S:g} s")
    if args.serve and (args.json or args.follow is not None):
        p.error("--serve goes without --json and --follow")
    if problem := problem_of(args.run):
        tell("status.py", f"error: {problem}")
        return 5
    if args.serve:
        return show_page(p, args)
    if args.json:
        show_lines(args.run, args.follow)
    else:
        show_screen(args.run, args.follow)
    return 0


def show_page(p: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Serves the page until Ctrl-C."""
    try:
        from copus_ext.monitor.serve import read_token, serve
    except ImportError as error:
        p.error(f'--serve needs {error.name}; run: pip install -e ".[report]"')
    try:
        token = None if args.token_file is None else read_token(args.token_file)
    except ValueError as error:
        p.error(str(error))
    except OSError as error:
        line = f"--token-file {args.token_file} cannot be read: {error.strerror or error}"
        tell("status.py", f"error: {line}")
        return 5
    where = {"address": args.address, "port": args.port}
    try:
        serve(args.run, **where, token=token, makes_token=args.token)
    except ValueError as error:
        p.error(str(error))
    except ImportError as error:
        p.error(f'--serve needs {error.name}; run: pip install -e ".[report]"')
    except (OSError, OverflowError) as error:
        p.error(f"--port {args.port} of --address {args.address} cannot be had: {error}")
    return 0


def show_lines(run: Path, every_s: float | None) -> None:
    """Prints JSON, once or again and again."""
    while True:
        now = read_now(run)
        print(encode(dataclasses.asdict(now)), flush=True)
        if every_s is None or is_over(now):
            return
        time.sleep(every_s)


def show_screen(run: Path, every_s: float | None) -> None:
    """Prints the screen, once or in the same place again and again; in a pipe below each other."""
    console, now = Console(highlight=False), read_now(run)
    if every_s is None or not console.is_terminal:
        console.print(screen(now))
        while every_s is not None and not is_over(now):
            time.sleep(every_s)
            now = read_now(run)
            console.print()
            console.print(screen(now))
        return
    with Live(screen(now), console=console, auto_refresh=False) as live:
        while not is_over(now):
            time.sleep(every_s)
            now = read_now(run)
            live.update(screen(now), refresh=True)


def is_over(now: RunStatus) -> bool:
    """Whether nothing will come any more; a run that failed may be started again."""
    return now.state == "done"


if __name__ == "__main__":
    sys.exit(main())
