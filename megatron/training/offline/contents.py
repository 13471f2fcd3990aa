"""What a checkpoint of a GPT must hold: its tensors by name and shape, from its own flags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron.training.offline.refusal import Refused
from megatron.training.tokenizer import told_vocab_size

LAYERS = "decoder.layers."
EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
STATE = "optimizer.state."
MASTERS = ("param", "fp32_param")
"""Names of the fp32 masters: of the distributed and of the plain half-precision optimizer."""
MOMENTS = ("exp_avg", "exp_avg_sq")
_NEEDED = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "padded_vocab_size",
    "max_position_embeddings",
)
_EXTRA_STATE = re.compile(r".+\._extra_state/shard_.+")
_PER_LAYOUT = re.compile(r"(rng_state|rerun_state_machine_state)/shard_.+")


def is_stacked(key: str) -> bool:
    """Whether the first axis of a tensor, or of its moments, is the layer."""
    return weight_of(key).startswith(LAYERS)


def kind_of(key: str) -> str | None:
    """Which state of the optimizer a tensor is (`param`, `exp_avg` ...), or None for a weight."""
    if not key.startswith("optimizer."):
        return None
    return key.removeprefix(STATE).partition(".")[0] if key.startswith(STATE) else "unknown"


def weight_of(key: str) -> str:
    """The weight that a tensor of the optimizer belongs to; a weight's own key."""
    return key.removeprefix(STATE).partition(".")[2] if key.startswith(STATE) else key


def state_key(kind: str, weight: str) -> str:
    """Key of one state of one weight."""
    return f"{STATE}{kind}.{weight}"


def is_extra_state(key: str) -> bool:
    """Whether a stored object is the extra state of a layer (FP8 scales), which no layout
    changes."""
    return _EXTRA_STATE.fullmatch(key) is not None


def is_per_layout(key: str) -> bool:
    """Whether a stored object is one per rank of a layout: random streams of another trainer."""
    return _PER_LAYOUT.fullmatch(key) is not None


def query_groups(arguments: Mapping[str, Any]) -> int:
    """Key-value heads of one layer."""
    heads = arguments["num_attention_heads"]
    if arguments.get("group_query_attention", True):
        return arguments.get("num_query_groups") or heads
    return heads


def head_width(arguments: Mapping[str, Any]) -> int:
    """Width of one attention head."""
    return (
        arguments.get("kv_channels") or arguments["hidden_size"] // arguments["num_attention_heads"]
    )


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
    if arguments.get("num_experts"):
        raise Refused(f"num_experts is {arguments['num_experts']}: mixtures are not converted")
    hidden, layers = arguments["hidden_size"], arguments["num_layers"]
    heads, width = arguments["num_attention_heads"], head_width(arguments)
    ffn, vocabulary = arguments["ffn_hidden_size"], arguments["padded_vocab_size"]
    bias = bool(arguments.get("add_bias_linear", True))
    qkv_rows = (heads + 2 * query_groups(arguments)) * width
    is_layer_norm = arguments.get("normalization", "LayerNorm") == "LayerNorm"
    norm = ("weight", "bias") if is_layer_norm else ("weight",)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (vocabulary, hidden)}
    if arguments.get("position_embedding_type", "learned_absolute") == "learned_absolute":
        positions = arguments["max_position_embeddings"]
        shapes["embedding.position_embeddings.weight"] = (positions, hidden)
    attention, mlp = f"{LAYERS}self_attention.", f"{LAYERS}mlp."
    shapes[f"{attention}linear_qkv.weight"] = (layers, qkv_rows, hidden)
    shapes[f"{attention}linear_proj.weight"] = (layers, hidden, heads * width)
    fc1_rows = ffn * (2 if arguments.get("swiglu") else 1)
    shapes[f"{mlp}linear_fc1.weight"] = (layers, fc1_rows, hidden)
    shapes[f"{mlp}linear_fc2.weight"] = (layers, hidden, ffn)
    if bias or arguments.get("add_qkv_bias"):
        shapes[f"{attention}linear_qkv.bias"] = (layers, qkv_rows)
    if bias:
        shapes[f"{attention}linear_proj.bias"] = (layers, hidden)
        shapes[f"{mlp}linear_fc1.bias"] = (layers, fc1_rows)
        shapes[f"{mlp}linear_fc2.bias"] = (layers, hidden)
    for part in norm:
        shapes[f"{attention}linear_qkv.layer_norm_{part}"] = (layers, hidden)
        shapes[f"{mlp}linear_fc1.layer_norm_{part}"] = (layers, hidden)
        shapes[f"decoder.final_layernorm.{part}"] = (hidden,)
        if arguments.get("qk_layernorm"):
            shapes[f"{attention}q_layernorm.{part}"] = (layers, width)
            shapes[f"{attention}k_layernorm.{part}"] = (layers, width)
    if arguments.get("untie_embeddings_and_output_weights"):
        shapes[HEAD] = (vocabulary, hidden)
    return shapes
