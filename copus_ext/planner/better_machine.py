"""What another machine would do for a search: one that is better in one respect, or larger."""

from __future__ import annotations

from dataclasses import replace

from copus_ext.cost_model.gpus import GpuSpec
from copus_ext.cost_model.spec_file import SpecError
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.search import Planner
from megatron.trainer.common.extras import extras
from megatron.trainer.config.draft import flag_of

_NODE = 8


def what_would_help(planner: Planner, batch: int) -> dict[str, tuple[float, Configuration]]:
    """What a machine that is twice as good in one respect would save. Choices of the run stand
    beside it: the other order of ranks, and what extras suggest.

    Returns:
        By respect (network, memory, order, or flags such as `--flag 8`), the share of the step that
        is saved, and the configuration that is the fastest then. Without those that save less than
        1 %.

    Predicted alone, as nothing was measured on such machines.
    """
    cluster = planner.cluster
    usual = planner
    if planner.is_corrected:
        usual = planner.on(cluster)
        usual.retime(())
    faster = planner.on(cluster)
    faster.constants = planner.constants.under(replace(planner.constants.factors, across=0.5))
    faster.retime(())
    nodes = tuple(replace(node, gpu=_with_twice_the_memory(node.gpu)) for node in cluster.nodes)
    roomy = planner.on(replace(cluster, gpu=_with_twice_the_memory(cluster.gpu), nodes=nodes))
    order = not planner.limits.use_tp_pp_dp_mapping
    other = planner.on(cluster, replace(planner.limits, use_tp_pp_dp_mapping=order))
    other.retime(())
    asked = {"network": faster, "memory": roomy, "order": other, **_suggested(planner)}
    found = {}
    for one in (usual, *asked.values()):
        # What was measured of the memory holds for all of them.
        one.set_peaks(planner.peaks)
    for name, one in asked.items():
        if name not in ("memory", "order"):
            one.take_space(usual, [batch])
    # The first of a ranking may be slower than its equals, by more than a machine saves.
    now, *better = (one.fastest(batch) for one in (usual, *asked.values()))
    for name, best in zip(asked, better):
        if now is None or best is None:
            continue
        saved = 1 - now.prediction.samples_per_s / best.prediction.samples_per_s
        if saved >= 0.01:
            found[name] = saved, best.configuration
    return found


def _suggested(planner: Planner) -> dict[str, Planner]:
    """By their text, flags that extras suggest and that the model does not have, and what prices
    them."""
    found, model = {}, planner.model
    for extra in extras():
        if extra.suggests and model.extras.keys().isdisjoint(extra.suggests):
            text = " ".join(f"{flag_of(name)} {value}" for name, value in extra.suggests.items())
            own = {**model.extras, **extra.suggests}
            found[text] = planner.on(planner.cluster, model=replace(model, extras=own))
            found[text].retime(())
    return found


def _with_twice_the_memory(gpu: GpuSpec) -> GpuSpec:
    return replace(gpu, memory_bytes=2 * gpu.memory_bytes)


def min_gpus(planner: Planner, batch: int) -> int | None:
    """A number of GPUs of this kind on which some configuration fits, trying multiples; None if 64
    times as many are not enough."""
    cluster = planner.cluster
    if cluster.num_nodes == 1:
        cluster = replace(cluster, gpus_per_node=max(cluster.gpus_per_node, _NODE))
    world = planner.cluster.world_size
    # More GPUs make more replicas.
    fixed = {name: size for name, size in planner.limits.fixed.items() if name != "dp"}
    limits = replace(planner.limits, fixed=fixed)
    for times in (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64):
        if world * times > cluster.gpus_per_node and world * times % cluster.gpus_per_node:
            continue
        larger = planner.on(cluster.resize(world * times), limits)
        dividing = batch if batch % (world * times) == 0 else batch * times
        try:
            found = larger.rank([dividing], top=1)[0]
        except SpecError:
            # What is fixed or at most leaves nothing for so many.
            continue
        if found.num_ranked:
            return world * times
    return None
