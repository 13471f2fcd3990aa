"""B11, kills: SIGKILL of ranks, their writers, the launcher, the supervisor, or all at once.

    python bench/fault_campaign.py --runs 200 --seed 0

A tiny GPT trains on two ranks under the supervisor and saves as it goes, every other run beside its
steps. Each run is killed again and again, at drawn times and at drawn moments: while it starts,
saves, has just committed, evaluates. It must come back by itself (where the supervisor was killed:
by the same command), end with the losses of a run that nobody hurt, bit for bit, with every sample
once, and leave no process, lock or half-made file. Writes docs/results/faults.json; what that
already holds of the same kills is not done again.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from support import RESULTS, open_source, origin

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


def main() -> int:
    """Kills, waits, compares, writes."""
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--runs", type=int, default=200)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--output", type=Path, default=RESULTS / "faults.json")
    args = p.parse_args()
    open_source()
    from tests.helpers.fault_cases import drawn, run_chain, uninterrupted

    chains = drawn(args.seed, args.runs, chain=CHAIN)
    rows = rows_so_far(args.output, args.seed, chains)
    with tempfile.TemporaryDirectory() as temporary:
        whole = uninterrupted(Path(temporary) / "whole")
        started, already = time.monotonic(), len(rows)
        for number, chain in enumerate(chains):
            if number < already // CHAIN:
                continue
            rows += run_chain(chain, Path(temporary) / str(number), whole)
            args.output.write_text(json.dumps(summary(rows, args.seed), indent=1) + "\n")
            left = (time.monotonic() - started) / (len(rows) - already) * (args.runs - len(rows))
            for kill, row in zip(chain, rows[-len(chain) :]):
                print(f"{kill}: {row['what']}: {'; '.join(row['problems']) or 'recovered'}")
            print(f"{len(rows)}/{args.runs} kills, {left / 60:.1f} min left", flush=True)
    return 1 if any(row["problems"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
