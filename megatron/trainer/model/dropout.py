"""Dropout where ranks share samples: they drop the entries that one rank with whole samples drops.

Every rank of a sample draws for the whole sample, from one random stream, and keeps its own part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.trainer.distributed.context_parallel import local_chunks
from megatron.trainer.distributed.process_groups import WHOLE_SAMPLE_STREAM


def drop_by_position(chunk: torch.nn.Module, group: Any) -> None:
    """Lets the hidden dropout of a model chunk depend on the place of a token in its sample.

    Args:
        chunk: not wrapped yet; its activations are not split over the sequence.
    """
    for module in chunk.modules():
        if isinstance(module, TransformerLayer):
            module.self_attn_bda = module.mlp_bda = _bias_dropout_add(group)
        elif isinstance(module, LanguageModelEmbedding):
            module.embedding_dropout = _Dropout(module.embedding_dropout.p, group)


def kept_weights(own: torch.Tensor, prob: float, size: int) -> torch.Tensor:
    """What the attention weights of a whole sample are multiplied with: 0 or 1 / (1 - prob).

    Args:
        own: [s / c, batch, heads, width] queries of this rank.
        size: ranks that share the sample, c.

    Returns:
        [batch, heads, s, s], the same on all ranks of the sample.
    """
    tokens, batch, heads, _ = own.shape
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    with tracker.fork(WHOLE_SAMPLE_STREAM):
        return F.dropout(own.new_ones(batch, heads, size * tokens, size * tokens), prob)


def _dropped(own: torch.Tensor, prob: float, group: Any) -> torch.Tensor:
    """[s / c, ...] the tokens of this rank after dropout."""
    whole = own.new_ones(group.size() * own.shape[0], *own.shape[1:])
    return own * local_chunks(F.dropout(whole, prob), group, dim=0)


class _Dropout(torch.nn.Dropout):
    """Of [s / c, batch, width]."""

    def __init__(self, prob: float, group: Any) -> None:
        super().__init__(prob)
        self.group = group

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the same shape."""
        is_active = self.training and self.p > 0.0
        return _dropped(input, self.p, self.group) if is_active else input


def _bias_dropout_add(group: Any) -> Callable[[bool, bool], Callable[..., torch.Tensor]]:
    """Stands for megatron-core's `get_bias_dropout_add`."""

    def get(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        plain = get_bias_dropout_add(training, fused)

        def add(x_with_bias: Any, residual: torch.Tensor, prob: float) -> torch.Tensor:
            if not training or prob == 0.0:
                return plain(x_with_bias, residual, prob)
            x, bias = x_with_bias
            dropped = _dropped(x if bias is None else x + bias, prob, group)
            return plain((dropped, None), residual, 0.0)

        return add

    return get
