"""Causal attention on torch's scaled_dot_product_attention, and multi-latent attention on it, used
where Transformer Engine is absent."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron.trainer.common.optional import have_transformer_engine
from megatron.trainer.distributed.context_parallel import (
    gather_sequence,
    heads_to_sequence,
    sequence_to_heads,
)
from megatron.trainer.model.dropout import kept_weights


class SdpaAttention(MegatronModule):
    """Core attention of a layer spec: no score matrix in memory where torch has a flash kernel.

    Only causal self-attention without packing or bias, which is what GPT pre-training uses. Ranks
    that share a sample gather keys and values (arXiv 2407.21783), or exchange tokens for heads.

    Args:
        layer_number: unused: what `apply_query_key_layer_scaling` divides by before the softmax it
            multiplies by inside, so that only fp16 score matrices, which are not made here, change.
        attn_mask_type: must be causal.
        attention_type: unused, part of the interface.
        attention_dropout: overrides the configured probability.
        softmax_scale: overrides 1/sqrt(head size).
        cp_comm_type: `all_gather`, or `a2a` to exchange tokens for heads.
        pg_collection: groups; those of tensor and context parallelism are used.
        k_channels: unused, part of the interface: queries and keys bring their width.
        v_channels: width of a head's value, if it is not that of the query.
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
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal, attn_mask_type
        assert config.kv_channels is not None and config.num_query_groups is not None
        tp_size = pg_collection.tp.size() if pg_collection is not None else 1
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None  # pyright: ignore[reportOptionalMemberAccess]
        self.cp_comm_type = cp_comm_type or config.cp_comm_type
        assert self.cp_group is None or self.cp_comm_type in ("all_gather", "a2a")
        width = v_channels or config.kv_channels
        self.output_size = width * config.num_attention_heads // tp_size
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
            query: [seq, batch, heads of this rank, head size]; under context parallelism the
                tokens of this rank, here and below.
            key: [seq, batch, query groups of this rank, head size].
            value: [seq, batch, query groups of this rank, value size].
            attention_mask: must be None.
            attn_mask_type: `no_mask` where a single new token looks back on all keys that are kept;
                else the mask is causal.
            attention_bias: must be None.
            packed_seq_params: must be None.

        Returns:
            [seq, batch, heads of this rank x value size].
        """
        assert attention_mask is None and attention_bias is None and packed_seq_params is None
        is_causal = attn_mask_type != AttnMaskType.no_mask
        if self.cp_group is None:
            context = self._attend(query, key, value, is_causal=is_causal)
        else:
            # torch has no kernel with dropout for CPU ranks and makes this matrix, too. Those of a
            # GPU draw for themselves.
            kept = None
            if self.training and self.dropout > 0.0 and query.device.type == "cpu":
                kept = kept_weights(query, self.dropout, self.cp_group.size())
            by_heads = self.cp_comm_type == "a2a"
            attend = self._attend_by_heads if by_heads else self._attend_to_all
            context = attend(query, key, value, self.cp_group, kept)
        seq, batch = query.shape[:2]
        return context.reshape(seq, batch, self.output_size)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        is_causal: bool = True,
        kept: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[seq, batch, heads, value size]. Causal queries stand at the end of the keys. The weights
        are multiplied with `kept`, [batch, heads, queries, keys], if it is given."""
        dropout = self.dropout if self.training else 0.0
        # [seq, batch, heads, size] -> [batch, heads, seq, size]
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        if kept is not None:
            mask = _lower_right(len(query), len(key), query.device)
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
            scores = (q @ k.transpose(2, 3) * self.softmax_scale).masked_fill(~mask, -math.inf)
            return (scores.softmax(dim=-1) * kept @ v).permute(2, 0, 1, 3)
        mask = None
        if is_causal and len(query) != len(key):
            mask, is_causal = _lower_right(len(query), len(key), query.device), False
        tracker: Any = tensor_parallel.get_cuda_rng_tracker()
        with tracker.fork() if dropout > 0.0 else contextlib.nullcontext():
            context = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=is_causal,
                scale=self.softmax_scale,
                enable_gqa=query.shape[2] != key.shape[2],
            )
        return context.permute(2, 0, 1, 3)

    def _attend_to_all(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: Any,
        kept: torch.Tensor | None,
    ) -> torch.Tensor:
        """Gathers keys and values; each of the two chunks attends to all tokens up to its end."""
        size, rank = group.size(), group.rank()
        width = key.shape[-1]
        both = gather_sequence(torch.cat([key, value], dim=-1), group)
        key, value = both[..., :width], both[..., width:]
        chunk = len(query) // 2
        parts = []
        for number, part in zip((rank, 2 * size - 1 - rank), query.split(chunk), strict=True):
            end = (number + 1) * chunk
            own = None if kept is None else kept[:, :, end - chunk : end, :end]
            parts.append(self._attend(part, key[:end], value[:end], kept=own))
        return torch.cat(parts)

    def _attend_by_heads(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: Any,
        kept: torch.Tensor | None,
    ) -> torch.Tensor:
        """Exchanges tokens for heads, attends, and exchanges back."""
        size, groups = group.size(), key.shape[2]
        if groups % size:
            key, value = (t.repeat_interleave(size // groups, dim=2) for t in (key, value))
        whole = [sequence_to_heads(t, group) for t in (query, key, value)]
        own = None if kept is None else kept.chunk(size, dim=1)[group.rank()]
        return heads_to_sequence(self._attend(*whole, kept=own), group)


@functools.lru_cache(maxsize=64)
def _lower_right(queries: int, keys: int, device: torch.device) -> Any:
    """The causal mask of queries that stand at the end of the keys."""
    if device.type == "cuda":
        # A form that flash kernels take; not run on a GPU yet. Its import loads a compiler.
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(queries, keys)
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


class SharedLinear(MegatronModule):
    """A linear layer that every tensor-parallel rank holds whole and applies to its own tokens.

    Its gradient is summed over tensor parallelism after the backward pass, as that of a norm.

    Args:
        config: dtype, and whether sequence parallelism is on.
    """

    def __init__(self, config: TransformerConfig, input_size: int, output_size: int) -> None:
        super().__init__(config=config)
        device: Any = torch.cuda.current_device()
        weight = torch.empty(output_size, input_size, device=device, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Returns [..., output size], and no bias."""
        return F.linear(x, self.weight), None


class LatentAttention(MLASelfAttention):
    """megatron-core's multi-latent attention with the compression that Transformer Engine gives it.

    megatron-core's local specification cuts the compressing layers over tensor parallelism, and
    leaves the gradient of the rotated key of each rank at that of its own heads. Here every rank
    compresses its own tokens with whole layers, so that nothing is left out.
    """

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        # It takes Transformer Engine to be there once the module that wraps it imports, and then
        # asks whether a layer is of a class that is none.
        multi_latent_attention.HAVE_TE = have_transformer_engine()
        super().__init__(config, *args, **kwargs)
        hidden, rotated = config.hidden_size, config.qk_pos_emb_head_dim
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = SharedLinear(config, hidden, config.q_lora_rank)
        self.linear_kv_down_proj = SharedLinear(config, hidden, config.kv_lora_rank + rotated)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """The layers of megatron-core 0.19, which would put a norm before queries that are not
        compressed, where releases before it had none."""
        if self.config.q_lora_rank is not None or not self.config.qk_layernorm:
            theirs: Any = super()
            return theirs._resolve_qk_norm_config(submodules)
        return {
            "linear_q_proj": submodules.linear_q_proj,
            "linear_q_up_proj": IdentityOp,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "q_layernorm": IdentityOp,
            "kv_layernorm": submodules.kv_layernorm,
        }
