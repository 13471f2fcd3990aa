"""How many GPUs a job needs that does not fit."""

from __future__ import annotations

from dataclasses import replace

from copus_ext.planner.search import Planner

_NODE = 8


def gpus_needed(planner: Planner, batch: int) -> int | None:
    """A number of GPUs of this kind on which some configuration fits, trying multiples; None if 64
    times as many are not enough."""
    cluster = planner.cluster
    if cluster.num_nodes == 1:
        cluster = replace(cluster, gpus_per_node=max(cluster.gpus_per_node, _NODE))
    world = planner.cluster.world_size
    for times in (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64):
        if world * times > cluster.gpus_per_node and world * times % cluster.gpus_per_node:
            continue
        larger = planner.on(cluster.resize(world * times))
        dividing = batch if batch % (world * times) == 0 else batch * times
        if larger.rank([dividing], top=1)[0].num_ranked:
            return world * times
    return None
