"""The shape of a model, from Megatron's flags, from a Hugging Face `config.json`, or by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from copus_ext.cost_model import model_size
from copus_ext.cost_model.extras import is_number
from copus_ext.cost_model.rows import ExpertBatch
from copus_ext.cost_model.spec_file import SpecError
from megatron.trainer.config.model_shape import ExpertShape, LatentShape, ModelShape
from megatron.trainer.config.moe_flags import layers_with_experts
from megatron.trainer.config.vocabulary import pad_vocab_size

_LARGEST = 1 << 31
_MAX_LAYERS = 1 << 16
"""Of a mixture of experts."""
IMPLEMENTATIONS = ("te", "local", "legacy")
"""Values of `ModelSpec.implementation`; `ConfigBatch` has their indices."""
NORMS = ("fused", "torch")
"""Values of `ModelSpec.norm`; `ConfigBatch` has their indices and one more, 0 without a value."""
ATTENTION: dict[str, dict[str, Any]] = {
    "flash": {"fused_attention": True, "softmax_in_fp32": False},
    "unfused": {"fused_attention": False, "softmax_in_fp32": False},
    "torch": {"fused_attention": False, "softmax_in_fp32": True},
}
"""Kinds of attention, and the fields of a model that say them."""
FUSED_SOFTMAX_TOKENS = 4096
"""Longest samples of Megatron's fused softmax (`FusedScaleMaskSoftmax.is_kernel_available`)."""
DISPATCHERS = ("alltoall", "allgather", "flex")
"""Values of `ModelSpec.moe_token_dispatcher_type`."""
EXPERT_FIELDS = (
    *("num_experts", "moe_layer_freq", "moe_router_topk", "moe_ffn_hidden_size"),
    *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
    *("moe_token_dispatcher_type", "moe_grouped_gemm"),
)
"""Fields of a mixture of experts, which the JSON of a dense model lacks."""
_KINDS = {
    **{"str": (str,), "bool": (bool,), "int": (int,), "int | None": (int, type(None))},
    **{"str | None": (str, type(None)), "bool | None": (bool, type(None))},
    "Mapping[str, Any]": (Mapping,),
}
_UNSET: dict[str, Any] = {
    **dict.fromkeys(("norm", "logits_sharded", "logits_bytes")),
    **{"softmax_in_fp32": False, "extras": {}},
}
"""Values with which the JSON of a model leaves a field out."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A GPT, dense or a mixture of experts, as Megatron's flags describe it."""

    name: str = "model"
    """What to call it."""
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    ffn_hidden_size: int | None = None
    """Width of the MLP; None: 4 h, or when gated LLaMA's: 8h/3, up to the next multiple of 256."""
    num_query_groups: int | None = None
    """Key-value heads; None: as many as query heads."""
    kv_channels: int | None = None
    """Width of a head; None: h / heads."""
    vocab_size: int = 51200
    """Tokens before padding."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this and of the tensor size."""
    gated: bool = False
    """Gated MLP (SwiGLU)."""
    bias: bool = True
    """Biases in linear layers."""
    qkv_bias: bool = False
    """Bias of the query, key and value projection even without `bias`."""
    qk_layernorm: bool = False
    """Queries and keys, or their compressed forms, are normalised."""
    normalization: str = "LayerNorm"
    """LayerNorm or RMSNorm."""
    tied: bool = True
    """Output layer and word embedding are one."""
    kv_lora_rank: int | None = None
    """Width of compressed keys and values; None: plain attention. The next four go with it."""
    q_lora_rank: int | None = None
    """Width of the compressed query; None: it is not compressed."""
    qk_head_dim: int = 128
    """Width of a head's query and key without their rotated part."""
    qk_pos_emb_head_dim: int = 64
    """Width of the rotated part."""
    v_head_dim: int = 128
    """Width of a head's value."""
    mtp_num_layers: int = 0
    """Layers that predict further tokens."""
    num_experts: int | None = None
    """Experts of a layer; None: a dense model, in which the next seven have no effect."""
    moe_layer_freq: str = "1"
    """Which layers have experts, as `--moe-layer-freq` says."""
    moe_router_topk: int = 2
    """Experts of each token."""
    moe_ffn_hidden_size: int | None = None
    """Width of an expert; None: that of the MLP."""
    moe_shared_expert_intermediate_size: int | None = None
    """Width of the expert that sees every token; None: there is none."""
    moe_shared_expert_gate: bool = False
    """The shared expert is scaled for each token."""
    moe_token_dispatcher_type: str = "alltoall"
    """How rows get to their experts: alltoall, allgather, or flex, which is priced as alltoall."""
    moe_grouped_gemm: bool = True
    """The experts of a rank are computed in one kernel, where the layers are Transformer
    Engine's."""
    learned_positions: int = 0
    """Rows of a learned position embedding; 0 for rotary."""
    dropout: bool = False
    """Hidden and attention dropout are on."""
    precision: str = "bf16"
    """bf16, fp16 or fp32."""
    gradient_bytes: int = 4
    """Bytes of a gradient element as it is kept and reduced: 4, or 2 in half precision."""
    fused_attention: bool = True
    """Attention runs as one kernel (flash)."""
    optimizer_bytes: int | None = None
    """Bytes of optimizer state of a parameter. None: 12 in half precision, which are a master and
    two moments in fp32, and 8 in fp32. Less where Megatron's precision-aware optimizer is on."""
    implementation: str = "te"
    """Whose layers: `te` (Transformer Engine), `local` (plain torch, `--transformer-impl local`) or
    `legacy`, of before megatron-core. It stands for what the next four do not say: `legacy` has
    norms in plain torch, and whole logits of 14 bytes on every rank."""
    norm: str | None = None
    """`fused`, or `torch`, which keeps fp32 copies; None: as `implementation` has it."""
    softmax_in_fp32: bool = False
    """Plain torch makes fp32 copies of the scores where attention is not fused; else Megatron's
    fused softmax, which needs no copy, up to `FUSED_SOFTMAX_TOKENS`."""
    logits_sharded: bool | None = None
    """Every tensor parallel rank has its columns of the logits alone; None: by `implementation`."""
    logits_bytes: int | None = None
    """Bytes of a logit and what the loss makes of it. None: in half precision 6, which are the
    logit and an fp32 copy that the loss overwrites; 4 in fp32; 14 with `legacy`, which are the
    logit, and an fp32 copy, softmax and gradient."""
    extras: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """By field name, the flags of extras that are on, as far as they are numbers: those of
    `extras.planned_flags`."""
    implementation_given: bool = field(default=False, compare=False)
    """Whether somebody said how layers are implemented; else what they keep is less sure."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            kinds = _KINDS[str(one.type)]
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise SpecError(f"{one.name} {str(value)[:60]!r} is of the wrong kind")
            if isinstance(value, int) and not isinstance(value, bool):
                least = 0 if one.name in ("learned_positions", "mtp_num_layers") else 1
                if not least <= value <= _LARGEST:
                    shown = value if abs(value) <= _LARGEST else "(a number too large)"
                    raise SpecError(f"{one.name} {shown} must be at least {least}")
        if not all(map(is_number, self.extras.values())):
            raise SpecError(f"extras {dict(self.extras)!s:.60} must be numbers by field name")
        if self.precision not in ("bf16", "fp16", "fp32"):
            raise SpecError(f"precision {self.precision!r} must be bf16, fp16 or fp32")
        if self.implementation not in IMPLEMENTATIONS:
            known = ", ".join(IMPLEMENTATIONS)
            raise SpecError(f"implementation {self.implementation!r} is none of {known}")
        if self.norm not in (None, *NORMS):
            raise SpecError(f"norm {self.norm!r} is none of {', '.join(NORMS)}")
        if self.softmax_in_fp32 and self.fused_attention:
            raise SpecError("softmax_in_fp32 is of attention that is not fused; drop one of both")
        if self.gradient_bytes not in ((4,) if self.precision == "fp32" else (2, 4)):
            raise SpecError(
                f"gradient_bytes {self.gradient_bytes} must be 4, or 2 with bf16 and fp16"
            )
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise SpecError(
                f"hidden_size {self.hidden_size} does not divide by num_attention_heads "
                f"{self.num_attention_heads}; give kv_channels"
            )
        if self.moe_token_dispatcher_type not in DISPATCHERS:
            known, given = ", ".join(DISPATCHERS), self.moe_token_dispatcher_type
            raise SpecError(f"moe_token_dispatcher_type {given!r} is none of {known}")
        if self.num_experts is not None:
            if self.num_layers > _MAX_LAYERS:
                raise SpecError(f"num_layers {self.num_layers} must be at most {_MAX_LAYERS}")
            if self.moe_router_topk > self.num_experts:
                raise SpecError(
                    f"moe_router_topk {self.moe_router_topk} is more than num_experts "
                    f"{self.num_experts}; lower it"
                )
            try:
                layers_with_experts(self.moe_layer_freq, self.num_layers)
            except ValueError as error:
                raise SpecError(f"moe_layer_freq {self.moe_layer_freq}: {error}") from error

    @property
    def ffn(self) -> int:
        """Width of the MLP."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return llama_ffn(self.hidden_size) if self.gated else 4 * self.hidden_size

    @property
    def groups(self) -> int:
        """Key-value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def channels(self) -> int:
        """Width of a head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    def padded_vocab_size(self, tp: Any) -> Any:
        """Rows of the embedding under a tensor size."""
        unit = np.lcm(self.make_vocab_size_divisible_by, np.asarray(tp))
        return pad_vocab_size(self.vocab_size, unit)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """[num_layers] 1 for every layer with experts, else 0; empty for a dense model."""
        if self.num_experts is None:
            return ()
        return layers_with_experts(self.moe_layer_freq, self.num_layers)

    @property
    def expert_ffn(self) -> int:
        """Width of an expert."""
        return self.moe_ffn_hidden_size or self.ffn

    def shape(self, *, padded_vocab_size: int = 0) -> ModelShape:
        """The sizes of the model in the form that the trainer knows.

        Args:
            padded_vocab_size: rows of the embedding; 0: as one tensor-parallel rank pads them.
        """
        return ModelShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn,
            num_attention_heads=self.num_attention_heads,
            num_query_groups=self.groups,
            kv_channels=self.channels,
            padded_vocab_size=padded_vocab_size or int(self.padded_vocab_size(1)),
            learned_positions=self.learned_positions,
            gated=self.gated,
            linear_bias=self.bias,
            qkv_bias=self.qkv_bias,
            normalization=self.normalization,
            qk_layernorm=self.qk_layernorm,
            tied=self.tied,
            latent=self._latent,
            mtp_num_layers=self.mtp_num_layers,
            experts=self._experts,
            fused_norm=self.implementation == "te",
        )

    @property
    def _latent(self) -> LatentShape | None:
        if self.kv_lora_rank is None:
            return None
        return LatentShape(**{f.name: getattr(self, f.name) for f in fields(LatentShape)})

    @property
    def _experts(self) -> ExpertShape | None:
        if self.num_experts is None:
            return None
        return ExpertShape(
            layers=self.moe_layers,
            num_experts=self.num_experts,
            moe_ffn_hidden_size=self.expert_ffn,
            moe_router_topk=self.moe_router_topk,
            moe_shared_expert_intermediate_size=self.moe_shared_expert_intermediate_size or 0,
            moe_shared_expert_gate=self.moe_shared_expert_gate,
            moe_grouped_gemm=self.moe_grouped_gemm and self.implementation == "te",
        )

    def expert_batch(self, ep: Any, etp: Any, pp: Any, vpp: Any) -> ExpertBatch | None:
        """The experts' part of `ConfigBatch` under some sizes; None: a dense model."""
        if (experts := self._experts) is None:
            return None
        return ExpertBatch(
            num_experts=experts.num_experts,
            moe_router_topk=experts.moe_router_topk,
            moe_ffn_hidden_size=experts.moe_ffn_hidden_size,
            moe_shared_expert_intermediate_size=experts.moe_shared_expert_intermediate_size,
            moe_shared_expert_gate=experts.moe_shared_expert_gate,
            share=sum(experts.layers) / self.num_layers,
            uses_allgather=self.moe_token_dispatcher_type == "allgather",
            is_grouped=experts.moe_grouped_gemm,
            ep=ep,
            etp=etp,
            stage_shares=model_size.stage_shares(
                self.moe_layers, np.atleast_1d(pp), np.atleast_1d(vpp)
            ),
        )

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, vocabulary padded for one rank."""
        return model_size.num_parameters(self.shape(), experts=self.num_experts or 0)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that a token meets: of the experts only those that it goes to."""
        return model_size.num_parameters(self.shape(), experts=self.moe_router_topk)

    def check_predictable(self) -> None:
        """Refuses a model that the cost model does not know.

        Raises:
            SpecError: naming the flag.
        """
        for flag, is_there in (
            ("--multi-latent-attention", self.kv_lora_rank is not None),
            ("--mtp-num-layers", self.mtp_num_layers > 0),
        ):
            if is_there:
                raise SpecError(
                    f"the cost model does not know {flag}; describe a model of like size without it"
                )

    def check_dense(self, what: str) -> None:
        """Refuses a mixture of experts.

        Raises:
            SpecError: naming what does not know such models.
        """
        if self.num_experts is not None:
            raise SpecError(f"{what} does not know mixtures of experts yet; use a plain search")

    @property
    def arguments(self) -> dict[str, Any]:
        """What extras read of a model to say which layouts and batches it cannot have."""
        sizes = {"num_experts": self.num_experts, "num_query_groups": self.groups}
        return {**sizes, **self.extras}

    def batch_fields(self, tp: Any) -> dict[str, Any]:
        """The model's fields of `ConfigBatch` under some tensor sizes.

        Raises:
            SpecError: the cost model does not know such a model.
        """
        self.check_predictable()
        wide, is_legacy = self.precision == "fp32", self.implementation == "legacy"
        norm = self.norm or ("torch" if is_legacy else None)
        is_long = self.seq_length > FUSED_SOFTMAX_TOKENS
        has_copies = not (wide or self.fused_attention) and (self.softmax_in_fp32 or is_long)
        return {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "ffn_hidden_size": self.ffn,
            "num_attention_heads": self.num_attention_heads,
            "num_query_groups": self.groups,
            "kv_channels": self.channels,
            "padded_vocab_size": self.padded_vocab_size(tp),
            "seq_length": self.seq_length,
            "mlp_matrices": 3 if self.gated else 2,
            "fused_attention": self.fused_attention,
            "softmax_in_fp32": has_copies,
            "implementation": IMPLEMENTATIONS.index(self.implementation),
            "implementation_given": self.implementation_given,
            "norm": 0 if norm is None else 1 + NORMS.index(norm),
            "logits_sharded": not is_legacy if self.logits_sharded is None else self.logits_sharded,
            "logits_bytes": self.logits_bytes or (14 if is_legacy else 4 if wide else 6),
            "scatter_gather": is_legacy,
            "dropout": self.dropout,
            "tied": self.tied,
            "learned_positions": self.learned_positions,
            "has_bias": self.bias,
            "norm_vectors": 1 if self.normalization == "RMSNorm" else 2,
            "element_bytes": 4 if wide else 2,
            "gradient_bytes": self.gradient_bytes,
            "extras": self.extras,
            "optimizer_bytes": self.optimizer_bytes or (8 if wide else 12),
        }

    def with_seq_length(self, seq_length: int) -> ModelSpec:
        positions = self.learned_positions and max(self.learned_positions, seq_length)
        return replace(self, seq_length=seq_length, learned_positions=positions)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; those of experts, extras and parts of the implementation only where
        they are set."""
        unset = [name for name, value in _UNSET.items() if getattr(self, name) == value]
        unset.append("implementation_given")
        data = {name: value for name, value in asdict(self).items() if name not in unset}
        if self.num_experts is None:
            for name in EXPERT_FIELDS:
                del data[name]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelSpec:
        """Inverse of `to_json`.

        Raises:
            SpecError: an unknown or missing key, or a bad value.
        """
        unknown = sorted(set(data) - {f.name for f in fields(cls)})
        if unknown:
            raise SpecError(f"unknown model keys: {', '.join(unknown)}")
        try:
            return cls(**data)
        except TypeError as error:
            raise SpecError(f"model: {error}") from error


def llama_ffn(hidden_size: int) -> int:
    """Width of LLaMA's MLP (arXiv 2302.13971): 8h/3, up to the next multiple of 256."""
    return -(-(8 * hidden_size // 3) // 256) * 256


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
