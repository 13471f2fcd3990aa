"""Runs every configuration the planner calls legal for one step, and counts parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.jobs import TINY, run

BATCH = 8


def tiny_spec() -> Any:
    """The model of `TINY`, vocabulary padded for the tensor size of each run."""
    from copus_ext.cost_model.model_spec import ModelSpec

    return ModelSpec(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        seq_length=32,
        vocab_size=128,
        gated=True,
        bias=False,
        normalization="RMSNorm",
        tied=False,
        precision="fp32",
        fused_attention=False,
    )


def legal_configurations(world_size: int) -> list[Any]:
    """One configuration per layout and micro-batch, recomputation and sharding taking turns."""
    from copus_ext.cost_model.cluster_spec import preset
    from copus_ext.planner.space import LEGAL, Limits, enumerate_points

    cluster = preset(f"cpu:{world_size}")
    points = enumerate_points(tiny_spec(), cluster, BATCH, Limits(cross_node_tp=True))
    at = np.flatnonzero(points.code == LEGAL)
    layouts: dict[Any, dict[Any, int]] = {}
    for i in at:
        c = points.configuration(int(i))
        ways = layouts.setdefault((c.layout, c.micro_batch_size), {})
        ways[c.recompute, int(c.use_distributed_optimizer)] = int(i)
    options = [("none", 1), ("full", 0), ("block", 1), ("selective", 1), ("none", 0), ("full", 1)]
    options += [("block", 0), ("selective", 0)]
    chosen = []
    for turn, ways in enumerate(layouts.values()):
        rotated = options[turn % 8 :] + options[: turn % 8]
        chosen.append(next(ways[way] for way in rotated if way in ways))
    return [(points.configuration(i), points.take(np.array([i]))) for i in chosen]


def main(output: Path) -> Any:
    """Returns what each configuration did."""
    import torch.distributed as dist

    from copus_ext.cost_model.cluster_spec import preset
    from copus_ext.cost_model.memory import stage_parameters
    from copus_ext.planner.space import to_rows
    from megatron.training.train.callbacks import Callback, CallbackContext

    class Count(Callback):
        """Counts the parameters of this rank."""

        number, stage = 0, 0

        def on_setup_start(self, context: CallbackContext) -> None:
            chunks = context.model
            self.number = sum(p.numel() for chunk in chunks for p in chunk.parameters())
            self.stage = context.groups.pp.rank()

    world = dist.get_world_size()
    rows = []
    for number, (configuration, point) in enumerate(legal_configurations(world)):
        count = Count()
        base = TINY.replace("--pad-vocab-for-tensor-parallel-size 4", "--lr-warmup-iters 0")
        flags = [*configuration.to_flags(), "--train-iters", "1"]
        steps = run(flags, output / str(number), [count], base=base)
        want = stage_parameters(to_rows(tiny_spec(), preset(f"cpu:{world}"), point))[:, 0]
        seen: list[Any] = [None] * world
        dist.all_gather_object(seen, (count.number, want[count.stage]))
        if dist.get_rank() == 0:
            losses = [step["losses"]["lm loss"] for step in steps]
            rows.append({"name": str(configuration), "losses": losses, "parameters": seen})
    return rows
