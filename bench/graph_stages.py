"""What do stages that are a graph save over a plain pipeline, predicted and measured?

    python -m bench.graph_stages

Four equal branches before a decoder, each a stage of its own, in three ways. The steps of both
plans, which the planner chooses from the measured times of the nodes, come in turn:

* Two ranks, one for each core, compute. The four branches lie two by two on the ranks, and the
  decoder behind them is small. Then they run a chain, which has nothing to run at the same time.
* Two ranks, and five, run tiny nodes that sleep in place of a device, as five cores are not here,
  and other work on the cores counts less. Messages, order and gradients are real.

The plain pipeline runs on the same code with the same messages, only in its own order. Writes
docs/results/graph_stages.json. It needs two cores, nothing else running, and about seven minutes.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

from bench.support import arguments, balanced_rows, block, launch, origin, ratio_summary, write

MESSAGES = 30


def shape_of(branches: int, layers: int, nodes: int, length: int, merged: int) -> dict[str, Any]:
    """Branches with so many layers in so many nodes, and a small decoder."""
    own = {"num_layers": layers, "nodes": nodes, "seq_length": length, "merged": merged}
    views = [{"name": f"view{i}", **own} for i in range(branches)]
    decoder = {"decoder_layers": 1, "seq_length": length // 2 if length > 8 else length}
    return {"branches": views, **decoder, "patch_size": length}


COMPUTING = {
    "flags": "--hidden-size 128 --ffn-hidden-size 512 --num-attention-heads 4 --lr 1e-3",
    **{"samples": 4, "num_microbatches": [4, 2], "steps": 3, "rows": 8},
}
SLEEPING = {
    "flags": "--hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --lr 1e-3",
    **{"samples": 1, "steps": 2, "rows": 6},
}
CASES: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "computing": [
        (2, {**COMPUTING, "shape": shape_of(4, 4, 4, 64, 8)}),
        (2, {**COMPUTING, "shape": shape_of(1, 12, 12, 64, 8)}),
    ],
    "sleeping": [
        (
            2,
            {
                **SLEEPING,
                "shape": shape_of(4, 4, 4, 8, 2),
                "num_microbatches": [2, 4, 8],
                "sleep_s": [[0.008, 0.016]] * 17,
            },
        ),
        (
            5,
            {
                **SLEEPING,
                "shape": shape_of(4, 1, 1, 8, 2),
                "num_microbatches": [4, 8],
                "sleep_s": [[0.04, 0.08]] * 5,
            },
        ),
    ],
}
"""Ranks and what they run."""


def node_seconds(shape: Any, batch: Any, nodes: Any, times: int) -> list[list[float]]:
    """Seconds of the forward and backward pass of every node, all ranks at once: the mean over the
    ranks of the medians over times and over branches, which are alike."""
    import torch
    import torch.distributed as dist

    seconds: list[list[list[float]]] = [[[], []] for _ in shape.nodes]
    producers = [[a for a, b in shape.edges if b == n] for n in range(len(shape.nodes))]
    last = len(shape.nodes) - 1
    dist.barrier()
    for _ in range(times):
        outputs: list[Any] = []
        for n in range(len(shape.nodes)):
            inputs = [outputs[a].detach().requires_grad_() for a in producers[n]]
            begun = time.perf_counter()
            output = nodes[n](batch, inputs)
            made = time.perf_counter()
            torch.autograd.backward(output, None if n == last else torch.ones_like(output))
            seconds[n][0].append(made - begun)
            seconds[n][1].append(time.perf_counter() - made)
            outputs.append(output)
    alike: dict[str, list[int]] = {}
    for n, name in enumerate(shape.nodes):
        alike.setdefault(name.partition(".")[2] if n < last else name, []).append(n)
    group_of = {n: group for group in alike.values() for n in group}
    own = torch.tensor(
        [
            [statistics.median(s for n in group_of[i] for s in seconds[n][back]) for back in (0, 1)]
            for i in range(len(shape.nodes))
        ]
    )
    dist.all_reduce(own)
    return (own / dist.get_world_size()).tolist()


def message_seconds(shape: Any, size: int, width: int) -> list[float]:
    """Half of the median time there and back of the output of every node, from rank 0 to 1."""
    import torch
    import torch.distributed as dist

    found = []
    for rows in shape.output_lengths():
        tensor, taken = torch.zeros(rows, size, width), []
        for _ in range(MESSAGES):
            begun = time.perf_counter()
            if dist.get_rank() == 0:
                dist.send(tensor, 1)
                dist.recv(tensor, 1)
            elif dist.get_rank() == 1:
                dist.recv(tensor, 0)
                dist.send(tensor, 0)
            taken.append((time.perf_counter() - begun) / 2)
        found.append(statistics.median(taken[MESSAGES // 3 :]))
    own = torch.tensor(found)
    dist.broadcast(own, 0)
    return own.tolist()


def worker(request: dict[str, Any]) -> dict[str, Any]:
    """One rank: costs, plans, and times of both plans for every number of micro-batches."""
    import torch
    import torch.distributed as dist

    from copus_ext.extras.graph_stages.model import build_nodes
    from copus_ext.extras.graph_stages.train import (
        TextWindows,
        config_of,
        on_device,
        shape_of_json,
        whole_nodes,
    )
    from megatron.trainer.distributed.process_groups import destroy_groups

    torch.set_num_threads(1)
    shape, size = shape_of_json(request["shape"]), request["samples"]
    config, text = config_of(request["flags"].split()), Path(os.__file__).read_bytes()
    sleeps: Any = request.get("sleep_s")
    with on_device("cpu") as device:
        groups = whole_nodes()
        every = build_nodes(shape, config, groups, range(len(shape.nodes)))
        costs = node_seconds(shape, TextWindows(text, shape, seed=1).batch(0, size), every, 12)
        if sleeps:
            costs = [[f + a, b + c] for (f, b), (a, c) in zip(costs, sleeps)]
        messages = message_seconds(shape, size, config.model.hidden_size)
        model = config, shape, text, device, groups
        points = [
            point(count, model, costs, messages, request) for count in request["num_microbatches"]
        ]
        destroy_groups()
        dist.destroy_process_group()
    return {"nodes": list(shape.nodes), "node_s": costs, "message_s": messages, "points": points}


def point(
    count: int, model: tuple[Any, ...], costs: Any, messages: Any, request: dict[str, Any]
) -> dict[str, Any]:
    """Times and plans of both ways with so many micro-batches."""
    import torch.distributed as dist

    from copus_ext.extras.graph_stages.search import (
        GraphPartition,
        GraphProblem,
        best_graph_partition,
    )
    from copus_ext.extras.graph_stages.train import BranchedTraining

    config, shape, text, device, groups = model
    size, sleeps = request["samples"], cast("Any", request.get("sleep_s"))
    problem = GraphProblem(
        names=shape.nodes,
        edges=shape.edges,
        num_stages=dist.get_world_size(),
        num_microbatches=count,
        forward_s=[f for f, _ in costs],
        backward_s=[b for _, b in costs],
        message_s=messages,
    )
    plans, sides, losses = {}, {}, {}
    for name in ("sequential", "graph"):
        plan = best_graph_partition(problem, is_sequential=name == "sequential")
        assert isinstance(plan, GraphPartition)
        training = BranchedTraining(config, shape, plan.graph, text, device, groups)
        for n, node in training.nodes.items() if sleeps else ():
            training.nodes[n] = sleeping(node, sleeps[n])
        own = losses[name] = []
        step = lambda t=training, own=own: own.append(t.step(count, size))  # noqa: E731
        plans[name], sides[name] = plan, lambda s=step: block(s, request["steps"])
    rows = balanced_rows(sides, request["rows"])
    return {
        "num_microbatches": count,
        "measured": ratio_summary(rows, "wall_s", of="sequential", to="graph"),
        "predicted_s": {name: plan.step_s for name, plan in plans.items()},
        "predicted_ratio": plans["sequential"].step_s / plans["graph"].step_s,
        "stages": {name: plan.stages for name, plan in plans.items()},
        "largest_difference_of_losses": max(
            abs(a - b) for a, b in zip(losses["graph"], losses["sequential"])
        ),
    }


def sleeping(node: Any, seconds: list[float]) -> Any:
    """A node that computes, and then sleeps in both directions in place of a device."""
    import torch

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
            ctx.backward_s = backward_s
            time.sleep(forward_s)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            time.sleep(ctx.backward_s)
            return gradients[0], None, None

    class Sleeping(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.node = node

        def forward(self, batch: Any, inputs: Any) -> torch.Tensor:
            return Sleep.apply(self.node(batch, inputs), *seconds)  # pyright: ignore[reportReturnType]

    return Sleeping()


def main() -> None:
    parser = arguments(__doc__, "graph_stages.json")
    parser.add_argument("--only", choices=CASES, help="keep the rest")
    args = parser.parse_args()
    found = json.loads(args.output.read_text()) if args.output.exists() else {}
    for name in [args.only] if args.only else CASES:
        found[name] = []
        for ranks, request in CASES[name]:
            with tempfile.TemporaryDirectory() as folder:
                asked, answered = Path(folder) / "request.json", Path(folder) / "result.json"
                asked.write_text(json.dumps(request))
                launch(ranks, "-m", "bench.graph_stages", "--worker", asked, answered)
                own = json.loads(answered.read_text())
            found[name].append({"ranks": ranks, "request": request, **own})
            for p in own["points"]:
                low, ratio, high = (
                    f"{p['measured'][f'median_{key}']:.2f}"
                    for key in ("low_95", "ratio", "high_95")
                )
                about = f"{name}, {ranks} ranks, {len(request['shape']['branches'])} branches"
                print(f"{about}, {p['num_microbatches']} micro-batches: {ratio} ({low} to {high})")
                print(f"predicted {p['predicted_ratio']:.2f}", flush=True)
    write(args.output, {**found, **origin()}, hide=[*CASES])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        result = worker(json.loads(Path(sys.argv[2]).read_text()))
        if os.environ["RANK"] == "0":
            Path(sys.argv[3]).write_text(json.dumps(result))
    else:
        main()
