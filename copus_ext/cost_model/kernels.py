"""Seconds of what passes are made of: a matrix product, moved bytes, a collective.

Those with a shape of their own stand with what they belong to: messages between stages and gradient
rings in `layer_time.py`, keys and values in `context.py`, rows for experts in `experts.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.rows import ConfigBatch

_TILE_ROWS, _TILE_COLUMNS = 256, 128
_HOP_S = 3.4e-6
"""Of a step of a ring over NVLink in the protocol of long messages (NCCL, src/graph/tuning.cc,
hwLat). A short message is slow because of these: with 8 ranks they take as long as 10 MB."""
_SLOWED = 0.25
"""Of a collective that hides, what the product behind which it hides takes longer: NCCL's kernels
hold 16 to 24 of 108 multiprocessors, and memory bandwidth. Between .1 and .4 public tables hardly
differ."""
_BEHIND = 1e-2
"""In roots of a second: measured on two cores, by `bench/collective_waits.py` of commit 070c845."""


def gemm_s(rows: ConfigBatch, c: Constants, m: Any, n: Any, k: Any, at_once: Any = 1) -> Any:
    """Seconds of a matrix product [m, k] x [k, n], or of several in one kernel.

    The efficiency falls for a short inner dimension, few columns, and a last wave of tiles that
    leaves multiprocessors idle.
    """
    tiles = at_once * np.ceil(m / _TILE_ROWS) * np.ceil(n / _TILE_COLUMNS)
    waves = tiles / (rows.num_sms * np.ceil(tiles / rows.num_sms))
    shape = k / (k + c.gemm_half_inner) * n / (n + c.gemm_half_outer)
    return (
        at_once * 2.0 * m * n * k / (rows.peak_flops * c.gemm_efficiency * shape * np.sqrt(waves))
    )


def moved_s(rows: ConfigBatch, c: Constants, num_bytes: Any) -> Any:
    """Seconds of memory-bound operations that move so many bytes (of 2-byte elements)."""
    width = rows.element_bytes / 2
    return c.memory_factor * num_bytes * width / rows.hbm_bytes_per_s


def network_bytes_per_s(rows: ConfigBatch, c: Constants) -> Any:
    """What a node reaches over the network."""
    share = np.where(rows.nic_is_measured, 1.0, c.nic_efficiency)
    return share * rows.nic_bytes_per_s / c.factors.across


def node_bytes_per_s(rows: ConfigBatch, c: Constants) -> Any:
    """What a rank reaches within its node."""
    reached = np.minimum(c.dp_bytes_per_s * rows.intra_share, rows.intra_bytes_per_s)
    return reached / c.factors.within


def tp_bytes_per_s(rows: ConfigBatch, c: Constants) -> Any:
    """What a rank reaches within its node in the collectives of a layer."""
    reached = np.minimum(c.tp_bytes_per_s * rows.intra_share, rows.intra_bytes_per_s)
    return reached / c.factors.within


def collective_s(rows: ConfigBatch, c: Constants, num_bytes: Any, ranks: Any) -> Any:
    """Seconds to reduce-scatter or to all-gather a message over so many ranks with numbers in a row
    (half an all-reduce): one step of the ring less than ranks."""
    bandwidth = np.where(
        ranks > rows.gpus_per_node,
        np.minimum(c.tp_cross_bytes_per_s / c.factors.across, network_bytes_per_s(rows, c)),
        tp_bytes_per_s(rows, c),
    )
    ring = (ranks - 1) / ranks * num_bytes / bandwidth
    ring = ring + np.where(rows.on_cpu, 0.0, _HOP_S) * (ranks - 1)
    return np.where(ranks > 1, ring + c.tp_latency_s / 2, 0.0)


def hidden_s(rows: ConfigBatch, seconds: Any, behind: Any) -> Any:
    """What a collective adds to a step that starts together with a matrix product: what is left of
    it when the product ends, and what it takes from the product while both run.

    Args:
        rows: configurations. Without `tp_overlap` nothing hides, nor on CPU ranks, which compute
            and send on the same core.
        seconds: [n] of the collective by itself.
        behind: [n] of the product by itself.
    """
    left = np.maximum(seconds - behind, 0.0) + _SLOWED * np.minimum(seconds, behind)
    return np.where(rows.tp_overlap & np.logical_not(rows.on_cpu), left, seconds)


def meeting_s(rows: ConfigBatch, work: Any) -> Any:
    """Seconds that a rank waits for another where they meet, besides the message.

    On CPU ranks other programs take a core now and then. So of two ranks one is behind, in
    proportion to the root of what they compute between two meetings. Devices are taken to be even.

    Args:
        work: [n] seconds of computation between two meetings.
    """
    return np.where(rows.on_cpu, _BEHIND * np.sqrt(np.maximum(work, 0.0)), 0.0)
