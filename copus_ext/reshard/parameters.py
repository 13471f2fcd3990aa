"""The parameters of a pipeline stage, in the order in which megatron-core registers them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from megatron.trainer.config.layout import Layout
from megatron.trainer.config.layout_rules import expert_problems, shape_problems
from megatron.trainer.config.model_shape import ModelShape

if TYPE_CHECKING:
    from megatron.trainer.config import Config

_WHOLE = ("linear_q_down_proj", "linear_kv_down_proj")
"""Compressing layers of multi-latent attention, of which every tensor-parallel rank has a copy."""
WORDS = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
"""Key of the word embedding, and of its copy in a tied output layer."""


def shape_of(config: Config) -> ModelShape:
    """Reads the trainer's resolved configuration.

    Raises:
        ValueError: a layer implementation that is not known here, or no padded vocabulary yet.
    """
    impl = config.kernels.transformer_impl
    if impl not in ("local", "transformer_engine"):
        raise ValueError(f"--transformer-impl {impl} is not known here; use local")
    if config.model.padded_vocab_size is None:
        raise ValueError("the padded vocabulary size is not known yet; read the tokenizer first")
    return ModelShape.of(config.flat())


class Parameter(NamedTuple):
    """A parameter of a stage, the same for all of its ranks."""

    key: str
    """Name of the global tensor."""
    shape: tuple[int, ...]
    """Global shape without the axis of layers."""
    partition_dim: int | None
    """Axis that tensor parallelism cuts; None: every tensor-parallel rank has a copy."""
    num_blocks: int = 1
    """Blocks of rows that tensor parallelism cuts one by one: 2 for gate and up."""
    layer: tuple[int, ...] = ()
    """Number of the layer, or empty outside layers."""
    layers: tuple[int, ...] = ()
    """Layers of the whole model, or empty outside layers."""
    is_shared: bool = False
    """A tied embedding of which another stage has a copy."""
    is_copy: bool = False
    is_expert: bool = False
    """Part of a routed expert: cut over the ranks that share an expert, and reduced over its
    copies. `layer` and `layers` end with the number of the expert and their count."""

    @property
    def numel(self) -> int:
        """Elements of the whole tensor in this layer."""
        return math.prod(self.shape)


def check(shape: ModelShape, layout: Layout) -> None:
    """Refuses a layout that the model cannot take.

    Raises:
        ValueError: naming the broken rules.
    """
    problems = shape_problems(layout, shape)
    problems += expert_problems(layout, shape, sequence_parallel=True)
    if shape.latent is None and shape.qkv_width % layout.tp:
        problems.append(
            f"the {shape.qkv_width} rows of queries, keys and values are not divisible by "
            f"{layout.tp}; choose another tensor parallel size"
        )
    if problems:
        raise ValueError("; ".join(problems))


def chunks_of_stage(shape: ModelShape, layout: Layout, stage: int) -> list[list[Parameter]]:
    """The parameters of every model chunk of a pipeline stage, in registration order."""
    chunks = []
    for chunk, layers in enumerate(layout.layers_of_stage(shape.num_layers, stage)):
        is_first = stage == 0 and chunk == 0
        is_last = stage == layout.pp - 1 and chunk == layout.vpp - 1
        further = shape.mtp_num_layers
        params = list(_embeddings(shape, layout)) if is_first else []
        if is_last and not is_first and further:
            params += _copy_of_words(shape)
        for layer in layers:
            params += _layer_of_decoder(shape, layer)
        # With further tokens the norm follows the last layer, also into a chunk before the head's.
        if shape.num_layers - 1 in layers if further else is_last:
            params += _norm(shape, "decoder.final_layernorm.", shape.hidden_size)
        if is_last:
            for number in range(further):
                params += _further_token(shape, f"mtp.layers.{number}.")
            params += _output(shape, layout)
        chunks.append(params)
    return chunks


def _layer_of_decoder(shape: ModelShape, layer: int) -> Iterator[Parameter]:
    """A checkpoint has one tensor for the same weight of all layers, where all are alike."""
    experts = shape.experts
    with_experts = experts is not None and bool(experts.layers[layer])
    if experts is not None and experts.is_mixed:
        yield from _layer(shape, f"decoder.layers.{layer}.", with_experts=with_experts)
        return
    for p in _layer(shape, "decoder.layers.", with_experts=with_experts):
        where, of = (layer, *p.layer), (shape.num_layers, *p.layers)
        yield p._replace(layer=where, layers=of)


def _embeddings(shape: ModelShape, layout: Layout) -> Iterator[Parameter]:
    h = shape.hidden_size
    is_shared = (shape.tied or shape.mtp_num_layers > 0) and layout.pp > 1
    yield Parameter(WORDS, (shape.padded_vocab_size, h), 0, is_shared=is_shared)
    if shape.learned_positions:
        key = "embedding.position_embeddings.weight"
        yield Parameter(key, (shape.learned_positions, h), None)


def _output(shape: ModelShape, layout: Layout) -> Iterator[Parameter]:
    size = (shape.padded_vocab_size, shape.hidden_size)
    if not shape.tied:
        yield Parameter(OUTPUT, size, 0)
    elif layout.pp > 1:
        yield from _copy_of_words(shape)


def _copy_of_words(shape: ModelShape) -> Iterator[Parameter]:
    """The word embedding on the last stage, of a tied head or of further tokens."""
    size = (shape.padded_vocab_size, shape.hidden_size)
    yield Parameter(WORDS, size, 0, is_shared=True, is_copy=True)


def _further_token(shape: ModelShape, prefix: str) -> Iterator[Parameter]:
    """The layer of a further token: a projection of the token's embedding and the stream before
    into one, and a layer."""
    h = shape.hidden_size
    yield from _norm(shape, f"{prefix}enorm.", h)
    yield from _norm(shape, f"{prefix}hnorm.", h)
    yield from _column_parallel(f"{prefix}eh_proj.", (h, 2 * h), False)
    with_experts = shape.experts is not None and bool(shape.experts.layers[-1])
    yield from _layer(shape, f"{prefix}transformer_layer.", with_experts=with_experts)
    yield from _norm(shape, f"{prefix}final_layernorm.", h)


def _norm(shape: ModelShape, prefix: str, size: int) -> Iterator[Parameter]:
    yield Parameter(f"{prefix}weight", (size,), None)
    if shape.normalization == "LayerNorm":
        yield Parameter(f"{prefix}bias", (size,), None)


def _layer(shape: ModelShape, prefix: str, *, with_experts: bool = False) -> Iterator[Parameter]:
    h, mlp = shape.hidden_size, f"{prefix}mlp."
    if with_experts:
        yield from (_attention if shape.latent is None else _latent_attention)(shape, prefix)
        yield from _norm(shape, f"{prefix}pre_mlp_layernorm.", h)
        yield from _experts(shape, mlp)
        return
    before_fc1 = list(_norm(shape, f"{mlp}linear_fc1.layer_norm_", h))
    attention = _attention if shape.latent is None else _latent_attention
    yield from attention(shape, prefix)
    # A norm of the linear layer stands right before its weight, as one before the MLP does.
    yield from before_fc1
    num_blocks, bias = 2 if shape.gated else 1, shape.linear_bias
    fc1 = (num_blocks * shape.ffn_hidden_size, h)
    yield from _column_parallel(f"{mlp}linear_fc1.", fc1, bias, num_blocks)
    yield from _row_parallel(f"{mlp}linear_fc2.", (h, shape.ffn_hidden_size), bias)


def _experts(shape: ModelShape, prefix: str) -> Iterator[Parameter]:
    """The router, the experts and the shared expert of a layer."""
    h, bias, experts = shape.hidden_size, shape.linear_bias, shape.experts
    assert experts is not None
    num_blocks, count = 2 if shape.gated else 1, experts.num_experts
    yield Parameter(f"{prefix}router.weight", (count, h), None)
    if bias:
        yield Parameter(f"{prefix}router.bias", (count,), None)
    own, width = f"{prefix}experts.experts.", experts.moe_ffn_hidden_size
    first = list(_column_parallel(f"{own}linear_fc1.", (num_blocks * width, h), bias, num_blocks))
    second = list(_row_parallel(f"{own}linear_fc2.", (h, width), bias))
    groups = (first, second) if experts.moe_grouped_gemm else ([*first, *second],)
    for group in groups:
        for number in range(count):
            for p in group:
                yield p._replace(layer=(number,), layers=(count,), is_expert=True)
    if width := experts.moe_shared_expert_intermediate_size:
        own = f"{prefix}shared_experts."
        if experts.moe_shared_expert_gate:
            yield Parameter(f"{own}gate_weight", (1, h), None)
        fc1 = (num_blocks * width, h)
        yield from _column_parallel(f"{own}linear_fc1.", fc1, bias, num_blocks)
        yield from _row_parallel(f"{own}linear_fc2.", (h, width), bias)


def _attention(shape: ModelShape, prefix: str) -> Iterator[Parameter]:
    """The output projection is registered before the input projection."""
    h, heads = shape.hidden_size, shape.num_attention_heads * shape.kv_channels
    attention, bias = f"{prefix}self_attention.", shape.linear_bias
    before_qkv = list(_norm(shape, f"{attention}linear_qkv.layer_norm_", h))
    if not shape.fused_norm:
        yield from before_qkv
    yield from _row_parallel(f"{attention}linear_proj.", (h, heads), bias)
    if shape.fused_norm:
        yield from before_qkv
    qkv = (shape.qkv_width, h)
    yield from _column_parallel(f"{attention}linear_qkv.", qkv, bias or shape.qkv_bias)
    if shape.qk_layernorm:
        yield from _norm(shape, f"{attention}q_layernorm.", shape.kv_channels)
        yield from _norm(shape, f"{attention}k_layernorm.", shape.kv_channels)


def _latent_attention(shape: ModelShape, prefix: str) -> Iterator[Parameter]:
    """The norm before it is always a layer of its own; those of the compressed forms are parts of
    the expanding layers after them where norms are fused."""
    assert shape.latent is not None
    attention = f"{prefix}self_attention."
    yield from _norm(shape, f"{prefix}input_layernorm.", shape.hidden_size)
    norms: list[Parameter] = []
    for name, size in shape.latent.weights(shape.hidden_size, shape.num_attention_heads).items():
        own = f"{attention}{name}."
        if name == "linear_proj":
            yield from _row_parallel(own, size, shape.linear_bias)
        elif name in _WHOLE:
            yield Parameter(f"{own}weight", size, None)
        else:
            if shape.qk_layernorm and name != "linear_q_proj":
                norms += _norm(shape, f"{own}layer_norm_", size[1])
            if shape.fused_norm:
                yield from norms
                norms.clear()
            yield from _column_parallel(own, size, False)
    yield from norms


def _column_parallel(
    prefix: str, size: tuple[int, int], bias: bool, num_blocks: int = 1
) -> Iterator[Parameter]:
    yield Parameter(f"{prefix}weight", size, 0, num_blocks)
    if bias:
        yield Parameter(f"{prefix}bias", size[:1], 0, num_blocks)


def _row_parallel(prefix: str, size: tuple[int, int], bias: bool) -> Iterator[Parameter]:
    yield Parameter(f"{prefix}weight", size, 1)
    if bias:
        yield Parameter(f"{prefix}bias", size[:1], None)
