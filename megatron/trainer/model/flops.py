"""Floating-point operations of training, for the throughput in the log. Pure arithmetic."""

from __future__ import annotations

from megatron.trainer.config.model_shape import ModelShape


def training_flops_per_sample(shape: ModelShape, seq_length: int) -> float:
    """Model FLOPs of one forward and backward pass over one sample, recomputation not counted.

    A multiply-add is two operations, and the backward pass costs twice the forward one. Attention
    is causal, so half of the score matrix counts (arXiv 2104.04473, appendix, with that half).

    Returns:
        Operations per sample.
    """
    return 3.0 * 2.0 * seq_length * sum(_multiply_adds(shape, seq_length))


def recomputation_flops_per_sample(shape: ModelShape, seq_length: int) -> float:
    """FLOPs of the forward pass of all layers over one sample, which full recomputation adds."""
    return 2.0 * seq_length * _multiply_adds(shape, seq_length)[0]


def _multiply_adds(shape: ModelShape, seq_length: int) -> tuple[float, float]:
    """Those of a token in the layers, and in all besides, of a forward pass."""
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    if shape.latent is None:
        query = shape.kv_channels * heads
        attention = hidden * shape.qkv_width + query * hidden + query * seq_length
    else:
        attention = shape.latent.multiply_adds(hidden, heads, seq_length)
    matrices = 3 if shape.gated else 2
    mlp = hidden * shape.ffn_hidden_size * matrices
    head = hidden * shape.padded_vocab_size
    # A further token has a layer, a projection of two streams into one, and the head again.
    further = shape.mtp_num_layers * (attention + mlp + 2 * hidden**2 + head)
    layers = shape.num_layers * (attention + mlp)
    if (experts := shape.experts) is not None:
        more = experts.multiply_adds(hidden, matrices) - mlp
        layers += sum(experts.layers) * more
        further += shape.mtp_num_layers * experts.layers[-1] * more
    return layers, head + further
