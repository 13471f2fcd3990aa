"""The flags of the user's own run, as the planner reads them: what counts, what is not priced."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

from copus_ext.cost_model.megatron_flags import attention_of, spec_of_arguments
from copus_ext.planner.shell_text import flags_of
from copus_ext.planner.space import may_overlap
from megatron.trainer.common.extras import extras
from megatron.trainer.config.draft import flag_of
from megatron.trainer.config.fields import option_specs
from megatron.trainer.config.known_flags import notes_of

_UNPRICED = (
    *("cross_entropy_loss_fusion", "fp8", "overlap_p2p_comm", "attention_softmax_in_fp32"),
    *("apply_query_key_layer_scaling", "masked_softmax_fusion", "bias_gelu_fusion"),
    *("bias_swiglu_fusion", "bias_dropout_fusion", "apply_rope_fusion"),
    *("gradient_accumulation_fusion", "no_persist_layer_norm", "deterministic_mode"),
    *("empty_unused_memory_level", "ddp_bucket_size", "num_distributed_optimizer_instances"),
    *("recompute_modules", "softmax_type", "microbatch_group_size_per_vp_stage"),
    *("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_permute_fusion"),
    *("moe_router_fusion", "moe_shared_expert_overlap", "moe_layer_recompute"),
)
"""Fields of Megatron's flags that change the time or memory of a step, and that the cost model does
not know."""
_OF_TORCH_SOFTMAX = (
    "attention_softmax_in_fp32",
    "apply_query_key_layer_scaling",
    "masked_softmax_fusion",
)
"""Those of them that the cost model knows where they make a softmax in plain torch and fp32, and
that change nothing where attention is one kernel."""
_UNEVEN = (
    *("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers"),
    *("decoder_last_pipeline_num_layers", "account_for_embedding_in_pipeline_split"),
    "account_for_loss_in_pipeline_split",
)
"""Fields of stages that need not be of equal length."""
SEARCHED = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    *(*_UNEVEN, "sequence_parallel", "use_distributed_optimizer"),
    *("micro_batch_size", "global_batch_size", "recompute_activations", "recompute_granularity"),
    *("recompute_method", "recompute_num_layers"),
)
"""Those that say what a search finds."""
_SPELLED = {
    "fp8": "--fp8-format",
    "overlap_p2p_comm": "--no-overlap-p2p-communication",
    "apply_rope_fusion": "--no-rope-fusion",
    **{
        name: "--no-" + name.replace("_", "-")
        for name in _UNPRICED
        if name.endswith("_fusion") and name.startswith(("masked", "bias", "gradient"))
    },
}
"""Flags that are not spelled like their field."""
_NO_MATTER = ("eval_", "exit_", "lr_", "min_lr", "adam_", "clip_grad")
"""Beginnings of fields that no plan depends on."""
_STATE = ("--main-grads-dtype", "--main-params-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype")
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
_OF_CONTROLLER = "--copus"
"""Beginning of the controller's flags, on which no plan depends."""


@cache
def specs() -> dict[str, Any]:
    """What every flag of the trainer is, by each of its names."""
    from megatron.trainer.config.arguments import GROUPS

    every = (spec for group in GROUPS.values() for spec in option_specs(group))
    return {name: spec for spec in every for name in spec.strings}


@cache
def without_effect() -> frozenset[str]:
    """Flags that change nothing of a plan."""
    from megatron.trainer.config.arguments import GROUPS

    groups = ("data", "checkpoint", "logging", "runtime")
    names = {spec.dest for group in groups for spec in option_specs(GROUPS[group])}
    names |= {x.dest for x in specs().values() if x.dest.startswith(_NO_MATTER)}
    names -= {*_UNPRICED, "tokenizer_type", "use_checkpoint_args", "device"}
    return frozenset(name for name, spec in specs().items() if spec.dest in names)


@lru_cache(maxsize=1)
def parsed_flags(megatron_args: str) -> Any:
    """Megatron's flags as the trainer reads them, by field name. Numbers that a shell would fill
    in, and that no plan depends on, are left out."""
    from megatron.trainer.config.arguments import parse_args

    kept: list[str] = []
    words = _without_controller(flags_of(megatron_args))
    for i, word in enumerate(words):
        flag, _, value = word.partition("=")
        following = value or "".join(words[i + 1 : i + 2])
        before = words[i - 1] if i else ""
        if not any(
            name in without_effect() and specs()[name].kind is not str and "$" in text
            for name, text in ((flag, following), (before, word))
        ):
            kept.append(word)
    kept, dtypes = _without_dtypes(kept)
    found = parse_args(kept)
    found.state_dtypes = dtypes
    return found


def _without_controller(words: list[str]) -> list[str]:
    """The words without the flags of the controller and their values."""
    kept, is_ours = list[str](), False
    for word in words:
        if word.startswith("--"):
            is_ours = word.startswith(_OF_CONTROLLER)
        if not is_ours:
            kept.append(word)
    return kept


def _without_dtypes(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """The words without the flags that say in which format the optimizer keeps its state, which
    this trainer refuses and a plan prices; and their values. Megatron-LM takes them with
    --use-precision-aware-optimizer alone."""
    if "--use-precision-aware-optimizer" not in words:
        return words, {}
    kept, found, is_value = list[str](), dict[str, str](), False
    for word, following in zip(words, [*words[1:], ""]):
        name, joined, value = word.partition("=")
        value = value if joined else following
        if name in _STATE and value in _BYTES:
            found[name], is_value = value, not joined
        elif is_value:
            is_value = False
        else:
            kept.append(word)
    return kept, found


def uneven_stages(given: Any) -> list[str]:
    """The flags with which stages of the pipeline may be of unequal length."""
    return [flag_of(name) for name in _UNEVEN if name in given.explicit_flags]


def state_bytes(given: Any) -> dict[str, int]:
    """The fields of a model that those flags say."""
    sizes = {flag: _BYTES[value] for flag, value in given.state_dtypes.items()}
    found = {"gradient_bytes": sizes["--main-grads-dtype"]} if "--main-grads-dtype" in sizes else {}
    if set(sizes) - {"--main-grads-dtype"}:
        found["optimizer_bytes"] = sum(sizes.get(flag, 4) for flag in _STATE[1:])
    return found


def notes_on(megatron_args: str, *, no_overlap: bool, priced: bool = False) -> list[str]:
    """What of a Megatron-LM command line the answer does not depend on, a line each. Its layout is
    priced by itself or not."""
    args = parsed_flags(megatron_args)
    given = args.explicit_flags
    known = () if attention_of(args) == "unfused" else _OF_TORCH_SOFTMAX
    of_extras = (name for extra in extras() for name in extra.unpriced)
    unpriced = [n for n in (*_UNPRICED, *of_extras) if n in given and n not in known]
    unpriced = [_SPELLED.get(name, flag_of(name)) for name in unpriced]
    if args.optimizer not in (
        "adam",
        *(name for e in extras() if e.cost_terms for name in e.optimizers),
    ):
        unpriced.append(f"--optimizer {args.optimizer}")
    searched = [flag_of(name) for name in SEARCHED if name in given]
    notes = []
    model, has_overlap = spec_of_arguments(args), not no_overlap
    if model.extras and has_overlap and not may_overlap(model):
        flags = ", ".join(flag_of(name) for name in model.extras if name in given)
        notes.append(f"{flags}: priced without --overlap-grad-reduce, which does not go with it")
        has_overlap = False
    if has_overlap and "overlap_grad_reduce" not in given:
        whose = "your command, priced without it," if priced else "your flags"
        notes.append(
            f"rows have --overlap-grad-reduce, which {whose} lack{'s' * priced}; give --no-overlap "
            "for rows without"
        )
    if unpriced:
        notes.append(f"the cost model does not know {', '.join(unpriced)}: priced as if not given")
    ignored = args.ignored_flags
    if args.state_dtypes:
        flags, them = ", ".join(args.state_dtypes), "them" if len(args.state_dtypes) > 1 else "it"
        notes.append(f"{flags}: priced; copus pretrain refuses {them}")
        ignored = [name for name in ignored if name != "--use-precision-aware-optimizer"]
    notes += notes_of(ignored)
    if searched and not priced:
        fix = "keep sizes with --fix and --recompute"
        notes.append(f"the search finds what {', '.join(searched)} would say; {fix}")
    return notes
