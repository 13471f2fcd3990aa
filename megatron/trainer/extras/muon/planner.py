"""What Muon adds to a step, for the planner: products of matrices, and bytes that it saves.

Counted as emerging-optimizers does it: each Newton-Schulz step takes three products, and every
tensor-parallel rank orthogonalizes whole matrices (`--muon-tp-mode duplicated`). The messages that
gather their parts are not priced. No GPU has run it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from megatron.trainer.common.extras import CostTerms

_MOMENT_BYTES = 4.0
"""Adam's second moment of an element, which Muon does not keep."""


def cost_terms(candidates: Any) -> CostTerms:
    """See `Extra.cost_terms`: the products of the Newton-Schulz steps, and a moment less.

    A learned position embedding is on the first stage alone. Its products count on all layers
    alike, and its moment is not taken off, so that no stage is said to hold less than it does.
    """
    rows = candidates
    steps = np.asarray(rows.extras["muon_num_ns_steps"], dtype=float)
    matrices = [*_matrices(rows)]
    held = sum(often / cut * m * n for often, cut, m, n in matrices)
    positions = np.asarray(rows.learned_positions)
    matrices.append(
        ((positions > 0) / rows.num_layers, 1, np.maximum(positions, 1), rows.hidden_size)
    )
    return CostTerms(
        layer_bytes=np.where(steps > 0, -_MOMENT_BYTES * held, 0.0),
        layer_products=tuple(
            product
            for often, _, m, n in matrices
            for product in _newton_schulz(steps * often, np.minimum(m, n), np.maximum(m, n))
        ),
    )


def _newton_schulz(steps: Any, short: Any, long: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
    """The products for a matrix X of `short` rows and `long` columns, or its transpose, in the form
    of `CostTerms.layer_products`: how many, rows, columns and inner length. In each step they are
    A = X X', A A, and (b A + c A A) X."""
    yield steps, short, short, long
    yield steps, short, short, short
    yield steps, short, long, short


def _matrices(rows: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Matrices of a layer that are orthogonalized alone: how many on a rank in the mean of the
    layers, over how many ranks each is cut, its rows and columns."""
    h, heads = rows.hidden_size, rows.num_attention_heads * rows.kv_channels
    groups, up = rows.num_query_groups * rows.kv_channels, rows.mlp_matrices - 1
    split = np.asarray(rows.extras["muon_split_qkv"], dtype=float)
    yield split, rows.tp, heads, h
    yield 2.0 * split, rows.tp, groups, h
    yield 1.0 - split, rows.tp, heads + 2 * groups, h
    yield 1.0, rows.tp, h, heads
    x = rows.experts
    dense = 1.0 if x is None else 1.0 - x.share
    yield dense, rows.tp, up * rows.ffn_hidden_size, h
    yield dense, rows.tp, h, rows.ffn_hidden_size
    if x is None:
        return
    yield x.share, 1, x.num_experts, h
    shared = x.moe_shared_expert_intermediate_size
    for often, cut, width in (
        (x.share * x.num_experts / x.ep, x.etp, x.moe_ffn_hidden_size),
        (x.share * (np.asarray(shared) > 0), rows.tp, np.maximum(shared, 1)),
    ):
        yield often, cut, up * width, h
        yield often, cut, h, width
