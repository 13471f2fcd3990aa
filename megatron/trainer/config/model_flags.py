"""Derived defaults and checks of the flags that make a model more than a plain GPT."""

from __future__ import annotations

from megatron.trainer.config.draft import Draft


def derive_features(draft: Draft) -> None:
    """Fills in what follows from the flags of a model that is more than a plain GPT, and notes what
    does not go together."""
    _check_norms_and_mlp(draft)
    _derive_latent_attention(draft)
    _check_rotation(draft)
    _derive_further_tokens(draft)


def _check_norms_and_mlp(draft: Draft) -> None:
    draft.require(
        not (draft["qk_layernorm"] and draft["qk_l2_norm"]),
        "--qk-layernorm and --qk-l2-norm exclude each other; drop one",
    )
    draft.require(
        draft["softmax_type"] != "learnable",
        "--softmax-type learnable is refused: its weights would have no layout-free start; use "
        "vanilla or off-by-one",
    )
    for name, flag in (
        ("glu_linear_offset", "--glu-linear-offset"),
        ("activation_func_clamp_value", "--activation-func-clamp-value"),
    ):
        draft.require(
            draft["quick_geglu"] or draft[name] in (None, 0.0),
            f"{flag} {draft[name]} goes with --quick-geglu; add it or drop the flag",
        )
    clamp = draft["activation_func_clamp_value"]
    draft.require(
        clamp is None or clamp > 0, f"--activation-func-clamp-value {clamp} must be above 0"
    )


def _derive_latent_attention(draft: Draft) -> None:
    draft.default("rope_type", "yarn" if draft["multi_latent_attention"] else "rope")
    if not draft["multi_latent_attention"]:
        draft.require(
            draft["rope_type"] == "rope",
            "--rope-type yarn needs --multi-latent-attention; use --rope-type rope",
        )
        return
    for name, flag in (
        ("group_query_attention", "--group-query-attention"),
        ("qk_l2_norm", "--qk-l2-norm"),
        ("rotary_interleaved", "--rotary-interleaved"),
        ("use_rope_scaling", "--use-rope-scaling"),
        ("rotary_seq_len_interpolation_factor", "--rotary-seq-len-interpolation-factor"),
        ("no_rope_freq", "--no-rope-freq"),
    ):
        draft.require(
            not draft[name], f"--multi-latent-attention excludes {flag}; drop one of the two"
        )
    draft.require(
        draft["softmax_type"] == "vanilla",
        f"--multi-latent-attention excludes --softmax-type {draft['softmax_type']}; use vanilla",
    )
    rotated, factor = draft["qk_pos_emb_head_dim"], draft["rotary_scaling_factor"]
    draft.require(rotated % 2 == 0, f"--qk-pos-emb-head-dim {rotated} must be even")
    draft.require(factor > 0, f"--rotary-scaling-factor {factor} must be above 0")


def _check_rotation(draft: Draft) -> None:
    if draft["position_embedding_type"] != "rope":
        for name, flag in (
            ("rotary_interleaved", "--rotary-interleaved"),
            ("rotary_seq_len_interpolation_factor", "--rotary-seq-len-interpolation-factor"),
            ("no_rope_freq", "--no-rope-freq"),
        ):
            draft.require(
                not draft[name], f"{flag} needs --position-embedding-type rope; add it or drop it"
            )
    layers, frequency = draft["num_layers"], draft["no_rope_freq"]
    draft.require(
        not frequency or layers % frequency == 0,
        f"--num-layers {layers} is not divisible by --no-rope-freq {frequency}; change one",
    )


def _derive_further_tokens(draft: Draft) -> None:
    """Of `--mtp-num-layers`."""
    if not draft["mtp_num_layers"]:
        draft["mtp_num_layers"] = None
        return
    kind = draft["position_embedding_type"]
    draft.require(
        kind in ("rope", "none"),
        f"--mtp-num-layers does not go with --position-embedding-type {kind}; use rope or none",
    )
    draft.require(
        draft["logits_chunks"] == 1,
        "--mtp-num-layers excludes --logits-chunks, which does not cut the logits of further "
        "tokens; drop one",
    )
    draft.require(
        not draft["no_rope_freq"],
        "--mtp-num-layers excludes --no-rope-freq, which names layers of the decoder; drop one",
    )
    draft.require(
        not draft["allow_uneven_micro_batches"] or draft["calculate_per_token_loss"],
        "--mtp-num-layers weighs all micro-batches alike: with --allow-uneven-micro-batches give "
        "--calculate-per-token-loss",
    )
    draft.require(
        draft["recompute_method"] != "uniform" or draft["recompute_num_layers"] == 1,
        "--mtp-num-layers with --recompute-method uniform needs --recompute-num-layers 1; set it",
    )
