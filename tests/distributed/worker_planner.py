"""Runs every configuration the planner calls legal for one step, and counts parameters; of a
mixture of experts one of every layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.jobs import MOE, TINY, run

BATCH = 8
SHARED = "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate"
MIXTURE = f"{MOE} {SHARED}"


def tiny_spec() -> Any:
    """The model of `TINY`, vocabulary padded for the tensor size of each run."""
    from copus_ext.cost_model.model_spec import ModelSpec

    return ModelSpec(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        seq_length=32,
        vocab_size=128,
        ffn_hidden_size=64,
        gated=True,
        bias=False,
        normalization="RMSNorm",
        tied=False,
        precision="fp32",
        fused_attention=False,
    )


def mixture_spec(dispatcher: str = "alltoall") -> Any:
    """The model of `MIXTURE`, vocabulary padded for the tensor size of each run."""
    return dataclasses.replace(
        tiny_spec(),
        num_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=24,
        moe_shared_expert_intermediate_size=16,
        moe_shared_expert_gate=True,
        moe_token_dispatcher_type=dispatcher,
        implementation="local",
    )


def layouts_of_a_mixture(world_size: int) -> dict[str, list[Any]]:
    """By dispatcher, one configuration of every layout that is legal; of those that rows may reach
    by all-to-all none is gathered. How ranks exchange keys and values does not matter to experts:
    one way stands for all."""
    from copus_ext.cost_model.cluster_spec import preset
    from copus_ext.planner.space import LEGAL, Limits, enumerate_points

    limits = Limits(
        fixed={"micro_batch": 1},
        largest={"vpp": 2},
        recompute=("none",),
        use_distributed_optimizer=(True,),
        cross_node_tp=True,
        cross_node_ep=True,
        narrow_experts=True,
        cp_comm_types=("all_gather",),
    )
    found: dict[str, list[Any]] = {}
    for way in ("alltoall", "allgather"):
        model, cluster = mixture_spec(way), preset(f"cpu:{world_size}")
        points = enumerate_points(model, cluster, BATCH, limits)
        some = [points.configuration(int(i)) for i in np.flatnonzero(points.code == LEGAL)]
        found[way] = [c for c in some if c not in found.get("alltoall", ())]
    return found


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


def sent_by_all_to_all(output: Path) -> dict[str, float]:
    """Bytes that the mean rank sends to others in a step with four expert parallel ranks: counted
    and predicted."""
    import torch
    import torch.distributed as dist

    from copus_ext.cost_model.cluster_spec import preset
    from copus_ext.cost_model.experts import alltoall_bytes
    from copus_ext.planner.request import configuration_of
    from copus_ext.planner.space import points_of, to_config_batch

    world, counted = dist.get_world_size(), torch.zeros(1, dtype=torch.float64)
    c = configuration_of("ep=4", global_batch_size=BATCH, world_size=world)
    usual = dist.all_to_all_single

    def count(got: Any, sent: Any, *rest: Any, **more: Any) -> Any:
        to_whom = more["input_split_sizes"]
        others = int(sum(to_whom) - to_whom[dist.get_rank()])
        counted.add_(others * sent[0].numel() * sent.element_size() if len(sent) else 0)
        return usual(got, sent, *rest, **more)

    dist.all_to_all_single = count
    try:
        flags = [*c.to_flags(), "--train-iters", "1", "--lr-warmup-iters", "0"]
        run(flags, output / "sent", base=MIXTURE)
    finally:
        dist.all_to_all_single = usual
    dist.all_reduce(counted)
    spec = mixture_spec()
    rows = to_config_batch(spec, preset(f"cpu:{world}"), points_of([c])).full()
    predicted = float(alltoall_bytes(rows)[0]) * c.num_microbatches * spec.num_layers
    return {"counted": float(counted) / world, "predicted": predicted}


SOME = 8
"""Every so manyth is taken, where some stand for all."""


def main(output: Path, which: str) -> Any:
    """Runs `all` of them, or `some`."""
    import torch.distributed as dist

    from copus_ext.cost_model.cluster_spec import preset
    from copus_ext.cost_model.memory import stage_parameters
    from copus_ext.planner.space import points_of, to_config_batch
    from megatron.trainer.train.callbacks import Callback, CallbackContext

    class Count(Callback):
        """Counts the parameters of this rank."""

        number, stage = 0, 0

        def on_setup_start(self, context: CallbackContext) -> None:
            chunks = context.model
            self.number = sum(p.numel() for chunk in chunks for p in chunk.parameters())
            self.stage = context.groups.pp.rank()

    world = dist.get_world_size()
    rows = []

    def record(kind: str, configuration: Any, point: Any, spec: Any, flags: str) -> None:
        count = Count()
        base = flags.replace("--pad-vocab-for-tensor-parallel-size 4", "--lr-warmup-iters 0")
        own = [*configuration.to_flags(), "--train-iters", "1"]
        steps = run(own, output / str(len(rows)), [count], base=base)
        want = stage_parameters(to_config_batch(spec, preset(f"cpu:{world}"), point))[:, 0]
        seen: list[Any] = [None] * world
        dist.all_gather_object(seen, (count.number, want[count.stage]))
        losses = [step["losses"]["lm loss"] for step in steps]
        name = str(configuration)
        rows.append({"kind": kind, "name": name, "losses": losses, "parameters": seen})

    step = SOME if which == "some" else 1
    for configuration, point in legal_configurations(world)[::step]:
        record("dense", configuration, point, tiny_spec(), TINY)
    if world == 4:
        for way, some in layouts_of_a_mixture(world).items():
            flags = f"{MIXTURE} --moe-token-dispatcher-type {way}"
            for c in some[::step]:
                record("mixture", c, points_of([c]), mixture_spec(way), flags)
        rows.append({"kind": "sent", "name": "", **sent_by_all_to_all(output)})
    return rows
