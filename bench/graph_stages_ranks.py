"""The ranks of `bench.graph_stages`: times nodes, plans, and steps both plans in turn.

torchrun --nproc-per-node RANKS -m bench.graph_stages_ranks REQUEST.json RESULT.json
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.support import balanced_rows, block, ratio_summary
from copus_ext.extras.graph_stages.model import BranchedShape, build_nodes
from copus_ext.extras.graph_stages.search import GraphPartition, GraphProblem, best_graph_partition
from copus_ext.extras.graph_stages.train import (
    BranchedTraining,
    TextWindows,
    config_of,
    on_device,
    shape_of_json,
    whole_nodes,
)
from megatron.training.distributed.process_groups import destroy_groups

MESSAGES = 30


class _Sleep(torch.autograd.Function):
    """Takes time in both directions."""

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
    """A node that computes, and then sleeps in place of a device."""

    def __init__(self, node: torch.nn.Module, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.node, self.seconds = node, (forward_s, backward_s)

    def forward(self, batch: Any, inputs: Any) -> torch.Tensor:
        return _Sleep.apply(self.node(batch, inputs), *self.seconds)  # pyright: ignore[reportReturnType]


def node_seconds(shape: BranchedShape, batch: Any, nodes: Any, times: int) -> list[list[float]]:
    """Seconds of the forward and backward pass of every node, all ranks at once: the mean over the
    ranks of the medians over times and over branches, which are alike."""
    seconds: list[list[list[float]]] = [[[], []] for _ in shape.nodes]
    producers = [[a for a, b in shape.edges if b == n] for n in range(len(shape.nodes))]
    last = len(shape.nodes) - 1
    dist.barrier()
    for _ in range(times):
        outputs: list[torch.Tensor] = []
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


def message_seconds(shape: BranchedShape, size: int, width: int) -> list[float]:
    """Half of the median time there and back of the output of every node, from rank 0 to 1."""
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


def planned(problem: GraphProblem) -> dict[str, GraphPartition]:
    """Both plans."""
    both = {
        "graph": best_graph_partition(problem),
        "sequential": best_graph_partition(problem, is_sequential=True),
    }
    assert all(isinstance(plan, GraphPartition) for plan in both.values())
    return both  # pyright: ignore[reportReturnType]


def measured(request: dict[str, Any]) -> dict[str, Any]:
    """Costs, plans, and times of both plans for every number of micro-batches."""
    shape, size = shape_of_json(request["shape"]), request["samples"]
    config = config_of(request["flags"].split())
    text = Path(os.__file__).read_bytes()
    with on_device("cpu") as device:
        groups = whole_nodes()
        sleeps = request.get("sleep_s")
        every = build_nodes(shape, config, groups, range(len(shape.nodes)))
        batch = TextWindows(text, shape, seed=1).batch(0, size)
        costs = node_seconds(shape, batch, every, 12)
        if sleeps:
            costs = [[f + a, b + c] for (f, b), (a, c) in zip(costs, sleeps)]
        messages = message_seconds(shape, size, config.model.hidden_size)
        points = []
        for count in request["num_microbatches"]:
            problem = GraphProblem(
                names=shape.nodes,
                edges=shape.edges,
                num_stages=dist.get_world_size(),
                num_microbatches=count,
                forward_s=[f for f, _ in costs],
                backward_s=[b for _, b in costs],
                message_s=messages,
            )
            plans = planned(problem)
            trainings = {
                name: BranchedTraining(config, shape, plan.graph, text, device, groups)
                for name, plan in plans.items()
            }
            if sleeps:
                for training in trainings.values():
                    for n, node in training.nodes.items():
                        training.nodes[n] = Sleeping(node, *sleeps[n])
            losses: dict[str, list[float]] = {name: [] for name in plans}

            def side(name: str) -> Callable[[], dict[str, float]]:
                def take() -> dict[str, float]:
                    step = lambda: losses[name].append(trainings[name].step(count, size))  # noqa: B023, E731
                    return block(step, request["steps"])

                return take

            sides = {name: side(name) for name in ("sequential", "graph")}
            rows = balanced_rows(sides, request["rows"])
            for training in trainings.values():
                training.close()
            points.append(point(count, plans, rows, losses))
        destroy_groups()
        dist.destroy_process_group()
    return {"nodes": list(shape.nodes), "node_s": costs, "message_s": messages, "points": points}


def point(
    count: int,
    plans: dict[str, GraphPartition],
    rows: Any,
    losses: dict[str, list[float]],
) -> dict[str, Any]:
    """Predicted and measured seconds of both plans."""
    apart = [abs(a - b) for a, b in zip(losses["graph"], losses["sequential"])]
    return {
        "num_microbatches": count,
        "measured": ratio_summary(rows, "wall_s", of="sequential", to="graph"),
        "predicted_s": {name: plan.step_s for name, plan in plans.items()},
        "predicted_ratio": plans["sequential"].step_s / plans["graph"].step_s,
        "stages": {name: plan.stages for name, plan in plans.items()},
        "in_flight": {name: plan.graph.in_flight(count) for name, plan in plans.items()},
        "steps": len(losses["graph"]),
        "largest_difference_of_losses": max(apart),
    }


def main() -> None:
    """One rank."""
    torch.set_num_threads(1)
    result = measured(json.loads(Path(sys.argv[1]).read_text()))
    if os.environ["RANK"] == "0":
        Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
