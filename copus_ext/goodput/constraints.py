"""What blocks a change: of the run as a whole, and of each candidate."""

from __future__ import annotations

from collections.abc import Iterator

from copus_ext.goodput.inputs import ConfigThroughput, DecisionInputs
from copus_ext.goodput.policy import Policy

_MAX_SKIPPED = 5
"""Of 100 steps: with more of them skipped nothing changes."""
_IN_RAMP = "the learning rate still follows the last growth"
_NOT_TIMED = "the present configuration is not timed yet"


def run_blocked_reason(s: DecisionInputs) -> str:
    """Why nothing can change now; empty if something may."""
    if s.paused:
        return "paused by an operator"
    if s.samples_left <= 0:
        return "the run is over"
    if s.skipped_steps > _MAX_SKIPPED:
        return f"{s.skipped_steps} of the last 100 steps were skipped"
    return ""


def blocked_reason(s: DecisionInputs, policy: Policy, to: ConfigThroughput) -> str:
    """Why the run cannot change to a row now, whatever it gains; empty if it can.

    Args:
        s: the inputs of the decision.
        policy: that decides.
        to: another row than the present one.
    """
    return next(_reasons(s, policy, to), "")


def _reasons(s: DecisionInputs, policy: Policy, to: ConfigThroughput) -> Iterator[str]:
    """Every reason against a row, the most basic one first."""
    if to.noise_unmeasurable and policy.needs_noise:
        of_what = "replica" if to.layout.dp == 1 else "copy of the experts"
        yield f"the noise scale cannot be seen in one micro-batch on one {of_what}"
    if to.layout != s.now.layout:
        yield from _layout_reasons(s, to)
    if policy.is_schedule:
        return  # the user has said which batch comes when, whatever the loss or a timing does
    if to.source == "assumed" and s.now.source != "measured":
        yield _NOT_TIMED
    if to.global_batch_size > s.now.global_batch_size and s.in_ramp:
        yield _IN_RAMP
    if s.consumed_samples < (held := held_until(s, to)):
        yield f"held after a loss spike until sample {held}"


def held_until(s: DecisionInputs, to: ConfigThroughput) -> int:
    """Samples trained before which a loss spike holds back the batch of a row; 0 for none."""
    growth = to.global_batch_size - s.now.global_batch_size
    held = s.hold_growth_until_samples if growth > 0 else s.hold_shrinking_until_samples
    return held if growth else 0


def _layout_reasons(s: DecisionInputs, to: ConfigThroughput) -> Iterator[str]:
    if not s.rules.relayout:
        yield "another layout, and the run keeps its own"
    if s.relayouts_ended or to.layout in s.blocked_layouts:
        yield "a change to this layout has failed, or too many others have"
    if s.in_ramp:
        yield _IN_RAMP
    if s.now.source != "measured":
        yield _NOT_TIMED
