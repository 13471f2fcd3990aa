"""The arithmetic of a step, and how long it takes at least."""

from __future__ import annotations

from typing import Any

import numpy as np

from copus_ext.cost_model.cluster_spec import ClusterSpec
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.cost_model.rows import RECOMPUTE_BLOCK, RECOMPUTE_FULL
from copus_ext.planner.space import Candidates
from megatron.trainer.model.flops import recomputation_flops_per_sample, training_flops_per_sample


def flops_per_sample(m: ModelSpec) -> float:
    """Operations of a model for one sample, forward and backward, nothing computed again."""
    return training_flops_per_sample(m.shape(), m.seq_length)


def peak_flops(model: ModelSpec, cluster: ClusterSpec) -> float:
    """Operations per second of a GPU at most, of the fastest kind if they differ; infinity of CPU
    ranks."""
    if cluster.is_gloo:
        return float("inf")
    return max(node.gpu.peak(model.precision) for node in cluster.nodes or [cluster])


def least_step_s(model: ModelSpec, cluster: ClusterSpec, points: Candidates) -> Any:
    """[n] seconds of a step in which all GPUs compute at their peak, layers that are computed again
    counted; 0 on CPU ranks."""
    layers = model.num_layers / (points.pp * points.vpp)
    again = np.where(points.recompute == RECOMPUTE_BLOCK, points.recompute_num_layers / layers, 0.0)
    again = np.where(points.recompute == RECOMPUTE_FULL, 1.0, again)
    more = again * recomputation_flops_per_sample(model.shape(), model.seq_length)
    samples = points.global_batch_size / cluster.world_size
    return (flops_per_sample(model) + more) * samples / peak_flops(model, cluster)
