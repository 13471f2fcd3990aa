"""Seconds of computation of one micro-batch, by part of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.rows import RECOMPUTE_SELECTIVE, Rows

FORWARD_LAUNCHES, BACKWARD_LAUNCHES = 28, 40
"""Kernels of a layer, unfused."""
_FUSED_ATTENTION_SAVES = 6
_TILE_ROWS, _TILE_COLUMNS = 256, 128


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Seconds of one micro-batch through one layer or part, without communication."""

    forward: Any
    """Forward pass."""
    backward: Any
    """Backward pass without recomputation."""
    recompute: Any
    """What is computed again in the backward pass."""


def gemm_s(rows: Rows, c: Constants, m: Any, n: Any, k: Any) -> Any:
    """Seconds of a matrix product [m, k] x [k, n].

    The efficiency falls for a short inner dimension, few columns, and a last wave of tiles that
    leaves multiprocessors idle.
    """
    tiles = np.ceil(m / _TILE_ROWS) * np.ceil(n / _TILE_COLUMNS)
    waves = tiles / (rows.num_sms * np.ceil(tiles / rows.num_sms))
    shape = k / (k + c.gemm_half_inner) * n / (n + c.gemm_half_outer)
    return 2.0 * m * n * k / (rows.peak_flops * c.gemm_efficiency * shape * np.sqrt(waves))


def moved_s(rows: Rows, c: Constants, num_bytes: Any) -> Any:
    """Seconds of memory-bound operations that move so many bytes (of 2-byte elements)."""
    width = rows.element_bytes / 2
    return c.memory_factor * num_bytes * width / rows.hbm_bytes_per_s


def attention_s(rows: Rows, c: Constants) -> Any:
    """Seconds of the core of the attention, forward: scores, softmax, values."""
    width = rows.num_attention_heads * rows.kv_channels / rows.tp
    flops = np.where(rows.fused_attention, 2.0, 4.0) * rows.tokens * rows.seq_length * width
    scores = rows.micro_batch_size * rows.num_attention_heads / rows.tp * rows.seq_length**2
    num_bytes = np.where(rows.fused_attention, 8.0 * rows.tokens * width, 14.0 * scores)
    return flops / (rows.peak_flops * c.attention_efficiency) + moved_s(rows, c, num_bytes)


def _products(rows: Rows) -> list[tuple[Any, Any]]:
    """(inner, columns) of the four matrix products of a layer on one rank."""
    heads = rows.num_attention_heads * rows.kv_channels / rows.tp
    up = (rows.mlp_matrices - 1) * rows.ffn_hidden_size / rows.tp
    return [
        (rows.hidden_size, rows.attention_width / rows.tp),
        (heads, rows.hidden_size),
        (rows.hidden_size, up),
        (rows.ffn_hidden_size / rows.tp, rows.hidden_size),
    ]


def layer(rows: Rows, c: Constants) -> Pass:
    """One transformer layer, the mean over those that are recomputed and those that are not."""
    tokens = rows.tokens
    products = sum(gemm_s(rows, c, tokens, n, k) for k, n in _products(rows))
    gradients = sum(
        gemm_s(rows, c, tokens, k, n) + gemm_s(rows, c, k, n, tokens) for k, n in _products(rows)
    )
    shared = np.where(rows.sequence_parallel, rows.tp, 1)
    elementwise = moved_s(
        rows,
        c,
        28.0 * tokens * rows.hidden_size / shared
        + 2.0 * tokens * rows.ffn_hidden_size * rows.mlp_matrices / rows.tp,
    )
    core = attention_s(rows, c)
    saved = np.where(rows.fused_attention, _FUSED_ATTENTION_SAVES, 0)
    forward = _with_launches(products + core + elementwise, FORWARD_LAUNCHES - saved, c)
    backward = _with_launches(
        gradients + 2.0 * core + 1.5 * elementwise, BACKWARD_LAUNCHES - 2 * saved, c
    )
    selective = np.where(rows.recompute == RECOMPUTE_SELECTIVE, core, 0.0)
    again = rows.recomputed_share * forward + selective
    return Pass(forward=forward, backward=backward, recompute=again)


def _with_launches(work: Any, launches: Any, c: Constants) -> Any:
    """A pass cannot beat the time it takes to start its kernels; the two join smoothly."""
    q = c.launch_sharpness
    return (work**q + (launches * c.launch_s) ** q) ** (1 / q)


def head(rows: Rows, c: Constants) -> Pass:
    """Final norm, output layer and loss; never recomputed."""
    tokens, columns = rows.tokens, rows.padded_vocab_size / rows.tp
    loss = moved_s(rows, c, 14.0 * tokens * columns)
    forward = gemm_s(rows, c, tokens, columns, rows.hidden_size) + loss
    backward = gemm_s(rows, c, tokens, rows.hidden_size, columns)
    backward = backward + gemm_s(rows, c, rows.hidden_size, columns, tokens) + loss
    return Pass(forward=forward, backward=backward, recompute=0.0 * forward)


def embedding(rows: Rows, c: Constants) -> Pass:
    """Look-up, and its gradient."""
    once = moved_s(rows, c, 6.0 * rows.tokens * rows.hidden_size)
    return Pass(forward=once, backward=once, recompute=0.0 * once)
