"""Parameters, bytes and seconds that the routed experts of a layer add.

A layer with experts is priced as a layer whose MLP is the shared expert, with the router and the
routed experts on top. A rank holds `E / ep` experts, each cut over `etp` ranks. Every expert has
`edp = tp cp dp / (ep etp)` copies in a stage.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.kernels import (
    collective_s,
    gemm_s,
    moved_s,
    network_bytes_per_s,
    node_bytes_per_s,
)
from copus_ext.cost_model.rows import ConfigBatch, ExpertBatch

ROUTER_LAUNCHES = 20
"""Kernels that choose experts, and move rows to them and back, in one direction."""
_MESSAGE_S = 2e-6
"""Seconds to start each further message of an all-to-all on GPUs; one of gloo follows the other."""
_SCORE = 4.0
"""Bytes of a score of the router, in fp32."""


def experts_of(rows: ConfigBatch) -> ExpertBatch:
    assert rows.experts is not None
    return rows.experts


def tokens_of_rank(rows: ConfigBatch) -> Any:
    """Tokens of a micro-batch that a rank routes; tensor parallelism needs sequence parallelism."""
    return rows.tokens / rows.tp


def rows_of_rank(rows: ConfigBatch) -> Any:
    """Rows that the experts of the mean rank compute of a micro-batch: every token has top-k of
    them, and the ranks that share an expert all have its rows."""
    x = experts_of(rows)
    return tokens_of_rank(rows) * x.moe_router_topk * x.etp


def routed_parameters(rows: ConfigBatch) -> Any:
    """Parameters of the routed experts of one layer on one rank, the mean over all layers."""
    x, m = experts_of(rows), rows.mlp_matrices
    width = x.moe_ffn_hidden_size
    biases = np.where(rows.has_bias, (m - 1) * width / x.etp + rows.hidden_size, 0)
    one = m * rows.hidden_size * width / x.etp + biases
    return x.share * (x.num_experts / x.ep * one)


def router_parameters(rows: ConfigBatch) -> Any:
    """Parameters of the router and of the gate of the shared expert, which every rank has whole."""
    x, h = experts_of(rows), rows.hidden_size
    gate = np.where(x.moe_shared_expert_gate & (x.moe_shared_expert_intermediate_size > 0), h, 0)
    return x.num_experts * (h + np.where(rows.has_bias, 1, 0)) + gate


def saved_bytes(rows: ConfigBatch) -> Any:
    """Bytes that router and experts of a layer keep of a micro-batch for the backward pass, on the
    busiest rank, besides those of the MLP of the shared expert. The input of the layer is counted
    elsewhere.

    In plain torch what autograd saves, on CPU ranks byte for byte
    (`tests/distributed/test_activations.py`), on a GPU to some percent
    (`bench/gpu_stub_memory.py`).
    """
    x, gated, tokens = experts_of(rows), rows.mlp_matrices == 3, tokens_of_rank(rows)
    # Plain torch keeps what an activation and the scores multiply, Transformer Engine their input.
    plain = np.where(gated, np.where(rows.on_cpu, 6.0, 3.0), 3.0)
    columns = np.where(rows.plain_torch, plain, np.where(gated, 3.0, 2.0))
    columns = columns * x.moe_ffn_hidden_size / x.etp
    each = rows.element_bytes * (rows.hidden_size + columns) + _SCORE
    # Scores of all experts, and which were chosen; then the scores of the chosen ones.
    copies = np.where(x.uses_allgather, x.etp, 1)
    routed = (_SCORE + 1.0) * copies * x.num_experts + _SCORE * x.moe_router_topk
    shared = x.moe_shared_expert_gate & (x.moe_shared_expert_intermediate_size > 0)
    gate = np.where(shared, rows.element_bytes * rows.hidden_size + _SCORE, 0.0)
    return x.busiest * rows_of_rank(rows) * each + tokens * (routed + gate)


def working_bytes(rows: ConfigBatch) -> Any:
    """Bytes that come and go while the routed experts of a layer are computed."""
    x, h = experts_of(rows), rows.hidden_size
    columns = rows.mlp_matrices * x.moe_ffn_hidden_size / x.etp + h
    moved = x.busiest * rows_of_rank(rows) * columns
    gathered = np.where(x.uses_allgather, tokens_of_rank(rows) * x.ep * x.etp * h, 0.0)
    return rows.element_bytes * (moved + gathered)


def work_s(rows: ConfigBatch, c: Constants) -> tuple[Any, Any]:
    """Seconds of the router and the routed experts of a layer, forward and backward, on the busiest
    rank, without starting kernels."""
    x, h, m = experts_of(rows), rows.hidden_size, rows.mlp_matrices
    tokens, count = tokens_of_rank(rows), x.busiest * rows_of_rank(rows)
    width = x.moe_ffn_hidden_size / x.etp
    products = [(h, (m - 1) * width), (width, h)]
    each = count / (x.num_experts / x.ep)
    forward = sum(_products_s(rows, c, each, n, k) for k, n in products)
    backward = sum(
        _products_s(rows, c, each, k, n) + _products_s(rows, c, k, n, each) for k, n in products
    )
    router = gemm_s(rows, c, tokens, x.num_experts, h)
    # Rows are sorted twice on the way to the experts and twice on the way back.
    moves = moved_s(rows, c, 16.0 * count * h + 2.0 * count * m * width)
    moves = moves + moved_s(rows, c, 20.0 * tokens * x.num_experts)
    return forward + router + moves, backward + 2.0 * router + 1.5 * moves


def _products_s(rows: ConfigBatch, c: Constants, m: Any, n: Any, k: Any) -> Any:
    """Seconds of a matrix product of every expert of a rank. Few rows wait for the weights."""
    count = experts_of(rows).num_experts / experts_of(rows).ep
    grouped = gemm_s(rows, c, m, n, k, at_once=count)
    single = count * gemm_s(rows, c, m, n, k)
    moved = moved_s(rows, c, 2.0 * count * (m * k + k * n + m * n))
    return np.maximum(np.where(_is_grouped(rows), grouped, single), moved)


def launches(rows: ConfigBatch) -> Any:
    """Kernels of the router and the routed experts, forward: one for each matrix of each expert, or
    of all experts of a rank."""
    x = experts_of(rows)
    return ROUTER_LAUNCHES + np.where(_is_grouped(rows), 2.0, 2.0 * x.num_experts / x.ep)


def _is_grouped(rows: ConfigBatch) -> Any:
    return experts_of(rows).is_grouped & np.logical_not(rows.plain_torch)


def messages_s(rows: ConfigBatch, c: Constants) -> tuple[Any, Any]:
    """Seconds in which rows go to their experts and back, of a layer with experts, forward and
    backward."""
    x = experts_of(rows)
    gathered, sent = _allgather_s(rows, c), _alltoall_s(rows, c)
    forward, backward = (np.where(x.uses_allgather, a, b) for a, b in zip(gathered, sent))
    return forward, backward


def _alltoall_s(rows: ConfigBatch, c: Constants) -> tuple[Any, Any]:
    """All-to-all over the ranks of other experts, and collectives over those that share one."""
    x, width = experts_of(rows), rows.element_bytes * rows.hidden_size
    count = x.busiest * tokens_of_rank(rows) * x.moe_router_topk
    # Rows go there and back; their scores go there forward, and their gradients back.
    way = 2.0 * alltoall_s(rows, c, count * width) + alltoall_s(rows, c, count * _SCORE)
    half = collective_s(rows, c, count * x.etp * width, x.etp)
    # gloo reduces everything and keeps a part: a reduce-scatter counts twice.
    both = way + np.where(rows.on_cpu, 3.0, 2.0) * half
    # How many rows come from whom is gathered first, and the host waits for the answer.
    counts = np.where((x.ep > 1) | (x.etp > 1), c.tp_latency_s, 0.0)
    return both + counts, both


def _allgather_s(rows: ConfigBatch, c: Constants) -> tuple[Any, Any]:
    """Every rank gathers the tokens of all ranks with experts of the layer."""
    x, tokens = experts_of(rows), tokens_of_rank(rows)
    ranks = x.ep * x.etp
    half = collective_s(rows, c, ranks * tokens * rows.element_bytes * rows.hidden_size, ranks)
    both = np.where(rows.on_cpu, 3.0, 2.0) * half
    routed = [collective_s(rows, c, ranks * tokens * n * x.num_experts, ranks) for n in (5.0, 4.0)]
    return both + routed[0], both + routed[1]


def alltoall_bytes(rows: ConfigBatch) -> Any:
    """Bytes that the mean rank sends to other ranks in the all-to-alls of a layer and micro-batch,
    forward and backward, without recomputation."""
    x = experts_of(rows)
    width = 4.0 * rows.element_bytes * rows.hidden_size + 2.0 * _SCORE
    return tokens_of_rank(rows) * x.moe_router_topk * (x.ep - 1) / x.ep * width


def alltoall_s(rows: ConfigBatch, c: Constants, num_bytes: Any) -> Any:
    """Seconds of an all-to-all in which a rank has so many bytes for all ranks, itself among them.

    What stays inside the node and what crosses nodes travel at the same time. All GPUs of a node
    share its network.
    """
    x, node = experts_of(rows), rows.gpus_per_node
    together = members_of_node(rows)
    within = (together - 1) / x.ep * num_bytes / node_bytes_per_s(rows, c)
    across = (x.ep - together) / x.ep * num_bytes / (network_bytes_per_s(rows, c) / node)
    single = np.where(rows.on_cpu, c.exchange_s, _MESSAGE_S)
    started = c.exchange_s + (x.ep - 2) * single
    return np.where(x.ep > 1, np.maximum(within, across) + started, 0.0)


def members_of_node(rows: ConfigBatch) -> Any:
    """[n] the fewest ranks of an all-to-all that share a node, over all its groups and nodes."""
    x = experts_of(rows)
    sizes = (x.ep, x.etp, rows.gpus_per_node, rows.tp * rows.copies * rows.pp)
    table = np.stack([np.broadcast_to(size, len(rows)) for size in sizes]).astype(np.int64)
    ep, etp, node, world = table
    cut = np.flatnonzero((node % (ep * etp) != 0) & (world > node))
    ep[cut] = [_fewest_together(*row) for row in table[:, cut].T.tolist()]
    return ep


@functools.cache
def _fewest_together(ep: int, etp: int, node: int, world: int) -> int:
    """Of one row. Groups lie one behind the other, each with `etp` interleaved all-to-alls."""
    span = ep * etp
    # Nodes are cut in the same way again after their least common multiple.
    starts = np.arange(0, min(world, math.lcm(span, node)), span)[:, None, None]
    at = (starts + np.arange(etp)[:, None] + etp * np.arange(ep)) // node
    return min(int(np.unique(one, return_counts=True)[1].min()) for one in at.reshape(-1, ep))
