"""What follows from the flags of number formats."""

from __future__ import annotations

from megatron.trainer.config.draft import Draft, Environment, flag_of

_EIGHT_BITS = (
    "fp8_recipe",
    "fp8_margin",
    "fp8_amax_history_len",
    "fp8_amax_compute_algo",
    "first_last_layers_bf16",
)
"""What means nothing without --fp8-format."""


def derive_precision(draft: Draft, environment: Environment) -> None:
    """Checks the flags of bf16 and fp16, and fills in what follows from them."""
    draft["params_dtype"] = "bf16" if draft["bf16"] else "fp16" if draft["fp16"] else "fp32"
    draft.require(
        not (draft["grad_reduce_in_bf16"] and draft["accumulate_allreduce_grads_in_fp32"]),
        "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other; drop "
        "one",
    )
    if draft["bf16"]:
        draft["accumulate_allreduce_grads_in_fp32"] = not draft["grad_reduce_in_bf16"]


def derive_eight_bits(draft: Draft, environment: Environment) -> None:
    """Checks the flags of fp8, and says what has no effect."""
    form, recipe = draft["fp8"], draft["fp8_recipe"]
    if form is None:
        draft.require(
            not draft["fp8_param_gather"], "--fp8-param-gather needs --fp8-format; give it, too"
        )
        idle = [flag_of(name) for name in _EIGHT_BITS if name in draft.explicit]
        if idle:
            draft.notes.append(f"without --fp8-format there is no effect of {', '.join(idle)}")
        return
    has_engine = draft["device"] == "cuda" and environment.transformer_engine
    draft.require(
        has_engine and draft["transformer_impl"] == "transformer_engine",
        f"--fp8-format {form} needs a GPU and --transformer-impl transformer_engine, and this run "
        "does not have both; use --bf16 and remove the --fp8 flags",
    )
    if draft["first_last_layers_bf16"]:
        draft.require(
            recipe != "delayed",
            "--first-last-layers-bf16 does not go with --fp8-recipe delayed; use tensorwise",
        )
        most = draft["num_layers"] // draft["pipeline_model_parallel_size"]
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            draft.require(
                draft[name] <= most,
                f"{flag_of(name)} {draft[name]} is above the {most} layers of a pipeline stage; "
                "lower it",
            )
    draft.notes.append(
        f"--fp8-format {form}: nobody has run this trainer with 8-bit matrix products yet; compare "
        "its first losses with those of --bf16"
    )
    if recipe == "delayed":
        draft.notes.append("--fp8-recipe delayed: its scales are not saved, a launch begins anew")
    if draft["fp8_param_gather"]:
        draft["fp8_param_gather"] = False
        draft.notes.append(
            "--fp8-param-gather: weights are stored and gathered in the format of the model, which "
            "takes more memory"
        )
