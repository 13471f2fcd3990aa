"""Killed or hurt at any moment, does a supervised run go on?

    python -m bench.faults.campaign --runs 200 --seed 0
    python -m bench.faults.campaign --kinds disk clock stop signals damage second link --each 20

A tiny GPT trains on two ranks under the supervisor. It saves as it goes, every other run beside its
steps. The first command kills ranks, their writers, the launcher, the supervisor or all at once,
again and again in one run. The moments are drawn: while it starts, saves, has just committed or
evaluates. The run must come back by itself, or by the same command if the supervisor was killed.

The second command hurts each run once in another way. It fills the disk, steps the clock, stops a
rank, signals the supervisor, damages the newest checkpoint, starts a second run in the directory or
breaks the link between two nodes.

Each run must end with the losses of one that nobody hurt, bit for bit, and with every sample once.
It must leave no process, lock or half-made file. The commands write docs/results/faults.json and
faults_other.json and go on from what these hold.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.faults import kills
from bench.faults.kinds import KINDS, drawn, run_case
from bench.faults.supervised_run import uninterrupted
from bench.support import RESULTS, arguments, origin

_CHAIN = 5
Rows = list[dict[str, Any]]


def summary(rows: Rows, name: str) -> dict[str, Any]:
    """What the faults of some rows have in common; `name` is that of their seconds."""
    own = [row for row in rows if row["what"] != "nobody was there"]
    seconds = [row[name] for row in own if row.get(name) is not None]
    return {
        "recovered_with_equal_losses": sum(not row["problems"] for row in own),
        f"median_{name}": statistics.median(seconds) if seconds else None,
        f"longest_{name}": max(seconds, default=None),
    }


def rows_so_far(output: Path, seed: int) -> Rows:
    """Rows of an earlier run with the same seed."""
    found = json.loads(output.read_text()) if output.exists() else {}
    return found["rows"] if found.get("seed") == seed else []


def kill(args: argparse.Namespace) -> Rows:
    """Kills, waits, compares, writes; returns the rows."""
    output = args.output or RESULTS / "faults.json"
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
            result = {
                "what": "processes of a supervised run killed, and what became of the run",
                "seed": args.seed,
                "kills": sum(row["what"] != "nobody was there" for row in rows),
                **summary(rows, "seconds_to_run"),
                "victim": collections.Counter(row["victim"] for row in rows),
                "moment": collections.Counter(row["moment"] for row in rows),
                **origin(),
                "rows": rows,
            }
            output.write_text(json.dumps(result, indent=1) + "\n")
            _say(rows[-len(new) :], f"{len(rows)}/{args.runs} kills")
    return rows


def is_drawn_now(row: dict[str, Any], seed: int) -> bool:
    """Whether a row is of what is drawn for its number today."""
    if row["kind"] not in KINDS:
        return False
    case = dataclasses.asdict(drawn(row["kind"], seed, row["number"]))
    return all(row[name] == value for name, value in case.items())


def inject(args: argparse.Namespace) -> Rows:
    """Does the faults of some kinds that are not done yet, in turn; returns the rows of all."""
    output = args.output or RESULTS / "faults_other.json"
    rows = [row for row in rows_so_far(output, args.seed) if is_drawn_now(row, args.seed)]
    skipped = {name: why for name in args.kinds if (why := KINDS[name].why_not())}
    done = {(row["kind"], row["number"]) for row in rows}
    names = [name for name in args.kinds if name not in skipped]
    wanted = [(name, number) for number in range(args.each) for name in names]
    wanted = [one for one in wanted if one not in done]
    with tempfile.TemporaryDirectory() as temporary:
        reference = uninterrupted(Path(temporary) / "whole") if wanted else []
        for i, (name, number) in enumerate(wanted):
            at = Path(temporary) / f"{name}{number}"
            rows.append(run_case(drawn(name, args.seed, number), at, reference))
            of_kind = {name: [row for row in rows if row["kind"] == name] for name in KINDS}
            result = {
                "what": "a supervised run hurt once, and what became of it",
                "seed": args.seed,
                "kinds": {
                    name: {
                        "faults": sum(row["what"] != "nobody was there" for row in own),
                        **summary(own, "seconds"),
                        "seconds_are": KINDS[name].seconds_are,
                        "numbers_with_problems": [r["number"] for r in own if r["problems"]],
                    }
                    for name, own in of_kind.items()
                    if own
                },
                "not_done_here": skipped,
                **origin(),
                "rows": rows,
            }
            output.write_text(json.dumps(result, indent=1) + "\n")
            _say(rows[-1:], f"{i + 1}/{len(wanted)} faults")
    return rows


def _say(rows: Rows, so_far: str) -> None:
    for row in rows:
        print(f"{row['what']}: {'; '.join(row['problems']) or 'recovered'}")
    print(so_far, flush=True)


def main() -> int:
    """Does what the flags say; 1 if any run did not get over it."""
    p = arguments(__doc__)
    p.add_argument("--runs", type=int, default=200, help="kills")
    p.add_argument("--jobs", type=int, default=2, help="runs that are killed at a time")
    p.add_argument("--kinds", nargs="+", choices=KINDS, help="other faults instead of kills")
    p.add_argument("--each", type=int, default=20, help="faults of each kind")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--output", type=Path, help="docs/results/faults.json or faults_other.json")
    args = p.parse_args()
    rows = inject(args) if args.kinds else kill(args)
    return 1 if any(row["problems"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
