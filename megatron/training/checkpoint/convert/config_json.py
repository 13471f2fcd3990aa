"""`config.json` of Hugging Face models: the families that are read, and what each field means here.

Every field is used, or changes nothing about the network, or is bound to the values at which it
changes nothing. A field of no table is refused: a network with a part that was not copied would
train without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.training.checkpoint.convert.refusal import Refused


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
    "what a call returns": "return_dict output_hidden_states output_attentions",
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
    """Width of one attention head."""
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
        family: of the model.

    Raises:
        Refused: names the field, its value, and the values that can be imported.
    """
    for name, value in config.items():
        bound = BOUND.get(name)
        if bound is None and name not in USED | NEUTRAL.keys():
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
