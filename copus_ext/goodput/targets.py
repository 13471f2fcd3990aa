"""Policies that name a batch: the run goes there, and compares layouts by their throughput."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from copus_ext.goodput import question
from copus_ext.goodput.inputs import DecisionInputs, Rules
from copus_ext.goodput.policy import WARMING_UP, Weighed, unknown_noise

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
class TargetPolicy:
    """A policy that names a batch."""

    target: Callable[[DecisionInputs], float | None]
    """The batch that it wants, samples; None while it has none."""
    needs_noise: bool = True
    """Whether it waits for the noise scale to be measured, and cannot go where it cannot be."""
    needs_critical_batch_size: bool = True
    """Whether it has no target where the gradient shows only noise."""
    snap: Callable[[float, Sequence[int]], int] = nearest
    """The size of a grid that stands for its target."""
    is_schedule: bool = False
    """Whether its target goes by the position in the run, and may shrink and jump."""
    acts_in_warmup: bool = False
    """Whether the batch may change while the learning rate warms up."""

    def weigh(self, s: DecisionInputs) -> Weighed:
        """See `Policy`. Another batch is taken itself, and no faster one beside it."""
        unknown, now = self._unknown(s), s.now.global_batch_size
        target = None if unknown else self.target(s)
        if target is None:
            unknown = unknown or "the policy has no target batch yet"
        wanted = now if target is None else self._next_towards(s, target)
        speed = np.log([row.samples_per_s for row in s.rows])
        is_in = np.array([row.global_batch_size == wanted for row in s.rows])
        if self.needs_noise and s.now.noise_unmeasurable:
            is_in[s.current] = False  # any measurable one is better
        cost = np.where(is_in, -speed, math.inf)
        costs = question.Costs(now=cost, ahead=cost[:, None], weights=np.ones(1))
        considered = sorted({*np.flatnonzero(is_in).tolist(), s.current})
        by = ""
        if target is not None and self.needs_critical_batch_size:
            by = s.critical_batch_size_words
        return Weighed(
            candidates=question.candidates(s, costs, considered),
            target_batch=target,
            goes_by=by,
            unknown=unknown,
        )

    def _unknown(self, s: DecisionInputs) -> str:
        if s.in_warmup and not self.acts_in_warmup:
            return WARMING_UP
        if self.needs_noise:
            return unknown_noise(s, positive=self.needs_critical_batch_size)
        return ""

    def _next_towards(self, s: DecisionInputs, target: float) -> int:
        """The batch that one change may take on the way to a target."""
        present = {row.global_batch_size for row in s.rows}
        sizes = sorted(present & {*s.rules.grid, s.now.global_batch_size})
        wanted, now = self.snap(target, sizes), s.now.global_batch_size
        if wanted > now * s.rules.growth:
            return max(size for size in sizes if size <= now * s.rules.growth)
        if wanted >= now or not (s.rules.allow_shrink or self.is_schedule):
            return max(wanted, now)
        return wanted if self.is_schedule else max(size for size in sizes if size < now)


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


def _schedule(*, acts_in_warmup: bool) -> TargetPolicy:
    return TargetPolicy(
        target=lambda s: scheduled_batch(s.rules, s.consumed_samples, s.total_samples),
        needs_noise=False,
        needs_critical_batch_size=False,
        snap=last_not_above,
        is_schedule=True,
        acts_in_warmup=acts_in_warmup,
    )


STATIC = TargetPolicy(
    target=lambda s: float(s.now.global_batch_size),
    needs_noise=False,
    needs_critical_batch_size=False,
)
STEP_SCHEDULE, DOUBLING = _schedule(acts_in_warmup=True), _schedule(acts_in_warmup=False)
