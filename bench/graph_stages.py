"""What do stages that are a graph save over a plain pipeline, predicted and measured?

    python -m bench.graph_stages

First the exact schedule: four equal branches before a decoder, each a stage of its own, and a
chain. Then the same on CPU ranks, in two ways, with the steps of both plans in turn:

* Two ranks, one for each core, compute. The four branches lie two by two on the ranks, and the
  decoder behind them is small. The planner chooses both plans from the measured times of the nodes.
  Then they run a chain.
* Two ranks, and five, run tiny nodes that sleep in place of a device, as five cores are not here,
  and other work on the cores counts less. Messages, order and gradients are real.

The plain pipeline runs on the same code with the same messages, only in its own order. Writes
docs/results/graph_stages.json. It needs two cores, nothing else running, and about seven minutes.
`--only` measures one of both ways.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from bench.support import arguments, launch, origin, write
from copus_ext.extras.graph_stages.search import GraphPartition, GraphProblem, best_graph_partition

BRANCHES = 4
COUNTS = (2, 4, 8, 16)
"""Micro-batches of a step in the exact schedule."""
COMPUTING = {
    "shape": {
        "branches": [
            {"name": f"view{i}", "num_layers": 4, "seq_length": 64, "nodes": 4, "merged": 8}
            for i in range(BRANCHES)
        ],
        "decoder_layers": 1,
        "seq_length": 32,
        "patch_size": 64,
    },
    "flags": "--hidden-size 128 --ffn-hidden-size 512 --num-attention-heads 4 --lr 1e-3",
    "samples": 4,
    "num_microbatches": [4, 2],
    "steps": 3,
    "rows": 8,
}
CHAIN = {
    **COMPUTING,
    "shape": {
        "branches": [
            {"name": "view", "num_layers": 12, "seq_length": 64, "nodes": 12, "merged": 8}
        ],
        "decoder_layers": 1,
        "seq_length": 32,
        "patch_size": 64,
    },
}
"""Nothing to run at the same time."""
TINY = {
    "flags": "--hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --lr 1e-3",
    "samples": 1,
    "steps": 2,
    "rows": 6,
}


def tiny_shape(nodes: int) -> dict[str, Any]:
    """Four branches of so many nodes."""
    own = {"num_layers": nodes, "seq_length": 8, "nodes": nodes, "merged": 2}
    views = [{"name": f"view{i}", **own} for i in range(BRANCHES)]
    return {"branches": views, "decoder_layers": 1, "seq_length": 8, "patch_size": 8}


SLEEPING = {
    2: {
        **TINY,
        "shape": tiny_shape(4),
        "num_microbatches": [2, 4, 8],
        "sleep_s": [[0.008, 0.016]] * (4 * BRANCHES + 1),
    },
    5: {
        **TINY,
        "shape": tiny_shape(1),
        "num_microbatches": [4, 8],
        "sleep_s": [[0.04, 0.08]] * (BRANCHES + 1),
    },
}
"""By ranks."""


def exact(num_branches: int, count: int) -> dict[str, Any]:
    """Equal branches before a decoder of the same work; one branch is a chain."""
    num = num_branches + 1
    problem = GraphProblem(
        names=(*(f"view{i}" for i in range(num_branches)), "decoder"),
        edges=tuple((i, num_branches) for i in range(num_branches)),
        num_stages=num,
        num_microbatches=count,
        forward_s=1.0,
        backward_s=2.0,
    )
    graph = best_graph_partition(problem)
    plain = best_graph_partition(problem, is_sequential=True)
    assert isinstance(graph, GraphPartition) and isinstance(plain, GraphPartition)
    return {
        "branches": num_branches,
        "stages": num,
        "num_microbatches": count,
        "graph_s": graph.step_s,
        "sequential_s": plain.step_s,
        "ratio": plain.step_s / graph.step_s,
        "in_flight": {
            "graph": graph.graph.in_flight(count),
            "sequential": plain.graph.in_flight(count),
        },
    }


def on_ranks(ranks: int, request: dict[str, Any]) -> dict[str, Any]:
    """Runs the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "request.json", Path(folder) / "result.json"
        asked.write_text(json.dumps(request))
        launch(ranks, "-m", "bench.graph_stages_ranks", asked, answered)
        return {"ranks": ranks, "request": request, **json.loads(answered.read_text())}


def table(result: dict[str, Any]) -> str:
    """Rows for the documentation."""
    lines = ["| where | M | plain s | graph s | ratio | predicted |", "|---|---|---|---|---|---|"]
    for p in result["exact"]:
        times = f"{p['sequential_s']:g} | {p['graph_s']:g} | {p['ratio']:.2f} | – |"
        lines.append(f"| {p['branches']} branches, exact | {p['num_microbatches']} | {times}")
    for name, run in [("computing", x) for x in result["computing"]] + [
        ("sleeping", x) for x in result["sleeping"]
    ]:
        for p in run["points"]:
            m = p["measured"]
            times = f"{m['sequential_wall_s']:.3f} | {m['graph_wall_s']:.3f}"
            ratio = f"{m['median_ratio']:.2f} ({m['median_low_95']:.2f}–{m['median_high_95']:.2f})"
            branches = len(run["request"]["shape"]["branches"])
            where = f"{run['ranks']} ranks, {branches} branches, {name} | {p['num_microbatches']}"
            lines.append(f"| {where} | {times} | {ratio} | {p['predicted_ratio']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Predicts, measures, prints and writes."""
    parser = arguments(__doc__, "graph_stages.json")
    parser.add_argument("--only", choices=("computing", "sleeping"), help="keep the rest")
    args = parser.parse_args()
    before = json.loads(args.output.read_text()) if args.output.exists() else {}
    points = [exact(branches, count) for branches in (BRANCHES, 1) for count in COUNTS]
    result = {
        **origin(),
        "command": "python -m bench.graph_stages",
        "exact": points,
        "computing": before.get("computing", []),
        "sleeping": before.get("sleeping", []),
    }
    if args.only in (None, "computing"):
        load = origin()["load_average"]
        result["computing"] = [
            {"load_average": load, **on_ranks(2, request)} for request in (COMPUTING, CHAIN)
        ]
    if args.only in (None, "sleeping"):
        result["sleeping"] = [on_ranks(ranks, request) for ranks, request in SLEEPING.items()]
    write(args.output, result, hide=("computing", "sleeping"))
    print(table(result))


if __name__ == "__main__":
    main()
