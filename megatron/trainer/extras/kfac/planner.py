"""What K-FAC adds to a step, for the planner: products of matrices, bytes to send and to keep.

Counted as `precondition.py` does it (arXiv 1503.05671), for dense layers that are whole on a rank.
No GPU has run it. There, products whose factors are rounded to TF32 are taken to have half of the
rate of those in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from megatron.trainer.common.extras import CostTerms
from megatron.trainer.extras.kfac.flags import MAX_WIDE

_INVERSE = 3.0
"""Time of an inverse over that of a product of as many operations."""
_MATRICES = 4
"""Of a layer."""


def cost_terms(candidates: Any) -> CostTerms:
    rows, is_on = candidates, np.asarray(candidates.extras["kfac"], dtype=float)
    often = is_on / np.maximum(rows.extras["kfac_interval"], 1)
    elements, share = covariance_elements(rows), local_share(rows)
    # Gradients of matrices that lie on several replicas go round twice, or those of all once.
    cut = np.minimum(2 * _buckets(rows) * (rows.copies - 1) / (_MATRICES * _layers(rows)), 1.0)
    gathered = np.where(rows.use_distributed_optimizer, rows.gradient_bytes * cut, 0.0)
    return CostTerms(
        # The sums of covariances, and the inverses of its own matrices.
        layer_bytes=is_on * 4.0 * elements * (1.0 + share),
        layer_products=tuple(_products(rows, is_on, often, share)),
        sent_parameter_bytes=is_on * gathered,
        # Halves of covariances, twice.
        sent_layer_bytes=often * 2 * 4.0 / 2 * elements,
    )


def _products(rows: Any, is_on: Any, often: Any, share: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
    width = np.where(np.logical_or(rows.on_cpu, np.equal(rows.element_bytes, 4)), 1.0, 2.0)
    for inputs, outputs in _matrices(rows):
        for side in (inputs, outputs):
            is_there = width * np.less_equal(side, MAX_WIDE)
            yield is_there * is_on * share, outputs, inputs, side
            yield is_there * often * rows.num_microbatches, side, side, rows.tokens
            # An inverse takes as many operations as half a product of two such matrices.
            yield is_there * often * share * _INVERSE / 2, side, side, side


def _matrices(rows: Any) -> Iterator[tuple[Any, Any]]:
    """Inputs and outputs of each matrix of a layer."""
    h, ffn = rows.hidden_size, rows.ffn_hidden_size
    yield h, rows.attention_width
    yield rows.num_attention_heads * rows.kv_channels, h
    yield h, (rows.mlp_matrices - 1) * ffn
    yield ffn, h


def _layers(rows: Any) -> Any:
    """[n] layers of a stage, all being equal."""
    return rows.num_layers / rows.pp


def covariance_elements(rows: Any) -> Any:
    """[n] elements of all covariances of one layer. A side that is too wide has none."""
    sides = (np.asarray(w, dtype=float) for pair in _matrices(rows) for w in pair)
    return sum(np.where(w <= MAX_WIDE, w * w, 0.0) for w in sides)


def local_share(rows: Any) -> Any:
    """[n] part of a stage's matrices that a rank inverts and multiplies for: all of them, or those
    of which it has a part of the optimizer's state. Its piece of a bucket cuts one more."""
    some = np.minimum(1.0 / rows.copies + _buckets(rows) / (_MATRICES * _layers(rows)), 1.0)
    return np.where(rows.use_distributed_optimizer, some, 1.0)


def _buckets(rows: Any) -> Any:
    """[n] buckets of gradients of the stage that has most: one for each chunk, and with overlap
    many for the first chunk of the first stage."""
    of_chunk = _layers(rows) / rows.vpp * sum(m * n for m, n in _matrices(rows))
    many = np.maximum(of_chunk / rows.bucket_parameters, 1.0)
    return rows.vpp - 1.0 + np.where(rows.overlap_grad_reduce, many, 1.0)
