"""The gain that a change needs.

`forward` asks for a gain that pays for the pause in the rest of the run, with confidence. `paper`
(Algorithm 2 of arXiv 2604.26687) goes by the time spent so far.
"""

from __future__ import annotations

import math

Z = 1.28
"""Standard deviations of confidence: right nine times of ten."""
BATCH_MARGIN, RELAYOUT_MARGIN = 0.005, 0.01
"""Least gain, as a logarithm, of another batch and of another layout."""
PAPER_MARGIN, _ROUNDING = 0.10, 1e-12
COOL_DOWN_COSTS, COOL_DOWN_STEPS, COOL_DOWN_SHARE = 10.0, (100, 200), 0.05
"""After a change the layout stays for so many times its pause, and for this share of the run's
steps within a least and a most: by then the outcome of the change is known."""
MAX_PAUSED = 0.02
"""Pauses so far over time so far, beyond one pause."""


def break_even(cost_s: float, remaining_s: float) -> float:
    """The gain at which a pause pays off in the rest of the run: c / (R - c); infinite if the pause
    is no shorter than the rest."""
    return cost_s / (remaining_s - cost_s) if remaining_s > cost_s else math.inf


def forward_needed(
    *, cost_s: float, remaining_s: float, log_sd: float, margin: float, z: float = Z
) -> float:
    """The gain that `forward` asks for.

    Args:
        cost_s: the pause, at its upper estimate.
        remaining_s: seconds that the rest takes without the move, at their lower estimate.
        log_sd: standard deviation of the logarithm of the gain.
        margin: least gain, as a logarithm.
        z: standard deviations of certainty.
    """
    gain = break_even(cost_s, remaining_s)
    return math.inf if math.isinf(gain) else (1.0 + gain) * math.exp(margin + z * log_sd) - 1.0


def paper_needed(*, cost_s: float, elapsed_s: float, paused_s: float) -> float:
    """The gain that Algorithm 2 asks for: after the discount T_useful / (T_elapsed + c) a tenth
    must be left. A change without a pause has no discount."""
    left = paper_discount(cost_s=cost_s, elapsed_s=elapsed_s, paused_s=paused_s)
    # A margin of a tenth is met by a tenth, whatever the rounding of 1 + 0.1.
    return (1.0 + PAPER_MARGIN) / left - 1.0 - _ROUNDING if left > 0 else math.inf


def paper_discount(*, cost_s: float, elapsed_s: float, paused_s: float) -> float:
    """What Algorithm 2 multiplies the goodput of another layout by: T_useful / (T_elapsed + c)."""
    if cost_s == 0:
        return 1.0
    return max(elapsed_s - paused_s, 0.0) / (elapsed_s + cost_s)


def relayout_blocked_reason(
    *,
    cost_s: float,
    elapsed_s: float,
    paused_s: float,
    steps_since: int | None,
    seconds_since: float | None,
    run_steps: float = math.inf,
) -> str:
    """Why the layout must not change now; empty if it may.

    Args:
        cost_s: seconds of a change.
        elapsed_s: seconds so far.
        paused_s: of these, pauses.
        steps_since: steps since the last change, None without one.
        seconds_since: seconds since then.
        run_steps: steps of the whole run with the present batch.
    """
    if steps_since is not None and seconds_since is not None:
        wait_s = COOL_DOWN_COSTS * cost_s
        least, most = COOL_DOWN_STEPS
        wait_steps = min(max(COOL_DOWN_SHARE * run_steps, least), most)
        if steps_since < wait_steps or seconds_since < wait_s:
            return f"cooling down: {steps_since} steps since the last change of layout"
    if paused_s > MAX_PAUSED * elapsed_s + cost_s:
        return f"pauses already took {paused_s:.0f} of {elapsed_s:.0f} s"
    return ""
