"""What decides which parameters a model has, and the parameters of a pipeline stage in the order in
which megatron-core registers them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.training.config.layout import Layout
from megatron.training.config.layout_rules import further_sizes, layout_problems
from megatron.training.model.flops import LatentWidths

if TYPE_CHECKING:
    from copus_ext.cost_model.model_spec import ModelSpec
    from megatron.training.config import Config

_WHOLE = ("linear_q_down_proj", "linear_kv_down_proj")
"""Compressing layers of multi-latent attention, of which every tensor-parallel rank has a copy."""
WORDS = "embedding.word_embeddings.weight"
"""Key of the word embedding, and of its copy in a tied output layer."""


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    layers: tuple[int, ...]
    """[num_layers] 1 for every layer with experts, else 0."""
    num_experts: int
    """Of a layer."""
    moe_ffn_hidden_size: int
    """Width of an expert."""
    shared_width: int = 0
    """Width of the shared expert; 0: there is none."""
    shared_gate: bool = False
    """The shared expert is scaled for each token."""
    is_grouped: bool = False
    """The experts of a rank are one module, as Transformer Engine's, whose first matrices of all
    experts come before their second ones."""

    @classmethod
    def of(cls, config: Config) -> ExpertShape | None:
        """Reads the trainer's resolved configuration; None for a dense model."""
        moe = config.moe
        if moe.num_experts is None:
            return None
        assert moe.moe_layers is not None and moe.moe_ffn_hidden_size is not None
        return cls(
            layers=moe.moe_layers,
            num_experts=moe.num_experts,
            moe_ffn_hidden_size=moe.moe_ffn_hidden_size,
            shared_width=moe.moe_shared_expert_intermediate_size or 0,
            shared_gate=moe.moe_shared_expert_gate,
            is_grouped=moe.moe_grouped_gemm,
        )

    @classmethod
    def of_spec(cls, spec: ModelSpec) -> ExpertShape | None:
        """Reads the planner's description of a model; None for a dense one."""
        if spec.num_experts is None:
            return None
        return cls(
            layers=spec.moe_layers,
            num_experts=spec.num_experts,
            moe_ffn_hidden_size=spec.expert_ffn,
            shared_width=spec.moe_shared_expert_intermediate_size or 0,
            shared_gate=spec.moe_shared_expert_gate,
            is_grouped=spec.moe_grouped_gemm and spec.implementation == "te",
        )

    @property
    def is_mixed(self) -> bool:
        """Whether some layers are dense. Then every layer has tensors of its own in a
        checkpoint."""
        return not all(self.layers)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """All that decides what each rank of a GPT owns, except for the layout."""

    num_layers: int
    """Transformer layers of the whole model."""
    hidden_size: int
    """Width of the residual stream."""
    ffn_hidden_size: int
    """Width of the MLP."""
    num_attention_heads: int
    """Query heads of a layer."""
    num_query_groups: int
    """Key-value heads of a layer."""
    kv_channels: int
    """Width of a head."""
    padded_vocab_size: int
    """Rows of the embedding."""
    learned_positions: int = 0
    """Rows of a learned position embedding; 0 without one."""
    gated: bool = False
    """Gated MLP (SwiGLU)."""
    linear_bias: bool = False
    """Biases in linear layers."""
    qkv_bias: bool = False
    """Bias of the query, key and value projection even without `linear_bias`."""
    normalization: str = "RMSNorm"
    """LayerNorm, which has biases, or RMSNorm."""
    qk_layernorm: bool = False
    """Queries and keys are normalised."""
    tied: bool = False
    """Output layer and word embedding are one."""
    latent: LatentWidths | None = None
    """Widths of multi-latent attention; None: plain attention."""
    mtp_num_layers: int = 0
    """Layers that predict further tokens, on the last stage."""
    experts: ExpertShape | None = None
    """Sizes of a mixture of experts; None: a dense model."""
    fused_norm: bool = False
    """The norms before attention and MLP are parts of the linear layers after them, as in
    Transformer Engine: other places in the gradient buffer."""
    use_distributed_optimizer: bool = True
    """Data-parallel ranks share the state out among them."""
    overlap_grad_reduce: bool = False
    """Gradients are reduced bucket by bucket while the backward pass goes on."""
    ddp_bucket_size: int | None = None
    """Elements after which a bucket closes; None: megatron-core's default."""
    use_tp_pp_dp_mapping: bool = False
    """Ranks are numbered with pipeline before data parallelism."""

    def __post_init__(self) -> None:
        if self.normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"normalization {self.normalization!r} must be LayerNorm or RMSNorm")

    @property
    def qkv_width(self) -> int:
        """Rows of the query, key and value projection."""
        return (self.num_attention_heads + 2 * self.num_query_groups) * self.kv_channels


def shape_of(config: Config) -> ModelShape:
    """Reads the trainer's resolved configuration.

    Raises:
        ValueError: a layer implementation that is not known here, or no padded vocabulary yet.
    """
    m, p, impl = config.model, config.parallel, config.kernels.transformer_impl
    if impl not in ("local", "transformer_engine"):
        raise ValueError(f"--transformer-impl {impl} is not known here; use local")
    if m.padded_vocab_size is None:
        raise ValueError("the padded vocabulary size is not known yet; read the tokenizer first")
    return ModelShape(
        num_layers=m.num_layers,
        hidden_size=m.hidden_size,
        ffn_hidden_size=m.ffn_hidden_size,
        num_attention_heads=m.num_attention_heads,
        num_query_groups=m.num_query_groups,
        kv_channels=m.kv_channels,
        padded_vocab_size=m.padded_vocab_size,
        learned_positions=(
            m.max_position_embeddings if m.position_embedding_type == "learned_absolute" else 0
        ),
        gated=m.gated_linear_unit,
        linear_bias=m.add_bias_linear,
        qkv_bias=m.add_qkv_bias,
        normalization=m.normalization,
        qk_layernorm=m.qk_layernorm,
        tied=not m.untie_embeddings_and_output_weights,
        latent=LatentWidths.of(config.flat()),
        mtp_num_layers=m.mtp_num_layers or 0,
        experts=ExpertShape.of(config),
        fused_norm=impl == "transformer_engine",
        use_distributed_optimizer=p.use_distributed_optimizer,
        overlap_grad_reduce=p.overlap_grad_reduce,
        ddp_bucket_size=p.ddp_bucket_size,
        use_tp_pp_dp_mapping=p.use_tp_pp_dp_mapping,
    )


def shape_of_spec(spec: ModelSpec, *, padded_vocab_size: int) -> ModelShape:
    """Reads the planner's description of a model.

    Args:
        spec: of the model.
        padded_vocab_size: rows of the embedding, the same under every layout of the run.
    """
    return ModelShape(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn,
        num_attention_heads=spec.num_attention_heads,
        num_query_groups=spec.groups,
        kv_channels=spec.channels,
        padded_vocab_size=padded_vocab_size,
        learned_positions=spec.learned_positions,
        gated=spec.gated,
        linear_bias=spec.bias,
        qkv_bias=spec.qkv_bias,
        normalization=spec.normalization,
        qk_layernorm=spec.qk_layernorm,
        tied=spec.tied,
        latent=spec.latent,
        mtp_num_layers=spec.mtp_num_layers,
        experts=ExpertShape.of_spec(spec),
        fused_norm=spec.implementation == "te",
    )


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
    problems = layout_problems(
        layout,
        num_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        ffn_hidden_size=shape.ffn_hidden_size,
        # Of any length that divides: it does not matter for the state.
        seq_length=2 * layout.cp * layout.tp,
        padded_vocab_size=shape.padded_vocab_size,
        sequence_parallel=True,
        **further_sizes(_arguments(shape)),
    )
    if shape.latent is None and shape.qkv_width % layout.tp:
        problems.append(
            f"the {shape.qkv_width} rows of queries, keys and values are not divisible by "
            f"{layout.tp}; choose another tensor parallel size"
        )
    if problems:
        raise ValueError("; ".join(problems))


def _arguments(shape: ModelShape) -> dict[str, Any]:
    """The flags of what not every model has."""
    latent = {} if shape.latent is None else asdict(shape.latent)
    if (experts := shape.experts) is not None:
        latent |= {
            "num_experts": experts.num_experts,
            "moe_ffn_hidden_size": experts.moe_ffn_hidden_size,
            "moe_shared_expert_intermediate_size": experts.shared_width or None,
            "add_bias_linear": shape.linear_bias,
            "use_tp_pp_dp_mapping": shape.use_tp_pp_dp_mapping,
        }
    return {
        "multi_latent_attention": shape.latent is not None,
        **latent,
        "mtp_num_layers": shape.mtp_num_layers,
        "hidden_size": shape.hidden_size,
        "untie_embeddings_and_output_weights": not shape.tied,
    }


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
        yield Parameter("output_layer.weight", size, 0)
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
    groups = (first, second) if experts.is_grouped else ([*first, *second],)
    for group in groups:
        for number in range(count):
            for p in group:
                yield p._replace(layer=(number,), layers=(count,), is_expert=True)
    if width := experts.shared_width:
        own = f"{prefix}shared_experts."
        if experts.shared_gate:
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
