"""Killed or hurt at any moment, does a supervised run go on?

    python -m bench.faults.campaign --runs 200 --seed 0
    python -m bench.faults.campaign --kinds disk,clock,stop,signals,damage,second,link --each 20

A tiny GPT trains on two ranks under the supervisor and saves as it goes, every other run beside its
steps. The first command kills: ranks, their writers, the launcher, the supervisor or all at once,
again and again in one run, at drawn times and at drawn moments: while it starts, saves, has just
committed, evaluates. It must come back by itself (where the supervisor was killed: by the same
command). The second hurts each run once in other ways: a full disk, steps of the clock, a stopped
rank, signals to the supervisor, a damaged newest checkpoint, a second start on the directory, a
broken link between two nodes. Each run must end with the losses of one that nobody hurt, bit for
bit, with every sample once, and leave no process, lock or half-made file. They write
docs/results/faults.json and faults_other.json; what those already hold is not done again.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.faults import kills
from bench.faults.kinds import KINDS, drawn
from bench.faults.supervised_run import uninterrupted
from bench.support import RESULTS, arguments, origin

CHAIN = 5


def summary(rows: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """What the kills have in common."""
    seconds = [row["seconds_to_run"] for row in rows if row.get("seconds_to_run") is not None]
    counts = {
        by: dict(sorted(collections.Counter(row[by] for row in rows).items()))
        for by in ("victim", "moment")
    }
    return {
        "what": "processes of a supervised run killed, and what became of the run",
        "seed": seed,
        "kills": sum(row["what"] != "nobody was there" for row in rows),
        "recovered_with_equal_losses": sum(
            not row["problems"] for row in rows if row["what"] != "nobody was there"
        ),
        **counts,
        "median_seconds_to_run": statistics.median(seconds) if seconds else None,
        "longest_seconds_to_run": max(seconds, default=None),
        **origin(),
        "rows": rows,
    }


def rows_so_far(output: Path, seed: int, chains: list[Any]) -> list[dict[str, Any]]:
    """Rows of whole chains of an earlier run of the same kills."""
    found = json.loads(output.read_text()) if output.exists() else {}
    if found.get("seed") != seed:
        return []
    rows = found["rows"]
    return rows[: len(rows) // CHAIN * CHAIN] if len(rows) <= CHAIN * len(chains) else []


def kill(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Kills, waits, compares, writes; returns the rows."""
    output = args.output or RESULTS / "faults.json"
    chains = kills.drawn(args.seed, args.runs, chain=CHAIN)
    rows = rows_so_far(output, args.seed, chains)
    started, already = time.monotonic(), len(rows)
    todo = list(enumerate(chains))[already // CHAIN :]
    with (
        tempfile.TemporaryDirectory() as temporary,
        ThreadPoolExecutor(args.jobs) as pool,
    ):
        whole = uninterrupted(Path(temporary) / "whole") if todo else []
        found = pool.map(
            lambda one: kills.run_chain(one[1], Path(temporary) / str(one[0]), whole), todo
        )
        for (_, chain), new in zip(todo, found):
            rows += new
            output.write_text(json.dumps(summary(rows, args.seed), indent=1) + "\n")
            left = (time.monotonic() - started) / (len(rows) - already) * (args.runs - len(rows))
            for one, row in zip(chain, rows[-len(chain) :]):
                print(f"{one}: {row['what']}: {'; '.join(row['problems']) or 'recovered'}")
            print(f"{len(rows)}/{args.runs} kills, {left / 60:.1f} min left", flush=True)
    return rows


def summary_of_kinds(
    rows: list[dict[str, Any]], seed: int, skipped: dict[str, str]
) -> dict[str, Any]:
    """What the faults of each kind have in common."""
    kinds: dict[str, Any] = {}
    for name, kind in KINDS.items():
        own = [row for row in rows if row["kind"] == name and row["what"] != "nobody was there"]
        if not own:
            continue
        seconds = [row["seconds"] for row in own if row["seconds"] is not None]
        kinds[name] = {
            "faults": len(own),
            "recovered_with_equal_losses": sum(not row["problems"] for row in own),
            "median_seconds": statistics.median(seconds) if seconds else None,
            "longest_seconds": max(seconds, default=None),
            "seconds_are": kind.seconds_are,
            "numbers_with_problems": [row["number"] for row in own if row["problems"]],
        }
    return {
        "what": "a supervised run hurt once, and what became of it",
        "seed": seed,
        "kinds": kinds,
        "not_done_here": skipped,
        **origin(),
        "rows": rows,
    }


def is_drawn_now(row: dict[str, Any], seed: int) -> bool:
    """Whether a row is of what is drawn for its number today."""
    if row["kind"] not in KINDS:
        return False
    case = dataclasses.asdict(drawn(row["kind"], seed, row["number"]))
    return all(row[name] == value for name, value in case.items())


def hurt(args: argparse.Namespace, names: list[str]) -> list[dict[str, Any]]:
    """Does the faults of some kinds that are not done yet, in turn; returns the rows of all."""
    from tests.helpers.fault_kinds import KINDS, drawn, run_case
    from tests.helpers.fault_runs import uninterrupted

    output = args.output or RESULTS / "faults_other.json"
    found = json.loads(output.read_text()) if output.exists() else {}
    rows = found["rows"] if found.get("seed") == args.seed else []
    rows = [row for row in rows if is_drawn_now(row, args.seed)]
    skipped = {name: why for name in names if (why := KINDS[name].why_not())}
    for name, why in skipped.items():
        print(f"{name}: skipped: {why}", flush=True)
    done = {(row["kind"], row["number"]) for row in rows}
    wanted = [(name, number) for number in range(args.each) for name in names]
    wanted = [one for one in wanted if one not in done and one[0] not in skipped]
    with tempfile.TemporaryDirectory() as temporary:
        whole = uninterrupted(Path(temporary) / "whole") if wanted else []
        for i, (name, number) in enumerate(wanted):
            row = run_case(
                drawn(name, args.seed, number), Path(temporary) / f"{name}{number}", whole
            )
            rows.append(row)
            told = summary_of_kinds(rows, args.seed, skipped)
            output.write_text(json.dumps(told, indent=1) + "\n")
            print(f"{name} {number}: {row['what']}: {'; '.join(row['problems']) or 'recovered'}")
            left = sum(_usual_s(rows, name) for name, _ in wanted[i + 1 :])
            print(f"{i + 1}/{len(wanted)} faults, {left / 60:.1f} min left", flush=True)
    return rows


def _usual_s(rows: list[dict[str, Any]], name: str) -> float:
    """Seconds that a run of a kind takes, of any kind if none was seen."""
    return statistics.fmean(
        [r["wall_s"] for r in rows if r["kind"] == name] or [rows[-1]["wall_s"]]
    )


def main() -> int:
    """Does what the flags say; 1 if any run did not get over it."""
    p = arguments(__doc__)
    p.add_argument("--runs", type=int, default=200, help="kills")
    p.add_argument("--jobs", type=int, default=2, help="runs that are killed at a time")
    p.add_argument("--kinds", help="other faults instead of kills, separated by commas")
    p.add_argument("--each", type=int, default=20, help="faults of each kind")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--output", type=Path, help="docs/results/faults.json or faults_other.json")
    args = p.parse_args()
    names = [] if args.kinds is None else args.kinds.split(",")
    if unknown := set(names) - set(KINDS):
        p.error(f"--kinds {', '.join(sorted(unknown))}: choose from {', '.join(KINDS)}")
    rows = kill(args) if args.kinds is None else hurt(args, names)
    return 1 if any(row["problems"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
