"""How many parameters a model has, and where those of its experts lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from copus_ext.cost_model.model_spec import ModelSpec


def num_parameters(model: ModelSpec, *, experts: int) -> int:
    """Of the whole model, vocabulary padded for one rank, with so many experts in each layer that
    has some."""
    h, vectors = model.hidden_size, 1 if model.normalization == "RMSNorm" else 2
    norm = h * vectors
    layer = _attention_parameters(model, vectors) + 2 * norm + (h if model.bias else 0)
    dense = layer + _mlp_parameters(model, model.ffn)
    other = layer
    if model.num_experts is not None:
        other += model.num_experts * (h + model.bias)
        other += experts * _mlp_parameters(model, model.expert_ffn)
        if shared := model.moe_shared_expert_intermediate_size:
            other += _mlp_parameters(model, shared) + (h if model.moe_shared_expert_gate else 0)
    layers = model.moe_layers
    is_last = bool(layers and layers[-1])
    tables = int(model.padded_vocab_size(1)) * h * (1 if model.tied else 2)
    further = model.mtp_num_layers * ((other if is_last else dense) + 2 * h * h + 3 * norm)
    stack = sum(layers) * other + (model.num_layers - sum(layers)) * dense
    return stack + further + tables + model.learned_positions * h + norm


def _mlp_parameters(model: ModelSpec, width: int) -> int:
    """Of an MLP, or of an expert."""
    h, matrices = model.hidden_size, 3 if model.gated else 2
    return matrices * h * width + ((matrices - 1) * width + h if model.bias else 0)


def _attention_parameters(model: ModelSpec, vectors: int) -> int:
    """Of one layer, without the bias of the output projection."""
    h, k, heads = model.hidden_size, model.channels, model.num_attention_heads
    if (latent := model.latent) is not None:
        norms = latent.kv_lora_rank + (latent.q_lora_rank or 0) if model.qk_layernorm else 0
        return sum(math.prod(w) for w in latent.weights(h, heads).values()) + vectors * norms
    width = (heads + 2 * model.groups) * k
    norms = 2 * k if model.qk_layernorm else 0
    bias = width if model.bias or model.qkv_bias else 0
    return h * width + heads * k * h + bias + vectors * norms


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
