"""What blocks a change: of the run as a whole, and of each candidate."""

from __future__ import annotations

import math
from collections.abc import Iterator

from copus_ext.goodput import objectives, policies, switch_rule, trial
from copus_ext.goodput.inputs import ConfigThroughput, DecisionInputs
from copus_ext.goodput.state import TRIED_STEPS, key_of

WARMING_UP = "the learning rate is warming up"
ONLY_NOISE = "the noise scale is not known: the gradient shows only noise"
_MAX_SKIPPED = 5
"""Of 100 steps: with more of them skipped nothing changes."""
_SETTLE_STEPS = 50
"""Steps between a change and one of the layout or the micro-batch alone, unless that is tried, or
both were timed."""
_MIN_SWING, _SWING_SDS, _UNKNOWN_SWING = 1.5, 5.5, 4.0
"""The batch turns round once the critical batch size has changed by a factor: so many standard
deviations of its logarithm, at least the first number, and the last where they are not known.
Two estimates within their 95 % intervals differ by 2 x 1.96 of them at most."""


def run_blocked_reason(s: DecisionInputs) -> str:
    """Why nothing can change now; empty if something may."""
    return next(_run_reasons(s), "")


def _run_reasons(s: DecisionInputs) -> Iterator[str]:
    if s.paused:
        yield "paused by an operator"
    if s.consumed_samples >= s.total_samples:
        yield "the run is over"
    if only_layouts(s) and (not s.rules.relayout or s.rules.policy == "copus"):
        yield WARMING_UP
    if s.skipped_steps > _MAX_SKIPPED:
        yield f"{s.skipped_steps} of the last 100 steps were skipped"


def only_layouts(s: DecisionInputs) -> bool:
    """Whether only the layout may change: the learning rate still warms up, on which everything but
    the speed of a layout depends."""
    return s.in_warmup and s.rules.policy != "step_schedule" and not s.rules.early_steps


def unmeasurable_reason(s: DecisionInputs, row: ConfigThroughput) -> str:
    """Why the noise scale that the policy needs cannot be measured in a row; empty if it can."""
    if row.noise_unmeasurable and policies.needs_noise(s.rules.policy):
        of_what = "replica" if row.layout.dp == 1 else "copy of the experts"
        return f"the noise scale cannot be seen in one micro-batch on one {of_what}"
    return ""


def blocked_reason(s: DecisionInputs, to: ConfigThroughput, *, above_optimal: bool) -> str:
    """Why the run cannot change to a row now, whatever it gains; empty if it can.

    Args:
        s: the inputs of the decision.
        to: another row than the present one.
        above_optimal: whether the batch is above the optimal one with confidence.
    """
    return next(_reasons(s, to, above_optimal), "")


def _reasons(s: DecisionInputs, to: ConfigThroughput, above_optimal: bool) -> Iterator[str]:
    """Every reason against a row, the most basic one first."""
    if reason := unmeasurable_reason(s, to):
        yield reason
    if to.layout != s.now.layout:
        yield from _layout_reasons(s, to)
    growth = to.global_batch_size - s.now.global_batch_size
    if growth == 0:
        yield from _same_batch_reasons(s, to)
    elif growth > 0:
        yield from _growth_reasons(s, to)
    else:
        yield from _shrink_reasons(s, to, above_optimal)


def _layout_reasons(s: DecisionInputs, to: ConfigThroughput) -> Iterator[str]:
    if not s.rules.relayout:
        yield "another layout, and the run keeps its own"
    if s.relayouts_ended:
        yield "another layout, and too many changes of layout have failed"
    if to.layout in s.blocked_layouts:
        yield "a change to this layout has failed"
    if s.in_ramp:
        yield "the learning rate is in a ramp"
    if trial.are_timed(s, to):
        # The outcome of the last change is known, and the way back from a wrong one stays open.
        return
    if to.global_batch_size == s.now.global_batch_size and trial.is_trial(s, to):
        # It weighs its pauses itself, so that they may come early; it waits for no outcome.
        run_s = s.elapsed_s + trial.min_remaining_s(s)
        if s.paused_s > switch_rule.MAX_PAUSED * run_s:
            yield f"pauses already took {s.paused_s:.0f} s of a run of some {run_s:.0f} s"
        return
    since_steps = since_s = None
    if s.last_relayout_iteration is not None:
        since_steps = s.iteration - s.last_relayout_iteration
        since_s = since_steps * s.now.global_batch_size / s.now.samples_per_s
    if reason := switch_rule.relayout_blocked_reason(
        cost_s=s.cost_s(to.layout),
        elapsed_s=s.elapsed_s,
        paused_s=s.paused_s,
        steps_since=since_steps,
        seconds_since=since_s,
        run_steps=s.total_samples / s.now.global_batch_size,
    ):
        yield reason


def _same_batch_reasons(s: DecisionInputs, to: ConfigThroughput) -> Iterator[str]:
    is_quick = trial.are_timed(s, to) or trial.is_trial(s, to)
    settle = TRIED_STEPS if is_quick else _SETTLE_STEPS
    if s.steps_since_change is not None and s.steps_since_change < settle:
        yield f"{s.steps_since_change} of {settle} steps since the last change"
    if s.in_ramp and not is_quick:
        yield "the learning rate is in a ramp"
    if key_of(to.configuration) in s.left_for_good:
        yield "it was timed and left for one that was faster, and conditions are the same since"


def _growth_reasons(s: DecisionInputs, to: ConfigThroughput) -> Iterator[str]:
    is_asked = to.global_batch_size <= s.annealing_batch
    if to.global_batch_size > s.now.global_batch_size * s.rules.growth and not is_asked:
        yield f"grows more than {s.rules.growth:g} times at once"
    if s.rules.policy in policies.SCHEDULED:
        return
    is_new = to.global_batch_size > s.rules.first_batch
    if s.rules.early_steps and not s.is_noise_known and is_new:
        yield from _unknown_noise_reasons(s, to)
    if s.in_ramp:
        yield "the learning rate still follows the last growth"
    if s.last_change_samples is not None and s.rules.policy in policies.TARGETS:
        since = (s.consumed_samples - s.last_change_samples) // s.rules.length_ratio
        if since < s.half_life_samples:
            yield f"{since} of {s.half_life_samples:.0f} samples since the last change of batch"
    then = s.critical_batch_size_when_shrunk
    if not is_asked and (factor := _swing_needed(s, to, then)):
        yield f"the batch shrank, and the critical one is not {factor:.1f} times what it was"
    if s.consumed_samples < s.hold_growth_until_samples:
        yield f"held after a loss spike until sample {s.hold_growth_until_samples}"


def _unknown_noise_reasons(s: DecisionInputs, to: ConfigThroughput) -> Iterator[str]:
    """Where the bound decides alone, a batch above the first one needs a noise scale too. Early on
    that is too small, so that it may hold growth back but asks for nothing."""
    if not s.is_noise_measured:
        steps, least = s.noise.effective_steps, s.rules.min_effective_steps
        if steps >= least:
            yield ONLY_NOISE
        else:
            yield f"the noise scale is not known yet: {steps:.0f} of {least:.0f} measurements"
        return
    there, here = (
        objectives.goodput(
            s.rules.objective,
            row.samples_per_s,
            row.global_batch_size,
            s.measured_critical_batch_size,
            reference_batch=s.rules.reference_batch,
        )
        for row in (to, s.now)
    )
    if there <= here:
        yield f"the noise scale asks for no more, and {WARMING_UP}"


def _shrink_reasons(s: DecisionInputs, to: ConfigThroughput, above_optimal: bool) -> Iterator[str]:
    if not s.rules.allow_shrink:
        yield "the batch does not shrink without allow_shrink"
    if s.rules.policy in policies.SCHEDULED:
        return
    if s.consumed_samples < s.hold_shrinking_until_samples:
        yield f"held after a loss spike until sample {s.hold_shrinking_until_samples}"
    if factor := _swing_needed(s, to, s.critical_batch_size_when_grown):
        yield f"the batch grew, and the critical one is not {factor:.1f} times smaller"
    if s.noise.status != "ok" and not s.is_critical_batch_size_bound:
        yield "the noise scale has no upper bound"
    if s.rules.early_steps:
        return
    if not above_optimal:
        yield "it is not certain that the optimal batch is smaller"


def _swing_needed(s: DecisionInputs, to: ConfigThroughput, then: float | None) -> float:
    """The factor by which the critical batch size has to change, and has not, for the batch to turn
    round: noise alone must not undo a change. 0 where nothing keeps it from that.

    Args:
        s: the inputs of the decision.
        to: a row of another batch, in the other direction than the last change.
        then: the critical batch size that the last change went by; None where there was none.
    """
    now, grows = s.critical_batch_size, to.global_batch_size > s.now.global_batch_size
    if not then or not now or _do_speeds_ask(s, to, then):
        return 0.0
    if s.changed_by_bound and s.is_critical_batch_size_bound:
        factor = 1.0  # no measurement, no doubt
    else:
        # Of two numbers, one of which is not measured, the difference has less doubt.
        is_mixed = s.changed_by_bound or s.is_critical_batch_size_bound
        factor = _swing_factor(s.noise_interval_variance / (2 if is_mixed else 1))
    moved = now / then if grows else then / now
    has_moved = moved >= factor if factor > 1.0 else moved > 1.0
    return 0.0 if has_moved else factor


def _do_speeds_ask(s: DecisionInputs, to: ConfigThroughput, then: float) -> bool:
    """Whether speeds that are news since the last change of the batch ask for another one by
    themselves: with certainty, and with the critical batch size of then."""
    if not (s.are_speeds_news and trial.are_timed(s, to)):
        return False
    there, here = (
        objectives.goodput(
            s.rules.objective,
            row.samples_per_s,
            row.global_batch_size,
            then,
            reference_batch=s.rules.reference_batch,
        )
        for row in (to, s.now)
    )
    sd = math.hypot(to.relative_sd, s.now.relative_sd)
    return here > 0 and there > here * math.exp(switch_rule.BATCH_MARGIN + switch_rule.Z * sd)


def _swing_factor(log_noise_variance: float) -> float:
    """Factor by which a critical batch size must have changed for a change to be undone.

    Args:
        log_noise_variance: of its logarithm; 0 where it is not known.
    """
    if not log_noise_variance:
        return _UNKNOWN_SWING
    return max(math.exp(_SWING_SDS * math.sqrt(log_noise_variance)), _MIN_SWING)


def grid(s: DecisionInputs) -> list[int]:
    """The batches to choose from, ascending."""
    present = {row.global_batch_size for row in s.rows}
    return sorted(present & {*s.rules.grid, s.now.global_batch_size})
