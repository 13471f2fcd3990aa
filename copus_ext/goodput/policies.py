"""The policies by name. Extras may add some."""

from __future__ import annotations

import functools

from copus_ext.goodput import targets
from copus_ext.goodput.adaptive import Adaptive
from copus_ext.goodput.inputs import ADAPTIVE, Rules
from copus_ext.goodput.policy import Policy
from megatron.trainer.common.extras import extras

SCHEDULED = {"step_schedule": targets.STEP_SCHEDULE, "doubling": targets.DOUBLING}
"""Those that name a batch by the position in the run alone, and so wait for nothing."""
_OWN: dict[str, Policy] = {ADAPTIVE: Adaptive(), "static": targets.STATIC, **SCHEDULED}
POLICIES = (*_OWN, *(name for extra in extras() for name in extra.policies))


@functools.cache
def named(policy: str) -> Policy:
    """A policy of `POLICIES`.

    Raises:
        ValueError: there is none of this name.
    """
    if policy in _OWN:
        return _OWN[policy]
    for extra in extras():
        if policy in extra.policies:
            return extra.load(extra.policies[policy])
    raise ValueError(f"there is no policy {policy!r}, or its extra is not here")


def scheduled_size(rules: Rules, consumed_samples: int, total_samples: int) -> int | None:
    """The batch of the grid that a schedule asks for at a place of the run; None without one."""
    wanted = targets.scheduled_batch(rules, consumed_samples, total_samples)
    if wanted is None or not rules.grid:
        return None
    return SCHEDULED[rules.policy].snap(wanted, rules.grid)
