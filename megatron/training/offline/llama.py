"""Llama by Hugging Face's names: configuration and tensors, each from the other's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from megatron.training.offline import contents
from megatron.training.offline.refusal import Refused

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

# What the flags must say so that the network is a Llama, and the flag to name.
_MUST_BE: dict[str, tuple[Any, Any]] = {
    # name: (value of a Llama, value where the flag is absent)
    "swiglu": (True, False),
    "normalization": ("RMSNorm", "LayerNorm"),
    "position_embedding_type": ("rope", "learned_absolute"),
    "add_bias_linear": (False, True),
    "add_qkv_bias": (False, False),
    "qk_layernorm": (False, False),
    "rotary_percent": (1.0, 1.0),
    "rotary_interleaved": (False, False),
    "apply_layernorm_1p": (False, False),
}
# Llama 3.1's, which megatron-core has as constants.
_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
_OPTIONAL = ("num_key_value_heads", "head_dim")


def config_of(arguments: Mapping[str, Any], vocab: int, dtype: torch.dtype) -> dict[str, Any]:
    """`config.json` of a model trained with these flags.

    Raises:
        Refused: the network is no Llama; names the flag.
    """
    for name, (value, default) in _MUST_BE.items():
        have = arguments.get(name, default)
        if have != value:
            raise Refused(f"{name} is {have!r}, which Hugging Face's Llama does not have")
    theta = float(arguments.get("rotary_base") or 10000)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if arguments.get("use_rope_scaling"):
        factor = float(arguments.get("rope_scaling_factor") or 8.0)
        rope = {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_SCALING}
    epsilon = arguments.get("layernorm_epsilon", arguments.get("norm_epsilon"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": arguments["hidden_size"],
        "intermediate_size": arguments["ffn_hidden_size"],
        "num_hidden_layers": arguments["num_layers"],
        "num_attention_heads": arguments["num_attention_heads"],
        "num_key_value_heads": contents.query_groups(arguments),
        "head_dim": contents.head_width(arguments),
        "vocab_size": vocab,
        "max_position_embeddings": arguments["max_position_embeddings"],
        "rms_norm_eps": 1e-5 if epsilon is None else epsilon,
        "tie_word_embeddings": not arguments.get("untie_embeddings_and_output_weights"),
        "attention_bias": False,
        "mlp_bias": False,
        # The first two are read by releases before 5, the third by later ones.
        "rope_theta": theta,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "rope_parameters": rope,
        "torch_dtype": DTYPE_NAMES[dtype],
    }


def arguments_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flags of this trainer for a model with this `config.json`.

    Raises:
        Refused: a field is missing, or asks for what the trainer does not have.
    """
    if config.get("model_type") != "llama":
        raise Refused(
            f"config.json: model_type is {config.get('model_type')!r}; only llama is read"
        )
    missing = [name for name in _REQUIRED if config.get(name) is None]
    if missing:
        raise Refused(f"config.json lacks {', '.join(missing)}")
    _check_kinds(config)
    for name, value in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        if config.get(name, value) != value:
            raise Refused(f"config.json: {name} is {config[name]!r}; only {value!r} is read")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    groups = config.get("num_key_value_heads") or heads
    if heads < 1 or groups < 1 or heads % groups:
        raise Refused(f"config.json: {heads} heads do not divide into {groups} groups")
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": hidden,
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "kv_channels": config.get("head_dim") or hidden // heads,
        "max_position_embeddings": config["max_position_embeddings"],
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        **_rope_arguments(config),
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.get("rms_norm_eps") or 1e-6,
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "vocab_size": config["vocab_size"],
    }


def _check_kinds(config: Mapping[str, Any]) -> None:
    for name in (*_REQUIRED, *_OPTIONAL):
        value = config.get(name)
        if (value is not None or name in _REQUIRED) and not (type(value) is int and value > 0):
            raise Refused(f"config.json: {name} is {value!r}, no number of anything")
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(name) or {}, dict):
            raise Refused(f"config.json: {name} is {config[name]!r}, no object")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    numbers = {name: config.get(name) for name in ("rms_norm_eps", "rope_theta")}
    numbers |= {
        name: rope.get(name) for name in ("rope_theta", "factor", *_SCALING) if name in rope
    }
    for name, value in numbers.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (value is None or (is_number and 0 < value < math.inf)):
            raise Refused(f"config.json: {name} is {value!r}, no number above 0")


def _rope_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    if float(theta) != int(theta):
        raise Refused(f"config.json: rope_theta {theta} is no integer, as --rotary-base needs")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rotary_base": int(theta), "use_rope_scaling": False}
    strange = [n for n, v in _SCALING.items() if float(rope.get(n, v)) != float(v)]
    if kind != "llama3" or strange:
        what = f"{strange[0]} is {rope[strange[0]]}" if strange else f"rope_type is {kind!r}"
        raise Refused(f"config.json: {what}; only Llama 3.1's scaling (llama3, 1, 4, 8192) is read")
    return {
        "rotary_base": int(theta),
        "use_rope_scaling": True,
        "rope_scaling_factor": float(rope.get("factor", 8.0)),
    }


def shapes_of(arguments: Mapping[str, Any], vocab: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a Llama, in the order of its layers."""
    hidden, ffn = arguments["hidden_size"], arguments["ffn_hidden_size"]
    width = contents.head_width(arguments)
    q, kv = arguments["num_attention_heads"] * width, contents.query_groups(arguments) * width
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(arguments["num_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {
            f"{layer}input_layernorm.weight": (hidden,),
            f"{layer}self_attn.q_proj.weight": (q, hidden),
            f"{layer}self_attn.k_proj.weight": (kv, hidden),
            f"{layer}self_attn.v_proj.weight": (kv, hidden),
            f"{layer}self_attn.o_proj.weight": (hidden, q),
            f"{layer}post_attention_layernorm.weight": (hidden,),
            f"{layer}mlp.gate_proj.weight": (ffn, hidden),
            f"{layer}mlp.up_proj.weight": (ffn, hidden),
            f"{layer}mlp.down_proj.weight": (hidden, ffn),
        }
    shapes["model.norm.weight"] = (hidden,)
    if arguments.get("untie_embeddings_and_output_weights"):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


TOP = {
    contents.EMBEDDING: "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    contents.HEAD: "lm_head.weight",
}
"""Tensors outside the layers: our key -> theirs."""
IN_LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
"""Tensors of a layer: our key after `decoder.layers.` -> theirs after `model.layers.N.`."""


def split(ours: str, data: torch.Tensor, arguments: Mapping[str, Any]) -> list[torch.Tensor]:
    """Cuts one layer's tensor into those of `IN_LAYER[ours]`.

    Queries, keys and values are stored by group: the query heads of the group, its key head, its
    value head. Gate and up projection lie one after the other.
    """
    if ours == "self_attention.linear_qkv.weight":
        groups, width = contents.query_groups(arguments), contents.head_width(arguments)
        per_group = arguments["num_attention_heads"] // groups
        view = data.reshape(groups, per_group + 2, width, data.shape[-1])
        parts = (view[:, :per_group], view[:, per_group], view[:, per_group + 1])
        return [part.reshape(-1, data.shape[-1]) for part in parts]
    if ours == "mlp.linear_fc1.weight":
        return list(data.chunk(2))
    return [data]


def join(ours: str, parts: list[torch.Tensor], arguments: Mapping[str, Any]) -> torch.Tensor:
    """Inverse of `split`."""
    if ours == "self_attention.linear_qkv.weight":
        groups, width = contents.query_groups(arguments), contents.head_width(arguments)
        views = [part.reshape(groups, -1, width, part.shape[-1]) for part in parts]
        return torch.cat(views, dim=1).reshape(-1, parts[0].shape[-1])
    return torch.cat(parts) if len(parts) > 1 else parts[0]
