"""Whether a change of layout of a checkout's job fits into memory beside the old state.

Our own trainer knows each tensor of the new layout before the change. Of a checkout's model the
planner's bytes stand in for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from copus_ext.controller.throughput_table import configuration_of_run, model_of
from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.memory import memory
from copus_ext.cost_model.spec_file import SpecError
from copus_ext.planner.space import points_of, to_config_batch
from copus_ext.reshard.saved_state import buffer_bytes, free_bytes, require_memory

_STATE = ("weights", "grads", "optimizer")


def state_bytes(target: Any, rank: int) -> float | None:
    """Bytes of weights, gradients and optimizer state that a rank of a layout holds; None for a
    model that the planner does not know.

    Args:
        target: what our controller is given as a configuration, under the layout.
        rank: in the order of Megatron-LM, the stages last.
    """
    layout, micro = target.layout, target.batch.micro_batch_size
    try:
        model = model_of(target)
    except SpecError:
        return None
    c = configuration_of_run(target, micro, micro * layout.dp * layout.pp, layout)
    cluster = preset("cpu:1").resize(layout.world_size)
    stages = memory(to_config_batch(model, cluster, points_of([c]))).stages
    stage = rank // (layout.world_size // layout.pp)
    if getattr(target.parallel, "use_tp_pp_dp_mapping", False):
        stage = rank // layout.tp % layout.pp
    return float(sum(stages[kind][stage, 0] for kind in _STATE))


def check_memory(target: Any, chunks: Iterable[torch.nn.Module]) -> None:
    """Compares what this rank needs for a change with what is free, as
    `copus_ext.reshard.saved_state` does: old masters and moments stay beside the new state, old
    weights and gradients do not. In fp32 weights are masters.

    Args:
        target: of the new layout.
        chunks: of the present model.

    Raises:
        TooLarge: with both figures.
    """
    needed = state_bytes(target, dist.get_rank())
    if needed is None:
        return
    released, is_cuda = 0, False
    for weight in (p for chunk in chunks for p in chunk.parameters()):
        size = weight.element_size()
        in_fp32 = target.batch.accumulate_allreduce_grads_in_fp32
        kept = 4 if in_fp32 else size
        released += weight.numel() * (kept + (0 if size == 4 else size))
        is_cuda = is_cuda or weight.is_cuda
    require_memory(needed + buffer_bytes(target.layout), free_bytes(is_cuda=is_cuda) + released)
