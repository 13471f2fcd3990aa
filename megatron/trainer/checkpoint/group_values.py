"""Hyperparameters that an optimizer keeps in its parameter groups.

They come back with its state, so that the flags of a resume do not count, as in Megatron-LM.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.trainer.common.extras import extras

_OF_ADAM = {"adam_beta1": "betas", "adam_eps": "eps"}
"""By field name, where groups have it. The second of `betas` is set before each step."""


def kept_flags(optimizer: str) -> list[str]:
    """Field names of the flags that an optimizer keeps in its groups. Muon has Adam's, too."""
    own = (extra.in_groups for extra in extras() if optimizer in extra.optimizers)
    return [*_OF_ADAM, *(name for names in own for name in names)]


def kept_values(common: Mapping[str, Any]) -> dict[str, float]:
    """By field name, the values in the groups of a checkpoint."""
    places = {**_OF_ADAM, **{n: key for extra in extras() for n, key in extra.in_groups.items()}}
    found: dict[str, float] = {}
    for group in groups_in(common.get("optimizer")):
        for name, key in places.items():
            value = group.get(key)
            value = value[0] if isinstance(value, (tuple, list)) and value else value
            if isinstance(value, (int, float)):
                found.setdefault(name, value)
    return found


def groups_in(state: Any) -> Iterator[dict[str, Any]]:
    """The parameter groups of an optimizer's state, whatever wraps it."""
    for key, value in state.items() if isinstance(state, dict) else ():
        if key == "param_groups" and isinstance(value, list):
            yield from (group for group in value if isinstance(group, dict))
        else:
            yield from groups_in(value)


def as_parts(stored: dict[Any, Any], own: dict[int, Any]) -> dict[Any, Any]:
    """Cuts a common state into those of several optimizers: Megatron-LM has a single one for a
    mixture whose experts have the layout of the rest, and we have one for each.

    Args:
        stored: of a checkpoint; returned as it is if it has parts.
        own: the present state of each optimizer.
    """
    if "param_groups" not in stored and "optimizer" not in stored:
        return stored
    parts = {i: copy.deepcopy(stored) for i in own}
    for i, part in parts.items():
        holder = part if "param_groups" in part else part["optimizer"]
        saved = {_kind_of(group): group for group in holder["param_groups"]}
        holder["param_groups"] = [
            {**saved[_kind_of(group)], "is_expert_parallel": group["is_expert_parallel"]}
            for group in groups_in(own[i])
        ]
    return parts


def _kind_of(group: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a group of weights from the others of its optimizer."""
    return tuple(group.get(key) for key in ("wd_mult", "lr_mult", "is_decoupled_lr"))
