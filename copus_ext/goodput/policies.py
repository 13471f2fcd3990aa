"""The target batch of a policy.

A policy either compares configurations by an objective or names a target batch. Constraints and the
switch rule are the same for all. Extras may add policies that name a batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from copus_ext.goodput.inputs import DecisionInputs, Rules
from megatron.trainer.common.extras import extras

_FIRST_DOUBLING = 8
"""By default the batch first doubles after the run divided by this."""


def nearest(target: float, sizes: Sequence[int]) -> int:
    """The size nearest to a target in log2, the smaller of two. Sizes ascend."""
    return min(sizes, key=lambda size: (abs(math.log2(size / max(target, 1e-9))), size))


def last_not_above(target: float, sizes: Sequence[int]) -> int:
    """The last size that is not larger than a target; the first if all are. Sizes ascend."""
    below = [size for size in sizes if size <= target * (1 + 1e-9)]
    return below[-1] if below else sizes[0]


def first_not_below(target: float, sizes: Sequence[int]) -> int:
    """The first size that is as large as a target; the last if none is. Sizes ascend."""
    return next((size for size in sizes if size >= target), sizes[-1])


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A policy that names a batch."""

    target: Callable[[DecisionInputs], float | None]
    """The batch that it wants, samples; None while it has none."""
    needs_noise: bool = True
    """Whether it waits for the noise scale to be measured, and cannot go where it cannot be."""
    needs_critical_batch_size: bool = True
    """Whether it has no target where the gradient shows only noise."""
    snap: Callable[[float, Sequence[int]], int] = nearest
    """The size of a grid that stands for its target."""


def scheduled_batch(rules: Rules, consumed_samples: int, total_samples: int) -> float | None:
    """The batch of a policy that depends on the position in the run alone; None for the others.

    `doubling` doubles after D1, D1 r, D1 r^2, ... samples (the form of arXiv 2505.23971).
    """
    if rules.policy == "step_schedule":
        sizes = [size for start, size in rules.schedule if start <= consumed_samples]
        return float(sizes[-1]) if sizes else None
    if rules.policy != "doubling":
        return None
    at = float(rules.doubling_first_samples or max(total_samples // _FIRST_DOUBLING, 1))
    batch = float(rules.first_batch)
    while at <= consumed_samples:
        batch, at = 2.0 * batch, at * rules.doubling_ratio
    return batch


def _of_position(s: DecisionInputs) -> float | None:
    return scheduled_batch(s.rules, s.consumed_samples, s.total_samples)


WEIGHING = ("adaptive", "copus")
"""Policies that compare configurations; `copus` is that of arXiv 2604.26687."""
SCHEDULED = ("step_schedule", "doubling")
"""Those that name a batch by the position in the run alone, and so wait for nothing."""
_SCHEDULE = Policy(
    target=_of_position,
    needs_noise=False,
    needs_critical_batch_size=False,
    snap=last_not_above,
)
_OWN = {
    "static": Policy(
        target=lambda s: float(s.now.global_batch_size),
        needs_noise=False,
        needs_critical_batch_size=False,
    ),
    **dict.fromkeys(SCHEDULED, _SCHEDULE),
}
TARGETS = (*_OWN, *(name for extra in extras() for name in extra.policies))
"""Policies that name a batch."""
POLICIES = (*WEIGHING, *TARGETS)


@functools.cache
def _named(policy: str) -> Policy:
    """A policy of `TARGETS`.

    Raises:
        ValueError: there is none of this name, or it names no batch.
    """
    if policy in _OWN:
        return _OWN[policy]
    for extra in extras():
        if policy in extra.policies:
            return extra.load(extra.policies[policy])
    raise ValueError(f"policy {policy!r} names no batch, or its extra is not here")


def needs_noise(policy: str) -> bool:
    """Whether a policy depends on the noise scale."""
    return policy in WEIGHING or _named(policy).needs_noise


def needs_critical_batch_size(policy: str) -> bool:
    """Whether a policy has no goal without a critical batch size."""
    return policy in WEIGHING or _named(policy).needs_critical_batch_size


def target_batch(s: DecisionInputs) -> float | None:
    """The target batch of a policy of `TARGETS`, samples; None while it has none.

    Raises:
        ValueError: a policy that names none.
    """
    return _named(s.rules.policy).target(s)


def scheduled_size(rules: Rules, consumed_samples: int, total_samples: int) -> int | None:
    """The batch of the grid that stands for `scheduled_batch`; None without one."""
    wanted = scheduled_batch(rules, consumed_samples, total_samples)
    if wanted is None or not rules.grid:
        return None
    return snap(wanted, rules.grid, policy=rules.policy)


def snap(target: float, sizes: Sequence[int], *, policy: str) -> int:
    """The size of a grid that stands for the target of a policy of `TARGETS`.

    Args:
        target: samples.
        sizes: ascending, not empty.
        policy: whose target it is.
    """
    return _named(policy).snap(target, sizes)
