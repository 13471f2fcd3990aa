"""The contenders: every policy as flags of the controller, and its first layout."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from copus_ext.controller.flags import CopusConfig
from copus_ext.goodput.inputs import ADAPTIVE
from copus_ext.goodput.policies import POLICIES

Start = Literal["small", "large"]
BASELINES = [n for n in POLICIES if n not in (ADAPTIVE, "copus", "static", "step_schedule")]


class UnknownPolicy(ValueError):
    """An unknown name."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    name: str
    is_baseline: bool = False
    """Whether it is a published or common way that keeps the layout."""
    batch: int | None = None
    """A static batch on its fastest layout, without a controller."""
    start: Start = "small"
    """First layout: the fastest of the first batch, or of the largest."""
    flags: CopusConfig | None = None
    first_batch: int | None = None
    """Batch of the first step; None: the scenario's smallest."""


def contenders(batches: Sequence[int]) -> dict[str, Contender]:
    """All contenders for batch sizes in ascending order, by name."""

    def flags(policy: str, **more: Any) -> CopusConfig:
        values: dict[str, Any] = {"copus": True, "copus_policy": policy, **more}
        return CopusConfig(copus_max_global_batch_size=batches[-1], **values)

    starts: tuple[Start, ...] = ("small", "large")
    found = [Contender(name=f"static_{batch}", is_baseline=True, batch=batch) for batch in batches]
    found += [
        Contender(name=f"{policy}_{start}", is_baseline=True, start=start, flags=flags(policy))
        for policy, start in itertools.product(BASELINES, starts)
    ]
    for name, policy in (("adaptive", ADAPTIVE), ("paper", "copus")):
        found.append(Contender(name=name, flags=flags(policy, copus_layouts="all")))
    return {one.name: one for one in found}


def chosen(everybody: dict[str, Contender], names: Sequence[str] | None) -> list[Contender]:
    """Some of them: by name, by the beginning of names (`static`, `adaptive`), or all.

    Raises:
        UnknownPolicy: nobody is called so.
    """
    if names is None:
        return list(everybody.values())
    found: dict[str, Contender] = {}
    for name in names:
        own = {n: c for n, c in everybody.items() if n == name or n.startswith(f"{name}_")}
        if not own:
            known = sorted({n.rsplit("_", 1)[0] for n in everybody})
            raise UnknownPolicy(f"{name} is unknown; use some of {', '.join(known)}")
        found |= own
    return list(found.values())
