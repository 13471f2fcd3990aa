"""Llama and its relatives by Hugging Face's names: configuration and tensors, each from the
other's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from megatron.training.checkpoint.convert import contents
from megatron.training.checkpoint.convert.config_json import (
    FAMILIES,
    Family,
    check_fields,
    family_of,
    head_dim_of,
)
from megatron.training.checkpoint.convert.refusal import Refused

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

# Flags of parts that no family here has.
_PARTS = """rotary_interleaved rotary_seq_len_interpolation_factor no_rope_freq mrope_section
    apply_layernorm_1p layernorm_zero_centered_gamma apply_residual_connection_post_layernorm
    squared_relu quick_geglu glu_linear_offset activation_func_clamp_value qk_l2_norm softmax_scale
    attention_output_gate multi_latent_attention window_size experimental_attention_variant
    linear_attention_freq num_experts mtp_num_layers spec is_hybrid_model
    heterogeneous_layers_config_path"""
# Flag that changes the network -> the values that `config.json` can express. None is an absent flag
# or one that Megatron-LM leaves open.
_EXPRESSIBLE: dict[str, tuple[Any, ...]] = {
    "swiglu": (True,),
    "normalization": ("RMSNorm",),
    "position_embedding_type": ("rope",),
    "rotary_percent": (None, 1.0),
    "softmax_type": (None, "vanilla"),
    **dict.fromkeys(_PARTS.split(), (None, False)),
}
# Megatron's defaults of flags that must have another value.
_DEFAULTS = {
    "swiglu": False,
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
}
# Llama 3.1's, which megatron-core has as constants.
_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_ROPE_FIELDS = {"default": (), "llama3": ("factor", *_SCALING)}
_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
_OPTIONAL = ("num_key_value_heads", "head_dim", "sliding_window")
_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias")


def config_of(arguments: Mapping[str, Any], vocab: int, dtype: torch.dtype) -> dict[str, Any]:
    """`config.json` of a model trained with these flags: Llama's, or Qwen2's with a bias in the
    query, key and value projection, or Qwen3's with normalised queries and keys.

    Raises:
        Refused: no family has this network; names the flag.
    """
    for name, values in _EXPRESSIBLE.items():
        have = arguments.get(name, _DEFAULTS.get(name))
        if have not in values:
            raise Refused(
                f"{name} is {have!r}, which config.json cannot express; only "
                f"{' or '.join(repr(v) for v in values if v is not None)} can be exported"
            )
    kind, bias = _family_of_flags(arguments)
    theta = float(arguments.get("rotary_base") or 10000)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if arguments.get("use_rope_scaling"):
        factor = float(arguments.get("rope_scaling_factor") or 8.0)
        rope = {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_SCALING}
    epsilon = arguments.get("layernorm_epsilon", arguments.get("norm_epsilon"))
    family = FAMILIES[kind]
    return {
        "architectures": [family.architecture],
        "model_type": kind,
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
        "attention_dropout": arguments.get("attention_dropout") or 0.0,
        **dict.fromkeys(family.bias_fields, bias),
        **({family.window_switch: False} if family.window_switch else {}),
        # Absent ones would become ids of Llama's tokenizer.
        "bos_token_id": None,
        "eos_token_id": None,
        # The first two are read by releases before 5, the third by later ones.
        "rope_theta": theta,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "rope_parameters": rope,
        "torch_dtype": DTYPE_NAMES[dtype],
    }


def _family_of_flags(arguments: Mapping[str, Any]) -> tuple[str, bool]:
    """The `model_type` for these flags, and whether all its linear layers have a bias."""
    bias = bool(arguments.get("add_bias_linear", True))
    qkv_bias, qk_norm = bias or arguments.get("add_qkv_bias"), arguments.get("qk_layernorm")
    if qkv_bias and qk_norm:
        raise Refused(
            f"qk_layernorm is True and {'add_bias_linear' if bias else 'add_qkv_bias'} is True; "
            "config.json can express either, not both"
        )
    return "qwen3" if qk_norm else "qwen2" if qkv_bias and not bias else "llama", bias


def arguments_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flags of this trainer for a model with this `config.json`.

    Raises:
        Refused: a field is missing, unknown, or asks for what the trainer does not have.
    """
    family = family_of(config)
    config = {**family.absent, **config}
    missing = [name for name in _REQUIRED if config.get(name) is None]
    if missing:
        raise Refused(f"config.json lacks {', '.join(missing)}")
    _check_kinds(config)
    check_fields(config, family)
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    if heads % groups:
        raise Refused(f"config.json: {heads} heads do not divide into {groups} groups")
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "kv_channels": head_dim_of(config),
        "max_position_embeddings": config["max_position_embeddings"],
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        **_rope_arguments(config),
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.get("rms_norm_eps") or 1e-6,
        "swiglu": True,
        "add_bias_linear": _has_biases(config, family),
        "add_qkv_bias": False,
        "qk_layernorm": False,
        **family.flags,
        "attention_dropout": config.get("attention_dropout") or 0.0,
        "hidden_dropout": 0.0,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "vocab_size": config["vocab_size"],
    }


def _has_biases(config: Mapping[str, Any], family: Family) -> bool:
    """Whether all linear layers have a bias; the trainer has it in all or in none."""
    asked = {name: bool(config.get(name)) for name in ("attention_bias", "mlp_bias")}
    if not any(asked.values()):
        return False
    if all(asked.values()) and set(asked) == set(family.bias_fields):
        return True
    name = next(name for name, value in asked.items() if value)
    raise Refused(
        f"config.json: {name} is True; the trainer has a bias in all linear layers "
        "(attention_bias and mlp_bias of a Llama) or in none"
    )


def _check_kinds(config: Mapping[str, Any]) -> None:
    for name in (*_REQUIRED, *_OPTIONAL):
        value = config.get(name)
        is_size = type(value) is int and 0 < value < 2**63
        if not is_size and (value is not None or name in _REQUIRED):
            raise Refused(f"config.json: {name} is {value!r}, no number of anything")
    for name in _SWITCHES:
        if type(config.get(name, False)) not in (bool, type(None)):
            raise Refused(f"config.json: {name} is {config[name]!r}, neither true nor false")
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(name) or {}, dict):
            raise Refused(f"config.json: {name} is {config[name]!r}, no object")
    ropes = [config.get("rope_parameters") or {}, config.get("rope_scaling") or {}]
    numbers = [(name, config.get(name)) for name in ("rms_norm_eps", "rope_theta")]
    for name in ("rope_theta", *_ROPE_FIELDS["llama3"]):
        numbers += [(name, rope.get(name)) for rope in ropes]
    for name, value in numbers:
        if not (value is None or (_is_number(value) and 0 < value < math.inf)):
            raise Refused(f"config.json: {name} is {value!r}, no number above 0")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if not config.get("head_dim") and hidden % heads:
        raise Refused(f"config.json: hidden_size {hidden} does not divide into {heads} heads")
    dropout = config.get("attention_dropout")
    if not (dropout is None or (_is_number(dropout) and 0 <= dropout < 1)):
        raise Refused(f"config.json: attention_dropout is {dropout!r}, not from 0 to below 1")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _rope_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flags of the rotary positions.

    Releases of `transformers` before 5 read `rope_theta` and `rope_scaling`, later ones
    `rope_parameters`; a file may have both.
    """
    found = [
        _rope_fields(name, config)
        for name in ("rope_scaling", "rope_parameters")
        if config.get(name)
    ] or [{"rope_theta": config.get("rope_theta") or 10000.0}]
    if found[0] != found[-1]:
        raise Refused(
            "config.json: rope_scaling and rope_parameters differ; take out the wrong one"
        )
    theta, factor = found[0]["rope_theta"], found[0].get("factor")
    if theta != int(theta):
        raise Refused(f"config.json: rope_theta {theta} is no integer, as --rotary-base needs")
    if factor is None:
        return {"rotary_base": int(theta), "use_rope_scaling": False}
    return {
        "rotary_base": int(theta),
        "use_rope_scaling": True,
        "rope_scaling_factor": float(factor),
    }


def _rope_fields(where: str, config: Mapping[str, Any]) -> dict[str, float]:
    """Base and, if there is a scaling, its factor; from one of the two fields that hold them.

    Raises:
        Refused: another scaling than Llama 3.1's, or a field that it does not have.
    """
    rope = {name: value for name, value in config[where].items() if value is not None}
    kinds = {str(rope.pop(name)) for name in ("rope_type", "type") if name in rope} or {"default"}
    kind = min(kinds)
    if len(kinds) > 1 or kind not in _ROPE_FIELDS:
        raise Refused(
            f"config.json: rope_type of {where} is {' and '.join(sorted(kinds))}; only default and "
            "llama3 can be imported"
        )
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    if theta != (config.get("rope_theta") or theta):
        raise Refused(
            f"config.json: rope_theta is {config['rope_theta']} and, in {where}, {theta}; take out "
            "the wrong one"
        )
    if rope.pop("partial_rotary_factor", 1) != 1:
        raise Refused(
            f"config.json: partial_rotary_factor of {where} is "
            f"{config[where]['partial_rotary_factor']!r}; only 1 can be imported"
        )
    unread = [name for name in rope if name not in _ROPE_FIELDS[kind]]
    if unread:
        raise Refused(
            f"config.json: {unread[0]} of {where} is {rope[unread[0]]!r}, a field that rope_type "
            f"{kind} does not have; take it out if it changes nothing"
        )
    if kind == "default":
        return {"rope_theta": theta}
    rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    for name, value in _SCALING.items():
        if rope.get(name, value) != value:
            raise Refused(
                f"config.json: {name} of {where} is {rope[name]}; only Llama 3.1's scaling "
                "(llama3, 1, 4, 8192) can be imported"
            )
    missing = [name for name in _ROPE_FIELDS[kind] if name not in rope]
    if missing:
        raise Refused(f"config.json: {where} lacks {', '.join(missing)}")
    return {"rope_theta": theta, "factor": rope["factor"]}


def shapes_of(arguments: Mapping[str, Any], vocab: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a model, layer by layer."""
    hidden, ffn = arguments["hidden_size"], arguments["ffn_hidden_size"]
    width = contents.head_width(arguments)
    q, kv = arguments["num_attention_heads"] * width, contents.query_groups(arguments) * width
    bias = bool(arguments.get("add_bias_linear", True))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(arguments["num_layers"]):
        layer = f"model.layers.{i}."
        matrices = {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        for name, shape in matrices.items():
            shapes[f"{layer}{name}.weight"] = shape
            is_qkv = name.endswith(("q_proj", "k_proj", "v_proj"))
            if bias or (is_qkv and arguments.get("add_qkv_bias")):
                shapes[f"{layer}{name}.bias"] = shape[:1]
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{name}.weight"] = (hidden,)
        if arguments.get("qk_layernorm"):
            for name in ("q_norm", "k_norm"):
                shapes[f"{layer}self_attn.{name}.weight"] = (width,)
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
_QKV = tuple(f"self_attn.{x}_proj" for x in "qkv")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
IN_LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": tuple(f"{x}.weight" for x in _QKV),
    "self_attention.linear_qkv.bias": tuple(f"{x}.bias" for x in _QKV),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "self_attention.linear_proj.bias": ("self_attn.o_proj.bias",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": tuple(f"{x}.weight" for x in _GATE_UP),
    "mlp.linear_fc1.bias": tuple(f"{x}.bias" for x in _GATE_UP),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
    "mlp.linear_fc2.bias": ("mlp.down_proj.bias",),
}
"""Tensors of a layer: our key after `decoder.layers.` -> theirs after `model.layers.N.`."""


def split(ours: str, data: torch.Tensor, arguments: Mapping[str, Any]) -> list[torch.Tensor]:
    """Cuts one layer's tensor into those of `IN_LAYER[ours]`.

    Queries, keys and values are stored by group: the query heads of the group, its key head, its
    value head. Gate and up projection lie one after the other.
    """
    if ours.startswith("self_attention.linear_qkv.") and len(IN_LAYER[ours]) > 1:
        groups, width = contents.query_groups(arguments), contents.head_width(arguments)
        per_group = arguments["num_attention_heads"] // groups
        view = data.reshape(groups, per_group + 2, width, *data.shape[1:])
        parts = (view[:, :per_group], view[:, per_group], view[:, per_group + 1])
        return [part.reshape(-1, *data.shape[1:]) for part in parts]
    return list(data.chunk(len(IN_LAYER[ours])))


def join(ours: str, parts: list[torch.Tensor], arguments: Mapping[str, Any]) -> torch.Tensor:
    """Inverse of `split`."""
    if ours.startswith("self_attention.linear_qkv.") and len(parts) > 1:
        groups, width = contents.query_groups(arguments), contents.head_width(arguments)
        views = [part.reshape(groups, -1, width, *part.shape[1:]) for part in parts]
        return torch.cat(views, dim=1).reshape(-1, *parts[0].shape[1:])
    return torch.cat(parts)
