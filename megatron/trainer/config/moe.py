"""Mixture of experts: its shape, its router and how tokens are balanced over experts."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.trainer.config.fields import derived, option

BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
"""Values of `--moe-router-load-balancing-type`."""


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Experts in place of the MLP. Without --num-experts nothing here has an effect."""

    num_experts: int | None = option(None)
    """Experts of a layer. Default: a dense model."""
    moe_layer_freq: str = option("1")
    """Which layers have experts: every N-th from the first on, or a list such as [0]*1+[1]*26."""
    moe_ffn_hidden_size: int | None = option(None)
    """Width of an expert. Default: --ffn-hidden-size."""
    moe_shared_expert_intermediate_size: int | None = option(None)
    """Width of the expert that sees every token. Default: none."""
    moe_shared_expert_gate: bool = option(False)
    """Scale the shared expert of each token by a sigmoid of its own."""
    moe_router_topk: int = option(2)
    """Experts of each token."""
    moe_router_score_function: str = option("softmax", choices=("softmax", "sigmoid"))
    """What turns the router's logits into scores."""
    moe_router_pre_softmax: bool = option(False)
    """Take the softmax over all experts and not over the chosen ones."""
    moe_router_topk_scaling_factor: float | None = option(None)
    """Factor on the scores of the chosen experts."""
    moe_router_num_groups: int | None = option(None)
    """Groups of experts, of which a token may use --moe-router-group-topk."""
    moe_router_group_topk: int | None = option(None)
    """Groups of experts that a token may use."""
    moe_router_dtype: str = option(None, choices=("fp32", "fp64"))
    """Number format of the router. Default: fp32."""
    moe_router_load_balancing_type: tuple[str, ...] = option(
        ("aux_loss",), choices=BALANCING, nargs="+"
    )
    """What keeps the load of experts even. Several losses may be given, each with a coefficient.
    Default: aux_loss."""
    moe_aux_loss_coeff: tuple[float, ...] = option((0.0,), nargs="+")
    """Weight of each loss of --moe-router-load-balancing-type. Default: 0."""
    moe_balance: str = option(None, choices=("lagged", "exact", "megatron"))
    """Expert fractions of the loss aux_loss. lagged: those of earlier global batches. exact: those
    of this global batch, with a second forward pass. megatron: those of the micro-batch, so that
    the loss depends on the layout. Default: lagged with --copus, else megatron."""
    moe_balance_samples: int = option(256)
    """Samples over which --moe-balance lagged averages the fractions."""
    moe_router_enable_expert_bias: bool = option(False)
    """Add a bias to the scores that choose experts, and move it towards an even load (arXiv
    2408.15664). Needs --moe-router-score-function sigmoid."""
    moe_router_bias_update_rate: float = option(1e-3)
    """Step of the expert bias."""
    moe_z_loss_coeff: float | None = option(None)
    """Weight of the loss that keeps the router's logits small. Default: none."""
    moe_input_jitter_eps: float | None = option(None)
    """Width of a random factor on the router's input. Not the same under every layout."""
    moe_expert_capacity_factor: float | None = option(None)
    """Most tokens of an expert, over the mean; others are dropped. Not the same under every layout.
    Default: none is dropped."""
    moe_pad_expert_input_to_capacity: bool = option(False)
    """Pad the rows of each expert to --moe-expert-capacity-factor."""
    moe_token_drop_policy: str = option("probs", choices=("probs", "position"))
    """Which tokens are dropped first: those of low score, or the last."""
    moe_token_dispatcher_type: str = option("allgather", choices=("allgather", "alltoall", "flex"))
    """How rows get to their experts. flex needs a GPU."""
    moe_flex_dispatcher_backend: str = option("deepep", choices=("deepep", "hybridep"))
    """Library of --moe-token-dispatcher-type flex."""
    moe_grouped_gemm: bool = option(False)
    """Compute the experts of a rank in one kernel. Needs Transformer Engine."""
    moe_permute_fusion: bool = option(False)
    """Fuse the permutation of rows. Needs Transformer Engine."""
    moe_router_fusion: bool = option(False)
    """Fuse the router. Needs Transformer Engine."""
    moe_shared_expert_overlap: bool = option(False)
    """Compute the shared expert while rows are under way. Needs a GPU and the dispatcher
    alltoall."""
    moe_layer_recompute: bool = option(False)
    """Older spelling of --recompute-granularity selective --recompute-modules moe."""
    moe_layers: tuple[int, ...] | None = derived(None)
    """[num_layers] 1 for every layer with experts, else 0; None in a dense model."""

    def coefficient(self, kind: str) -> float:
        """Weight of one of the losses of `--moe-router-load-balancing-type`; 0 if it is not
        among them."""
        pairs = zip(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff, strict=True)
        return dict(pairs).get(kind, 0.0)
