"""Names of norms in checkpoints. Transformer Engine fuses a norm with the linear layer behind it,
and our checkpoints have its names whatever the layers are made of. Megatron-LM's local layers name
some of them otherwise."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.utils import nested_values

_FUSED = "mlp.linear_fc1.layer_norm_"
LATENT_NORMS = {
    "pre_mlp_layernorm.": _FUSED,
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
"""Norms of a layer with latent attention -> the same norms with the layers behind them."""


def other_names(keys: Collection[str]) -> dict[str, str]:
    """Our names of the tensors of a checkpoint that it names otherwise.

    Args:
        keys: all names in it, those of the optimizer's state among them.

    Returns:
        Its name -> ours.
    """
    found: dict[str, str] = {}
    for key in keys:
        prefix, fused, end = key.partition(_FUSED)
        if fused:
            # Before experts it is a norm of its own in Transformer Engine, too.
            if f"{prefix}mlp.router.weight" in keys:
                found[key] = f"{prefix}pre_mlp_layernorm.{end}"
            continue
        for part, name in LATENT_NORMS.items():
            prefix, own, end = key.partition(part)
            layer = f"{prefix}{name.removesuffix('layer_norm_')}weight"
            if own and layer in keys:
                found[key] = f"{prefix}{name}{end}"
    return found


def ask_by(names: dict[str, str], state: dict[str, Any]) -> None:
    """Has a load ask for tensors by the names that the checkpoint has.

    Args:
        names: see `other_names`.
        state: sharded tensors by our names; changed.
    """
    theirs = {own: name for name, own in names.items()}
    for tensor in nested_values(state):
        if isinstance(tensor, ShardedTensor):
            tensor.key = theirs.get(tensor.key, tensor.key)
