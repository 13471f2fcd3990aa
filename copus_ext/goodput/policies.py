"""The target batch of a policy: ours, and those that people use or publish.

A policy either compares configurations by an objective or names a target batch. Constraints and the
switch rule are the same for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from copus_ext.goodput.inputs import DecisionInputs, Rules

WEIGHING = ("adaptive", "copus")
"""Policies that compare configurations; `copus` is that of arXiv 2604.26687."""
TARGETS = ("static", "step_schedule", "cbs", "norm_test", "doubling", "seesaw")
"""Policies that name a batch."""
POLICIES = (*WEIGHING, *TARGETS)
SCHEDULED = ("step_schedule", "doubling")
"""Those of the targets that depend on the position in the run alone, and so wait for nothing."""
_FIRST_DOUBLING = 8
"""By default the batch first doubles after the run divided by this."""


def needs_noise(policy: str) -> bool:
    """Whether a policy depends on the noise scale."""
    return policy not in (*SCHEDULED, "static", "seesaw")


def needs_critical_batch_size(policy: str) -> bool:
    """Whether a policy has no goal without a critical batch size. The norm test compares the
    gradient with its variance, and so has one where the gradient shows only noise."""
    return needs_noise(policy) and policy != "norm_test"


def target_batch(s: DecisionInputs) -> float | None:
    """The target batch of a policy of `TARGETS`, samples; None while it has none.

    Raises:
        ValueError: a policy that names none.
    """
    policy, batch = s.rules.policy, s.now.global_batch_size
    if policy == "static":
        return float(batch)
    if policy in ("step_schedule", "doubling"):
        return scheduled_batch(s.rules, s.consumed_samples, s.total_samples)
    if policy == "seesaw":
        return _seesaw(s)
    if policy == "cbs":
        return s.critical_batch_size
    if policy == "norm_test":
        return _norm_test(s)
    raise ValueError(f"policy {policy!r} names no batch")


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


def scheduled_size(rules: Rules, consumed_samples: int, total_samples: int) -> int | None:
    """The batch of the grid that stands for `scheduled_batch`; None without one."""
    wanted = scheduled_batch(rules, consumed_samples, total_samples)
    if wanted is None or not rules.grid:
        return None
    return snap(wanted, rules.grid, policy=rules.policy)


def _seesaw(s: DecisionInputs) -> float:
    """B_0 / f, f the part of the learning rate that the schedule has left (arXiv 2510.14717).

    A cut by f becomes one by sqrt(f), the batch doing the rest; not above the noise scale.
    """
    wanted = s.rules.first_batch / max(s.lr_decay_factor, 1e-9)
    most = wanted if s.critical_batch_size is None else max(s.critical_batch_size, 1.0)
    # What it has taken it keeps: a cap that moves with the noise would swing the batch.
    return max(min(wanted, most), float(s.now.global_batch_size))


def _norm_test(s: DecisionInputs) -> float | None:
    """Least batch with V/B <= eta^2 |g|^2, never below the present one (Byrd et al. 2012, eq. 3.4;
    arXiv 2402.11215). The largest of the grid where |g|^2 is not positive; None before V is known.

    |g|^2 is the squared norm that the gradient of the present batch has on average, |G|^2 + V/B.
    """
    batch = s.now.global_batch_size
    g2, v = s.noise.grad_norm_sq, s.noise.grad_variance_trace
    if g2 is None or v is None:
        return None
    measured = g2 + v / batch
    if measured <= 0:
        return float(max(batch, *s.rules.grid))
    return float(max(batch, math.ceil(v / (s.rules.norm_test_eta**2 * measured))))


def snap(target: float, sizes: Sequence[int], *, policy: str) -> int:
    """The size of a grid that stands for a target: the nearest in log2, the smaller of two; for the
    norm test the first that is large enough, for seesaw and schedules the last that is not larger.

    Args:
        target: samples.
        sizes: ascending, not empty.
        policy: whose target it is.
    """
    if policy == "norm_test":
        return next((size for size in sizes if size >= target), sizes[-1])
    if policy in (*SCHEDULED, "seesaw"):
        below = [size for size in sizes if size <= target * (1 + 1e-9)]
        return below[-1] if below else sizes[0]
    return min(sizes, key=lambda size: (abs(math.log2(size / max(target, 1e-9))), size))
