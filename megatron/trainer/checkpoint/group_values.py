"""Hyperparameters that an optimizer keeps in its parameter groups.

They come back with its state, so that the flags of a resume do not count, as in Megatron-LM.
"""

from __future__ import annotations

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
    """By field name, the values in the groups of a checkpoint.

    Args:
        common: its common state.
    """
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
