"""How long do two CPU ranks wait for one another where they meet, besides the message?

    flock /tmp/ranks.lock python -m bench.collective_waits

Two ranks multiply matrices for a while, and then exchange a message, again and again. The time of
the same products alone is taken off. What a collective costs more behind long work than behind none
is how far one rank is behind. The planner takes that to be a constant times the root of the work's
seconds (`kernels.meeting_s`). Writes docs/results/collective_waits.json in five minutes: the rounds
differ. It needs a core per rank and nothing else running.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.support import arguments, launch, origin, write

NUMBERS = (65_536, 262_144)
PRODUCTS = (0, 4, 16, 64)
"""Matrix products between two meetings."""
_MEETINGS, _ROUNDS = 20, 7


def measured() -> list[dict[str, Any]]:
    """On a rank: rows of collective, numbers, seconds of work and seconds of the collective."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    left, right = torch.randn(512, 256), torch.randn(256, 256)

    def seconds(products: int, meet: Callable[[], Any] | None) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(_MEETINGS):
            for _ in range(products):
                torch.mm(left, right)
            if meet is not None:
                meet()
        return (time.perf_counter() - began) / _MEETINGS

    rows = []
    for numbers in NUMBERS:
        one, two, part = torch.randn(numbers), torch.randn(2 * numbers), torch.empty(numbers)
        kinds = {
            "all_gather": functools.partial(dist.all_gather_into_tensor, two, one),
            "reduce_scatter": functools.partial(dist.reduce_scatter_tensor, part, two),
            "all_to_all": functools.partial(dist.all_to_all_single, part, one),
        }
        for kind, meet in kinds.items():
            for products in PRODUCTS:
                found = []
                for _ in range(_ROUNDS):
                    alone = seconds(products, None)
                    found.append((seconds(products, meet) - alone, alone))
                row = {"collective": kind, "numbers": numbers}
                row["work_s"] = statistics.median(alone for _, alone in found) if products else 0.0
                rows.append(row | {"collective_s": statistics.median(s for s, _ in found)})
    dist.destroy_process_group()
    return rows


def behind(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each amount of work, the mean over collectives and messages of what it adds, over the
    root of its seconds."""
    none = {(r["collective"], r["numbers"]): r["collective_s"] for r in rows if not r["work_s"]}
    found = []
    for at in range(1, len(PRODUCTS)):
        some = rows[at :: len(PRODUCTS)]
        more = [r["collective_s"] - none[r["collective"], r["numbers"]] for r in some]
        work_s = statistics.mean(r["work_s"] for r in some)
        added = statistics.mean(more)
        found.append({"work_s": work_s, "added_s": added, "over_root": added / work_s**0.5})
    return found


def main() -> None:
    """Measures, prints and writes."""
    parser = arguments(__doc__, "collective_waits.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank-output", type=Path, help="used between the processes")
    args = parser.parse_args()
    if args.rank_output is not None:
        rows = measured()
        if os.environ["RANK"] == "0":
            args.rank_output.write_text(json.dumps(rows))
        return
    before, rounds = origin(), []
    with tempfile.TemporaryDirectory() as scratch:
        for at in range(args.rounds):
            output = Path(scratch) / f"{at}.json"
            launch(2, __file__, "--rank-output", output)
            rounds.append(json.loads(output.read_text()))
    found = [behind(rows) for rows in rounds]
    means = [statistics.mean(one["over_root"] for one in some) for some in found]
    result = {
        "what": "seconds that two CPU ranks wait for one another, by the work between two meetings",
        "over_root": statistics.median(means),
        "over_root_of_rounds": means,
        "by_work": found,
        **before,
        "rows": rounds,
    }
    write(args.output, result, hide=["rows"])


if __name__ == "__main__":
    main()
