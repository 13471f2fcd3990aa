"""Causal attention on torch's scaled_dot_product_attention, used where Transformer Engine is
absent."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class SdpaAttention(MegatronModule):
    """Core attention of a layer spec: no score matrix in memory where torch has a flash kernel.

    Only causal self-attention without packing or bias, which is what GPT pre-training uses.

    Args:
        config: head counts, dropout.
        layer_number: unused: what `apply_query_key_layer_scaling` divides by before the softmax it
            multiplies by inside, so that only fp16 score matrices, which are not made here, change.
        attn_mask_type: must be causal.
        attention_type: unused, part of the interface.
        attention_dropout: overrides the configured probability.
        softmax_scale: overrides 1/sqrt(head size).
        pg_collection: groups; the tensor-parallel one is used.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal, attn_mask_type
        assert config.context_parallel_size == 1
        assert config.kv_channels is not None and config.num_query_groups is not None
        tp_size = pg_collection.tp.size() if pg_collection is not None else 1
        self.grouped = config.num_query_groups != config.num_attention_heads
        self.output_size = config.kv_channels * config.num_attention_heads // tp_size
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attends causally.

        Args:
            query: [seq, batch, heads of this rank, head size].
            key: [seq, batch, query groups of this rank, head size].
            value: like key.
            attention_mask: must be None; the mask is causal.
            attn_mask_type: unused, part of the interface.
            attention_bias: must be None.
            packed_seq_params: must be None.

        Returns:
            [seq, batch, heads of this rank x head size].
        """
        assert attention_mask is None and attention_bias is None and packed_seq_params is None
        dropout = self.dropout if self.training else 0.0
        # [seq, batch, heads, size] -> [batch, heads, seq, size]
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        if dropout > 0.0:
            tracker: Any = tensor_parallel.get_cuda_rng_tracker()
            with tracker.fork():
                context = self._attend(q, k, v, dropout)
        else:
            context = self._attend(q, k, v, 0.0)
        seq, batch = query.shape[:2]
        return context.permute(2, 0, 1, 3).reshape(seq, batch, self.output_size)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=dropout,
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=self.grouped,
        )
