"""The software of a plan as its GPU can run it, and the flags of Megatron-LM that say it."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from copus_ext.cost_model.cluster_spec import ClusterSpec
from copus_ext.cost_model.gpus import BEFORE_A100
from copus_ext.cost_model.megatron_flags import attention_of
from copus_ext.cost_model.model_spec import ATTENTION, ModelSpec
from copus_ext.planner.request import megatron_flag
from copus_ext.planner.run_flags import parsed_flags

_BACKENDS = ("attention_backend", "use_flash_attn")
_IMPLEMENTATIONS = {"te": "transformer_engine", "local": "local"}


def old_gpu(cluster: ClusterSpec) -> str | None:
    """The name of a GPU of a cluster that has neither bf16, Transformer Engine nor flash attention;
    None where all have them."""
    names = [cluster.gpu.name, *(node.gpu.name for node in cluster.nodes)]
    return next((name for name in names if name in BEFORE_A100), None)


def left_open(args: argparse.Namespace) -> set[str]:
    """Of `precision`, `implementation` and `attention`, what neither flags of a plan nor those of
    Megatron-LM say."""
    if args.megatron_args is None:
        return {"precision", *(n for n in ("implementation", "attention") if not getattr(args, n))}
    backend = any(megatron_flag(args, name) not in (None, "auto") for name in _BACKENDS)
    found = {"attention"} if not backend else set()
    return found | (
        {"implementation"} if megatron_flag(args, "transformer_impl") is None else set()
    )


def suited(args: argparse.Namespace, model: ModelSpec, cluster: ClusterSpec) -> ModelSpec:
    """The model as GPUs before the A100 run it, in what nobody said; on others as it is."""
    if old_gpu(cluster) is None:
        return model
    opened, fields = left_open(args), dict[str, Any]()
    if "precision" in opened:
        fields |= {"precision": "fp16", "gradient_bytes": args.gradient_bytes or 2}
    if "implementation" in opened:
        fields["implementation"] = "local"
    if "attention" in opened:
        kind = "unfused"
        if args.megatron_args is not None:
            given = vars(parsed_flags(args.megatron_args))
            kind = attention_of(argparse.Namespace(**{**given, "attention_backend": kind}))
        fields |= ATTENTION[kind]
    return replace(model, **fields)


def will_not_run(args: argparse.Namespace, model: ModelSpec, cluster: ClusterSpec) -> str:
    """What a GPU lacks of what was asked for, and the fix; empty where it lacks nothing."""
    if (name := old_gpu(cluster)) is None:
        return ""
    own = args.megatron_args is None
    lacks = [
        ("bf16", "--fp16", model.precision == "bf16"),
        (
            "Transformer Engine",
            "--implementation local" if own else "--transformer-impl local",
            model.implementation == "te",
        ),
        (
            "flash attention",
            "--attention unfused" if own else "--attention-backend unfused",
            model.fused_attention,
        ),
    ]
    what = [text for text, _, is_asked in lacks if is_asked]
    if not what:
        return ""
    fix = " ".join(fix for _, fix, is_asked in lacks if is_asked)
    words = f"no {', '.join(what[:-1])} or {what[-1]}" if len(what) > 1 else f"no {what[0]}"
    return f"{name} has {words}: this will not run there as priced; give {fix}"


def software_flags(args: argparse.Namespace, model: ModelSpec, cluster: ClusterSpec) -> list[str]:
    """Megatron-LM's flags for what a plan was made for and a run's own flags do not say. Flags of
    Megatron-LM that were given say all but what their GPU lacks. None for CPU ranks."""
    if cluster.is_gloo:
        return []
    if args.megatron_args is not None:
        return _kernels(model, left_open(args)) if old_gpu(cluster) is not None else []
    flags = ["--bf16" if model.precision == "bf16" else "--fp16"]
    if model.precision == "bf16" and model.gradient_bytes == 2:
        flags.append("--grad-reduce-in-bf16")
    if model.precision == "fp16" and model.gradient_bytes == 4:
        flags.append("--accumulate-allreduce-grads-in-fp32")
    if not model.dropout:
        flags += ["--attention-dropout", "0", "--hidden-dropout", "0"]
    usual = {
        "implementation": model.implementation == "te",
        "attention": model.fused_attention,
    }
    named = {name for name, is_usual in usual.items() if getattr(args, name) or not is_usual}
    return [*flags, *_kernels(model, named)]


def _kernels(model: ModelSpec, named: Collection[str]) -> list[str]:
    """The flags of implementation and attention, as far as they are named."""
    flags: list[str] = []
    if "implementation" in named and model.implementation in _IMPLEMENTATIONS:
        flags += ["--transformer-impl", _IMPLEMENTATIONS[model.implementation]]
    if "attention" in named:
        flags += ["--attention-backend", "flash" if model.fused_attention else "unfused"]
        if model.softmax_in_fp32:
            flags += ["--attention-softmax-in-fp32", "--no-masked-softmax-fusion"]
    return flags
