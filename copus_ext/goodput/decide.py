"""The decision at a step boundary, from top to bottom.

The controller measures and builds the inputs. The policy orders the configurations, and the first
that nothing blocks is taken. The controller applies and records what comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from copus_ext.goodput import constraints, policies
from copus_ext.goodput.inputs import TOO_LITTLE, Candidate, Decision, DecisionInputs
from copus_ext.goodput.policy import Weighed

_KEPT = 12
"""Candidates that a decision keeps."""


def decide(s: DecisionInputs) -> Decision:
    """What to do now. The same inputs give the same decision, bit for bit."""
    if reason := constraints.run_blocked_reason(s):
        return _decision(s, reason, Weighed(candidates=[]))
    policy = policies.named(s.rules.policy)
    found = policy.weigh(s)
    found = replace(found, candidates=[_judged(s, policy, c) for c in found.candidates])
    chosen = next((c for c in found.candidates if not c.blocked_reason), None)
    if chosen is None:
        return _decision(s, _reason_to_stay(s, found), found)
    return _decision(s, _reason_to_change(s, found, chosen), found, chosen)


def _judged(s: DecisionInputs, policy: policies.Policy, c: Candidate) -> Candidate:
    """A candidate with what blocks it."""
    if c.row == s.now:
        return c
    reason = constraints.blocked_reason(s, policy, c.row)
    if reason or not c.blocked_reason:
        return replace(c, blocked_reason=reason)
    return replace(c, blocked_reason=gain_words(c)) if c.blocked_reason == TOO_LITTLE else c


def _decision(
    s: DecisionInputs, reason: str, found: Weighed, chosen: Candidate | None = None
) -> Decision:
    to = s.now if chosen is None else chosen.row
    kind: Literal["batch", "relayout"] = "batch" if to.layout == s.now.layout else "relayout"
    low, high = s.critical_batch_size_range
    return Decision(
        kind="stay" if chosen is None else kind,
        to=to,
        reason=reason,
        gain=None if chosen is None else chosen.gain,
        gain_sd=None if chosen is None else chosen.gain_sd,
        is_scaled="measured" in (s.now.source, to.source),
        target_batch=found.target_batch,
        critical_batch_size=s.critical_batch_size,
        critical_batch_size_low=low,
        critical_batch_size_high=high,
        candidates=tuple(found.candidates[:_KEPT]),
    )


def best_alternative(s: DecisionInputs, candidates: Sequence[Candidate]) -> Candidate | None:
    """The best other configuration of a decision's candidates, which are in order."""
    return next((c for c in candidates if c.row != s.now), None)


def gain_words(c: Candidate) -> str:
    """What a change is predicted to gain, with one standard deviation of that where its speed is
    uncertain, and whether that is enough."""
    assert c.gain is not None
    doubt = f" +- {100 * (1.0 + c.gain) * c.gain_sd:.1f}" if c.gain_sd else ""
    words = f"predicted to {_signed(c.gain)}{doubt} %"
    if c.needed is None:
        return words
    is_enough, needed = not c.blocked_reason, _signed(c.needed)
    if not c.gain_sd:
        needed = needed.partition(" ")[2]
        return f"{words}, {'enough' if is_enough else 'too little'} (it needs {needed} %)"
    kind, _, amount = needed.partition(" ")
    limit = f"the limit is a predicted {'gain' if kind == 'gain' else 'loss'} of {amount} %"
    return f"{words}, {'' if is_enough else 'not '}worth a short trial ({limit})"


def _signed(share: float) -> str:
    """A gain or a loss in percent; what rounds to nothing is no loss."""
    amount = f"{100 * abs(share):.1f}"
    return f"{'lose' if share < 0 and float(amount) else 'gain'} {amount}"


def aim_words(target: float | None, *, now: int, to: int) -> str:
    """Where a policy wants to go in the end, if that is not where it goes now; else empty.

    Args:
        target: the batch that it wants, samples; None if it names none.
        now: the present batch.
        to: the next one.
    """
    if target is None or round(target) == to:
        return ""
    is_ahead = (target - to) * (to - now) >= 0
    return f"aims at batch {target:.0f}" if is_ahead else f"batch {target:.0f} is predicted best"


def _reason_to_stay(s: DecisionInputs, found: Weighed) -> str:
    """Why the policy has no goal, or what blocks the best alternative."""
    if found.unknown:
        return found.unknown
    if best := best_alternative(s, found.candidates):
        return f"considered {best.row}: {best.blocked_reason}"
    sizes = [*s.rules.grid, s.now.global_batch_size]
    return f"no other batch from {min(sizes)} to {max(sizes)}, as the flags allow, fits or divides"


def _reason_to_change(s: DecisionInputs, found: Weighed, chosen: Candidate) -> str:
    """A change: from what to what, its gain, and what it goes by."""
    now, to = s.now, chosen.row
    sizes = {
        "batch": (now.global_batch_size, to.global_batch_size),
        "micro-batch": (now.micro_batch_size, to.micro_batch_size),
        "layout": (now.layout, to.layout),
    }
    parts = [", ".join(f"{name} {a} -> {b}" for name, (a, b) in sizes.items() if a != b)]
    if chosen.gain is not None:
        parts.append(gain_words(chosen))
    if found.unknown:
        speed = f"{to.samples_per_s:.3g} samples/s ({to.source})"
        parts.append(f"{found.unknown}, so the run takes the fastest one where it can: {speed}")
    parts += [found.goes_by] if found.goes_by else []
    aim = aim_words(found.target_batch, now=now.global_batch_size, to=to.global_batch_size)
    parts += [aim] if aim else []
    if s.annealing_batch > now.global_batch_size:
        parts.append(f"annealing at the end asks for batch {s.annealing_batch:.0f}")
    return "; ".join(parts)
