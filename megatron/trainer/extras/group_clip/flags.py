"""The flags that clip the gradients of groups of samples, and their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.draft import Draft, Environment, flag_of
from megatron.trainer.config.fields import option
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.layout_rules import nearest_multiples

ADAPTIVE = "adaptive"
"""Value of `--clip-group-norm`: the smallest norm of a step."""
_EXCLUDED_BY_LAYOUT = (
    ("overlap_grad_reduce", "the last group's scale would come after the reduction has begun"),
    ("num_experts", "ranks see parts of the gradient of an expert"),
)
_EXCLUDED = (
    (
        "calculate_per_token_loss",
        "a group's mean needs its number of tokens, which the last stage alone knows",
    ),
    ("fp16", "norms would have the loss scale in them; use --bf16"),
    ("grad_reduce_in_bf16", "sums of groups would be rounded once more for each"),
    ("allow_uneven_micro_batches", "groups are whole micro-batches"),
    ("grad_compression_rank", "residuals would keep what was not clipped"),
    ("kfac", "nobody has run both together"),
    ("seq_length_schedule", "groups must fit every length of samples"),
    ("layout_schedule", "groups must fit every layout"),
    ("micro_batch_size_schedule", "groups must fit every micro-batch"),
)


@dataclass(frozen=True, kw_only=True)
class GroupClipConfig:
    """Flags of the extra."""

    clip_group_size: int | None = option(None)
    """Samples of a group whose mean gradient --clip-group-norm scales, by themselves. Groups are
    samples in a row of the run, under every layout and micro-batch size. Changes the training.
    Default: no groups."""
    clip_group_norm: str | None = option(None)
    """Largest norm of a group's mean gradient, over attention and MLP matrices; or `adaptive`: all
    groups of a step get the smallest norm among them."""


def limit_of(text: str) -> float | None:
    """The limit that `--clip-group-norm` names; None for `adaptive`.

    Raises:
        ValueError: neither that word nor a number above 0.
    """
    if text == ADAPTIVE:
        return None
    limit = float(text)
    if not limit > 0:
        raise ValueError(text)
    return limit


def check_group_clipping(draft: Draft, environment: Environment) -> None:
    """Notes what groups of samples do not go with."""
    size, norm = draft["clip_group_size"], draft["clip_group_norm"]
    for name, other in (("clip_group_size", norm), ("clip_group_norm", size)):
        draft.require(
            draft[name] is not None or other is None,
            f"--clip-group-size and --clip-group-norm go together; give {flag_of(name)}, too",
        )
    if size is None or norm is None:
        return
    draft.require(size >= 1, _bad_size(size))
    try:
        limit = limit_of(norm)
    except ValueError:
        draft.problem(f"--clip-group-norm {norm}: give a number above 0, or {ADAPTIVE}")
        return
    flag = f"--clip-group-size {size}"
    for name, why in _EXCLUDED:
        # Flags of other extras are not there without their folder.
        is_given = draft.values.get(name)
        draft.require(not is_given, f"{flag} excludes {flag_of(name)}: {why}; drop one")
    draft.require(
        not draft["gradient_accumulation_fusion"],
        f"{flag} excludes fused gradient accumulation, with which nobody has run it; give "
        "--no-gradient-accumulation-fusion",
    )
    if limit is None or math.isfinite(limit):
        draft.notes.append(
            f"{flag} --clip-group-norm {norm} changes the training: the mean of clipped gradients "
            "is not the mean gradient"
        )


def _bad_size(size: int) -> str:
    return f"--clip-group-size {size} must be at least 1"


def planned(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """See `Extra.planned`."""
    if (size := arguments.get("clip_group_size")) is None:
        return {}
    if size < 1:
        raise UsageError(_bad_size(size))
    return {"clip_group_size": size}


def layout_problems(arguments: Mapping[str, Any], layout: Layout) -> list[str]:
    """See `Extra.layout_problems`."""
    size = arguments.get("clip_group_size")
    if size is None:
        return []
    flag = f"--clip-group-size {size}"
    found = [
        f"{flag} excludes {flag_of(name)}: {why}; drop one"
        for name, why in _EXCLUDED_BY_LAYOUT
        if arguments.get(name)
    ]
    if layout.cp > 1:
        found.append(
            f"{flag} excludes --context-parallel-size {layout.cp}: ranks that share a sample each "
            "see a part of its gradient; drop one"
        )
    return found


def controller_problems(arguments: Mapping[str, Any], moves: bool) -> list[str]:
    """See `Extra.controller_problems`. In observe mode, too: what `--copus` would report is of
    another gradient."""
    if arguments.get("clip_group_size") is None:
        return []
    return [
        "--copus measures the noise of the mean gradient, and --clip-group-size changes it before "
        "it is reduced; drop one"
    ]


def batch_problems(
    arguments: Mapping[str, Any], layout: Layout, micro_batch_size: int, global_batch_size: int
) -> list[str]:
    """Lists why groups are no whole micro-batches, or replicas have no whole groups; see
    `Extra.batch_problems`."""
    clip_group_size = arguments.get("clip_group_size")
    if clip_group_size is None or clip_group_size < 1:
        return []
    if clip_group_size % micro_batch_size != 0:
        return [
            f"--clip-group-size {clip_group_size} is not divisible by --micro-batch-size "
            f"{micro_batch_size}; use {nearest_multiples(clip_group_size, micro_batch_size)}, or "
            "a smaller micro-batch"
        ]
    unit = clip_group_size * layout.dp
    if global_batch_size % unit != 0:
        group = layout.pp * micro_batch_size * layout.dp if layout.vpp > 1 else 1
        return [
            f"--global-batch-size {global_batch_size} is not divisible by --clip-group-size "
            f"{clip_group_size} x data parallel size {layout.dp} = {unit}; use "
            f"{nearest_multiples(global_batch_size, math.lcm(unit, group))}"
        ]
    return []
