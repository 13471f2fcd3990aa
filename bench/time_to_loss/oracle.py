"""How much could anybody save in S1? The best sequence of batches and layouts, with all knowledge.

    python -m bench.time_to_loss.oracle [--seeds N] [--first-seed N]

On S1's four clusters under its first truth: progress 1/(1 + B/Phi), Phi known, all speeds known,
pauses of changes of layout counted, measuring and deciding free. Stands over the best static batch
known afterwards, as S1 does. (Under the second truth S1 has its own `best_schedules`.) Writes
`oracle` into docs/results/time_to_loss_scenarios.json in a minute.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from bench.support import arguments
from bench.time_to_loss.scenarios import FILE, about, clusters, save, static_seconds
from bench.time_to_loss.unprofiled import Machine
from copus_ext.simulate.compare import optimum
from copus_ext.simulate.scenario import preset


def one(name: str, seed: int) -> dict[str, Any]:
    """A cluster with the speeds of a seed of S1."""
    s = Machine(preset(name), seed).known_afterwards()
    best = optimum(s, s.speeds(), s.last)
    static_s = min(static_seconds(s).values())
    return {
        "cluster": name,
        "seed": seed,
        "seconds": best.seconds,
        "relayouts": best.relayouts,
        "best_s": static_s,
        "over_best_static": best.seconds / static_s,
    }


def main() -> None:
    """Finds, prints and writes."""
    parser = arguments(__doc__, FILE)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=10)
    args = parser.parse_args()
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    rows = [one(name, seed) for name in clusters() for seed in seeds]
    by_cluster = {
        name: statistics.fmean(r["over_best_static"] for r in rows if r["cluster"] == name)
        for name in clusters()
    }
    mean = statistics.fmean(r["over_best_static"] for r in rows)
    flags = f"--seeds {args.seeds} --first-seed {args.first_seed}"
    found = {
        "mean": mean,
        "by_cluster": by_cluster,
        "rows": rows,
        **about(f"oracle {flags}", seeds),
    }
    save(args.output, {"oracle": found})
    print(json.dumps({"mean": mean, **by_cluster}, indent=1))


if __name__ == "__main__":
    main()
