"""What ranks that share the tokens of a sample exchange and keep, and how long that takes.

A rank of context parallel size c has s / c tokens of each sample: two mirrored chunks of 2c, so
that causal attention is as much for all. Keys and values of the others come in one of three ways:

- `all_gather`: all of them at once, before attention.
- `p2p`: round a ring, while attention to those that have come is computed.
- `a2a`: tokens of all heads are exchanged for all tokens of some heads, and back.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.kernels import network_bytes_per_s, tp_bytes_per_s
from copus_ext.cost_model.rows import ConfigBatch

CP_COMM_TYPES = ("all_gather", "p2p", "a2a")
"""Values of `--cp-comm-type` that are priced; `ConfigBatch.cp_comm_type` has their indices."""
GATHER, RING, HEADS = range(3)
_LAUNCHES = (8.0, 6.0, 12.0)
"""Further kernels of a layer, forward, by form; a ring has so many for every rank."""
_CPU_BLOCK = 512.0
"""Keys that torch's fused attention takes at a time on a CPU rank."""
_CPU_MASK = 1.1
"""Time of that kernel with a mask to read over that without, for as many keys: 1.05 to 1.12 with 8
heads of 32 columns and 512 queries to 1,024 to 2,048 keys."""
_GATHERED_COPIES = 5.5
"""Times that gathered keys and values are read or written beside the exchange, counted as forward:
3 times to put them in order, and 16 backward, where each chunk's gradient is filled up to the whole
sample and added. Backward counts 2.5 times forward."""
_EXCHANGES = 4
"""All-to-alls of a layer in one direction: queries, keys, values, and the answer."""


def is_shared(rows: ConfigBatch) -> bool:
    """Whether ranks share samples in any row."""
    return bool(np.any(np.greater(rows.cp, 1)))


def _is(rows: ConfigBatch, form: int) -> Any:
    return np.greater(rows.cp, 1) & np.equal(rows.cp_comm_type, form)


def is_ring(rows: ConfigBatch) -> Any:
    """[n] whether ranks that share samples send keys and values round a ring."""
    return _is(rows, RING)


def gathers_itself(rows: ConfigBatch) -> Any:
    """[n] whether attention in plain torch gathers keys and values: it keeps them for the backward
    pass, and computes whole rectangles of its masks."""
    return _is(rows, GATHER) & rows.plain_torch


def keys_of_a_token(rows: ConfigBatch) -> Any:
    """[n] scores that attention computes for each query, the mean over them: half of a sample if
    its kernel skips what is masked. Of gathered keys a chunk sees all up to its own end, which is
    1/(2c) of a half more than needed. torch's kernel for CPU ranks skips whole blocks alone. What
    it takes to read a mask counts as further keys."""
    half = 0.5 * rows.seq_length
    blocks = np.minimum(half + _CPU_BLOCK / 2, rows.seq_length)
    fused = np.where(rows.on_cpu, blocks, half)
    usual = np.where(rows.fused_attention, fused, rows.seq_length)
    rectangles = 0.5 * rows.seq_length * (1.0 + 0.5 / rows.cp)
    rectangles = rectangles * np.where(rows.on_cpu & rows.fused_attention, _CPU_MASK, 1.0)
    return np.where(gathers_itself(rows), rectangles, usual)


def joined_bytes(rows: ConfigBatch) -> Any:
    """[n] bytes moved to put together what ranks share, forward. Round a ring each step's answer is
    joined with the sum of those before: read twice and written once, in fp32. Gathered keys and
    values are put in the order of the sample."""
    width = rows.num_attention_heads * rows.kv_channels / rows.tp
    ring = np.where(_is(rows, RING), 12.0 * (rows.cp - 1.0) * rows.tokens * width, 0.0)
    groups = np.maximum(rows.num_query_groups / rows.tp, 1.0)
    gathered = 2.0 * groups * rows.kv_channels * rows.tokens * rows.cp * 2.0
    return ring + np.where(gathers_itself(rows), _GATHERED_COPIES * gathered, 0.0)


def received_elements(rows: ConfigBatch) -> tuple[Any, Any]:
    """Elements that a rank receives of one layer and micro-batch: [n] forward, [n] backward."""
    c, heads = rows.cp, rows.num_attention_heads / rows.tp
    # A tensor parallel rank holds one group of keys at least.
    groups = np.maximum(rows.num_query_groups / rows.tp, 1.0)
    tokens = rows.micro_batch_size * rows.seq_length * rows.kv_channels * (c - 1) / c
    gathered = 2.0 * groups * tokens
    exchanged = 2.0 * (heads + np.maximum(groups, c)) * tokens / c
    is_exchange = _is(rows, HEADS)
    # Gradients come back the same way. Round a ring keys and values go once more beside them, and
    # Transformer Engine gathers them again.
    again = np.where(is_exchange | gathers_itself(rows), 1.0, 2.0)
    forward = np.where(is_exchange, exchanged, gathered)
    return forward, again * forward


def members_of_node(rows: ConfigBatch) -> Any:
    """[n] the fewest ranks of a group that share a node, over all groups and nodes. Ranks of a
    group lie tensor parallel size apart."""
    of_node = np.maximum(rows.gpus_per_node // rows.tp, 1)
    return np.gcd(np.asarray(rows.cp, dtype=np.int64), np.asarray(of_node, dtype=np.int64))


def _wire_s(rows: ConfigBatch, c: Constants, num_bytes: Any) -> Any:
    """Seconds to receive so many bytes. All GPUs of a node share its network; round a ring one rank
    of each node receives from another node, and the rest from within."""
    # As other collectives within a layer, of which each is waited for.
    fast = tp_bytes_per_s(rows, c)
    together = members_of_node(rows)
    lane = np.minimum(network_bytes_per_s(rows, c) / rows.gpus_per_node, fast)
    slowest = np.where(together < rows.cp, np.minimum(fast, lane * together), fast)
    outside = (rows.cp - together) / np.maximum(rows.cp - 1, 1) * num_bytes
    return np.where(
        _is(rows, HEADS), np.maximum(num_bytes / fast, outside / lane), num_bytes / slowest
    )


def exchange_s(rows: ConfigBatch, c: Constants, core: Any, core_backward: Any) -> tuple[Any, Any]:
    """Seconds of one layer and micro-batch in which nothing is computed: [n] forward, [n] backward.

    A gather is waited for. Round a ring each step travels behind the attention of the one before.

    Args:
        core: [n] seconds of attention itself, forward.
        core_backward: [n] the same backward.
    """
    forward, backward = (
        _wire_s(rows, c, rows.element_bytes * elements) for elements in received_elements(rows)
    )
    is_exchange, half = _is(rows, HEADS), c.tp_latency_s / 2
    # gloo reduces everything and keeps a part: a reduce-scatter counts twice. It starts an
    # all-to-all as slowly, and sends one message after the other.
    twice = np.where(_is(rows, GATHER) & rows.on_cpu, 2.0, 1.0)
    further = np.where(rows.on_cpu, half + c.exchange_s * np.maximum(rows.cp - 2.0, 0.0), 0.0)
    start = np.where(is_exchange, _EXCHANGES * (half + further), half)
    behind = np.where(_is(rows, RING), (rows.cp - 1.0) / rows.cp, 0.0)

    def exposed(wire: Any, begin: Any, work: Any) -> Any:
        slow, hidden = c.factors.tp * wire, c.factors.compute * behind * work
        seconds = np.maximum(slow - hidden, 0.0) + c.factors.tp * begin
        return np.where(np.greater(rows.cp, 1), seconds, 0.0)

    return (
        exposed(forward, start, core),
        exposed(twice * backward, twice * start, core_backward),
    )


def meetings(rows: ConfigBatch) -> Any:
    """[n] times that ranks which share samples meet in a pass of a layer; 0 for others."""
    return np.where(np.greater(rows.cp, 1), np.where(_is(rows, HEADS), 2.0, 1.0), 0.0)


def launches(rows: ConfigBatch) -> Any:
    """[n] further kernels of a layer, forward."""
    each = np.asarray(_LAUNCHES)[np.asarray(rows.cp_comm_type)]
    each = each * np.where(_is(rows, RING), rows.cp, 1.0)
    return np.where(np.greater(rows.cp, 1), each, 0.0)


def core_columns(rows: ConfigBatch, query: Any) -> Any:
    """[n] elements that attention in plain torch keeps for every token of a rank that shares its
    samples, times the tensor parallel size: queries, whole gathered keys and values or those of
    exchanged heads, and its answer before and after it is put together.

    Args:
        query: [n] columns of the tensor that holds the queries.
    """
    groups = np.maximum(rows.num_query_groups, rows.tp) * rows.kv_channels
    answer = rows.num_attention_heads * rows.kv_channels
    gathered = query + 2.0 * groups * rows.cp
    some = np.maximum(groups, rows.cp * rows.tp * rows.kv_channels)
    return np.where(_is(rows, HEADS), answer + 2.0 * some, gathered) + 2.0 * answer


def score_columns(rows: ConfigBatch) -> Any:
    """[n] scores of a token and all heads that attention without a flash kernel makes."""
    whole = np.where(gathers_itself(rows), 0.5 + 0.25 / rows.cp, 1.0) * rows.seq_length
    return rows.num_attention_heads * whole


def mask_bytes(rows: ConfigBatch) -> Any:
    """[n] bytes of the masks over gathered keys, which torch keeps on a CPU rank."""
    chunk = rows.seq_length / (2.0 * rows.cp)
    masks = rows.element_bytes * chunk**2 * (2.0 * rows.cp + 1.0)
    return np.where(gathers_itself(rows) & rows.on_cpu, masks, 0.0)


def working_bytes(rows: ConfigBatch) -> Any:
    """[n] bytes that come and go while a layer exchanges: gathered keys and values, two steps of a
    ring, or what the heads are exchanged through."""
    c, groups = rows.cp, np.maximum(rows.num_query_groups / rows.tp, 1.0)
    each = rows.element_bytes * rows.tokens * rows.kv_channels
    heads = rows.num_attention_heads / rows.tp + 2.0 * np.maximum(groups, c)
    whole = np.where(
        _is(rows, GATHER), 2.0 * groups * c, np.where(_is(rows, HEADS), heads, 4.0 * groups)
    )
    return np.where(np.greater(c, 1), each * whole, 0.0)
