"""What keeps a run from moving: wholly, from its batch, or to one configuration."""

from __future__ import annotations

from copus_ext.goodput import policies, switch_rule
from copus_ext.goodput.inputs import ConfigThroughput, DecisionInputs

WARMING_UP = "the learning rate is warming up"
_SHRINK_HALF_LIVES = 4.0
_MOST_SKIPPED = 5
"""Of 100 steps: with more of them skipped nothing is changed."""
_SETTLE_STEPS = 50
"""Steps between a change and one of the micro-batch alone."""
_SWING = 8.0
"""After it shrank, the batch grows again when the noise scale is so many times what it was."""


def closed(s: DecisionInputs) -> str:
    """Why nothing is decided now; empty if something may be."""
    if s.paused:
        return "paused by an operator"
    if s.consumed_samples >= s.total_samples:
        return "the run is over"
    if only_layouts(s) and (not s.rules.relayout or s.rules.policy == "copus"):
        return WARMING_UP
    if s.skipped_steps > _MOST_SKIPPED:
        return f"{s.skipped_steps} of the last 100 steps were skipped"
    return ""


def only_layouts(s: DecisionInputs) -> bool:
    """Whether the learning rate still warms up: how fast a layout is does not depend on it, all
    else does."""
    return s.in_warmup and s.rules.policy != "step_schedule"


def blind(s: DecisionInputs, row: ConfigThroughput) -> str:
    """Why a row lets nobody see the noise scale that the policy needs; empty if it does."""
    if row.is_blind and policies.needs_noise(s.rules.policy):
        return f"{row}: the noise scale cannot be seen in one micro-batch on one replica"
    return ""


def barred(s: DecisionInputs, row: ConfigThroughput, *, small: bool) -> str:
    """Why a row must not be taken now, whatever it gains; empty if it may."""
    now = s.now
    if why := blind(s, row):
        return why
    if row.layout != now.layout and (why := _relayout_barred(s, row)):
        return why
    if row.global_batch_size == now.global_batch_size:
        if s.steps_since_change is not None and s.steps_since_change < _SETTLE_STEPS:
            return f"{s.steps_since_change} of {_SETTLE_STEPS} steps since the last change"
        return "the learning rate is in a ramp" if s.in_ramp else ""
    since = None
    if s.last_change_samples is not None:
        since = s.consumed_samples - s.last_change_samples
    if row.global_batch_size > now.global_batch_size:
        if row.global_batch_size > now.global_batch_size * s.rules.growth:
            return f"grows more than {s.rules.growth:g} times at once"
        if s.rules.policy in policies.SCHEDULED:
            return ""
        if s.in_ramp:
            return "the learning rate still follows the last growth"
        waits = s.rules.policy != "copus"
        if waits and since is not None and since < s.half_life_samples:
            return f"{since} of {s.half_life_samples:.0f} samples since the last change"
        if _would_swing(s):
            return f"the batch shrank, and the noise scale is not {_SWING:g} times what it was"
        if s.consumed_samples < s.hold_growth_until_samples:
            return f"held after a loss spike until sample {s.hold_growth_until_samples}"
        return ""
    return _shrink_barred(s, row, small=small)


def _would_swing(s: DecisionInputs) -> bool:
    """Whether growing now could undo a shrinking on account of mere noise."""
    then, now = s.noise_when_shrunk, s.critical_batch_size
    return then is not None and now is not None and now < _SWING * then


def _shrink_barred(s: DecisionInputs, row: ConfigThroughput, *, small: bool) -> str:
    if not s.rules.allow_shrink:
        return "the batch does not shrink without allow_shrink"
    if s.rules.policy in policies.SCHEDULED:
        return ""
    smaller = [size for size in grid(s) if size < s.now.global_batch_size]
    if row.global_batch_size < max(smaller):
        return "shrinks by more than one step of the grid"
    if s.noise.status != "ok":
        return "the noise scale has no upper end"
    long_enough = _SHRINK_HALF_LIVES * s.half_life_samples
    if not small or s.small_since_samples is None:
        return "the best batch is not surely smaller"
    if s.consumed_samples - s.small_since_samples < long_enough:
        return f"surely smaller for less than {long_enough:.0f} samples"
    return ""


def _relayout_barred(s: DecisionInputs, row: ConfigThroughput) -> str:
    if not s.rules.relayout:
        return "another layout, and the run keeps its own"
    if s.relayouts_ended:
        return "another layout, and too many changes of layout have failed"
    if row.layout in s.barred_layouts:
        return "a change to this layout has failed"
    since_steps = since_s = None
    if s.last_relayout_iteration is not None:
        since_steps = s.iteration - s.last_relayout_iteration
        since_s = since_steps * s.now.global_batch_size / s.now.samples_per_s
    if s.in_ramp:
        return "the learning rate is in a ramp"
    return switch_rule.may_relayout(
        cost_s=s.switch_cost_s,
        elapsed_s=s.elapsed_s,
        paused_s=s.paused_s,
        steps_since=since_steps,
        seconds_since=since_s,
        run_steps=s.total_samples / s.now.global_batch_size,
    )


def grid(s: DecisionInputs) -> list[int]:
    """The batches to choose from, ascending."""
    present = {row.global_batch_size for row in s.rows}
    return sorted(present & {*s.rules.grid, s.now.global_batch_size})
