"""Floating-point operations of training, for the throughput in the log. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.training.config import Config


def flops_of_config(config: Config, seq_length: int) -> float:
    """Model FLOPs of one sample of a run, forward and backward.

    Args:
        config: resolved configuration.
        seq_length: tokens of the sample.
    """
    return training_flops_per_sample(
        num_layers=config.model.num_layers,
        hidden_size=config.model.hidden_size,
        ffn_hidden_size=config.model.ffn_hidden_size,
        num_attention_heads=config.model.num_attention_heads,
        num_query_groups=config.model.num_query_groups,
        kv_channels=config.model.kv_channels,
        seq_length=seq_length,
        padded_vocab_size=config.model.padded_vocab_size,
        gated_mlp=config.model.gated_linear_unit,
        latent=LatentWidths.of(config.flat()),
        mtp_num_layers=config.model.mtp_num_layers or 0,
        experts=ExpertWidths.of(config.flat()),
    )


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
    latent: LatentWidths | None = None,
    mtp_num_layers: int = 0,
    experts: ExpertWidths | None = None,
) -> float:
    """Model FLOPs of one forward and backward pass over one sample, recomputation not counted.

    A multiply-add is two operations, and the backward pass costs twice the forward one. Attention
    is causal, so half of the score matrix counts (arXiv 2104.04473, appendix, with that half).

    Returns:
        Operations per sample.
    """
    if latent is None:
        query = kv_channels * num_attention_heads
        key_value = 2 * kv_channels * num_query_groups
        attention = hidden_size * (query + key_value) + query * hidden_size + query * seq_length
    else:
        attention = latent.multiply_adds(hidden_size, num_attention_heads, seq_length)
    matrices = 3 if gated_mlp else 2
    mlp = hidden_size * ffn_hidden_size * matrices
    head = hidden_size * padded_vocab_size
    # A further token has a layer, a projection of two streams into one, and the head again.
    further = mtp_num_layers * (attention + mlp + 2 * hidden_size**2 + head)
    layers = num_layers * (attention + mlp)
    if experts is not None:
        more = experts.multiply_adds(hidden_size, matrices) - mlp
        layers += experts.num_layers * more
        further += mtp_num_layers * experts.is_last * more
    return 3.0 * 2.0 * seq_length * (layers + head + further)


@dataclass(frozen=True, kw_only=True)
class ExpertWidths:
    """Sizes of a mixture of experts that its work depends on."""

    num_layers: int
    """Layers with experts, without those of further tokens."""
    is_last: bool
    """Whether the last layer has experts, as those of further tokens then have."""
    num_experts: int
    """Of a layer."""
    moe_router_topk: int
    """Experts of a token."""
    moe_ffn_hidden_size: int
    moe_shared_expert_intermediate_size: int = 0
    """Width of the shared expert; 0: there is none."""
    moe_shared_expert_gate: bool = False
    """Whether the shared expert is scaled for each token."""

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> ExpertWidths | None:
        """Reads flags by field name; None for a dense model."""
        if not arguments.get("num_experts"):
            return None
        return cls(
            num_layers=sum(arguments["moe_layers"]),
            is_last=bool(arguments["moe_layers"][-1]),
            num_experts=arguments["num_experts"],
            moe_router_topk=arguments["moe_router_topk"],
            moe_ffn_hidden_size=arguments["moe_ffn_hidden_size"],
            moe_shared_expert_intermediate_size=(
                arguments.get("moe_shared_expert_intermediate_size") or 0
            ),
            moe_shared_expert_gate=bool(arguments.get("moe_shared_expert_gate")),
        )

    def multiply_adds(self, hidden_size: int, matrices: int) -> int:
        """Of one token in one layer with experts: the experts that it goes to, the shared one and
        the router.

        Args:
            hidden_size: of the model.
            matrices: of an MLP: 3 if it is gated, else 2.
        """
        width = self.moe_router_topk * self.moe_ffn_hidden_size
        width += self.moe_shared_expert_intermediate_size
        routed = self.num_experts + self.moe_shared_expert_gate
        return hidden_size * (matrices * width + routed)


@dataclass(frozen=True, kw_only=True)
class LatentWidths:
    q_lora_rank: int | None
    """Of the compressed query; None: it is not compressed."""
    kv_lora_rank: int
    """Of the compressed keys and values."""
    qk_head_dim: int
    """Of a head's query and key without their rotated part."""
    qk_pos_emb_head_dim: int
    """Of the rotated part."""
    v_head_dim: int
    """Of a head's value."""

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> LatentWidths | None:
        """Reads flags by field name; None for a model with plain attention."""
        if not arguments.get("multi_latent_attention"):
            return None
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})

    def weights(self, hidden_size: int, heads: int) -> dict[str, tuple[int, int]]:
        """Shape of every weight matrix of a layer's attention by the name of its module, in the
        order in which megatron-core registers them."""
        query = heads * (self.qk_head_dim + self.qk_pos_emb_head_dim)
        shapes = {"linear_proj": (hidden_size, heads * self.v_head_dim)}
        if self.q_lora_rank is None:
            shapes["linear_q_proj"] = (query, hidden_size)
        else:
            shapes["linear_q_down_proj"] = (self.q_lora_rank, hidden_size)
            shapes["linear_q_up_proj"] = (query, self.q_lora_rank)
        shapes["linear_kv_down_proj"] = (self.kv_lora_rank + self.qk_pos_emb_head_dim, hidden_size)
        key_value = heads * (self.qk_head_dim + self.v_head_dim)
        shapes["linear_kv_up_proj"] = (key_value, self.kv_lora_rank)
        return shapes

    def multiply_adds(self, hidden_size: int, heads: int, seq_length: int) -> float:
        """Of one token in one layer's attention."""
        matrices = sum(math.prod(size) for size in self.weights(hidden_size, heads).values())
        width = self.qk_head_dim + self.qk_pos_emb_head_dim + self.v_head_dim
        return matrices + heads * width * seq_length / 2
