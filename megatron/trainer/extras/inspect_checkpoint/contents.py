"""The tensors that a checkpoint of a GPT must hold, by name and shape, from its own flags."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from megatron.trainer.checkpoint import files
from megatron.trainer.common.errors import Refused
from megatron.trainer.config.model_shape import LatentShape
from megatron.trainer.config.moe_flags import layers_with_experts
from megatron.trainer.data.tokenizer import told_vocab_size

LAYERS = "decoder.layers."
EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
EXPERTS = "mlp.experts.experts."
"""Prefix of the tensors of routed experts, in a layer; their first axis is the expert."""
STATE = "optimizer.state."
MASTERS = ("param", "fp32_param")
"""Names of the fp32 masters: of the distributed and of the plain half-precision optimizer."""
MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum_buffer"
"""What Muon keeps of a matrix in place of Adam's moments."""
_NEEDED = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "padded_vocab_size",
    "max_position_embeddings",
)
_EXTRA_STATE = re.compile(r".+\._extra_state/shard_.+")
_ONE_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_PER_LAYOUT = re.compile(rf"({'|'.join(files.OF_RANKS)})/shard_.+")


def leading_axes(key: str) -> int:
    """How many first axes of a tensor, or of its moments, count layers and experts: the layer where
    layers share a key, then the expert of a tensor of routed experts."""
    weight = weight_of(key)
    if not weight.startswith(LAYERS):
        return 0
    return (_ONE_LAYER.match(weight) is None) + (EXPERTS in weight)


def leading_indices(key: str, shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All indices of the leading axes of a tensor; the empty one where it has none."""
    return itertools.product(*(range(count) for count in shape[: leading_axes(key)]))


def in_layer(key: str) -> str:
    """The key of a weight of a layer within it."""
    found = _ONE_LAYER.match(key)
    return key[found.end() :] if found else key.removeprefix(LAYERS)


def layer_of(key: str, index: Sequence[int]) -> int:
    """Number of the layer of a weight at an index of its leading axes."""
    found = _ONE_LAYER.match(key)
    return int(found[1]) if found else index[0]


def is_buffer(key: str) -> bool:
    """Whether a tensor is no parameter: it is fp32 in every model, and has no moments."""
    return key.endswith("mlp.router.expert_bias")


def kind_of(key: str) -> str | None:
    """Which state of the optimizer a tensor is (`param`, `exp_avg` ...), or None for a weight."""
    if not key.startswith("optimizer."):
        return None
    return key.removeprefix(STATE).partition(".")[0] if key.startswith(STATE) else "unknown"


def weight_of(key: str) -> str:
    """The weight that a tensor of the optimizer belongs to; a weight's own key."""
    return key.removeprefix(STATE).partition(".")[2] if key.startswith(STATE) else key


def state_key(kind: str, weight: str) -> str:
    return f"{STATE}{kind}.{weight}"


def is_per_layout(key: str) -> bool:
    """Whether a stored object is one per rank of a layout: random streams of another trainer."""
    return _PER_LAYOUT.fullmatch(key) is not None


def is_known_blob(key: str) -> bool:
    """Whether a stored object can be kept or left out: it is one per rank, or the FP8 scales of a
    layer, which no layout changes."""
    return is_per_layout(key) or _EXTRA_STATE.fullmatch(key) is not None


def query_groups(arguments: Mapping[str, Any]) -> int:
    heads = arguments["num_attention_heads"]
    if arguments.get("group_query_attention", True):
        return arguments.get("num_query_groups") or heads
    return heads


def head_width(arguments: Mapping[str, Any]) -> int:
    return (
        arguments.get("kv_channels") or arguments["hidden_size"] // arguments["num_attention_heads"]
    )


def experts_of_layers(arguments: Mapping[str, Any]) -> tuple[int, ...] | None:
    """[num_layers] 1 for a layer with experts, else 0; None for a dense model.

    Raises:
        Refused: `moe_layer_freq` says nothing of the sort.
    """
    if not arguments.get("num_experts"):
        return None
    freq = arguments.get("moe_layer_freq", 1)
    text = str([*freq]) if isinstance(freq, (list, tuple)) else str(freq)
    try:
        return layers_with_experts(text, arguments["num_layers"])
    except ValueError as error:
        raise Refused(f"moe_layer_freq is {freq!r}: {error}") from error


def layer_prefixes(arguments: Mapping[str, Any]) -> list[str]:
    """[num_layers] what the keys of a layer begin with: the same for all where layers are alike,
    else with the number of the layer."""
    pattern = experts_of_layers(arguments)
    if pattern is None or all(pattern):
        return [LAYERS] * arguments["num_layers"]
    return [f"{LAYERS}{number}." for number in range(len(pattern))]


def true_vocab_size(arguments: Mapping[str, Any]) -> int | None:
    """Tokens of the tokenizer, or None if the flags do not tell without its files."""
    return told_vocab_size(arguments.get("tokenizer_type"), arguments.get("vocab_size"))


def expected_weights(arguments: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and global shape of every weight of the model that the stored flags describe.

    Raises:
        Refused: a flag is missing, or describes a model this trainer does not have.
    """
    missing = [name for name in _NEEDED if not arguments.get(name)]
    if missing:
        raise Refused(
            f"its common state does not say {', '.join(missing)}, so nothing proves it complete"
        )
    pattern = experts_of_layers(arguments)
    if pattern is not None and arguments.get("mtp_num_layers"):
        raise Refused(
            f"num_experts is {arguments['num_experts']} and mtp_num_layers is "
            f"{arguments['mtp_num_layers']}; the tools know models with either, not both"
        )
    hidden, vocabulary = arguments["hidden_size"], arguments["padded_vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (vocabulary, hidden)}
    if arguments.get("position_embedding_type", "learned_absolute") == "learned_absolute":
        positions = arguments["max_position_embeddings"]
        shapes["embedding.position_embeddings.weight"] = (positions, hidden)
    if pattern is None or all(pattern):
        of_layer = _layer(arguments, with_experts=pattern is not None)
        layers = (arguments["num_layers"],)
        shapes |= {f"{LAYERS}{key}": (*layers, *size) for key, size in of_layer.items()}
    else:
        for prefix, is_mixture in zip(layer_prefixes(arguments), pattern, strict=True):
            of_layer = _layer(arguments, with_experts=bool(is_mixture))
            shapes |= {f"{prefix}{key}": size for key, size in of_layer.items()}
    shapes |= _norm(arguments, "decoder.final_layernorm.", hidden)
    for number in range(arguments.get("mtp_num_layers") or 0):
        further = f"mtp.layers.{number}."
        for name in ("enorm", "hnorm", "final_layernorm"):
            shapes |= _norm(arguments, f"{further}{name}.", hidden)
        shapes[f"{further}eh_proj.weight"] = (hidden, 2 * hidden)
        own = _layer(arguments)
        shapes |= {f"{further}transformer_layer.{key}": size for key, size in own.items()}
    if arguments.get("untie_embeddings_and_output_weights"):
        shapes[HEAD] = (vocabulary, hidden)
    return shapes


def _norm(arguments: Mapping[str, Any], prefix: str, size: int) -> dict[str, tuple[int, ...]]:
    is_layer_norm = arguments.get("normalization", "LayerNorm") == "LayerNorm"
    return {f"{prefix}{part}": (size,) for part in ("weight", "bias")[: 1 + is_layer_norm]}


def _layer(
    arguments: Mapping[str, Any], *, with_experts: bool = False
) -> dict[str, tuple[int, ...]]:
    """Name and shape of the weights of one layer."""
    latent = LatentShape.of(arguments)
    attention = _attention if latent is None else partial(_latent_attention, latent=latent)
    shapes = attention(arguments)
    if arguments.get("add_bias_linear", True):
        shapes["self_attention.linear_proj.bias"] = (arguments["hidden_size"],)
    return {**shapes, **(_experts if with_experts else _mlp)(arguments)}


def _mlp(arguments: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes = _pair(arguments, "mlp.", arguments["ffn_hidden_size"])
    return shapes | _norm(arguments, "mlp.linear_fc1.layer_norm_", arguments["hidden_size"])


def _experts(arguments: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The router, the routed experts and the shared one, and the norm before them."""
    hidden, count = arguments["hidden_size"], arguments["num_experts"]
    width = arguments.get("moe_ffn_hidden_size") or arguments["ffn_hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"mlp.router.weight": (count, hidden)}
    if arguments.get("add_bias_linear", True):
        shapes["mlp.router.bias"] = (count,)
    if arguments.get("moe_router_enable_expert_bias"):
        shapes["mlp.router.expert_bias"] = (count,)
    of_each = _pair(arguments, EXPERTS, width)
    shapes |= {key: (count, *size) for key, size in of_each.items()}
    shared = arguments.get("moe_shared_expert_intermediate_size")
    if shared:
        shapes |= _pair({**arguments, "add_bias_linear": False}, "mlp.shared_experts.", shared)
        if arguments.get("moe_shared_expert_gate"):
            shapes["mlp.shared_experts.gate_weight"] = (1, hidden)
    return shapes | _norm(arguments, "pre_mlp_layernorm.", hidden)


def _pair(arguments: Mapping[str, Any], prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    """The two linear layers of an MLP of some width; gate and up projection are one of them."""
    hidden = arguments["hidden_size"]
    rows = width * (2 if arguments.get("swiglu") or arguments.get("quick_geglu") else 1)
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}linear_fc1.weight": (rows, hidden),
        f"{prefix}linear_fc2.weight": (hidden, width),
    }
    if arguments.get("add_bias_linear", True):
        shapes |= {f"{prefix}linear_fc1.bias": (rows,), f"{prefix}linear_fc2.bias": (hidden,)}
    return shapes


def _attention(arguments: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = arguments["hidden_size"], arguments["num_attention_heads"]
    width, own = head_width(arguments), "self_attention."
    rows = (heads + 2 * query_groups(arguments)) * width
    shapes: dict[str, tuple[int, ...]] = {
        f"{own}linear_qkv.weight": (rows, hidden),
        f"{own}linear_proj.weight": (hidden, heads * width),
    }
    if arguments.get("add_bias_linear", True) or arguments.get("add_qkv_bias"):
        shapes[f"{own}linear_qkv.bias"] = (rows,)
    shapes |= _norm(arguments, f"{own}linear_qkv.layer_norm_", hidden)
    if arguments.get("qk_layernorm"):
        shapes |= _norm(arguments, f"{own}q_layernorm.", width)
        shapes |= _norm(arguments, f"{own}k_layernorm.", width)
    return shapes


def _latent_attention(
    arguments: Mapping[str, Any], *, latent: LatentShape
) -> dict[str, tuple[int, ...]]:
    hidden, own = arguments["hidden_size"], "self_attention."
    shapes = dict(_norm(arguments, "input_layernorm.", hidden))
    for name, size in latent.weights(hidden, arguments["num_attention_heads"]).items():
        shapes[f"{own}{name}.weight"] = size
        if arguments.get("qk_layernorm") and name in ("linear_q_up_proj", "linear_kv_up_proj"):
            shapes |= _norm(arguments, f"{own}{name}.layer_norm_", size[1])
    return shapes
