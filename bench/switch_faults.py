"""Kills a rank in the middle of a change of layout, again and again.

    python -m bench.switch_faults --runs 50 --seed 0

A tiny GPT trains on two ranks, saves, changes its layout and loses a rank at a drawn place of the
change, the way back among them. The other rank must leave by itself to be launched again; the run
that is started again loses a rank elsewhere, and after five of these it must have come to the
losses of one that was never broken, bit for bit. What the output already holds is not done again.
"""

from __future__ import annotations

import collections
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.support import arguments, origin
from tests.helpers.switch_cases import CHAIN, drawn, run_chain, uninterrupted


def summary(rows: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """What the runs have in common."""
    leaving = [row["seconds_to_leave"] for row in rows if row["seconds_to_leave"] is not None]
    return {
        "what": "ranks killed in the middle of a change of layout, and the runs started again",
        "seed": seed,
        "runs": len(rows),
        "resumed_with_equal_losses": sum(not row["problems"] for row in rows),
        "by_topic": dict(sorted(collections.Counter(row["topic"] for row in rows).items())),
        "median_seconds_to_leave": statistics.median(leaving) if leaving else None,
        "longest_seconds_to_leave": max(leaving, default=None),
        **origin(),
        "rows": rows,
    }


def rows_so_far(output: Path, cases: Sequence[Any]) -> list[dict[str, Any]]:
    """The rows of an earlier run of the same kills, which goes on after them; none of another."""
    rows = json.loads(output.read_text())["rows"] if output.exists() else []
    same = [all(row.get(k) == v for k, v in asdict(c).items()) for row, c in zip(rows, cases)]
    return rows if all(same) and len(rows) <= len(cases) else []


def main() -> int:
    """Kills, restarts, compares, writes; 1 if any run had a problem."""
    parser = arguments(__doc__, "switch_faults.json")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    cases = drawn(args.seed, args.runs)
    rows = rows_so_far(args.output, cases)
    with tempfile.TemporaryDirectory() as temporary:
        whole = uninterrupted(Path(temporary) / "whole")
        while len(rows) < args.runs:
            chain = cases[len(rows) : len(rows) + CHAIN]
            rows += run_chain(chain, Path(temporary) / str(len(rows)), whole)
            args.output.write_text(json.dumps(summary(rows, args.seed), indent=1) + "\n")
            for case, row in zip(chain, rows[-len(chain) :]):
                seen = "; ".join(row["problems"]) or f"resumed from {row['resumed_from']}"
                print(f"{case}: {seen}")
            print(f"{len(rows)}/{args.runs} kills", flush=True)
    return 1 if any(row["problems"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
