"""The contenders: every policy as flags of the controller, and its first layout."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from copus_ext.controller.flags import CopusConfig
from copus_ext.goodput.objectives import OBJECTIVES

Start = Literal["small", "large"]
SWITCH_RULES = ("forward", "paper")
ORACLE = "oracle"


class UnknownPolicy(ValueError):
    """An unknown name."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to run."""

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


def _flags(policy: str, **more: Any) -> CopusConfig:
    values = {"copus": True, "copus_policy": policy, **more}
    return CopusConfig(**values)  # pyright: ignore[reportArgumentType]


def contenders(
    batches: Sequence[int], *, noise_scale_multiplier: float | None = None
) -> dict[str, Contender]:
    """All contenders, by name.

    Args:
        batches: batch sizes of the scenario, ascending.
        noise_scale_multiplier: as the policies assume; None: the default of each.
    """
    c: dict[str, Any] = {
        "copus_noise_scale_multiplier": noise_scale_multiplier,
        "copus_max_global_batch_size": batches[-1],
    }
    static = [Contender(name=f"static_{batch}", is_baseline=True, batch=batch) for batch in batches]
    starts: tuple[Start, ...] = ("small", "large")
    fixed = [
        Contender(
            name=f"{policy}_{start}", is_baseline=True, start=start, flags=_flags(policy, **c)
        )
        for policy in ("cbs", "norm_test", "doubling", "seesaw")
        for start in starts
    ]
    ours = [
        Contender(
            name=f"adaptive_{objective}_{rule}",
            flags=_flags(
                "adaptive",
                copus_objective=objective,
                copus_switch_rule=rule,
                copus_layouts="all",
                **c,
            ),
        )
        for objective, rule in itertools.product(OBJECTIVES, SWITCH_RULES)
    ]
    others = [
        Contender(name="paper", flags=_flags("copus", copus_layouts="all", **c)),
        Contender(name="cbs_layouts", flags=_flags("cbs", copus_layouts="all", **c)),
        Contender(name="norm_test_layouts", flags=_flags("norm_test", copus_layouts="all", **c)),
        *(
            Contender(
                name=f"no_layouts_{objective}_{start}",
                start=start,
                flags=_flags("adaptive", copus_objective=objective, **c),
            )
            for objective in ("copus", "goodput")
            for start in starts
        ),
        Contender(
            name="no_batches",
            flags=_flags(
                "adaptive",
                copus_layouts="all",
                copus_noise_scale_multiplier=noise_scale_multiplier,
                copus_max_global_batch_size=batches[0],
            ),
        ),
    ]
    return {one.name: one for one in [*static, *fixed, *ours, *others]}


def chosen(everybody: dict[str, Contender], names: Sequence[str] | None) -> list[Contender]:
    """Some of them: by name, by the beginning of names (`static`, `adaptive`), or all.

    Raises:
        UnknownPolicy: nobody is called so.
    """
    if names is None:
        return list(everybody.values())
    found: dict[str, Contender] = {}
    for name in names:
        if name == ORACLE:
            continue
        own = {n: c for n, c in everybody.items() if n == name or n.startswith(f"{name}_")}
        if not own:
            known = sorted({n.split("_")[0] for n in everybody})
            raise UnknownPolicy(f"{name} is unknown; use some of {', '.join(known)}, {ORACLE}")
        found |= own
    return list(found.values())
