"""How many parameters a model has, and where those of its experts lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.trainer.config.model_shape import ModelShape


def num_parameters(shape: ModelShape, *, experts: int) -> int:
    """Of the whole model, with so many experts in each layer that has some."""
    h, vectors = shape.hidden_size, 1 if shape.normalization == "RMSNorm" else 2
    norm, mixture = h * vectors, shape.experts
    layer = _attention_parameters(shape, vectors) + 2 * norm + (h if shape.linear_bias else 0)
    dense, other = layer + _mlp_parameters(shape, shape.ffn_hidden_size), layer
    num_other, is_last = 0, False
    if mixture is not None:
        other += mixture.num_experts * (h + shape.linear_bias)
        other += experts * _mlp_parameters(shape, mixture.moe_ffn_hidden_size)
        if shared := mixture.moe_shared_expert_intermediate_size:
            other += _mlp_parameters(shape, shared) + (h if mixture.moe_shared_expert_gate else 0)
        num_other, is_last = sum(mixture.layers), bool(mixture.layers[-1])
    tables = shape.padded_vocab_size * h * (1 if shape.tied else 2)
    further = shape.mtp_num_layers * ((other if is_last else dense) + 2 * h * h + 3 * norm)
    stack = num_other * other + (shape.num_layers - num_other) * dense
    return stack + further + tables + shape.learned_positions * h + norm


def _mlp_parameters(shape: ModelShape, width: int) -> int:
    """Of an MLP, or of an expert."""
    h, matrices = shape.hidden_size, 3 if shape.gated else 2
    return matrices * h * width + ((matrices - 1) * width + h if shape.linear_bias else 0)


def _attention_parameters(shape: ModelShape, vectors: int) -> int:
    """Of one layer, without the bias of the output projection."""
    h, k, heads = shape.hidden_size, shape.kv_channels, shape.num_attention_heads
    if (latent := shape.latent) is not None:
        norms = latent.kv_lora_rank + (latent.q_lora_rank or 0) if shape.qk_layernorm else 0
        return sum(math.prod(w) for w in latent.weights(h, heads).values()) + vectors * norms
    norms = 2 * k if shape.qk_layernorm else 0
    bias = shape.qkv_width if shape.linear_bias or shape.qkv_bias else 0
    return h * shape.qkv_width + heads * k * h + bias + vectors * norms


def stage_shares(moe_layers: Sequence[int], pp: Any, vpp: Any) -> Any:
    """Part of each stage's layers that have experts, the chunks of a stage together.

    Args:
        moe_layers: 1 for every layer with experts, else 0.
        pp: [n] stages.
        vpp: [n] chunks of a stage.

    Returns:
        [n, max pp]; None: it is the same for all stages of every row.
    """
    num = len(moe_layers)
    if all(moe_layers):
        return None
    before = np.concatenate([[0], np.cumsum(moe_layers)])
    found = np.zeros((len(pp), int(pp.max())))
    shapes, row = np.unique(np.stack([pp, vpp], axis=1), axis=0, return_inverse=True)
    for i, (p, v) in enumerate(shapes):
        ends = np.arange(p * v + 1) * num // (p * v)
        held = np.diff(before[ends]).reshape(v, p).sum(axis=0)
        found[row.reshape(-1) == i, :p] = held * p / num
    inside = np.arange(found.shape[1]) < pp[:, None]
    return found if np.ptp(found[inside]) else None
