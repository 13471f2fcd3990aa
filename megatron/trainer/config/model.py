"""Shape of the model and the kernels that compute it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.trainer.config.fields import derived, option


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What the network is: everything here changes the function that is trained."""

    num_layers: int = option(None, required=True)
    """Number of transformer layers of the whole model."""
    hidden_size: int = option(None, required=True)
    """Width of the residual stream."""
    ffn_hidden_size: int = option(None)
    """Width of the MLP. Default: 4 x hidden size, with SwiGLU 8/3 x hidden size rounded down to
    a multiple of 64."""
    num_attention_heads: int = option(None, required=True)
    """Number of query heads of one layer."""
    kv_channels: int = option(None)
    """Width of one attention head. Default: hidden size / attention heads."""
    group_query_attention: bool = option(False)
    """Share key and value heads between groups of query heads. --num-query-groups says how many."""
    num_query_groups: int = option(1)
    """Number of key-value heads with --group-query-attention. Default: the number of query
    heads."""
    max_position_embeddings: int = option(None, required=True)
    """Longest sequence that the model can represent, in tokens. At least --seq-length."""
    position_embedding_type: str = option(
        "learned_absolute", choices=("learned_absolute", "rope", "mrope", "relative", "none")
    )
    """How positions enter the model. mrope and relative are refused."""
    use_rotary_position_embeddings: bool = option(False)
    """Older spelling of --position-embedding-type rope."""
    add_position_embedding: bool = option(True, "--no-position-embedding")
    """Learned positions. Older spelling; goes only with another --position-embedding-type."""
    rotary_base: int = option(10000)
    """Base of the rotary frequencies."""
    rotary_percent: float = option(1.0)
    """Share of each head that is rotated, in (0, 1]."""
    use_rope_scaling: bool = option(False)
    """Scale the rotary frequencies as Llama 3.1 does."""
    rope_scaling_factor: float = option(8.0)
    """Factor of --use-rope-scaling."""
    rotary_interleaved: bool = option(False)
    """Rotate pairs of neighbouring dimensions. Default: pairs across the two halves of a head."""
    rotary_seq_len_interpolation_factor: int | None = option(None)
    """Divide positions by this before the rotation. Megatron-LM 0.16.1 ignores it in GPT models."""
    rope_type: str = option(None, choices=("rope", "yarn"))
    """Kind of rotation. Default: yarn with --multi-latent-attention, else rope."""
    no_rope_freq: int | None = option(None)
    """Every N-th layer goes without the rotation. A pattern as text is refused."""
    make_vocab_size_divisible_by: int = option(128)
    """Pad the vocabulary to a multiple of this and of every tensor parallel size that the run may
    take. Its size then does not depend on the layout."""
    pad_vocab_for_tensor_parallel_size: int | None = option(None)
    """Pad the vocabulary as Megatron-LM does at this tensor parallel size. The unit is this size
    times --make-vocab-size-divisible-by."""
    padded_vocab_size: int = option(None)
    """Rows of the embedding table. Default: the padded vocabulary. A checkpoint keeps its own."""
    vocab_size: int | None = option(None)
    """Rows of the vocabulary before padding. Default: what the tokenizer says."""
    normalization: str = option("LayerNorm", choices=("LayerNorm", "RMSNorm"))
    """Kind of the norm layers."""
    layernorm_epsilon: float = option(1e-5, "--norm-epsilon")
    """Added to the variance in the norm layers."""
    layernorm_zero_centered_gamma: bool = option(False, "--apply-layernorm-1p")
    """Store the scale of the norm layers minus 1, so that weight decay pulls it to 1."""
    qk_layernorm: bool = option(False)
    """Normalise queries and keys of each head. With --multi-latent-attention: their compressed
    forms."""
    qk_l2_norm: bool = option(False)
    """Divide queries and keys of each head by their root mean square, without weights."""
    multi_latent_attention: bool = option(False)
    """Attention with compressed queries, keys and values (arXiv 2405.04434)."""
    q_lora_rank: int | None = option(None)
    """Width of the compressed query of --multi-latent-attention. Default: not compressed."""
    kv_lora_rank: int = option(32)
    """Width of the compressed keys and values of --multi-latent-attention."""
    qk_head_dim: int = option(128)
    """Width of a head's query and key without their rotated part."""
    qk_pos_emb_head_dim: int = option(64)
    """Width of the rotated part, which all heads share in the key."""
    v_head_dim: int = option(128)
    """Width of a head's value with --multi-latent-attention."""
    rotary_scaling_factor: float = option(1.0)
    """YaRN: length of sequences over that of the original model."""
    mscale: float = option(1.0)
    """YaRN: weight of the scale of the rotation."""
    mscale_all_dim: float = option(0.0)
    """YaRN: weight of the scale of the attention scores."""
    softmax_type: str = option("vanilla", choices=("vanilla", "off-by-one", "learnable"))
    """off-by-one adds 1 to the denominator of the attention softmax. learnable is refused."""
    mtp_num_layers: int | None = option(None)
    """Number of further tokens to predict at every position, with a layer for each (arXiv
    2412.19437). Default: none."""
    mtp_loss_scaling_factor: float = option(0.1)
    """Weight of the mean loss of --mtp-num-layers beside that of the next token."""
    swiglu: bool = option(False)
    """Gated MLP with SiLU in place of GELU."""
    squared_relu: bool = option(False)
    """Squared ReLU in place of GELU."""
    quick_geglu: bool = option(False)
    """Gated MLP with the sigmoid approximation of GELU in place of GELU."""
    glu_linear_offset: float = option(0.0)
    """Added to the linear half of --quick-geglu."""
    activation_func_clamp_value: float | None = option(None)
    """Bound of both halves of --quick-geglu. Default: none."""
    add_bias_linear: bool = option(True, "--disable-bias-linear")
    """Bias in the linear layers."""
    add_qkv_bias: bool = option(False)
    """Bias in the query, key and value projection even with --disable-bias-linear."""
    untie_embeddings_and_output_weights: bool = option(False)
    """Give the output layer weights of its own instead of those of the input embedding."""
    attention_dropout: float = option(0.1)
    """Probability of dropping an attention weight."""
    hidden_dropout: float = option(0.1)
    """Probability of dropping an entry of a block's output."""
    init_method_std: float = option(0.02)
    """Standard deviation of the initial weights."""
    embedding_init_method_std: float | None = option(None)
    """Standard deviation of the initial word and position embeddings. Default:
    --init-method-std."""
    init_method_xavier_uniform: bool = option(False)
    """Draw initial matrices from Xavier's uniform distribution."""

    @property
    def gated_linear_unit(self) -> bool:
        """Whether the MLP multiplies an activation with a linear half."""
        return self.swiglu or self.quick_geglu


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """How the same function is computed: implementation and fused kernels."""

    transformer_impl: str = option(
        "transformer_engine", choices=("local", "transformer_engine", "inference_optimized")
    )
    """Layer implementation. Without Transformer Engine it becomes local, with a note."""
    attention_backend: str = option("auto", choices=("flash", "fused", "unfused", "local", "auto"))
    """Attention kernel."""
    use_flash_attn: bool = option(False)
    """Older spelling of --attention-backend flash."""
    attention_softmax_in_fp32: bool = option(False)
    """Compute the attention softmax in fp32."""
    apply_query_key_layer_scaling: bool = option(False)
    """Scale attention scores by 1 / layer number, for stability in fp16. Implies
    --attention-softmax-in-fp32."""
    masked_softmax_fusion: bool = option(True, "--no-masked-softmax-fusion")
    """Fuse scale, mask and softmax."""
    bias_gelu_fusion: bool = option(True, "--no-bias-gelu-fusion")
    """Fuse bias and GELU."""
    bias_swiglu_fusion: bool = option(True, "--no-bias-swiglu-fusion")
    """Fuse bias and SwiGLU."""
    bias_dropout_fusion: bool = option(True, "--no-bias-dropout-fusion")
    """Fuse bias, dropout and residual."""
    apply_rope_fusion: bool = option(True, "--no-rope-fusion")
    """Fuse the rotation of queries and keys."""
    gradient_accumulation_fusion: bool = option(True, "--no-gradient-accumulation-fusion")
    """Add weight gradients inside the matrix product."""
    no_persist_layer_norm: bool = option(False)
    """Do not use the persistent LayerNorm kernel of apex."""
    cross_entropy_loss_fusion: bool = option(False)
    """Fuse the cross entropy over the vocabulary."""
    logits_chunks: int = option(1)
    """Parts of the tokens whose logits exist at a time. More parts take less memory, and compute
    the output layer once more."""
    cross_entropy_fusion_impl: str = option("native", choices=("native", "te"))
    """Implementation of --cross-entropy-loss-fusion."""
    bias_activation_fusion: bool = derived(None)
    """The one of the two activation fusions that applies to this MLP."""
