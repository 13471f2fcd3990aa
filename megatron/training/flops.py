"""Floating-point operations of training, for the throughput in the log. Pure arithmetic."""

from __future__ import annotations


def training_flops_per_sample(
    *,
    num_layers: int,
    hidden_size: int,
    ffn_hidden_size: int,
    num_attention_heads: int,
    num_query_groups: int,
    kv_channels: int,
    seq_length: int,
    padded_vocab_size: int,
    gated_mlp: bool,
) -> float:
    """Model FLOPs of one forward and backward pass over one sample, recomputation not counted.

    A multiply-add is two operations and the backward pass costs twice the forward one; attention is
    causal, so half of the score matrix counts (arXiv 2104.04473, appendix, with that half).

    Returns:
        Operations per sample.
    """
    query = kv_channels * num_attention_heads
    key_value = 2 * kv_channels * num_query_groups
    attention = hidden_size * (query + key_value) + query * hidden_size + query * seq_length
    mlp = hidden_size * ffn_hidden_size * (3 if gated_mlp else 2)
    head = hidden_size * padded_vocab_size
    return 3.0 * 2.0 * seq_length * (num_layers * (attention + mlp) + head)
