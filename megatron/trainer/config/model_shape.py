"""The shape of a model, in one form for FLOPs, layout rules, planner, reshard plan and report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from megatron.trainer.config.moe_flags import layers_with_experts


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Widths of multi-latent attention."""

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
    def of(cls, arguments: Mapping[str, Any]) -> LatentShape | None:
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


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """Sizes of a mixture of experts."""

    layers: tuple[int, ...]
    """[num_layers] 1 for every layer with experts, else 0."""
    num_experts: int
    """Of a layer."""
    moe_ffn_hidden_size: int
    """Width of an expert."""
    moe_router_topk: int = 2
    """Experts of a token."""
    moe_shared_expert_intermediate_size: int = 0
    """Width of the shared expert; 0: there is none."""
    moe_shared_expert_gate: bool = False
    """The shared expert is scaled for each token."""
    moe_grouped_gemm: bool = False
    """The experts of a rank are one module, as Transformer Engine's, whose first matrices of all
    experts come before their second ones."""

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> ExpertShape | None:
        """Reads flags by field name, as derived or as stored; None for a dense model."""
        if not arguments.get("num_experts"):
            return None
        layers = arguments.get("moe_layers")
        if layers is None:
            freq = str(arguments.get("moe_layer_freq", 1))
            layers = layers_with_experts(freq, arguments["num_layers"])
        width = arguments.get("moe_ffn_hidden_size") or arguments["ffn_hidden_size"]
        return cls(
            layers=tuple(layers),
            num_experts=arguments["num_experts"],
            moe_ffn_hidden_size=width,
            moe_router_topk=arguments.get("moe_router_topk") or cls.moe_router_topk,
            moe_shared_expert_intermediate_size=(
                arguments.get("moe_shared_expert_intermediate_size") or 0
            ),
            moe_shared_expert_gate=bool(arguments.get("moe_shared_expert_gate")),
            moe_grouped_gemm=bool(arguments.get("moe_grouped_gemm")),
        )

    @property
    def is_mixed(self) -> bool:
        """Whether some layers are dense. Then every layer has tensors of its own in a
        checkpoint."""
        return not all(self.layers)

    def multiply_adds(self, hidden_size: int, matrices: int) -> int:
        """Of one token in one layer with experts: the experts that it goes to, the shared one and
        the router.

        Args:
            matrices: of an MLP: 3 if it is gated, else 2.
        """
        width = self.moe_router_topk * self.moe_ffn_hidden_size
        width += self.moe_shared_expert_intermediate_size
        routed = self.num_experts + self.moe_shared_expert_gate
        return hidden_size * (matrices * width + routed)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a GPT, and how data-parallel ranks share its state."""

    num_layers: int
    hidden_size: int
    """Width of the residual stream."""
    ffn_hidden_size: int
    """Width of the MLP."""
    num_attention_heads: int
    """Query heads of a layer."""
    num_query_groups: int
    """Key-value heads of a layer."""
    kv_channels: int
    """Width of a head."""
    padded_vocab_size: int = 0
    """Rows of the embedding; 0 while they are not known."""
    learned_positions: int = 0
    """Rows of a learned position embedding; 0 without one."""
    gated: bool = False
    """Gated MLP (SwiGLU)."""
    linear_bias: bool = False
    """Biases in linear layers."""
    qkv_bias: bool = False
    """Bias of the query, key and value projection even without `linear_bias`."""
    normalization: str = "RMSNorm"
    """LayerNorm, which has biases, or RMSNorm."""
    qk_layernorm: bool = False
    """Queries and keys are normalised."""
    tied: bool = False
    """Output layer and word embedding are one."""
    latent: LatentShape | None = None
    """Widths of multi-latent attention; None: plain attention."""
    mtp_num_layers: int = 0
    """Layers that predict further tokens, on the last stage."""
    experts: ExpertShape | None = None
    """Sizes of a mixture of experts; None: a dense model."""
    fused_norm: bool = False
    """The norms before attention and MLP are parts of the linear layers after them, as in
    Transformer Engine: other places in the gradient buffer."""
    use_distributed_optimizer: bool = True
    """Data-parallel ranks share the state out among them."""
    keeps_momenta: bool = False
    """The optimizer keeps one momentum of a matrix in place of both moments, as all but Adam do."""
    overlap_grad_reduce: bool = False
    """Gradients are reduced bucket by bucket while the backward pass goes on."""
    ddp_bucket_size: int | None = None
    """Elements after which a bucket closes; None: megatron-core's default."""
    use_tp_pp_dp_mapping: bool = False
    """Ranks are numbered with pipeline before data parallelism."""

    def __post_init__(self) -> None:
        if self.normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"normalization {self.normalization!r} must be LayerNorm or RMSNorm")

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> ModelShape:
        """Reads flags by field name, as derived or as stored in a checkpoint.

        Raises:
            KeyError: a size that every model has is missing.
            ValueError: `--moe-layer-freq` is neither a number nor a list of 0 and 1.
        """
        a = arguments
        heads = a["num_attention_heads"]
        groups = a.get("num_query_groups") if a.get("group_query_attention", True) else heads
        learned = a.get("position_embedding_type") == "learned_absolute"
        return cls(
            num_layers=a["num_layers"],
            hidden_size=a["hidden_size"],
            ffn_hidden_size=a["ffn_hidden_size"],
            num_attention_heads=heads,
            num_query_groups=groups or heads,
            kv_channels=a.get("kv_channels") or a["hidden_size"] // heads,
            padded_vocab_size=a.get("padded_vocab_size") or 0,
            learned_positions=(a.get("max_position_embeddings") or 0) if learned else 0,
            gated=bool(a.get("swiglu") or a.get("quick_geglu")),
            linear_bias=bool(a.get("add_bias_linear", True)),
            qkv_bias=bool(a.get("add_qkv_bias")),
            normalization=a.get("normalization") or "LayerNorm",
            qk_layernorm=bool(a.get("qk_layernorm")),
            tied=not a.get("untie_embeddings_and_output_weights"),
            latent=LatentShape.of(a),
            mtp_num_layers=a.get("mtp_num_layers") or 0,
            experts=ExpertShape.of(a),
            fused_norm=a.get("transformer_impl") == "transformer_engine",
            use_distributed_optimizer=bool(a.get("use_distributed_optimizer", True)),
            keeps_momenta=(a.get("optimizer") or "adam") != "adam",
            overlap_grad_reduce=bool(a.get("overlap_grad_reduce")),
            ddp_bucket_size=a.get("ddp_bucket_size"),
            use_tp_pp_dp_mapping=bool(a.get("use_tp_pp_dp_mapping")),
        )

    @property
    def qkv_width(self) -> int:
        """Rows of the query, key and value projection."""
        return (self.num_attention_heads + 2 * self.num_query_groups) * self.kv_channels
