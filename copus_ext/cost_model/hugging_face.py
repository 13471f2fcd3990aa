"""Reads the shape of a model from a Hugging Face `config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.cost_model.spec_file import SpecError, read_json

_LLAMA = {"gated": True, "bias": False, "normalization": "RMSNorm"}
_TYPES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": {**_LLAMA, "qkv_bias": True},
    "qwen3": {**_LLAMA, "qk_layernorm": True},
    "gpt2": {"gated": False, "bias": True, "normalization": "LayerNorm"},
    "mixtral": _LLAMA,
    "qwen2_moe": {**_LLAMA, "qkv_bias": True},
    "qwen3_moe": {**_LLAMA, "qk_layernorm": True},
}
_LATENT_TYPES = ("deepseek_v2", "deepseek_v3")
_MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")


def spec_of_config(path: Path, *, seq_length: int | None) -> ModelSpec:
    """Reads a `config.json`. A mixture of experts is priced with all-to-all and one kernel for the
    experts of a rank.

    Raises:
        SpecError: an unknown model type, experts that are not known, or no sample length.
    """
    data = read_json(path)
    if not isinstance(data, dict):
        raise SpecError(f"{path.name} is not a config.json: it holds no object")
    kind = data.get("model_type")
    if not isinstance(kind, str):
        raise SpecError(f"{path.name}: model_type is missing or no text")
    if kind in _LATENT_TYPES:
        raise SpecError(
            f"{path.name}: model_type {kind}: the cost model does not know "
            "--multi-latent-attention; describe a model of like size without it, such as "
            "deepseek-v3-sized"
        )
    for key in _EXPERT_KEYS:
        if kind not in _MIXTURES and data.get(key):
            raise SpecError(
                f"{path.name}: {key}={data[key]}: experts of model_type {kind!r} are not known; "
                f"known: {', '.join(_MIXTURES)}, or describe it with --megatron-args"
            )
    if kind not in _TYPES:
        raise SpecError(
            f"{path.name}: model_type {kind!r} is not known; known: "
            f"{', '.join(sorted(_TYPES))}, or describe it with --megatron-args"
        )
    if seq_length is None:
        longest = data.get("max_position_embeddings") or data.get("n_positions")
        context = "which names no context" if longest is None else f"whose context is {longest}"
        raise SpecError(f"--seq-length is required with --model {path.name}, {context}")

    def get(*names: str, default: Any = None) -> Any:
        return next((data[n] for n in names if data.get(n) is not None), default)

    def whole(*names: str) -> int:
        if not isinstance(value := get(*names), int) or isinstance(value, bool):
            raise SpecError(f"{path.name}: {names[0]} is missing or no whole number")
        return value

    layers, hidden = whole("num_hidden_layers", "n_layer"), whole("hidden_size", "n_embd")
    vocabulary, heads = whole("vocab_size"), whole("num_attention_heads", "n_head")
    experts: dict[str, Any] = {}
    if kind == "mixtral":
        experts = {"num_experts": whole("num_local_experts")}
    elif kind in _MIXTURES:
        experts = {
            "num_experts": whole("num_experts"),
            "moe_ffn_hidden_size": whole("moe_intermediate_size"),
            "moe_layer_freq": _layers(data, layers, path.name),
        }
    if experts:
        experts["moe_router_topk"] = whole("num_experts_per_tok")
    if kind == "qwen2_moe":
        experts["moe_shared_expert_intermediate_size"] = whole("shared_expert_intermediate_size")
        experts["moe_shared_expert_gate"] = True
    return ModelSpec(
        name=str(get("_name_or_path", default=path.parent.name) or kind),
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        seq_length=seq_length,
        ffn_hidden_size=get("intermediate_size", "n_inner"),
        num_query_groups=get("num_key_value_heads", default=heads),
        kv_channels=get("head_dim"),
        vocab_size=vocabulary,
        tied=bool(get("tie_word_embeddings", default=kind == "gpt2")),
        learned_positions=get("n_positions", default=1024) if kind == "gpt2" else 0,
        **_TYPES[kind],
        **experts,
    )


def _layers(data: dict[str, Any], num_layers: int, name: str) -> str:
    """Which layers have experts, as `--moe-layer-freq` says."""
    step, dense = data.get("decoder_sparse_step", 1), data.get("mlp_only_layers") or []
    if not isinstance(step, int) or step < 1 or not isinstance(dense, list):
        raise SpecError(
            f"{name}: decoder_sparse_step must be a whole number from 1, and mlp_only_layers a list"
        )
    found = [int((i + 1) % step == 0 and i not in dense) for i in range(num_layers)]
    return "1" if all(found) else str(found).replace(" ", "")
