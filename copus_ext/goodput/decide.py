"""The decision at a step boundary, as a function of nothing but the situation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from copus_ext.goodput import objectives, policies, switch_rule
from copus_ext.goodput.constraints import WARMING_UP, barred, blind, closed, grid, only_layouts
from copus_ext.goodput.inputs import Candidate, ConfigThroughput, Decision, DecisionInputs

_SHOWN = 12
"""Candidates that a decision keeps."""
_INTERVAL_Z = 1.96
_SAME_BATCH_NOISE = 1.0


@dataclass(frozen=True, kw_only=True)
class _Goal:
    """What is best, before limits."""

    log_worth: list[float]
    """ln(worth) of every row; minus infinity where it is not positive."""
    batch: float | None
    """The batch aimed at, samples."""
    critical_batch_size: float
    """Phi, samples."""


def decide(s: DecisionInputs) -> Decision:
    """What to do now. The same situation gives the same decision, bit for bit."""
    why_not = closed(s)
    if why_not:
        return _stay(s, why_not)
    wanted = None if blind(s, s.now) or only_layouts(s) else _goal(s)
    goal = wanted or _present_batch(s)
    small = wanted is not None and _is_small(s)
    judged = [_judge(s, i, goal, small=small) for i in _considered(s, goal)]
    judged.sort(key=lambda c: (-_net(s, c), _order(s, c.row)))
    chosen = next((c for c in judged if c.verdict == "chosen"), None)
    if chosen is None:
        reason = _unknown(s) if wanted is None else _kept_back(s, judged)
        return _stay(s, reason, target=goal.batch, small=small, candidates=judged)
    is_same = chosen.row.layout == s.now.layout
    return Decision(
        kind="batch" if is_same else "relayout",
        to=chosen.row,
        reason=_why(s, chosen, goal),
        gain=chosen.gain,
        target_batch=goal.batch,
        batch_above_optimal=small,
        candidates=tuple(judged[:_SHOWN]),
    )


def best_other(s: DecisionInputs, judged: Sequence[Candidate]) -> Candidate | None:
    """The best move, within reach if any is.

    Args:
        s: where the run stands.
        judged: candidates, best first.
    """
    most = s.now.global_batch_size * s.rules.growth
    others = [c for c in judged if c.row != s.now]
    within = [c for c in others if c.row.global_batch_size <= most]
    return next(iter(within or others), None)


def _kept_back(s: DecisionInputs, judged: list[Candidate]) -> str:
    """The best move within reach, and what keeps it back."""
    best = best_other(s, judged)
    return f"{best.row}: {best.verdict}" if best else "nothing else fits or divides"


def _unknown(s: DecisionInputs) -> str:
    """Why only configurations of the present batch were compared."""
    if why := blind(s, s.now):
        return why
    if only_layouts(s):
        return WARMING_UP
    steps, least = s.noise.effective_steps, s.rules.min_effective_steps
    if steps >= least:
        return "the noise scale is not known: the gradient shows nothing but noise"
    return f"the noise scale is not known yet: {steps:.0f} of {least:.0f} measurements"


def _stay(
    s: DecisionInputs,
    reason: str,
    *,
    target: float | None = None,
    small: bool = False,
    candidates: Sequence[Candidate] = (),
) -> Decision:
    return Decision(
        kind="stay",
        to=s.now,
        reason=reason,
        gain=None,
        target_batch=target,
        batch_above_optimal=small,
        candidates=tuple(candidates[:_SHOWN]),
    )


def _goal(s: DecisionInputs) -> _Goal | None:
    """What the policy wants; None where it lacks the noise scale."""
    policy, noise = s.rules.policy, s.critical_batch_size
    if policies.needs_noise(policy) and (
        noise is None or noise <= 0 or s.noise.effective_steps < s.rules.min_effective_steps
    ):
        return None
    if policy in policies.WEIGHING:
        assert noise is not None
        worths = _log_worths(s, s.rows, noise)
        own = [i for i, row in enumerate(s.rows) if row.layout == s.now.layout]
        best = max(own, key=lambda i: worths[i])
        return _Goal(
            log_worth=worths, batch=float(s.rows[best].global_batch_size), critical_batch_size=noise
        )
    batch = policies.target_batch(s)
    if batch is None:
        return None
    sizes = sorted({row.global_batch_size for row in s.rows})
    snapped = policies.snap(batch, grid(s) or sizes, policy=policy)
    within = _reachable(s, snapped, sizes)
    critical = noise or _SAME_BATCH_NOISE
    return _Goal(log_worth=_speeds(s, within), batch=batch, critical_batch_size=critical)


def _present_batch(s: DecisionInputs) -> _Goal:
    """Without a noise scale only configurations of the present batch can be compared."""
    speeds = _speeds(s, s.now.global_batch_size)
    if blind(s, s.now):  # any that sees is better
        speeds[s.current] = -math.inf
    return _Goal(log_worth=speeds, batch=None, critical_batch_size=_SAME_BATCH_NOISE)


def _speeds(s: DecisionInputs, batch: int) -> list[float]:
    """ln(throughput) of the rows of one batch, between which nothing else decides."""
    return [
        math.log(row.samples_per_s) if row.global_batch_size == batch else -math.inf
        for row in s.rows
    ]


def _reachable(s: DecisionInputs, wanted: int, sizes: list[int]) -> int:
    """The batch nearest to the wanted one that may be taken in one go."""
    now = s.now.global_batch_size
    most = now * s.rules.growth
    if wanted > most:
        return max((size for size in sizes if now <= size <= most), default=now)
    if wanted >= now or s.rules.policy in policies.SCHEDULED:
        return wanted if wanted >= now or s.rules.allow_shrink else now
    smaller = [size for size in sizes if size < now]
    return max(smaller) if s.rules.allow_shrink and smaller else now


def _log_worths(s: DecisionInputs, rows: Sequence[ConfigThroughput], noise: float) -> list[float]:
    """ln(worth) of rows; minus infinity where it is not positive."""
    values = objectives.worth(
        s.rules.objective,
        np.array([row.samples_per_s for row in rows]),
        np.array([row.global_batch_size for row in rows]),
        noise,
        reference_batch=s.rules.reference_batch,
    )
    return [math.log(value) if value > 0 else -math.inf for value in values.tolist()]


def _considered(s: DecisionInputs, goal: _Goal) -> list[int]:
    """Rows worth a verdict: of every layout and batch the best one, and the one with the present
    micro-batch, whose speed is surer; and the present one."""
    allowed = {*grid(s)}
    # From a batch that is worth nothing any smaller one is a way back.
    worthless = s.rules.policy in policies.WEIGHING and goal.log_worth[s.current] == -math.inf
    best: dict[tuple, int] = {}
    alike = set()
    for i, row in enumerate(s.rows):
        if row.global_batch_size not in allowed:
            continue
        if goal.log_worth[i] == -math.inf and not (
            worthless and row.global_batch_size < s.now.global_batch_size
        ):
            continue
        key = (row.layout, row.global_batch_size)
        known = best.get(key)
        if known is None or goal.log_worth[i] > goal.log_worth[known]:
            best[key] = i
        if row.layout == s.now.layout and row.micro_batch_size == s.now.micro_batch_size:
            alike.add(i)
    return sorted({*best.values(), *alike, s.current})


def _judge(s: DecisionInputs, i: int, goal: _Goal, *, small: bool) -> Candidate:
    """One row against the present one."""
    row, now = s.rows[i], s.now
    if i == s.current:
        return Candidate(row=row, gain=0.0, needed=None, verdict="present")
    base = goal.log_worth[s.current]
    is_target = s.rules.policy in policies.TARGETS
    moves_batch = row.global_batch_size != now.global_batch_size
    if (is_target and moves_batch) or base == -math.inf:
        gain, needed = None, None
    else:
        gain = math.expm1(goal.log_worth[i] - base)
        needed = _needed(s, row, goal)
    why = barred(s, row, small=small)
    if needed is not None and math.isinf(needed):
        why, needed = why or "the pause would not pay off in the rest of the run", None
    if not why and gain is not None and needed is not None and gain <= needed:
        why = f"gains {100 * gain:.1f} %, needs {100 * needed:.1f} %"
    return Candidate(row=row, gain=gain, needed=needed, verdict=why or "chosen")


def _needed(s: DecisionInputs, row: ConfigThroughput, goal: _Goal) -> float:
    """The gain that the switch rule asks for."""
    is_same = row.layout == s.now.layout
    cost_s = 0.0 if is_same else s.switch_cost_s
    if s.rules.switch_rule == "paper":
        return switch_rule.paper_needed(cost_s=cost_s, elapsed_s=s.elapsed_s, paused_s=s.paused_s)
    return switch_rule.forward_needed(
        cost_s=cost_s,
        remaining_s=_remaining_s(s),
        log_sd=_log_sd(s, row, goal.critical_batch_size),
        margin=switch_rule.BATCH_MARGIN if is_same else switch_rule.RELAYOUT_MARGIN,
    )


def _log_sd(s: DecisionInputs, row: ConfigThroughput, noise: float) -> float:
    """Standard deviation of the logarithm of a gain: of the noise scale, as far as it moves the two
    worths apart, and of the two throughputs."""
    slopes = [
        objectives.sensitivity(
            s.rules.objective,
            r.global_batch_size,
            noise,
            reference_batch=s.rules.reference_batch,
        )
        for r in (row, s.now)
    ]
    variance = (slopes[0] - slopes[1]) ** 2 * _log_variance(s)
    return math.sqrt(variance + row.relative_sd**2 + s.now.relative_sd**2)


def _log_variance(s: DecisionInputs) -> float:
    """Variance of ln(phi), from its interval; none where a lower bound stands for it."""
    low, phi, high = s.noise.low_samples, s.noise.phi_samples, s.noise.high_samples
    if s.noise.status != "ok" or not phi or not high:
        return 0.0
    # An interval that reaches down to 0 says nothing below: take it as wide as above.
    width = math.log(high / low) if low else 2 * math.log(high / phi)
    return (width / (2 * _INTERVAL_Z)) ** 2


def _is_small(s: DecisionInputs) -> bool:
    """Whether the present batch is too large even at the upper end of the noise scale."""
    high = s.noise.high_samples
    if s.noise.status != "ok" or high is None:
        return False
    if s.rules.policy == "cbs":
        nearest = policies.snap(s.rules.noise_scale_multiplier * high, grid(s), policy="cbs")
        return nearest < s.now.global_batch_size
    if s.rules.policy not in policies.WEIGHING:
        return False
    rows = [row for row in s.rows if row.layout == s.now.layout]
    worths = _log_worths(s, rows, s.rules.noise_scale_multiplier * high)
    best = rows[max(range(len(rows)), key=lambda i: worths[i])]
    return best.global_batch_size < s.now.global_batch_size


def _net(s: DecisionInputs, c: Candidate) -> float:
    """The worth of a candidate over the present one, its pause taken off."""
    if c.gain is None:
        return -math.inf
    cost_s = 0.0 if c.row.layout == s.now.layout else s.switch_cost_s
    if s.rules.switch_rule == "paper":
        return (1.0 + c.gain) * switch_rule.paper_discount(
            cost_s=cost_s, elapsed_s=s.elapsed_s, paused_s=s.paused_s
        )
    return (1.0 + c.gain) / (1.0 + switch_rule.break_even(cost_s, _remaining_s(s)))


def _remaining_s(s: DecisionInputs) -> float:
    """Seconds that the rest of the run takes as it is now."""
    return max(s.total_samples - s.consumed_samples, 0) / s.now.samples_per_s


def _order(s: DecisionInputs, row: ConfigThroughput) -> tuple:
    """Of equals the present layout, then the faster, the smaller tp, the smaller batch."""
    is_other = row.layout != s.now.layout
    return is_other, -row.samples_per_s, row.layout.tp, row.global_batch_size, row.micro_batch_size


def _why(s: DecisionInputs, chosen: Candidate, goal: _Goal) -> str:
    """A change in words: from what to what, its gain, and what it goes by."""
    parts = [_change(s.now, chosen.row)]
    if chosen.gain is not None and chosen.needed is not None:
        parts.append(f"gains {100 * chosen.gain:.1f} %, needs {100 * chosen.needed:.1f} %")
    if policies.needs_noise(s.rules.policy) and goal.batch is not None:
        parts.append(critical_batch_size_words(s))
    if goal.batch is not None:
        parts.append(f"target batch {goal.batch:.0f}")
    return "; ".join(parts)


def _change(now: ConfigThroughput, to: ConfigThroughput) -> str:
    sizes = {
        "batch": (now.global_batch_size, to.global_batch_size),
        "micro-batch": (now.micro_batch_size, to.micro_batch_size),
        "layout": (now.layout, to.layout),
    }
    return ", ".join(f"{name} {a} -> {b}" for name, (a, b) in sizes.items() if a != b)


def critical_batch_size_words(s: DecisionInputs) -> str:
    """The critical batch size and what it is made of, as the log and the report put it."""
    critical, multiplier = s.critical_batch_size, s.rules.noise_scale_multiplier
    assert critical is not None
    least = "at least " if s.noise.status == "lower_bound_only" else ""
    noise = critical / multiplier
    return f"critical batch size {least}{critical:.1f} = {multiplier:g} x noise scale {noise:.1f}"
