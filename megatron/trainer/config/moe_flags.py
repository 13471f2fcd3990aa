"""Derived defaults and checks of the flags of a mixture of experts."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron.trainer.config.draft import Draft, Environment, flag_of
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.moe import MoeConfig

_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
_ENGINE_ONLY = ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion")


def derive_moe(draft: Draft) -> None:
    """Fills in what follows from the flags of a mixture of experts, and notes what does not go
    together. Independent of machine and layout."""
    names = [field.name for field in fields(MoeConfig) if field.name in draft.values]
    if not draft["num_experts"]:
        # Megatron-LM, too, takes it for a dense model.
        names.append("expert_tensor_parallel_size")
        draft["expert_tensor_parallel_size"] = None
        idle = [flag_of(name) for name in names if name in draft.explicit and name != "num_experts"]
        if idle:
            draft.notes.append(f"without --num-experts: no effect of {', '.join(idle)}")
        draft["num_experts"] = None
        return
    _note_idle(draft)
    draft.default("moe_ffn_hidden_size", draft["ffn_hidden_size"])
    draft.default("moe_router_dtype", "fp32")
    _derive_layers(draft)
    _check_router(draft)
    _derive_balance(draft)
    _check_dropping(draft)
    if draft["moe_layer_recompute"]:
        draft.require(
            draft["recompute_granularity"] != "full",
            "--moe-layer-recompute excludes --recompute-granularity full, which computes whole "
            "layers again; drop one",
        )
        draft["recompute_granularity"] = "selective"
        modules = draft["recompute_modules"] or ()
        draft["recompute_modules"] = tuple(dict.fromkeys((*modules, "moe")))
    # Experts and the rest have a loss scaler each in megatron-core 0.16.1, and one scales the loss.
    draft.require(
        not draft["fp16"],
        "--num-experts excludes --fp16, whose scales of experts and the rest may part; use --bf16",
    )


_NEEDS = {
    "moe_shared_expert_gate": "moe_shared_expert_intermediate_size",
    "moe_token_drop_policy": "moe_expert_capacity_factor",
    "moe_router_bias_update_rate": "moe_router_enable_expert_bias",
}
"""Field -> the one without which it means nothing."""


def _note_idle(draft: Draft) -> None:
    """Notes flags that were given and mean nothing beside the others."""
    idle = [(name, flag_of(need)) for name, need in _NEEDS.items() if not draft[need]]
    if draft["moe_balance"] not in (None, "lagged"):
        idle.append(("moe_balance_samples", "--moe-balance lagged"))
    if not any(draft["moe_aux_loss_coeff"]):
        idle.append(("moe_balance", "--moe-aux-loss-coeff"))
    if draft["moe_router_load_balancing_type"] == ("none",) and any(draft["moe_aux_loss_coeff"]):
        idle.append(("moe_aux_loss_coeff", "a loss in --moe-router-load-balancing-type"))
    for name, need in idle:
        if name in draft.explicit:
            draft.notes.append(f"no effect of {flag_of(name)} without {need}")


def _derive_layers(draft: Draft) -> None:
    text, layers = str(draft["moe_layer_freq"]), draft["num_layers"]
    try:
        found = layers_with_experts(text, layers)
    except ValueError as error:
        draft.problem(f"--moe-layer-freq {text}: {error}")
        return
    draft["moe_layers"] = found


def layers_with_experts(text: str, num_layers: int) -> tuple[int, ...]:
    """Reads `--moe-layer-freq`.

    Args:
        text: a number N, for every N-th layer from the first on; or a list of 0 and 1, which may
            be written with + and *.

    Returns:
        [num_layers] 1 for a layer with experts, else 0.

    Raises:
        ValueError: says what it should be.
    """
    try:
        value = _evaluated(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError):
        raise ValueError("give a number, or a list such as [0]*1+[1]*26") from None
    if isinstance(value, int):
        if value < 1:
            raise ValueError("it must be at least 1")
        return tuple(int(i % value == 0) for i in range(num_layers))
    if any(n not in (0, 1) for n in value) or len(value) != num_layers:
        raise ValueError(f"give a 0 or 1 for each of the {num_layers} layers, not {len(value)}")
    if not any(value):
        raise ValueError("no layer has experts; remove --num-experts")
    return tuple(value)


def _evaluated(node: ast.expr) -> int | list[int]:
    """The value of whole numbers, lists, + and *; anything else is refused."""
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 1 << 16:
        return node.value
    if isinstance(node, ast.List):
        items = [_evaluated(item) for item in node.elts]
        if all(isinstance(item, int) for item in items):
            return items  # pyright: ignore[reportReturnType]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        a, b = _evaluated(node.left), _evaluated(node.right)
        if isinstance(node.op, ast.Add) and isinstance(a, list) and isinstance(b, list):
            return a + b
        if isinstance(node.op, ast.Mult) and isinstance(a, int) != isinstance(b, int):
            times, items = (a, b) if isinstance(a, int) else (b, a)
            assert isinstance(times, int) and isinstance(items, list)
            if times * len(items) < 1 << 16:
                return items * times
    raise ValueError("give a number, or a list such as [0]*1+[1]*26")


def _check_router(draft: Draft) -> None:
    experts, topk = draft["num_experts"], draft["moe_router_topk"]
    draft.require(
        topk <= experts, f"--moe-router-topk {topk} is more than --num-experts {experts}; lower it"
    )
    is_sigmoid = draft["moe_router_score_function"] == "sigmoid"
    kinds = draft["moe_router_load_balancing_type"]
    draft.require(
        topk > 1 or is_sigmoid or draft["moe_router_pre_softmax"] or "sinkhorn" in kinds,
        "--moe-router-topk 1 with softmax needs --moe-router-pre-softmax; add it",
    )
    draft.require(
        not draft["moe_router_enable_expert_bias"] or is_sigmoid,
        "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid; add it",
    )
    shared = draft["moe_shared_expert_intermediate_size"]
    draft.require(
        shared is None or not draft["add_bias_linear"],
        f"--moe-shared-expert-intermediate-size {shared} needs --disable-bias-linear; add it",
    )
    groups, group_topk = draft["moe_router_num_groups"], draft["moe_router_group_topk"]
    draft.require(
        (groups is None) == (group_topk is None),
        "--moe-router-num-groups and --moe-router-group-topk go together; give both",
    )
    if groups is not None and group_topk is not None:
        draft.require(
            experts % groups == 0,
            f"--num-experts {experts} is not divisible by --moe-router-num-groups {groups}; change "
            "one",
        )
        draft.require(
            group_topk <= groups and topk % group_topk == 0,
            f"--moe-router-group-topk {group_topk} must divide --moe-router-topk {topk} and be at "
            f"most --moe-router-num-groups {groups}; change it",
        )


def _derive_balance(draft: Draft) -> None:
    kinds, weights = draft["moe_router_load_balancing_type"], draft["moe_aux_loss_coeff"]
    if len(weights) == 1 and len(kinds) > 1 and "moe_aux_loss_coeff" not in draft.explicit:
        weights = weights * len(kinds)
        draft["moe_aux_loss_coeff"] = weights
    draft.require(min(weights) >= 0, f"--moe-aux-loss-coeff {min(weights):g} must not be negative")
    draft.require(
        len(kinds) == len(weights),
        f"--moe-router-load-balancing-type names {len(kinds)} and --moe-aux-loss-coeff "
        f"{len(weights)}; give as many",
    )
    draft.require(
        len(set(kinds)) == len(kinds) and (len(kinds) == 1 or set(kinds) <= set(_LOSSES)),
        "--moe-router-load-balancing-type takes one value, or different losses of "
        f"{', '.join(_LOSSES)}",
    )
    draft.require(
        "sinkhorn" not in kinds or not any(weights),
        "--moe-router-load-balancing-type sinkhorn has no loss; give --moe-aux-loss-coeff 0",
    )
    draft.require(
        draft["moe_balance"] in (None, "megatron") or "aux_loss" in kinds,
        f"--moe-balance {draft['moe_balance']} needs --moe-router-load-balancing-type aux_loss; "
        "add it or drop --moe-balance",
    )


def _check_dropping(draft: Draft) -> None:
    factor = draft["moe_expert_capacity_factor"]
    if factor is not None and factor < 0:
        draft["moe_expert_capacity_factor"] = factor = None
    draft.require(
        factor is not None or not draft["moe_pad_expert_input_to_capacity"],
        "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor; give it",
    )
    draft.require(
        factor is None or "sinkhorn" not in draft["moe_router_load_balancing_type"],
        "--moe-expert-capacity-factor excludes --moe-router-load-balancing-type sinkhorn; drop one",
    )
    eps = draft["moe_input_jitter_eps"]
    draft.require(
        eps is None or 0 < eps < 1, f"--moe-input-jitter-eps {eps} must be between 0 and 1"
    )


def derive_moe_layout(draft: Draft, layout: Layout) -> None:
    """Fills in what a mixture of experts needs under a layout."""
    draft["expert_tensor_parallel_size"] = layout.etp
    if not draft["num_experts"]:
        return
    if not layout.experts_see_whole_samples:
        draft.notes.append(
            f"experts of {layout} see parts of samples: their gradient noise is not measured"
        )


def derive_moe_kernels(draft: Draft, environment: Environment) -> None:
    """Turns off what this machine cannot do for a mixture of experts."""
    if not draft["num_experts"]:
        return
    is_cpu = draft["device"] == "cpu"
    off = [] if draft["transformer_impl"] == "transformer_engine" else list(_ENGINE_ONLY)
    off += ["moe_shared_expert_overlap"] if is_cpu else []
    if was_on := [flag_of(name) for name in off if draft[name]]:
        why = "CPU run" if is_cpu else "without Transformer Engine"
        draft.notes.append(f"{why}: no effect of {', '.join(was_on)}")
    for name in off:
        draft[name] = False
    modules = draft["recompute_modules"] or ()
    if "moe_act" in modules and not draft["moe_grouped_gemm"]:
        draft["recompute_modules"] = tuple(name for name in modules if name != "moe_act")
        draft.notes.append("no effect of --recompute-modules moe_act without --moe-grouped-gemm")
    draft.require(
        not is_cpu or draft["moe_token_dispatcher_type"] != "flex",
        "--moe-token-dispatcher-type flex needs a GPU; use alltoall or allgather",
    )
    tensor = draft["expert_tensor_parallel_size"] or draft["tensor_model_parallel_size"]
    draft.require(
        draft["moe_token_dispatcher_type"] != "flex"
        or tensor * draft["expert_model_parallel_size"] > 1,
        "--moe-token-dispatcher-type flex needs experts on several ranks; raise "
        "--expert-model-parallel-size, or use alltoall or allgather",
    )
    draft.require(
        not draft["moe_shared_expert_overlap"] or draft["moe_token_dispatcher_type"] == "alltoall",
        "--moe-shared-expert-overlap needs --moe-token-dispatcher-type alltoall; give it",
    )
    computes_again = draft["recompute_granularity"] == "selective" or draft["recompute_activations"]
    draft.require(
        not (computes_again and "shared_experts" in modules and draft["moe_shared_expert_overlap"]),
        "--recompute-modules shared_experts excludes --moe-shared-expert-overlap; drop one",
    )


def changed_by_batch_or_layout(arguments: Mapping[str, Any]) -> list[str]:
    """What makes a mixture of experts train another loss under another batch, micro-batch or
    layout, so that no controller may change any of them.

    Args:
        arguments: flags by field name, derived; also those of Megatron-LM, which may have
            `moe_balance` "micro_batch": it counts micro-batches whose size stays.

    Returns:
        A line for each reason, with the fix; empty for a dense model.
    """
    if not arguments.get("num_experts"):
        return []
    kinds, weights = (
        list(value) if isinstance(value, (list, tuple)) else [value]
        for value in map(arguments.get, ("moe_router_load_balancing_type", "moe_aux_loss_coeff"))
    )
    weight = dict(zip(kinds, weights * len(kinds) if len(weights) == 1 else weights))
    balance = arguments.get("moe_balance") or "megatron"
    found = []
    if weight.get("aux_loss") and balance not in ("lagged", "micro_batch"):
        counts = "micro-batches" if balance == "megatron" else "the samples of a batch together"
        found.append(f"--moe-balance {balance} counts {counts}; use --moe-balance lagged")
    if weight.get("global_aux_loss"):
        found.append(
            "--moe-router-load-balancing-type global_aux_loss is divided by the data parallel "
            "size; use aux_loss with --moe-balance lagged"
        )
    if "sinkhorn" in kinds:
        found.append(
            "--moe-router-load-balancing-type sinkhorn couples the tokens of a rank; use aux_loss"
        )
    for name in ("moe_expert_capacity_factor", "moe_input_jitter_eps"):
        if arguments.get(name) is not None:
            found.append(f"{flag_of(name)} depends on the tokens of a rank; remove it")
    return found
