"""The flags that put K-FAC in front of Adam, and their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.draft import Draft, Environment, flag_of
from megatron.trainer.config.fields import option
from megatron.trainer.config.layout import Layout

MAX_WIDE = 8192
"""Inputs or outputs of a layer above which it has no such covariance: that would take more than
0.27 GB, and its inverse as much."""
_EXCLUDED = (
    ("fp16", "gradients of outputs have the loss scale in them; use --bf16"),
    ("grad_compression_rank", "nobody has run both together"),
)


@dataclass(frozen=True, kw_only=True)
class KfacConfig:
    """Flags of the extra."""

    kfac: bool = option(False)
    """Multiply the gradients of attention and MLP matrices by the inverse covariances of their
    layer's inputs and outputs' gradients, before clipping and Adam. Needs one tensor parallel
    rank."""
    kfac_damping: float = option(0.01)
    """Above 0. Its root is added to the eigenvalues of each covariance of --kfac, which are 1 in
    the mean."""
    kfac_interval: int = option(10)
    """Steps between two covariances of --kfac."""


def check_kfac(draft: Draft, environment: Environment) -> None:
    """Notes what K-FAC does not go with; see `Extra.check`."""
    damping, interval = draft["kfac_damping"], draft["kfac_interval"]
    draft.require(
        damping > 0 and math.isfinite(damping),
        f"--kfac-damping {damping:g} must be a number above 0; use 0.01",
    )
    draft.require(interval >= 1, _bad_interval(interval))
    if not draft["kfac"]:
        idle = [flag_of(n) for n in ("kfac_damping", "kfac_interval") if n in draft.explicit]
        if idle:
            draft.notes.append(f"without --kfac there is no effect of {', '.join(idle)}")
        return
    for name, why in _EXCLUDED:
        # Flags of other extras are not there without their folder.
        is_given = draft.values.get(name)
        draft.require(not is_given, f"--kfac excludes {flag_of(name)}: {why}; drop one")
    draft.require(
        draft["optimizer"] == "adam",
        f"--kfac goes in front of Adam; use --optimizer adam (now {draft['optimizer']})",
    )
    draft.require(
        draft["transformer_impl"] == "local",
        "--kfac needs --transformer-impl local: layers of Transformer Engine do not show their "
        "inputs; give it",
    )
    draft.notes.append(
        "--kfac changes the training. A launch, a checkpoint and a change of layout begin its "
        "covariances anew"
    )


def _bad_interval(interval: int) -> str:
    return f"--kfac-interval {interval} must be at least 1; use 10"


def planned(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """See `Extra.planned`. The damping costs nothing."""
    if not arguments.get("kfac"):
        return {}
    if (interval := arguments["kfac_interval"]) < 1:
        raise UsageError(_bad_interval(interval))
    return {"kfac": True, "kfac_interval": interval, "transformer_impl": "local"}


def layout_problems(arguments: Mapping[str, Any], layout: Layout) -> list[str]:
    """See `Extra.layout_problems`."""
    if not arguments.get("kfac"):
        return []
    found = []
    if arguments.get("num_experts"):
        found.append(
            "--kfac excludes --num-experts: experts see few tokens each, and nobody has tried it; "
            "drop one"
        )
    if layout.tp > 1:
        found.append(
            "--kfac needs whole layers on a rank; drop it, or choose "
            f"--tensor-model-parallel-size 1 (now {layout.tp})"
        )
    return found


def step_period(arguments: Mapping[str, Any]) -> int:
    """See `Extra.step_period`: the first step of an interval makes covariances and takes longer."""
    return arguments["kfac_interval"] if arguments.get("kfac") else 1
