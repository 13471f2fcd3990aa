"""How fast does the planner search?

    python -m bench.planner_speed

GPT-3 175B on 1,024 and 4,096 A100: the whole space of one global batch, and of ten at once; a
re-plan of some thousand configurations; and the ranking against one that simulates everything. Each
three times, the re-plan ten times; the best counts. Two commands are timed from start to end, five
times each: the plan of 1,024 A100, and the order of 64 nodes of three speeds. Writes
docs/results/planner_speed.json.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.support import ROOT, arguments, origin, write
from copus_ext.cost_model import schedule
from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.model_spec import PRESETS
from copus_ext.cost_model.step import step_time
from copus_ext.planner.plan import Plan
from copus_ext.planner.profile import Timing
from copus_ext.planner.search import Planner
from copus_ext.planner.space import to_rows

UNEVEN = {
    "gpu": "A100-80GB",
    "num_nodes": 64,
    "gpus_per_node": 8,
    "nic_bytes_per_s": "100GB/s",
    "intra_bytes_per_s": "300GB/s",
    "constants": "a100-80g",
    "nodes": [{"count": 30}, {"count": 14, "speed": 0.7}, {"count": 20, "speed": 0.9}],
}
"""A cluster file of 64 nodes, of which 34 are slower than the others."""
LADDER = [256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192]


def timed(action: Callable[[], Any], times: int) -> tuple[list[float], Any]:
    """Seconds of some runs, and what the last returned."""
    seconds, result = [], None
    for _ in range(times):
        start = time.perf_counter()
        result = action()
        seconds.append(time.perf_counter() - start)
    return seconds, result


def best_of(action: Callable[[], Any], times: int = 3) -> tuple[float, Any]:
    """Least seconds of some runs, and what the last returned."""
    seconds, result = timed(action, times)
    return min(seconds), result


def space(gpus: int, batches: list[int]) -> dict[str, Any]:
    """Configurations per second over the whole space, cold and warm."""
    model, cluster = PRESETS["gpt3-175b"], preset(f"a100-80g:{gpus}")

    def first() -> list[Plan]:
        for cached in (schedule._compiled, schedule._program):
            cached.cache_clear()
        return Planner(model, cluster).rank(batches)

    cold, plans = best_of(first)
    warm, _ = best_of(lambda: Planner(model, cluster).rank(batches))
    count = sum(p.num_ranked + sum(r.count for r in p.rejected) for p in plans)
    return {
        "gpus": gpus,
        "batches": len(batches),
        "configurations": count,
        "ranked": sum(p.num_ranked for p in plans),
        "first_s": cold,
        "again_s": warm,
        "configurations_per_s": count / warm,
        "first_configurations_per_s": count / cold,
        "best": [str(p.ranked[0].configuration) if p.ranked else p.status for p in plans],
    }


def replan() -> dict[str, Any]:
    """A table of about 2,000 configurations ranked again after a new measured time."""
    planner = Planner(PRESETS["llama-2-13b"].with_seq_length(2048), preset("h100-80g:16"))
    batches = [32, 48, 64, 96, 128]
    timings = []
    for plan in planner.rank(batches, top=12):
        for r in plan.ranked:
            step_s = 1.1 * r.prediction.step_s
            timings.append(Timing(configuration=r.configuration, step_s=step_s))
    planner.retime(timings[:-1])
    planner.rank(batches)

    def again() -> None:
        planner.retime(timings)
        planner.rank(batches)

    seconds, _ = best_of(again, 10)
    candidates = len(planner._judged(batches).candidates)
    return {"configurations": candidates, "timings": len(timings), "seconds": seconds}


def against_everything() -> dict[str, Any]:
    """The pruned ranking of a large space, and the one that simulates all of it."""
    planner = Planner(PRESETS["gpt3-175b"], preset("a100-80g:1024"))
    space = planner._judged(LADDER)
    points = space.points
    equal, compared = True, 0
    for plan in planner.rank(LADDER):
        mine = np.flatnonzero(space.fits & (points.global_batch_size == plan.global_batch_size))
        rows = to_rows(planner.model, planner.cluster, points.take(mine)).full()
        seconds = np.sort(step_time(rows, planner.constants).step_s)[: len(plan.ranked)]
        got = [r.prediction.step_s for r in plan.ranked]
        equal &= bool(np.allclose(got, seconds, rtol=1e-12))
        compared += len(mine)
    return {"configurations": len(points), "simulated": compared, "same_ranking": equal}


def whole(*words: str) -> dict[str, Any]:
    """Seconds of `tools/plan.py` with some words from its start to its end, five times."""
    command = [sys.executable, str(ROOT / "tools/plan.py"), *words]
    seconds, _ = timed(lambda: subprocess.run(command, check=True, capture_output=True), 5)
    return {"seconds": seconds, "least_s": min(seconds), "median_s": statistics.median(seconds)}


def commands() -> dict[str, Any]:
    """Times the plan of 1,024 A100, and the order of 64 nodes of three speeds."""
    with tempfile.TemporaryDirectory() as folder:
        uneven = Path(folder) / "cluster.json"
        uneven.write_text(json.dumps(UNEVEN))
        model, batch = ("--model", "gpt3-175b"), "--global-batch-size"
        return {
            "plan of 1,024 A100": whole(*model, "--cluster", "a100-80g:1024", batch, "1536"),
            "64 uneven nodes": whole("nodes", *model, "--cluster", str(uneven), batch, "512"),
        }


def main() -> None:
    """Measures, prints and writes."""
    args = arguments(__doc__, "planner_speed.json").parse_args()
    result = {
        "what": "seconds of the planner's search, NumPy on one core",
        "spaces": [space(1024, [1536]), space(1024, LADDER), space(4096, [4096])],
        "replan": replan(),
        "exactness": against_everything(),
        "commands": commands(),
        **origin(),
    }
    write(args.output, result)


if __name__ == "__main__":
    main()
