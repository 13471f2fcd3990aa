"""What K-FAC adds to a step: seconds, bytes to send, and bytes to keep.

Counted as `megatron/training/model/kfac.py` does it (arXiv 1503.05671), for dense layers that are
whole on a rank. No GPU has run it. There, products whose factors are rounded to TF32 are taken to
have half of the rate of those in bf16.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.kernels import gemm_s
from copus_ext.cost_model.rows import Rows
from megatron.training.config.kfac_flags import MOST_WIDE

_INVERSE = 3.0
"""Time of an inverse over that of a product of as many operations."""
_MATRICES = 4
"""Of a layer."""


def _matrices(rows: Rows) -> Iterator[tuple[Any, Any]]:
    """Inputs and outputs of each matrix of a layer."""
    h, ffn = rows.hidden_size, rows.ffn_hidden_size
    yield h, rows.attention_width
    yield rows.num_attention_heads * rows.kv_channels, h
    yield h, (rows.mlp_matrices - 1) * ffn
    yield ffn, h


def layers(rows: Rows) -> Any:
    """[n] layers of a stage, all being equal."""
    return rows.num_layers / rows.pp


def covariance_elements(rows: Rows) -> Any:
    """[n] elements of all covariances of one layer. A side that is too wide has none."""
    sides = (np.asarray(w, dtype=float) for pair in _matrices(rows) for w in pair)
    return sum(np.where(w <= MOST_WIDE, w * w, 0.0) for w in sides)


def own_share(rows: Rows) -> Any:
    """[n] part of a stage's matrices that a rank inverts and multiplies for: all of them, or those
    of which it has a part of the optimizer's state. Its piece of a bucket cuts one more."""
    some = np.minimum(1.0 / rows.copies + _buckets(rows) / (_MATRICES * layers(rows)), 1.0)
    return np.where(rows.use_distributed_optimizer, some, 1.0)


def _buckets(rows: Rows) -> Any:
    """[n] buckets of gradients of the stage that has most: one for each chunk, and with overlap
    many for the first chunk of the first stage."""
    of_chunk = layers(rows) / rows.vpp * sum(m * n for m, n in _matrices(rows))
    many = np.maximum(of_chunk / bucket_parameters(rows.copies), 1.0)
    return rows.vpp - 1.0 + np.where(rows.overlap_grad_reduce, many, 1.0)


def bucket_parameters(copies: Any) -> Any:
    """Parameters of a bucket of gradients, as megatron-core chooses it with overlap."""
    return np.maximum(40e6, 1e6 * copies)


def compute_s(rows: Rows, c: Constants) -> Any:
    """[n] mean seconds that a rank of any stage computes in a step; 0 without K-FAC."""
    tokens, products, covariances, inverses = rows.tokens, 0.0, 0.0, 0.0
    for inputs, outputs in _matrices(rows):
        for side, times in (
            (inputs, gemm_s(rows, c, outputs, inputs, inputs)),
            (outputs, gemm_s(rows, c, outputs, inputs, outputs)),
        ):
            is_there = np.less_equal(side, MOST_WIDE)
            of_tokens = rows.num_microbatches * gemm_s(rows, c, side, side, tokens)
            # An inverse takes as many operations as half a product of two such matrices.
            inverse = _INVERSE / 2 * gemm_s(rows, c, side, side, side)
            products = products + np.where(is_there, times, 0.0)
            covariances = covariances + np.where(is_there, of_tokens, 0.0)
            inverses = inverses + np.where(is_there, inverse, 0.0)
    often = 1.0 / np.maximum(rows.kfac_interval, 1)
    layer = own_share(rows) * (products + often * inverses) + often * covariances
    width = np.where(np.logical_or(rows.on_cpu, np.equal(rows.element_bytes, 4)), 1.0, 2.0)
    return np.where(np.greater(rows.kfac_interval, 0), width * layers(rows) * layer, 0.0)


def sent_bytes(rows: Rows, held: Any) -> Any:
    """Bytes that go once round the replicas besides, mean of the steps: halves of covariances,
    twice, and with the distributed optimizer the reduced gradients of matrices that lie on several
    replicas, twice, or of all, once; 0 without K-FAC.

    Args:
        rows: configurations.
        held: parameters of a rank, [pp, n].
    """
    halves = 2 * 4.0 / 2 * covariance_elements(rows) * layers(rows)
    cut = np.minimum(2 * _buckets(rows) * (rows.copies - 1) / (_MATRICES * layers(rows)), 1.0)
    gathered = np.where(rows.use_distributed_optimizer, rows.gradient_bytes * held * cut, 0.0)
    found = gathered + halves / np.maximum(rows.kfac_interval, 1)
    return np.where(np.greater(rows.kfac_interval, 0), found, 0.0)


def usual_step_s(seconds: Sequence[float], interval: int) -> float:
    """Seconds of a usual step, of which one in so many makes covariances and takes longer: the
    median over whole intervals of their means, or over all steps while there is no interval.

    Args:
        seconds: of steps in order, at least one.
        interval: steps between two long ones; 1 without K-FAC.
    """
    begins = range(0, len(seconds) - interval + 1, interval)
    means = [statistics.fmean(seconds[i : i + interval]) for i in begins]
    return statistics.median(means or seconds)


def held_bytes(rows: Rows) -> Any:
    """[n] bytes of a rank of any stage in a step that makes covariances: their sums, and the
    inverses of its own matrices; 0 without K-FAC."""
    found = 4.0 * covariance_elements(rows) * layers(rows) * (1.0 + own_share(rows))
    return np.where(np.greater(rows.kfac_interval, 0), found, 0.0)
