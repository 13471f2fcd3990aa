"""`config.json` of Hugging Face models: Llama and its relatives, to and from the trainer's flags.

Every field is used, or changes nothing about the network, or is bound to the values at which it
changes nothing. A field of no table is refused: a network with a part that was not copied would
train without an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.trainer.common.errors import Refused
from megatron.trainer.extras.huggingface import experts
from megatron.trainer.extras.inspect_checkpoint import contents


@dataclass(frozen=True, kw_only=True)
class Family:
    """The models of one `model_type`: Llama, or Llama with one part more."""

    architecture: str
    """Class in `transformers` with the head for language modelling."""
    flags: Mapping[str, bool] = field(default_factory=dict)
    """Flags of this trainer that Llama does not need."""
    bias_fields: tuple[str, ...] = ()
    """Fields that ask for biases; the other families do not read them."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """Value of a field that is not in the file, where that is not Llama's."""
    window_switch: str | None = None
    """Field without which `sliding_window` has no effect."""
    rope_theta: float = 10000.0
    """Base of the rotary positions where the file has none."""
    experts: experts.ExpertFields | None = None
    """How it writes down its experts, in a mixture."""


_ABSENT_OF_QWEN = {
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
}
FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM", bias_fields=("attention_bias", "mlp_bias")),
    "mistral": Family(
        architecture="MistralForCausalLM",
        absent={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        flags={"add_qkv_bias": True},
        absent={"num_key_value_heads": 32, "sliding_window": 4096},
        window_switch="use_sliding_window",
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        flags={"qk_layernorm": True},
        bias_fields=("attention_bias",),
        absent={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
        window_switch="use_sliding_window",
    ),
    "granite": Family(
        architecture="GraniteForCausalLM",
        bias_fields=("attention_bias", "mlp_bias"),
        absent={"attention_multiplier": 1.0},
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        absent={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001,
        },
        rope_theta=1e6,
        experts=experts.FAMILIES["mixtral"],
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        absent={
            **_ABSENT_OF_QWEN,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
        },
        window_switch="use_sliding_window",
        experts=experts.FAMILIES["qwen2_moe"],
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        flags={"qk_layernorm": True},
        bias_fields=("attention_bias",),
        absent={
            **_ABSENT_OF_QWEN,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        window_switch="use_sliding_window",
        experts=experts.FAMILIES["qwen3_moe"],
    ),
}
"""`model_type` -> family."""
_GEMMA = "scales its embedding, adds 1 to its norm weights and gates with GELU"
REFUSED_FAMILIES = {
    "gemma": _GEMMA,
    "gemma2": f"{_GEMMA}, caps its scores and logits, and attends in windows",
    "gemma3_text": f"{_GEMMA}, and attends in windows",
    "gemma3": f"{_GEMMA}, attends in windows, and reads images",
}
"""`model_type` -> the parts that this trainer does not have."""

_USED = """model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim max_position_embeddings rms_norm_eps
    tie_word_embeddings attention_bias mlp_bias attention_dropout rope_theta rope_scaling
    rope_parameters"""
USED = frozenset(_USED.split())
"""Fields that become flags, or say which family it is."""

_WITHOUT_EFFECT = {
    "says who wrote the file": """transformers_version _name_or_path name_or_path _commit_hash
        unsloth_version unsloth_fixed is_llama_config transformers.js_config""",
    "the files of weights say it themselves": "dtype torch_dtype use_bfloat16",
    "acts where weights are drawn, which are read here": "initializer_range",
    "ids of tokens; padding changes a gradient in transformers, and no output": """bos_token_id
        eos_token_id pad_token_id sep_token_id decoder_start_token_id""",
    "the same function, computed in another way or memory": """use_cache pretraining_tp
        chunk_size_feed_forward gradient_checkpointing attn_implementation _attn_implementation
        _attn_implementation_internal _attn_implementation_autoset torchscript xla_device""",
    "what a call returns": """return_dict output_hidden_states output_attentions
        output_router_logits""",
    "for heads that are not for language modelling": """id2label label2id num_labels problem_type
        finetuning_task task_specific_params""",
    "for the tokenizer": "tokenizer_class prefix",
    "only how text is generated": """max_length min_length do_sample early_stopping num_beams
        num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty
        length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
        num_return_sequences output_scores return_dict_in_generate forced_bos_token_id
        forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
        begin_suppress_tokens""",
    "read only where windows are on, which are refused": "max_window_layers",
    "read by none of these classes": "is_decoder max_sequence_length",
}
NEUTRAL = {name: why for why, names in _WITHOUT_EFFECT.items() for name in names.split()}
"""Field without an effect on the network -> why."""
_OF_GENERATION = tuple(
    why for why in _WITHOUT_EFFECT if why.startswith(("ids of", "only how", "for the tokenizer"))
)
KEPT = frozenset(name for why in _OF_GENERATION for name in _WITHOUT_EFFECT[why].split()) | {
    "use_cache"
}
"""Fields without an effect on the network that `generate()` reads; an export keeps them."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Values of a field at which the network is one of this trainer."""

    only: str
    """These values, in words."""
    why: str
    """What another value asks for, or the way on."""
    allows: Callable[[Any, Mapping[str, Any]], bool]
    """Whether a value, in this configuration, is one of them; null always is."""


def _bound(*values: Any, why: str) -> Bound:
    only = " or ".join(["null", *(str(value).lower() for value in values)])
    return Bound(only=only, why=why, allows=lambda value, config: value in values)


def _fits_window(window: Any, config: Mapping[str, Any]) -> bool:
    return type(window) is int and window >= config["max_position_embeddings"]


def _is_full(types: Any, config: Mapping[str, Any]) -> bool:
    return types == ["full_attention"] * config["num_hidden_layers"]


def head_dim_of(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _is_usual_scale(scale: Any, config: Mapping[str, Any]) -> bool:
    is_number = isinstance(scale, (int, float)) and scale > 0
    return is_number and abs(scale * scale * head_dim_of(config) - 1) < 1e-6


def _is_head_dim(scalar: Any, config: Mapping[str, Any]) -> bool:
    return scalar == head_dim_of(config)


_NO_FACTOR = "the trainer has no such factor"
_NO_CAP = "the trainer caps neither scores nor logits"
_NO_WINDOW = (
    "the trainer attends to all tokens before; if no sequence of yours is longer than the window, "
    "set max_position_embeddings to it"
)
_DEQUANTIZE = "dequantize the model and save it in bf16, fp16 or fp32"
BOUND = {
    "hidden_act": _bound("silu", why="the MLP is gated with SiLU"),
    "hidden_activation": _bound("silu", why="the MLP is gated with SiLU"),
    "partial_rotary_factor": _bound(1, why="no family here rotates a part of each head"),
    "rope_interleaved": _bound(False, why="no family here rotates neighbours"),
    "use_mrope": _bound(False, why="positions are those of text"),
    "rope_local_base_freq": _bound(why="all layers rotate alike"),
    "sliding_window": Bound(
        only="null, or max_position_embeddings and more", why=_NO_WINDOW, allows=_fits_window
    ),
    "use_sliding_window": Bound(
        only="false, or a sliding_window of max_position_embeddings and more",
        why=_NO_WINDOW,
        allows=lambda value, config: (
            value is False or _fits_window(config.get("sliding_window"), config)
        ),
    ),
    "layer_types": Bound(
        only="full_attention for each layer", why="the trainer's layers are alike", allows=_is_full
    ),
    "router_jitter_noise": _bound(0, why="the trainer's noise is on the router's input alone"),
    "sliding_window_pattern": _bound(why="the trainer's layers are alike"),
    "_sliding_window_pattern": _bound(why="the trainer's layers are alike"),
    "per_layer_config": _bound({}, why="the trainer's layers are alike"),
    "attn_logit_softcapping": _bound(why=_NO_CAP),
    "final_logit_softcapping": _bound(why=_NO_CAP),
    "clip_qkv": _bound(why="the trainer does not clip queries, keys and values"),
    "query_pre_attn_scalar": Bound(
        only="head_dim", why="scores are divided by its root", allows=_is_head_dim
    ),
    "attention_multiplier": Bound(
        only="1/sqrt(head_dim)", why="scores are multiplied by it", allows=_is_usual_scale
    ),
    "embedding_multiplier": _bound(1, why=_NO_FACTOR),
    "residual_multiplier": _bound(1, why=_NO_FACTOR),
    "logits_scaling": _bound(1, why=_NO_FACTOR),
    "logit_scale": _bound(1, why=_NO_FACTOR),
    "is_causal": _bound(True, why="no token sees those after it"),
    "use_bidirectional_attention": _bound(False, why="no token sees those after it"),
    "is_encoder_decoder": _bound(False, why="the trainer has no encoder"),
    "add_cross_attention": _bound(False, why="the trainer has no encoder"),
    "tie_encoder_decoder": _bound(False, why="the trainer has no encoder"),
    "cross_attention_hidden_size": _bound(why="the trainer has no encoder"),
    "pruned_heads": _bound({}, why="all layers have all heads"),
    "quantization_config": _bound(why=_DEQUANTIZE),
    "compression_config": _bound(why=_DEQUANTIZE),
    "auto_map": _bound(
        {}, why="it names code of its own; take it out if transformers' own class is the same"
    ),
}
"""Field that changes the network -> the values at which it does not."""


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that `model_type` names.

    Raises:
        Refused: another model, or a class for another task.
    """
    kind = config.get("model_type")
    known = ", ".join(FAMILIES)
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        parts = REFUSED_FAMILIES.get(kind) if isinstance(kind, str) else None
        why = f", which {parts}" if parts else ""
        raise Refused(f"config.json: model_type is {kind!r}{why}; only {known} can be imported")
    classes = config.get("architectures") or [family.architecture]
    if classes != [family.architecture]:
        raise Refused(
            f"config.json: architectures is {classes!r}; only {family.architecture} of model_type "
            f"{kind!r} can be imported"
        )
    return family


def check_fields(config: Mapping[str, Any], family: Family) -> None:
    """Proves that no field asks for what is not copied.

    Args:
        config: with the family's values of absent fields; sizes are proved already.

    Raises:
        Refused: names the field, its value, and the values that can be imported.
    """
    known = USED | NEUTRAL.keys() | (family.experts.fields if family.experts else frozenset())
    for name, value in config.items():
        bound = BOUND.get(name)
        if bound is None and name not in known:
            raise Refused(
                f"config.json: {name} is {_short(value)}, a field unknown here; take it out if "
                "it changes nothing about the network"
            )
        if bound is None or value is None:
            continue
        if name == "sliding_window" and family.window_switch:
            continue  # has no effect without its switch, which is proved instead
        if not bound.allows(value, config):
            raise Refused(
                f"config.json: {name} is {_short(value)}; only {bound.only} can be imported: "
                f"{bound.why}"
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# Flags of parts that no family here has.
_PARTS = """rotary_interleaved rotary_seq_len_interpolation_factor no_rope_freq mrope_section
    apply_layernorm_1p layernorm_zero_centered_gamma apply_residual_connection_post_layernorm
    squared_relu quick_geglu glu_linear_offset activation_func_clamp_value qk_l2_norm softmax_scale
    attention_output_gate multi_latent_attention window_size experimental_attention_variant
    linear_attention_freq mtp_num_layers spec is_hybrid_model
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
    "add_bias_linear": True,
}
# Llama 3.1's, which megatron-core has as constants.
_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_ROPE_FIELDS = {"default": (), "llama3": ("factor", *_SCALING)}
_SIZES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}
"""Fields that every model has -> our flag."""
_OPTIONAL = ("num_key_value_heads", "head_dim", "sliding_window")
_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias")


def config_of(arguments: Mapping[str, Any], vocab: int, dtype: torch.dtype) -> dict[str, Any]:
    """`config.json` of a model trained with these flags: Llama's, or Qwen2's with a bias in the
    query, key and value projection, or Qwen3's with normalised queries and keys.

    Raises:
        Refused: no family has this network; names the flag.
    """
    is_mixture = bool(arguments.get("num_experts"))
    for name, values in {**_EXPRESSIBLE, **(experts.EXPRESSIBLE if is_mixture else {})}.items():
        have = arguments.get(name, _DEFAULTS.get(name))
        if have not in values:
            raise Refused(
                f"{name} is {have!r}, which config.json cannot express; only "
                f"{' or '.join(repr(v) for v in values if v is not None) or None} can be exported"
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
        **{theirs: arguments.get(ours) for theirs, ours in _SIZES.items()},
        **(experts.config_of(arguments, kind) if is_mixture else {}),
        "vocab_size": vocab,
        "num_key_value_heads": contents.query_groups(arguments),
        "head_dim": contents.head_width(arguments),
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
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _family_of_flags(arguments: Mapping[str, Any]) -> tuple[str, bool]:
    """The `model_type` for these flags, and whether all its linear layers have a bias."""
    if arguments.get("num_experts"):
        return experts.kind_of(arguments), False
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
    if family.experts is not None:
        config = experts.with_one_count(config, family.experts)
    config = {**family.absent, **config}
    if family.window_switch and config.get("sliding_window") == 0:
        config["sliding_window"] = None  # as transformers writes one that is switched off
    missing = [name for name in _SIZES if config.get(name) is None]
    if missing:
        raise Refused(f"config.json lacks {', '.join(missing)}")
    _check_kinds(config)
    check_fields(config, family)
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    if heads % groups:
        raise Refused(f"config.json: {heads} heads do not divide into {groups} groups")
    return {
        **{ours: config[theirs] for theirs, ours in _SIZES.items()},
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "kv_channels": head_dim_of(config),
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        **_rope_arguments(config, family.rope_theta),
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.get("rms_norm_eps") or 1e-6,
        "swiglu": True,
        "add_bias_linear": _has_biases(config, family),
        "add_qkv_bias": False,
        "qk_layernorm": False,
        **family.flags,
        **(experts.arguments_of(config, family.experts) if family.experts else {}),
        "attention_dropout": config.get("attention_dropout") or 0.0,
        "hidden_dropout": 0.0,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
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
    for name in (*_SIZES, *_OPTIONAL):
        value = config.get(name)
        is_size = type(value) is int and 0 < value < 2**63
        if not is_size and (value is not None or name in _SIZES):
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


def _rope_arguments(config: Mapping[str, Any], default: float) -> dict[str, Any]:
    """Flags of the rotary positions.

    Releases of `transformers` before 5 read `rope_theta` and `rope_scaling`, later ones
    `rope_parameters`; a file may have both.
    """
    found = [
        _rope_fields(name, config, default)
        for name in ("rope_scaling", "rope_parameters")
        if config.get(name)
    ] or [{"rope_theta": config.get("rope_theta") or default}]
    if found[0] != found[-1]:
        raise Refused(
            "config.json: rope_scaling and rope_parameters differ; take out the wrong one"
        )
    theta, factor = found[0]["rope_theta"], found[0].get("factor")
    if theta != int(theta):
        raise Refused(f"config.json: rope_theta {theta} is not an integer, as --rotary-base needs")
    if factor is None:
        return {"rotary_base": int(theta), "use_rope_scaling": False}
    return {
        "rotary_base": int(theta),
        "use_rope_scaling": True,
        "rope_scaling_factor": float(factor),
    }


def _rope_fields(where: str, config: Mapping[str, Any], default: float) -> dict[str, float]:
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
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or default
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
