"""Killed or hurt at any moment, does a supervised run go on?

    python -m bench.faults.campaign --runs 225 --seed 0

A tiny GPT trains on two ranks under the supervisor. It saves as it goes, every other run beside its
steps. Ranks, their writers, the launcher, the supervisor or all at once are killed, again and again
in one run. The moments are drawn: while it starts, saves, has just committed or evaluates. The run
must come back by itself, or by the same command if the supervisor was killed.

Each run must end with the losses of one that nobody hurt, bit for bit, and with every sample once.
It must leave no process, lock or half-made file. Writes docs/results/faults.json and goes on from
what it holds. `tests/distributed/test_faults.py` has other faults.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.faults import kills
from bench.faults.supervised_run import uninterrupted
from bench.support import arguments, origin

_CHAIN = 5
Rows = list[dict[str, Any]]


def rows_so_far(output: Path, seed: int) -> Rows:
    """Rows of an earlier run with the same seed."""
    found = json.loads(output.read_text()) if output.exists() else {}
    return found["rows"] if found.get("seed") == seed else []


def kill(args: argparse.Namespace) -> Rows:
    """Kills, waits, compares, writes; returns the rows."""
    output = args.output
    chains = kills.drawn(args.seed, args.runs, chain=_CHAIN)
    rows = rows_so_far(output, args.seed)
    rows = rows[: len(rows) // _CHAIN * _CHAIN] if len(rows) <= args.runs else []
    todo = list(enumerate(chains))[len(rows) // _CHAIN :]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.jobs) as pool:
        folder = Path(temporary)
        reference = uninterrupted(folder / "whole") if todo else []
        found = pool.map(lambda one: kills.run_chain(one[1], folder / str(one[0]), reference), todo)
        for new in found:
            rows += new
            own = [row for row in rows if row["what"] != "nobody was there"]
            seconds = [s for row in own if (s := row.get("seconds_to_run")) is not None]
            result = {
                "what": "processes of a supervised run killed, and what became of the run",
                "seed": args.seed,
                "kills": len(own),
                "recovered_with_equal_losses": sum(not row["problems"] for row in own),
                "median_seconds_to_run": statistics.median(seconds) if seconds else None,
                "longest_seconds_to_run": max(seconds, default=None),
                "victim": collections.Counter(row["victim"] for row in rows),
                "moment": collections.Counter(row["moment"] for row in rows),
                **origin(),
                "rows": rows,
            }
            output.write_text(json.dumps(result, indent=1) + "\n")
            _say(rows[-len(new) :], f"{len(rows)}/{args.runs} kills")
    return rows


def _say(rows: Rows, so_far: str) -> None:
    for row in rows:
        print(f"{row['what']}: {'; '.join(row['problems']) or 'recovered'}")
    print(so_far, flush=True)


def main() -> int:
    """Does what the flags say; 1 if any run did not get over it."""
    p = arguments(__doc__, "faults.json")
    p.add_argument("--runs", type=int, default=225, help="kills")
    p.add_argument("--jobs", type=int, default=2, help="runs that are killed at a time")
    p.add_argument("--seed", type=int, default=0)
    rows = kill(p.parse_args())
    return 1 if any(row["problems"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
