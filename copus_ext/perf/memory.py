"""Bytes that every pipeline stage needs, by kind.

Saved activations follow arXiv 2205.05198 (section 4), widened to grouped queries, gated MLPs and
fused attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from copus_ext.perf.params import all_stages, stage_parameters
from copus_ext.perf.rows import RECOMPUTE_SELECTIVE, Rows

KINDS = (
    "weights",
    "grads",
    "optimizer",
    "activations",
    "logits",
    "buffers",
    "context",
    "fragmentation",
)
FRAGMENTATION = 1.06
"""Reserved over allocated, of what comes and goes."""
CONTEXT_BYTES = 1.2e9
"""CUDA context, libraries and communicators of a process."""
PEAK_SD = 0.05
"""Relative uncertainty of a predicted peak before any was measured."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of many configurations."""

    stages: dict[str, Any]
    """Of each of `KINDS`, [max pp, n]; zero beyond a row's own stages."""
    peak_bytes: Any
    """[n] of the stage that needs most."""
    worst_stage: Any
    """[n] which stage that is."""


def layer_activation_bytes(rows: Rows) -> Any:
    """Bytes that one layer keeps of one micro-batch for its backward pass."""
    h, tokens = rows.hidden_size, rows.tokens
    shared = np.where(rows.sequence_parallel, rows.tp, 1)
    streams = (8.0 + np.where(rows.dropout, 2.0, 0.0)) * tokens * h / shared
    heads = 2.0 * tokens * 2 * (rows.num_attention_heads + rows.num_query_groups)
    scores = tokens * rows.num_attention_heads * rows.seq_length
    scores = scores * np.where(rows.dropout, 5.0, 2.0)
    kept = np.where(rows.recompute == RECOMPUTE_SELECTIVE, 0.0, scores)
    core = np.where(rows.fused_attention, 4.0 * tokens * rows.num_attention_heads, kept)
    mlp = 2.0 * rows.mlp_matrices * tokens * rows.ffn_hidden_size
    return (streams + (heads * rows.kv_channels + core + mlp) / rows.tp) * rows.element_bytes / 2


def in_flight(rows: Rows, stage: Any) -> Any:
    """Micro-batches (of all chunks of a stage together) whose activations a stage keeps at most."""
    ahead = rows.pp - stage
    plain = np.minimum(ahead, rows.num_microbatches)
    chunks = np.minimum(
        2 * (ahead - 1) + (rows.vpp - 1) * rows.pp + 1, rows.num_microbatches * rows.vpp
    )
    return np.where(rows.vpp > 1, chunks / rows.vpp, plain)


def memory(rows: Rows, *, context_bytes: float = CONTEXT_BYTES) -> Memory:
    """Predicts the bytes of every stage of every row."""
    rows = rows.full()
    stages = _of_stages(rows, all_stages(rows), context_bytes)
    total = np.sum(list(stages.values()), axis=0)
    return Memory(stages=stages, peak_bytes=total.max(axis=0), worst_stage=total.argmax(axis=0))


def peak_bytes(rows: Rows, *, context_bytes: float = CONTEXT_BYTES) -> Any:
    """Bytes of the stage that needs most: [n], as `memory` but sooner. The first or the last it is:
    those between hold fewer parameters than both and fewer micro-batches than the first."""
    rows = rows.full()
    ends = np.stack([np.zeros(len(rows), dtype=np.int64), rows.pp - 1])
    return np.sum(list(_of_stages(rows, ends, context_bytes).values()), axis=0).max(axis=0)


def _of_stages(rows: Rows, stage: Any, context_bytes: float) -> dict[str, Any]:
    """Bytes by kind of some stages ([m, 1 or n]) of every row: [m, n]."""
    inside, last = stage < rows.pp, stage == rows.pp - 1
    held = stage_parameters(rows, stage)
    state = np.where(rows.element_bytes == 4, 8.0, 12.0)
    owned = np.where(rows.use_distributed_optimizer, held / rows.dp, held)
    layers = rows.num_layers / rows.pp
    shared = np.where(rows.sequence_parallel, rows.tp, 1)
    message = rows.element_bytes * rows.tokens * rows.hidden_size / shared
    saved = layer_activation_bytes(rows)
    share = rows.recomputed_share
    kept = share * message + (1 - share) * saved
    activations = in_flight(rows, stage) * layers * kept + np.where(share > 0, saved, 0.0)
    per_logit = np.where(rows.element_bytes == 4, 8.0, 6.0)
    logits = np.where(last, per_logit * rows.tokens * rows.padded_vocab_size / rows.tp, 0.0)
    stages = {
        "weights": rows.element_bytes * held,
        "grads": 4.0 * held,
        "optimizer": state * owned,
        "activations": activations,
        "logits": logits,
        "buffers": np.broadcast_to(_buffers(rows, message), held.shape),
        "context": np.full(held.shape, float(context_bytes)),
    }
    moving = stages["activations"] + stages["logits"] + stages["buffers"]
    stages["fragmentation"] = (FRAGMENTATION - 1) * moving
    return {name: np.where(inside, values, 0.0) for name, values in stages.items()}


def _buffers(rows: Rows, message: Any) -> Any:
    """Gathered inputs, score workspace and messages under way."""
    whole = rows.element_bytes * rows.tokens * rows.hidden_size
    gathered = np.where(rows.sequence_parallel, whole, 0.0)
    scores = rows.element_bytes * rows.micro_batch_size * rows.num_attention_heads / rows.tp
    workspace = np.where(rows.fused_attention, 0.0, scores * rows.seq_length**2)
    return gathered + workspace + np.where(rows.pp > 1, 4.0 * message, 0.0)


def static_bytes(rows: Rows) -> Any:
    """Bytes of weights, gradients and optimizer on the stage that holds most: [n]; a lower bound of
    the peak that is cheap."""
    held = stage_parameters(rows.full())
    state = np.where(rows.element_bytes == 4, 8.0, 12.0)
    owned = np.where(rows.use_distributed_optimizer, held / rows.dp, held)
    return ((rows.element_bytes + 4.0) * held + state * owned).max(axis=0)


def fit_probability(peak_bytes: Any, limit_bytes: Any, sd: float = PEAK_SD) -> Any:
    """Probability that a configuration fits, the peak being log-normal around its prediction."""
    z = np.log(limit_bytes / np.asarray(peak_bytes, dtype=float)) / (sd * np.sqrt(2.0))
    return 0.5 * (1.0 + _erf(z))


def _erf(x: Any) -> Any:
    """Error function to 1.5e-7 (Abramowitz and Stegun 7.1.26)."""
    t = 1.0 / (1.0 + 0.3275911 * np.abs(x))
    series = t * (
        0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    )
    return np.sign(x) * (1.0 - series * np.exp(-x * x))
