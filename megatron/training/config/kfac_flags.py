"""Checks of the flags that put K-FAC in front of Adam."""

from __future__ import annotations

import math

from megatron.training.config.draft import Draft, Environment, flag_of

MOST_WIDE = 8192
"""Inputs or outputs of a layer above which it has no such covariance: that would take more than
0.27 GB, and its inverse as much."""
_EXCLUDED = (
    ("num_experts", "experts see few tokens each, and nobody has tried it"),
    ("fp16", "gradients of outputs have the loss scale in them; use --bf16"),
    ("grad_compression_rank", "nobody has run both together"),
)


def check_kfac(draft: Draft, environment: Environment) -> None:
    """Notes what K-FAC does not go with. Sizes of tensor parallelism are a rule of layouts.

    Args:
        draft: with its kernels.
        environment: unused.
    """
    damping, interval = draft["kfac_damping"], draft["kfac_interval"]
    draft.require(
        damping > 0 and math.isfinite(damping),
        f"--kfac-damping {damping:g} must be a number above 0; use 0.01",
    )
    draft.require(interval >= 1, f"--kfac-interval {interval} must be at least 1; use 10")
    if not draft["kfac"]:
        idle = [flag_of(n) for n in ("kfac_damping", "kfac_interval") if n in draft.explicit]
        if idle:
            draft.notes.append(f"without --kfac there is no effect of {', '.join(idle)}")
        return
    for name, why in _EXCLUDED:
        draft.require(not draft[name], f"--kfac excludes {flag_of(name)}: {why}; drop one")
    draft.require(
        draft["transformer_impl"] == "local",
        "--kfac needs --transformer-impl local: layers of Transformer Engine do not show their "
        "inputs; give it",
    )
    draft.notes.append(
        "--kfac changes the training. A launch, a checkpoint and a change of layout begin its "
        "covariances anew"
    )
