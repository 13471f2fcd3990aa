"""How fast is the best serving plan found, and what does it predict over equal bits?

    python -m bench.plan_serving

llama-3-70b, 32 prompts of 512 tokens, 128 to generate, on 8 unlike devices: three clusters, three
limits of the loss, three draws of loss increases. The increases are drawn, not measured: the bench
times the search. Seconds are predicted; no latency was measured. Writes
docs/results/plan_serving.json.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from bench.support import arguments, origin, write
from copus_ext.cost_model.cluster_spec import ClusterSpec
from copus_ext.cost_model.models import PRESETS
from copus_ext.extras.serving.costs import ServingCosts, Workload
from copus_ext.extras.serving.plan import plan_serving

BITS = (3, 4, 8, 16)
LIMITS = (0.02, 0.05, 0.1)
DRAWS = 3
TARGET_S = 10.0
T4 = {
    "name": "T4-16GB",
    "memory_bytes": "16GiB",
    "peak_flops": 65e12,
    "hbm_bytes_per_s": 0.32e12,
    "num_sms": 40,
}
CLUSTERS: dict[str, list[Any]] = {
    "4 A100-40GB, 4 T4": [{"gpu": "A100-40GB"}, {"gpu": T4}],
    "4 H100-80GB, 4 A100-40GB": [{"gpu": "H100-80GB"}, {"gpu": "A100-40GB"}],
    "4 T4, 4 T4 at 0.7 of the speed": [{"gpu": T4}, {"gpu": T4, "speed": 0.7}],
}


def cluster_of(nodes: list[Any]) -> ClusterSpec:
    """Two nodes of four GPUs, with the constants of A100 where none were fitted."""
    return ClusterSpec.from_json(
        {
            "gpu": "A100-40GB",
            "num_nodes": 2,
            "gpus_per_node": 4,
            "intra_bytes_per_s": "300GB/s",
            "nic_bytes_per_s": "25GB/s",
            "constants": "a100-80g",
            "nodes": nodes,
        }
    )


def drawn_increases(seed: int) -> Any:
    """[layers, bits]: 4 bits cost a layer .001 nats in the median; 3 bits 6 times, 8 bits .02."""
    each = 1e-3 * np.random.default_rng(seed).lognormal(0.0, 0.7, PRESETS["llama-3-70b"].num_layers)
    return np.stack([6 * each, each, 0.02 * each, 0 * each], axis=1)


def case(nodes: list[Any], limit: float, seed: int) -> dict[str, Any]:
    """Seconds of the search, and the plan beside the best with equal bits."""
    work = Workload(prompts=32, prompt=512, generate=128)
    start, cpu = time.perf_counter(), time.process_time()
    costs = ServingCosts(PRESETS["llama-3-70b"], cluster_of(nodes), work, bits=BITS, group_size=128)
    best, uniform = plan_serving(costs, drawn_increases(seed), max_loss_increase=limit)
    found: dict[str, Any] = {
        "limit": limit,
        "seed": seed,
        "search_s": time.perf_counter() - start,
        "search_cpu_s": time.process_time() - cpu,
    }
    if best is not None:
        found |= {
            "predicted_s": best.seconds,
            "loss_increase": best.found.costs.loss_increase,
            "stages": [len(s.bits) for s in best.found.stages],
            "layers_by_bits": {str(b): best.bits.count(b) for b in BITS},
            "uniform": {str(b): plan.seconds for b, plan in uniform.items()},
        }
        if uniform:
            found["faster"] = min(plan.seconds for plan in uniform.values()) / best.seconds
    return found


def main() -> None:
    args = arguments(__doc__, "plan_serving.json").parse_args()
    cases = {
        name: [case(nodes, limit, seed) for limit in LIMITS for seed in range(DRAWS)]
        for name, nodes in CLUSTERS.items()
    }
    flat = [one for some in cases.values() for one in some]
    gains = [one["faster"] for one in flat if "faster" in one]
    longest_s = max(one["search_s"] for one in flat)
    summary = {
        "cases": len(flat),
        "with_a_plan": sum("predicted_s" in one for one in flat),
        "longest_search_s": longest_s,
        "longest_search_cpu_s": max(one["search_cpu_s"] for one in flat),
        "target_s": TARGET_S,
        "target_met": longest_s <= TARGET_S,
        "predicted_times_faster_than_equal_bits": {
            "least": min(gains),
            "median": statistics.median(gains),
            "most": max(gains),
        },
    }
    write(args.output, {"origin": origin(), "summary": summary, "cases": cases}, hide=("cases",))


if __name__ == "__main__":
    main()
