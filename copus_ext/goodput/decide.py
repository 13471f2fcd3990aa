"""The decision at a step boundary, from top to bottom.

The controller measures and builds the inputs. `decide` then takes three steps: it asks the policy
for its goal, builds every candidate with its gain and with what blocks it, and chooses the best one
that nothing blocks. The controller applies and records what comes out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from copus_ext.goodput import constraints, objectives, policies, switch_rule, trial
from copus_ext.goodput.inputs import PRESENT, Candidate, ConfigThroughput, Decision, DecisionInputs

PREDICTED = "predicted to gain"
"""How the words of a predicted gain begin."""
_KEPT = 12
"""Candidates that a decision keeps."""
_SAME_BATCH_NOISE = 1.0
"""A critical batch size where only rows of one batch compare: any value gives the same order."""


def decide(s: DecisionInputs) -> Decision:
    """What to do now. The same inputs give the same decision, bit for bit."""
    if reason := constraints.run_blocked_reason(s):
        return _decision(s, reason=reason)
    goal = _goal(s)
    above_optimal = goal.unknown == "" and _is_above_optimal(s)
    candidates = _candidates(s, goal, above_optimal)
    chosen = next((c for c in candidates if not c.blocked_reason), None)
    reason = (
        _reason_to_stay(s, goal, candidates)
        if chosen is None
        else _reason_to_change(s, goal, chosen)
    )
    return _decision(
        s,
        reason=reason,
        chosen=chosen,
        target_batch=goal.batch,
        batch_above_optimal=above_optimal,
        candidates=tuple(candidates[:_KEPT]),
    )


def _decision(
    s: DecisionInputs,
    *,
    reason: str,
    chosen: Candidate | None = None,
    target_batch: float | None = None,
    batch_above_optimal: bool = False,
    candidates: tuple[Candidate, ...] = (),
) -> Decision:
    is_same = chosen is not None and chosen.row.layout == s.now.layout
    to = s.now if chosen is None else chosen.row
    return Decision(
        kind="stay" if chosen is None else "batch" if is_same else "relayout",
        to=to,
        reason=reason,
        gain=None if chosen is None else chosen.gain,
        gain_sd=None if chosen is None else chosen.gain_sd,
        is_scaled="measured" in (s.now.source, to.source),
        target_batch=target_batch,
        batch_above_optimal=batch_above_optimal,
        critical_batch_size=s.critical_batch_size,
        critical_batch_size_is_bound=s.is_critical_batch_size_bound,
        candidates=candidates,
    )


# The goal.


@dataclass(frozen=True, kw_only=True)
class _Goal:
    """What the policy wants, before constraints."""

    log_goodput: list[float]
    """ln(goodput) of every row; minus infinity where it is not a candidate."""
    critical_batch_size: float
    """In samples."""
    batch: float | None = None
    """The target batch, samples."""
    unknown: str = ""
    """Why the policy has no goal, so that only rows of the present batch compare."""


def _goal(s: DecisionInputs) -> _Goal:
    policy, critical = s.rules.policy, s.critical_batch_size
    unknown, target = _unknown(s), None
    if compares_goodput(s):
        assert critical is not None
        values = _log_goodputs(s, s.rows, critical)
        best = _best_of_layout(s, values)
        return _Goal(log_goodput=values, batch=float(best), critical_batch_size=critical)
    if not unknown:
        target = policies.target_batch(s)
        unknown = "the policy has no target batch yet" if target is None else ""
    if target is None:
        values = _log_throughputs(s, s.now.global_batch_size)
        if constraints.unmeasurable_reason(s, s.now):  # any measurable one is better
            values[s.current] = -math.inf
        return _Goal(log_goodput=values, critical_batch_size=_SAME_BATCH_NOISE, unknown=unknown)
    sizes = sorted({row.global_batch_size for row in s.rows})
    snapped = policies.snap(target, constraints.grid(s) or sizes, policy=policy)
    return _Goal(
        log_goodput=_log_throughputs(s, _next_towards(s, snapped, sizes)),
        batch=target,
        critical_batch_size=critical or _SAME_BATCH_NOISE,
    )


def compares_goodput(s: DecisionInputs) -> bool:
    """Whether a decision compares batches by their goodput, and not throughput alone."""
    return s.rules.policy in policies.WEIGHING and not _unknown(s)


def _unknown(s: DecisionInputs) -> str:
    """Why the policy cannot compare batches; empty if it can."""
    if reason := constraints.unmeasurable_reason(s, s.now):
        return reason
    if constraints.only_layouts(s):
        return constraints.WARMING_UP
    if not policies.needs_noise(s.rules.policy) or s.rules.early_steps:
        return ""
    steps, least = s.noise.effective_steps, s.rules.min_effective_steps
    if steps < least:
        return f"the noise scale is not known yet: {steps:.0f} of {least:.0f} measurements"
    is_known = s.critical_batch_size is not None and s.critical_batch_size > 0
    if is_known or not policies.needs_critical_batch_size(s.rules.policy):
        return ""
    return constraints.ONLY_NOISE


def _log_throughputs(s: DecisionInputs, batch: int) -> list[float]:
    """ln(throughput) of the rows of one batch, which nothing else tells apart."""
    return [
        math.log(row.samples_per_s) if row.global_batch_size == batch else -math.inf
        for row in s.rows
    ]


def _log_goodputs(
    s: DecisionInputs, rows: Sequence[ConfigThroughput], critical_batch_size: float
) -> list[float]:
    """ln(goodput) of rows; minus infinity where it is not positive. Below the batch that annealing
    asks for, a row loses in proportion to what it lacks."""
    sizes = np.array([row.global_batch_size for row in rows])
    values = objectives.goodput(
        s.rules.objective,
        np.array([row.samples_per_s for row in rows]),
        sizes,
        critical_batch_size,
        reference_batch=s.rules.reference_batch,
    )
    if s.annealing_batch:
        values = values * np.minimum(sizes / s.annealing_batch, 1.0)
    return [math.log(value) if value > 0 else -math.inf for value in values.tolist()]


def _best_of_layout(s: DecisionInputs, log_goodput: Sequence[float]) -> int:
    """The batch of most goodput on the present layout."""
    own = [i for i, row in enumerate(s.rows) if row.layout == s.now.layout]
    return s.rows[max(own, key=lambda i: log_goodput[i])].global_batch_size


def _next_towards(s: DecisionInputs, wanted: int, sizes: list[int]) -> int:
    """The batch that one change may take on the way to the wanted one."""
    now = s.now.global_batch_size
    most = now * s.rules.growth
    if wanted > most:
        return max((size for size in sizes if now <= size <= most), default=now)
    if wanted >= now or not s.rules.allow_shrink:
        return max(wanted, now)
    if s.rules.policy in policies.SCHEDULED:
        return wanted
    return max((size for size in sizes if size < now), default=now)


def _is_above_optimal(s: DecisionInputs) -> bool:
    """Whether the batch is above the optimal one even at the upper end of the noise scale."""
    high, policy = s.noise.high_samples, s.rules.policy
    if s.noise.status != "ok" or high is None:
        return False
    critical = s.critical_batch_size_of(high)
    assert critical is not None
    best = s.now.global_batch_size
    if policy in policies.WEIGHING:
        best = _best_of_layout(s, _log_goodputs(s, s.rows, critical))
    elif policies.needs_critical_batch_size(policy):
        target = policies.target_batch(replace(s, noise=replace(s.noise, phi_samples=high)))
        assert target is not None
        best = policies.snap(target, constraints.grid(s), policy=policy)
    return best < s.now.global_batch_size


# The candidates.


def _candidates(s: DecisionInputs, goal: _Goal, above_optimal: bool) -> list[Candidate]:
    """The candidates, the one of most net gain first."""
    found = []
    for i in _considered(s, goal):
        tried = trial.judge(s, i, goal.log_goodput)
        c = _candidate(s, i, goal, above_optimal, tried)
        found.append((_net(s, c) if tried is None else tried.net, c))
    found.sort(key=lambda pair: (-pair[0], _tie_break(s, pair[1].row)))
    return [c for _, c in found]


def _considered(s: DecisionInputs, goal: _Goal) -> list[int]:
    """Rows that become candidates: the best micro-batch of every layout and batch; those with the
    present micro-batch, whose speed is more certain; what can be tried, or gone back to since it
    was timed; and the present one."""
    allowed = {*constraints.grid(s)}
    # From a batch without goodput any smaller one is a way back.
    is_lost = s.rules.policy in policies.WEIGHING and goal.log_goodput[s.current] == -math.inf
    best: dict[tuple, int] = {}
    alike, tried = set(), set()
    for i, row in enumerate(s.rows):
        is_way_back = is_lost and row.global_batch_size < s.now.global_batch_size
        if row.global_batch_size not in allowed:
            continue
        if goal.log_goodput[i] == -math.inf and not is_way_back:
            continue
        known = best.setdefault((row.layout, row.global_batch_size), i)
        if goal.log_goodput[i] > goal.log_goodput[known]:
            best[row.layout, row.global_batch_size] = i
        if row.layout == s.now.layout and row.micro_batch_size == s.now.micro_batch_size:
            alike.add(i)
        is_same = row.global_batch_size == s.now.global_batch_size
        if is_same and (trial.is_trial(s, row) or trial.are_timed(s, row)):
            tried.add(i)
    return sorted({*best.values(), *alike, *tried, s.current})


def _candidate(
    s: DecisionInputs, i: int, goal: _Goal, above_optimal: bool, tried: trial.Trial | None
) -> Candidate:
    """One row: its gain over the present one, the gain that it needs, and what blocks it."""
    row = s.rows[i]
    if i == s.current:
        return Candidate(row=row, gain=0.0, needed=None, blocked_reason=PRESENT)
    base, gain, needed, sd = goal.log_goodput[s.current], None, None, None
    is_target = s.rules.policy in policies.TARGETS
    if base > -math.inf and not (is_target and row.global_batch_size != s.now.global_batch_size):
        gain = math.expm1(goal.log_goodput[i] - base)
        needed = _needed_gain(s, row, goal.critical_batch_size) if tried is None else tried.needed
        sd = gain_log_sd(s, row, goal.critical_batch_size)
    blocked = constraints.blocked_reason(s, row, above_optimal=above_optimal)
    if needed is not None and math.isinf(needed):
        what = "a trial" if row.layout == s.now.layout else "the pause"
        blocked, needed = blocked or f"{what} would not pay off in the rest of the run", None
    elif not blocked and gain is not None and needed is not None and gain <= needed:
        blocked = gain_words(gain, needed, sd, is_tried=tried is not None)
    return Candidate(row=row, gain=gain, needed=needed, gain_sd=sd, blocked_reason=blocked)


def _needed_gain(s: DecisionInputs, row: ConfigThroughput, critical_batch_size: float) -> float:
    """The gain that the switch rule asks for. What is tried needs no certainty of its speed, but
    has to be worth the way back."""
    cost_s = _cost_s(s, row) * (2 if trial.is_trial(s, row) else 1)
    if s.rules.switch_rule == "paper":
        return switch_rule.paper_needed(cost_s=cost_s, elapsed_s=s.elapsed_s, paused_s=s.paused_s)
    is_same = row.layout == s.now.layout
    log_sd = gain_log_sd(s, row, critical_batch_size, with_speeds=not trial.is_trial(s, row))
    return switch_rule.forward_needed(
        cost_s=cost_s,
        remaining_s=_remaining_s(s),
        log_sd=log_sd,
        margin=switch_rule.BATCH_MARGIN if is_same else switch_rule.RELAYOUT_MARGIN,
    )


def gain_log_sd(
    s: DecisionInputs,
    row: ConfigThroughput,
    critical_batch_size: float,
    *,
    with_speeds: bool = True,
) -> float:
    """Standard deviation of the logarithm of a gain: of the noise scale, as far as it changes the
    two goodputs differently, and of the two throughputs."""
    slopes = [
        objectives.sensitivity(
            s.rules.objective,
            r.global_batch_size,
            critical_batch_size,
            reference_batch=s.rules.reference_batch,
        )
        for r in (row, s.now)
    ]
    variance = (slopes[0] - slopes[1]) ** 2 * s.log_noise_variance
    if not with_speeds:
        return math.sqrt(variance)
    return math.sqrt(variance + row.relative_sd**2 + s.now.relative_sd**2)


def _net(s: DecisionInputs, c: Candidate) -> float:
    """The goodput of a candidate over the present one, less its pause."""
    if c.gain is None:
        return -math.inf
    cost_s = _cost_s(s, c.row)
    if s.rules.switch_rule == "paper":
        return (1.0 + c.gain) * switch_rule.paper_discount(
            cost_s=cost_s, elapsed_s=s.elapsed_s, paused_s=s.paused_s
        )
    return (1.0 + c.gain) / (1.0 + switch_rule.break_even(cost_s, _remaining_s(s)))


def _cost_s(s: DecisionInputs, row: ConfigThroughput) -> float:
    """Seconds that the change to a row stops training for."""
    return s.cost_s(row.layout)


def _remaining_s(s: DecisionInputs) -> float:
    """Seconds that the rest of the run takes in the present configuration."""
    return s.samples_left / s.now.samples_per_s


def _tie_break(s: DecisionInputs, row: ConfigThroughput) -> tuple:
    """Of equals the present layout, then the faster, the smaller tp, the smaller batch."""
    is_other = row.layout != s.now.layout
    return is_other, -row.samples_per_s, row.layout.tp, row.global_batch_size, row.micro_batch_size


# The reasons.


def best_alternative(s: DecisionInputs, candidates: Sequence[Candidate]) -> Candidate | None:
    """The best other configuration, within one step of growth if any is.

    Args:
        s: the inputs of the decision.
        candidates: of the decision, best first.
    """
    most = s.now.global_batch_size * s.rules.growth
    others = [c for c in candidates if c.row != s.now]
    within = [c for c in others if c.row.global_batch_size <= most]
    return next(iter(within or others), None)


def gain_words(gain: float, needed: float | None, sd: float | None, *, is_tried: bool) -> str:
    """What a change is predicted to gain, with one standard deviation of that, and what it needs.

    Args:
        gain: predicted goodput over the present one, minus 1.
        needed: the gain that it needs; None if nothing tells.
        sd: of the logarithm of 1 plus the gain; None without a gain.
        is_tried: whether it is to be tried, as nobody has timed it.
    """
    doubt = "" if sd is None else f" +- {100 * (1.0 + gain) * sd:.1f}"
    words = f"{PREDICTED} {100 * gain:.1f}{doubt} %"
    if needed is None:
        return words
    return f"{words}, {'worth a trial above' if is_tried else 'needs'} {100 * needed:.1f} %"


def _reason_to_stay(s: DecisionInputs, goal: _Goal, candidates: Sequence[Candidate]) -> str:
    """Why the policy has no goal, or what blocks the best alternative."""
    if goal.unknown:
        return goal.unknown
    if best := best_alternative(s, candidates):
        return f"{best.row}: {best.blocked_reason}"
    sizes = [*s.rules.grid, s.now.global_batch_size]
    return f"no other batch from {min(sizes)} to {max(sizes)}, as the flags allow, fits or divides"


def _reason_to_change(s: DecisionInputs, goal: _Goal, chosen: Candidate) -> str:
    """A change: from what to what, its gain, and what it goes by."""
    now, to = s.now, chosen.row
    sizes = {
        "batch": (now.global_batch_size, to.global_batch_size),
        "micro-batch": (now.micro_batch_size, to.micro_batch_size),
        "layout": (now.layout, to.layout),
    }
    parts = [", ".join(f"{name} {a} -> {b}" for name, (a, b) in sizes.items() if a != b)]
    if chosen.gain is not None and chosen.needed is not None:
        is_tried = trial.judge(s, s.rows.index(to), goal.log_goodput) is not None
        words = gain_words(chosen.gain, chosen.needed, chosen.gain_sd, is_tried=is_tried)
        parts.append(words)
    elif goal.batch is None:
        # The present configuration has no goodput to compare with.
        speed = f"{to.samples_per_s:.3g} samples/s ({to.source})"
        parts.append(f"{goal.unknown}, so the run takes the fastest one where it can: {speed}")
    if policies.needs_critical_batch_size(s.rules.policy) and goal.batch is not None:
        parts.append(critical_batch_size_words(s))
    if goal.batch is not None:
        parts.append(f"target batch {goal.batch:.0f}")
    if s.annealing_batch > now.global_batch_size:
        parts.append(f"annealing asks for {s.annealing_batch:.0f}")
    return "; ".join(parts)


def critical_batch_size_words(s: DecisionInputs) -> str:
    """The critical batch size and what it comes from, as the log and the report put it."""
    critical, multiplier = s.critical_batch_size, s.rules.noise_scale_multiplier
    assert critical is not None
    if s.is_critical_batch_size_bound:
        trained, steps = s.trained_samples, s.rules.early_steps
        source = f"{trained:.0f} samples / {steps:g}"
        if s.rules.seq_length and s.max_critical_batch_size > trained / steps:
            source = f"half of a published law at {trained * s.rules.seq_length:.0f} tokens"
    else:
        source = f"{multiplier:g} x noise scale {critical / multiplier:.1f}"
    least = "at least " if s.is_noise_bound else ""
    return f"critical batch size {least}{critical:.1f} = {source}"
