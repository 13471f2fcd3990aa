"""Seconds of communication: tensor, pipeline and data parallel."""

from __future__ import annotations

from typing import Any

import numpy as np

from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.rows import Rows


def tp_collective_s(rows: Rows, c: Constants, num_bytes: Any) -> Any:
    """Seconds to reduce-scatter or to all-gather a message over the tensor-parallel ranks (half an
    all-reduce)."""
    bandwidth = np.where(
        rows.tp > rows.gpus_per_node,
        np.minimum(c.tp_cross_bytes_per_s, rows.nic_bytes_per_s),
        np.minimum(c.tp_bytes_per_s, rows.intra_bytes_per_s),
    )
    ring = (rows.tp - 1) / rows.tp * num_bytes / bandwidth
    return np.where(rows.tp > 1, ring + c.tp_latency_s / 2, 0.0)


def tp_layer_s(rows: Rows, c: Constants) -> tuple[Any, Any, Any]:
    """Seconds of tensor-parallel collectives of one layer and micro-batch, the mean over layers.

    Without sequence parallelism two all-reduces forward and two backward; with it the same volume
    as reduce-scatters and all-gathers, and two more gathers backward for the inputs that were kept
    in parts.

    Returns:
        Forward, backward, recomputation.
    """
    half = tp_collective_s(rows, c, rows.element_bytes * rows.tokens * rows.hidden_size)
    forward = 4.0 * half
    backward = np.where(rows.sequence_parallel, 6.0, 4.0) * half
    again = rows.recomputed_share * forward
    return forward, backward, again


def tp_ends_s(rows: Rows, c: Constants) -> tuple[Any, Any]:
    """Seconds of collectives of embedding and head, per micro-batch: forward on the first stage;
    forward and backward together on the last."""
    message = rows.element_bytes * rows.tokens * rows.hidden_size
    first = 2.0 * tp_collective_s(rows, c, message)
    losses = 6.0 * tp_collective_s(rows, c, 4.0 * rows.tokens)
    gather = np.where(rows.sequence_parallel, 3.0, 2.0) * tp_collective_s(rows, c, message)
    return first, losses + gather


def hop_bytes(rows: Rows) -> Any:
    """Bytes of a pipeline message of one rank: [n]."""
    shared = np.where(rows.sequence_parallel, rows.tp, 1)
    return rows.element_bytes * rows.tokens * rows.hidden_size / shared


def hop_s(rows: Rows, c: Constants) -> Any:
    """Seconds of one pipeline message over every boundary, in rank order tensor, data, pipeline.

    Every tensor-parallel rank sends its own copy, or its part under sequence parallelism; all GPUs
    of a node send at once.

    Returns:
        [max pp, n]: from stage r to r + 1; the last row from the last stage to the first.
    """
    stage = np.arange(int(np.max(rows.pp)))[:, None]
    stride = rows.tp * rows.dp
    following = np.where(stage + 1 < rows.pp, stage + 1, 0)
    crosses = (stage * stride) // rows.gpus_per_node != (following * stride) // rows.gpus_per_node
    crosses |= stride >= rows.gpus_per_node
    num_bytes = hop_bytes(rows)
    network = np.minimum(c.nic_bytes_per_s, rows.nic_bytes_per_s) / rows.gpus_per_node
    inside = np.minimum(c.dp_bytes_per_s, rows.intra_bytes_per_s)
    return c.exchange_s + num_bytes / np.where(crosses, network, inside)


def ring_s(rows: Rows, c: Constants, num_bytes: Any) -> Any:
    """Seconds to reduce-scatter or all-gather a buffer over the replicas (half an all-reduce).

    The smaller of one ring through all replicas and a ring inside the nodes followed by rings
    across them.
    """
    inside = np.minimum(rows.dp, np.maximum(rows.gpus_per_node // rows.tp, 1))
    nodes = np.ceil(rows.dp / inside)
    fast = np.minimum(c.dp_bytes_per_s, rows.intra_bytes_per_s)
    network = np.minimum(c.nic_bytes_per_s, rows.nic_bytes_per_s)
    lane = network / rows.gpus_per_node
    slowest = np.where(nodes > 1, np.minimum(fast, lane * inside), fast)
    flat = (rows.dp - 1) / rows.dp * num_bytes / slowest
    staged = (inside - 1) / inside * num_bytes / fast
    staged = staged + (nodes - 1) / nodes * num_bytes / inside / lane
    return np.where(rows.dp > 1, np.minimum(flat, staged) + c.tp_latency_s / 2, 0.0)
