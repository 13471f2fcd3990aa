"""B11, inputs: thousands of wrong flags, files and records, read by what reads them.

    python bench/fault_inputs.py --runs 10000 --seed 0

Each input is right but for what was drawn: bytes flipped, cut, doubled, JSON values of other kinds,
flags without a value. The reader must answer or say one line; a traceback, an endless search and a
half-made output are counted and listed. Writes docs/results/fault_inputs.json.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from support import RESULTS, open_source, origin

_SHOWN_EVERY_S = 30.0


def numbers(runs: int, weights: dict[str, int]) -> dict[str, int]:
    """Of each kind so many that together they are `runs` or a few more."""
    total = sum(weights.values())
    return {kind: -(-runs * weight // total) for kind, weight in weights.items()}


def main() -> int:
    """Spoils, reads, counts, writes."""
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--runs", type=int, default=10_000)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--kinds", nargs="*", help="default: all")
    p.add_argument("--output", type=Path, default=RESULTS / "fault_inputs.json")
    args = p.parse_args()
    open_source()
    warnings.filterwarnings("ignore")
    from tests.helpers.bad_inputs import KINDS, spoil_and_read

    wanted = numbers(args.runs, {k: w for k, (w, _) in KINDS.items() if k in (args.kinds or KINDS)})
    problems: list[dict[str, Any]] = []
    done: collections.Counter[str] = collections.Counter()
    started = shown = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for kind, number in wanted.items():
            for index in range(number):
                problem = spoil_and_read(kind, args.seed, index, Path(folder))
                done[kind] += 1
                if problem:
                    problems.append({"kind": kind, "index": index, "problem": problem})
                    print(f"{kind} {index}: {problem}", flush=True)
                if time.monotonic() - shown > _SHOWN_EVERY_S:
                    shown = time.monotonic()
                    print(f"{done.total()}/{sum(wanted.values())}, now {kind}", flush=True)
    result = {
        "what": "wrong inputs, and what their readers did with them",
        "seed": args.seed,
        "inputs": done.total(),
        "by_kind": dict(done),
        "problems": problems,
        "seconds": time.monotonic() - started,
        **origin(),
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{done.total()} inputs, {len(problems)} with a problem; {args.output}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
