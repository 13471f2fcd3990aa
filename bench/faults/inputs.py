"""What do thousands of wrong flags, files and records do to what reads them?

    python -m bench.faults.inputs --runs 10000 --seed 0

Each input is right but for what was drawn: bytes flipped, cut, doubled, JSON values of other kinds,
flags without a value. The reader must answer or say one line; a traceback, an endless search and a
half-made output are counted and listed. Writes docs/results/fault_inputs.json.
"""

from __future__ import annotations

import collections
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from bench.support import arguments, origin, write
from tests.helpers.bad_inputs import KINDS, spoil_and_read

_SHOWN_EVERY_S = 30.0


def main() -> int:
    """Spoils, reads, counts, writes; 1 if any input had a problem."""
    parser = arguments(__doc__, "fault_inputs.json")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    weights = {kind: weight for kind, (weight, _) in KINDS.items() if kind in args.kinds}
    # Of each kind so many that together they are `runs` or a few more.
    wanted = {k: -(-args.runs * w // sum(weights.values())) for k, w in weights.items()}
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
    write(args.output, result)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
