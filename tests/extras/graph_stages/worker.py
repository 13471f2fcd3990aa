"""Trains a decoder behind branches, with stages that are a graph or all on one rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

STEPS, MICRO_BATCHES, SAMPLES = 20, 4, 2
SIZES = "--hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --lr 2e-3"
PLANS: dict[str, list[list[str]]] = {
    "a stage for each branch": [["image.0", "image.1"], ["words"], ["decoder.0", "decoder.1"]],
    "a branch in two parts": [["image.0", "words"], ["image.1", "decoder.0"], ["decoder.1"]],
    "a branch beside the decoder": [["image.0"], ["image.1"], ["words", "decoder.0", "decoder.1"]],
    "a plain pipeline": [["image.0", "image.1"], ["words", "decoder.0"], ["decoder.1"]],
}
"""Nodes of the stages of three ranks."""
REPLICAS = {"two replicas": [["image.0", "image.1"], ["words", "decoder.0", "decoder.1"]]}
"""Nodes of the stages of four ranks."""


def main(output: Path) -> Any:
    """Returns for every plan the losses, and some of the gradients of the first step."""
    import torch.distributed as dist

    from copus_ext.extras.graph_stages.train import whole_nodes
    from megatron.trainer.common.device import use_device
    from megatron.trainer.distributed.process_groups import destroy_groups

    shape, _ = model([])
    alone = {"one rank": [list(shape.nodes)]}
    plans = {1: alone, 3: PLANS, 4: REPLICAS}[dist.get_world_size()]
    # Text that every Python has.
    text = Path(os.__file__).read_bytes()
    with use_device("cpu", local_rank=0, backend="gloo") as device:
        groups = whole_nodes()
        found = {n: train(n, stages, text, device, groups) for n, stages in plans.items()}
        destroy_groups()
        return found


def model(stages: list[list[str]], *, is_sequential: bool = False) -> Any:
    """An image of eight patches and twelve tokens, one beside the other; their stages."""
    from copus_ext.extras.graph_stages.model import Branch, BranchedShape
    from copus_ext.extras.graph_stages.stage_graph import StageGraph

    shape = BranchedShape(
        branches=(
            Branch(name="image", num_layers=2, seq_length=8, nodes=2, merged=2),
            Branch(name="words", num_layers=1, seq_length=12, reads="tokens"),
        ),
        decoder_layers=2,
        decoder_nodes=2,
        seq_length=16,
        patch_size=16,
    )
    if not stages:
        return shape, None
    stage_of = shape.stage_of(stages)
    num = len(shape.nodes)
    return shape, StageGraph(
        num_nodes=num, edges=shape.edges, stage_of=stage_of, is_sequential=is_sequential
    )


def train(name: str, stages: list[list[str]], text: bytes, device: Any, groups: Any) -> Any:
    """Losses of all steps, and gradients of the first."""
    import torch.distributed as dist

    from copus_ext.extras.graph_stages.train import BranchedTraining, config_of

    shape, graph = model(stages, is_sequential=name == "a plain pipeline")
    training = BranchedTraining(config_of(SIZES.split()), shape, graph, text, device, groups)
    count = MICRO_BATCHES // training.num_replicas
    losses = [training.step(count, SAMPLES)]
    own = {
        f"{shape.nodes[n]} {key}": few(param.grad)
        for n, node in training.nodes.items()
        for key, param in node.named_parameters()
    }
    losses += [training.step(count, SAMPLES) for _ in range(STEPS - 1)]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    training.close()
    return {"losses": losses, "gradients": {k: v for one in every for k, v in one.items()}}


def few(gradient: Any) -> list[float]:
    """Norm, first and last entry."""
    g = gradient.double().flatten()
    return [g.norm().item(), g[0].item(), g[-1].item()]
