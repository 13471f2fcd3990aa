"""Parameters that a rank holds, exactly as megatron-core builds them."""

from __future__ import annotations

from typing import Any

import numpy as np

from copus_ext.cost_model.rows import Rows


def layer_parameters(rows: Rows) -> Any:
    """Parameters of one layer on one tensor-parallel rank."""
    h, tp = rows.hidden_size, rows.tp
    heads = rows.num_attention_heads * rows.kv_channels
    matrices = h * rows.attention_width + heads * h + rows.mlp_matrices * h * rows.ffn_hidden_size
    up = (rows.mlp_matrices - 1) * rows.ffn_hidden_size
    split_biases = np.where(rows.has_bias, rows.attention_width + up, 0)
    whole_biases = np.where(rows.has_bias, 2 * h, 0)
    return (matrices + split_biases) / tp + whole_biases + 2 * rows.norm_vectors * h


def end_parameters(rows: Rows) -> tuple[Any, Any]:
    """Parameters of the embedding, and of the final norm with the output layer, on one
    tensor-parallel rank."""
    word = rows.padded_vocab_size / rows.tp * rows.hidden_size
    first = word + rows.learned_positions * rows.hidden_size
    # A tied output layer of another stage is a copy; of the same stage it is the embedding itself.
    output = np.where(np.logical_and(rows.tied, rows.pp == 1), 0.0, word)
    return first, output + rows.norm_vectors * rows.hidden_size


def all_stages(rows: Rows) -> Any:
    """[max pp, 1] numbers of the stages of the longest pipeline."""
    return np.arange(int(np.max(rows.pp)))[:, None]


def stage_parameters(rows: Rows, stage: Any = None) -> Any:
    """Parameters of every stage on one tensor-parallel rank.

    Args:
        rows: configurations.
        stage: [m, 1 or n] which stages; None is `all_stages`.

    Returns:
        [m, n]: zero beyond a row's own stages.
    """
    stage = all_stages(rows) if stage is None else stage
    pp = np.broadcast_to(rows.pp, len(rows))
    inside = stage < pp
    last = stage == pp - 1
    layers = rows.num_layers / rows.pp * layer_parameters(rows)
    first, end = end_parameters(rows)
    return np.where(inside, layers + np.where(stage == 0, first, 0.0) + np.where(last, end, 0.0), 0)
