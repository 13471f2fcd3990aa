"""The shape of a model, from Megatron's flags, from a Hugging Face `config.json`, or by name."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from copus_ext.cost_model.spec_file import SpecError, read_json
from megatron.training.config.vocabulary import pad_vocab_size, padding_unit
from megatron.training.model.flops import LatentWidths

_DENSE_TYPES = {
    "llama": {"gated": True, "bias": False, "normalization": "RMSNorm"},
    "mistral": {"gated": True, "bias": False, "normalization": "RMSNorm"},
    "qwen2": {"gated": True, "bias": False, "normalization": "RMSNorm", "qkv_bias": True},
    "qwen3": {"gated": True, "bias": False, "normalization": "RMSNorm", "qk_layernorm": True},
    "gpt2": {"gated": False, "bias": True, "normalization": "LayerNorm"},
}
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")

_LARGEST = 1 << 31
IMPLEMENTATIONS = ("te", "local", "legacy")
"""Values of `ModelSpec.implementation`; `Rows` has their indices."""
_KINDS = {"str": (str,), "bool": (bool,), "int": (int,), "int | None": (int, type(None))}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A dense GPT as Megatron's flags describe it."""

    name: str = "model"
    """What to call it."""
    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width of the residual stream."""
    num_attention_heads: int
    """Query heads of a layer."""
    seq_length: int
    """Tokens of a sample."""
    ffn_hidden_size: int | None = None
    """Width of the MLP; None: 4 h, or int(8h/3/64) 64 when gated."""
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
    `legacy`, of before megatron-core: norms that are not fused, and whole logits on every rank."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kinds = _KINDS[str(field.type)]
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise SpecError(f"{field.name} {str(value)[:60]!r} is of the wrong kind")
            if isinstance(value, int) and not isinstance(value, bool):
                least = 0 if field.name in ("learned_positions", "mtp_num_layers") else 1
                if not least <= value <= _LARGEST:
                    shown = value if abs(value) <= _LARGEST else "(a number too large)"
                    raise SpecError(f"{field.name} {shown} must be at least {least}")
        if self.precision not in ("bf16", "fp16", "fp32"):
            raise SpecError(f"precision {self.precision!r} must be bf16, fp16 or fp32")
        if self.implementation not in IMPLEMENTATIONS:
            known = ", ".join(IMPLEMENTATIONS)
            raise SpecError(f"implementation {self.implementation!r} is none of {known}")
        if self.gradient_bytes not in ((4,) if self.precision == "fp32" else (2, 4)):
            raise SpecError(
                f"gradient_bytes {self.gradient_bytes} must be 4, or 2 with bf16 and fp16"
            )
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise SpecError(
                f"hidden_size {self.hidden_size} does not divide by num_attention_heads "
                f"{self.num_attention_heads}; give kv_channels"
            )

    @property
    def ffn(self) -> int:
        """Width of the MLP."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return int(8 * self.hidden_size / 3 / 64) * 64 if self.gated else 4 * self.hidden_size

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
    def latent(self) -> LatentWidths | None:
        """Widths of multi-latent attention; None: plain attention."""
        if self.kv_lora_rank is None:
            return None
        return LatentWidths(
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_head_dim=self.qk_head_dim,
            qk_pos_emb_head_dim=self.qk_pos_emb_head_dim,
            v_head_dim=self.v_head_dim,
        )

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, vocabulary padded for one rank."""
        h, matrices = self.hidden_size, 3 if self.gated else 2
        vectors = 1 if self.normalization == "RMSNorm" else 2
        norm = h * vectors
        layer = self._attention_parameters(vectors) + matrices * h * self.ffn + 2 * norm
        if self.bias:
            layer += (matrices - 1) * self.ffn + 2 * h
        tables = int(self.padded_vocab_size(1)) * h * (1 if self.tied else 2)
        further = self.mtp_num_layers * (layer + 2 * h * h + 3 * norm)
        return self.num_layers * layer + further + tables + self.learned_positions * h + norm

    def _attention_parameters(self, vectors: int) -> int:
        """Of one layer, without the bias of the output projection."""
        h, k, heads, latent = (
            self.hidden_size,
            self.channels,
            self.num_attention_heads,
            self.latent,
        )
        if latent is not None:
            norms = latent.kv_lora_rank + (latent.q_lora_rank or 0) if self.qk_layernorm else 0
            return sum(math.prod(w) for w in latent.weights(h, heads).values()) + vectors * norms
        width = (heads + 2 * self.groups) * k
        norms = 2 * k if self.qk_layernorm else 0
        return (
            h * width
            + heads * k * h
            + (width if self.bias or self.qkv_bias else 0)
            + vectors * norms
        )

    def check_predictable(self) -> None:
        """Refuses a model that the cost model does not know.

        Raises:
            SpecError: naming the flag.
        """
        for flag, is_there in (
            ("--multi-latent-attention", self.latent is not None),
            ("--mtp-num-layers", self.mtp_num_layers > 0),
        ):
            if is_there:
                raise SpecError(
                    f"the cost model does not know {flag}; describe a model of like size without it"
                )

    def row_fields(self, tp: Any) -> dict[str, Any]:
        """The model's fields of `Rows` under some tensor sizes.

        Raises:
            SpecError: the cost model does not know such a model.
        """
        self.check_predictable()
        wide = self.precision == "fp32"
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
            "implementation": IMPLEMENTATIONS.index(self.implementation),
            "dropout": self.dropout,
            "tied": self.tied,
            "learned_positions": self.learned_positions,
            "has_bias": self.bias,
            "norm_vectors": 1 if self.normalization == "RMSNorm" else 2,
            "element_bytes": 4 if wide else 2,
            "gradient_bytes": self.gradient_bytes,
            "optimizer_bytes": self.optimizer_bytes or (8 if wide else 12),
        }

    def with_seq_length(self, seq_length: int) -> ModelSpec:
        """The same with another sample length."""
        positions = self.learned_positions and max(self.learned_positions, seq_length)
        return replace(self, seq_length=seq_length, learned_positions=positions)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelSpec:
        """Inverse of `to_json`.

        Raises:
            SpecError: an unknown or missing key, or a bad value.
        """
        if isinstance(data, dict) and "local" in data:
            # As profiles of earlier releases have it.
            if not isinstance(data["local"], bool) or "implementation" in data:
                raise SpecError("local is implementation now: te, local or legacy; replace it")
            data = {**data, "implementation": "local" if data["local"] else "te"}
            del data["local"]
        unknown = sorted(set(data) - {f.name for f in fields(cls)})
        if unknown:
            raise SpecError(f"unknown model keys: {', '.join(unknown)}")
        try:
            return cls(**data)
        except TypeError as error:
            raise SpecError(f"model: {error}") from error

    @classmethod
    def from_megatron_flags(cls, flags: list[str]) -> ModelSpec:
        """Reads the flags of a Megatron-LM command line.

        Raises:
            SpecError: a flag of the shape is missing.
            UsageError: an unknown or refused flag.
        """
        from megatron.training.config.arguments import parse_args

        return cls.from_arguments(parse_args(flags))

    @classmethod
    def from_arguments(cls, args: Any) -> ModelSpec:
        """Reads parsed flags, or anything with the same attributes. The padded vocabulary of a
        configuration that ran stands for the vocabulary under every tensor size.

        Raises:
            SpecError: a flag of the shape is missing.
        """
        for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
            if getattr(args, name) is None:
                raise SpecError(f"--{name.replace('_', '-')} is required in --megatron-args")
        learned = args.position_embedding_type == "learned_absolute"
        geglu, ffn = getattr(args, "quick_geglu", False), args.ffn_hidden_size
        if geglu and ffn is None:
            ffn = 4 * args.hidden_size
        latent = LatentWidths.of(vars(args))
        # Once it is known a run holds its padded vocabulary under every tensor size.
        rows = getattr(args, "padded_vocab_size", None)
        padded_for = getattr(args, "pad_vocab_for_tensor_parallel_size", None)
        unit = padding_unit(args.make_vocab_size_divisible_by, (), padded_for=padded_for)
        return cls(
            name="megatron-args",
            num_layers=args.num_layers,
            hidden_size=args.hidden_size,
            num_attention_heads=args.num_attention_heads,
            seq_length=args.seq_length,
            ffn_hidden_size=ffn,
            num_query_groups=args.num_query_groups if args.group_query_attention else None,
            kv_channels=args.kv_channels,
            vocab_size=rows or _vocab_size(args),
            make_vocab_size_divisible_by=1 if rows else unit,
            gated=args.swiglu or bool(geglu),
            bias=args.add_bias_linear,
            qkv_bias=bool(getattr(args, "add_qkv_bias", False)),
            qk_layernorm=bool(getattr(args, "qk_layernorm", False)),
            normalization=args.normalization,
            tied=not args.untie_embeddings_and_output_weights,
            mtp_num_layers=getattr(args, "mtp_num_layers", None) or 0,
            **(asdict(latent) if latent is not None else {}),
            learned_positions=(args.max_position_embeddings or args.seq_length) if learned else 0,
            dropout=args.hidden_dropout > 0,
            precision="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
            gradient_bytes=_gradient_bytes(args),
            fused_attention=args.attention_backend != "unfused",
            implementation="local" if args.transformer_impl == "local" else "te",
        )

    @classmethod
    def from_hugging_face(cls, path: Path, *, seq_length: int | None) -> ModelSpec:
        """Reads a `config.json`.

        Raises:
            SpecError: an unknown model type, experts, or no sample length.
        """
        data = read_json(path)
        if not isinstance(data, dict):
            raise SpecError(f"{path.name} is no config.json: it holds no object")
        for key in _EXPERT_KEYS:
            if data.get(key):
                raise SpecError(
                    f"{path.name}: {key}={data[key]}: mixture of experts is not modelled yet"
                )
        kind = data.get("model_type")
        if kind not in _DENSE_TYPES:
            raise SpecError(
                f"{path.name}: model_type {kind!r} is not known; known: "
                f"{', '.join(sorted(_DENSE_TYPES))}, or describe it with --megatron-args"
            )
        if seq_length is None:
            longest = data.get("max_position_embeddings") or data.get("n_positions")
            raise SpecError(
                f"--seq-length is required with --model {path.name} "
                f"(max_position_embeddings is {longest})"
            )

        def get(*names: str, default: Any = None) -> Any:
            return next((data[n] for n in names if data.get(n) is not None), default)

        for names in (("num_hidden_layers", "n_layer"), ("hidden_size", "n_embd"), ("vocab_size",)):
            if not isinstance(get(*names), int):
                raise SpecError(f"{path.name}: {names[0]} is missing or no whole number")
        heads = get("num_attention_heads", "n_head")
        if not isinstance(heads, int):
            raise SpecError(f"{path.name}: num_attention_heads is missing or no whole number")
        known = _DENSE_TYPES[kind]
        learned = get("n_positions", default=1024) if kind == "gpt2" else 0
        return cls(
            name=str(get("_name_or_path", default=path.parent.name) or kind),
            num_layers=get("num_hidden_layers", "n_layer"),
            hidden_size=get("hidden_size", "n_embd"),
            num_attention_heads=heads,
            seq_length=seq_length,
            ffn_hidden_size=get("intermediate_size", "n_inner"),
            num_query_groups=get("num_key_value_heads", default=heads),
            kv_channels=get("head_dim"),
            vocab_size=get("vocab_size"),
            tied=bool(get("tie_word_embeddings", default=kind == "gpt2")),
            learned_positions=learned,
            **known,
        )


def _gradient_bytes(args: Any) -> int:
    """Bytes of a gradient element: Megatron keeps fp32 ones with bf16 unless told otherwise, and
    half ones with fp16."""
    if args.bf16:
        return 2 if args.grad_reduce_in_bf16 else 4
    return 2 if args.fp16 and not args.accumulate_allreduce_grads_in_fp32 else 4


def _vocab_size(args: Any) -> int:
    """Tokens of the tokenizer that flags name, as far as they tell without its files."""
    from megatron.training.data.tokenizer import told_vocab_size

    told = told_vocab_size(getattr(args, "tokenizer_type", None), args.vocab_size)
    return told or ModelSpec.vocab_size


def _llama(name: str, **shape: Any) -> ModelSpec:
    common = {"gated": True, "bias": False, "normalization": "RMSNorm", "tied": False}
    return ModelSpec(name=name, **{**common, **shape})


PRESETS = {
    spec.name: spec
    for spec in (
        ModelSpec(
            name="gpt3-175b",
            num_layers=96,
            hidden_size=12288,
            num_attention_heads=96,
            seq_length=2048,
            vocab_size=51200,
            learned_positions=2048,
        ),
        _llama(
            "llama-3.2-3b",
            num_layers=28,
            hidden_size=3072,
            num_attention_heads=24,
            num_query_groups=8,
            kv_channels=128,
            ffn_hidden_size=8192,
            vocab_size=128256,
            seq_length=2048,
            tied=True,
        ),
        _llama(
            "llama-2-7b",
            num_layers=32,
            hidden_size=4096,
            num_attention_heads=32,
            ffn_hidden_size=11008,
            vocab_size=32000,
            seq_length=2048,
        ),
        _llama(
            "llama-2-13b",
            num_layers=40,
            hidden_size=5120,
            num_attention_heads=40,
            ffn_hidden_size=13824,
            vocab_size=32000,
            seq_length=2048,
        ),
        _llama(
            "qwen2.5-32b",
            num_layers=64,
            hidden_size=5120,
            num_attention_heads=40,
            num_query_groups=8,
            kv_channels=128,
            ffn_hidden_size=27648,
            qkv_bias=True,
            vocab_size=152064,
            seq_length=2048,
        ),
        _llama(
            "llama-3-70b",
            num_layers=80,
            hidden_size=8192,
            num_attention_heads=64,
            num_query_groups=8,
            ffn_hidden_size=28672,
            vocab_size=128256,
            seq_length=8192,
        ),
        _llama(
            "copus-quickstart",
            num_layers=8,
            hidden_size=256,
            num_attention_heads=8,
            ffn_hidden_size=1024,
            vocab_size=257,
            seq_length=128,
            precision="fp32",
        ),
    )
}
"""Models by name, their usual sample length included."""


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
