"""What nobody timed is tried: some steps tell its speed, and a wrong trial is left again.

So a doubtful speed may only win. With X the logarithm of the goodput of what is tried over the best
that was timed, normal around its prediction, a trial wins E max(X, 0) of the rest of the run. It
loses the pause, another one where X < 0, and E max(-X, 0) during its steps. It is the rule of
Weitzman (Econometrica 1979) for boxes of unknown content that cost something to open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from copus_ext.goodput import policies
from copus_ext.goodput.inputs import ConfigThroughput, DecisionInputs
from copus_ext.goodput.state import TRIED_STEPS

_MIN_LEFT_STEPS = 100
"""Steps that a run must have left for a trial."""
MIN_WON = 0.002
"""Of the rest of the run, for a trial to pay."""
_FAR = 8.0
"""Standard deviations within which a gain is looked for."""
MAX_TRIED = 2
"""Times that a micro-batch or a batch may be smaller or larger to be tried."""


def is_trial(s: DecisionInputs, to: ConfigThroughput) -> bool:
    """Whether a row was not timed, and is near enough to the present one to be tried: another batch
    or micro-batch of about its size, or another layout once this one was timed. The run must have
    room for a hundred steps."""
    now = s.now
    if not _is_ours(s) or to.source == "measured":
        return False
    batches = to.global_batch_size, now.global_batch_size
    micros = to.micro_batch_size, now.micro_batch_size
    if to.layout != now.layout:
        is_near = now.source == "measured" and max(batches) <= MAX_TRIED * min(batches)
        return is_near and s.samples_left >= _MIN_LEFT_STEPS * max(batches)
    # A smaller batch may have no larger micro-batches.
    least = min(micros) if batches[0] == batches[1] else now.micro_batch_size
    is_near = max(batches) <= MAX_TRIED * min(batches) and max(micros) <= MAX_TRIED * least
    return is_near and s.samples_left >= _MIN_LEFT_STEPS * max(batches)


def are_timed(s: DecisionInputs, to: ConfigThroughput) -> bool:
    """Whether this run has timed a row and the present one, and its policy goes by that."""
    return _is_ours(s) and to.source == s.now.source == "measured"


def _is_ours(s: DecisionInputs) -> bool:
    return s.rules.policy == "adaptive" and s.rules.switch_rule == "forward"


@dataclass(frozen=True, kw_only=True)
class Trial:
    needed: float
    """Predicted goodput over the present one, minus 1, from which it pays. Mostly below 0."""
    net: float
    """Expected goodput over the present one, less pauses."""


def judge(s: DecisionInputs, i: int, log_goodput: Sequence[float]) -> Trial | None:
    """Whether it pays to try a row of the present batch; None where it is no trial of that kind.

    Args:
        s: the inputs of the decision.
        i: index of the row.
        log_goodput: of every row.
    """
    row, now = s.rows[i], s.now
    if row.global_batch_size != now.global_batch_size or not is_trial(s, row):
        return None
    if now.source != "measured" or row.relative_sd <= 0:
        return None
    if math.isinf(log_goodput[i]) or math.isinf(log_goodput[s.current]):
        return None
    best = max(_timed(s), key=lambda j: log_goodput[j])
    known, rest_s, step_s = s.rows[best], min_remaining_s(s), _step_s(now)
    there_s, known_s = s.cost_s(row.layout), s.cost_s(known.layout)
    back_s = 0.0
    if row.layout != known.layout:
        # What stays on the present layout, which is another one, puts off the pause of leaving it.
        back_s = known_s if row.layout == now.layout else there_s

    def won(mean: float) -> float:
        """Part of the rest that a trial wins over going to the best that was timed, if X has a
        mean."""
        above, behind, below = _normal_parts(mean, row.relative_sd)
        lost_s = there_s - known_s + below * back_s + behind * TRIED_STEPS * step_s
        return above - lost_s / rest_s

    ahead = log_goodput[best] - log_goodput[s.current]
    needed = _rises_to(won, MIN_WON, width=_FAR * row.relative_sd)
    net = math.exp(ahead) - known_s / rest_s + won(log_goodput[i] - log_goodput[best])
    return Trial(needed=math.expm1(needed + ahead), net=net)


def min_remaining_s(s: DecisionInputs) -> float:
    """Seconds that the rest of the run takes at least: it may become as fast as its fastest
    configuration, several times as fast as a small first batch."""
    return s.samples_left / max(row.samples_per_s for row in s.rows)


def _step_s(row: ConfigThroughput) -> float:
    return row.global_batch_size / row.samples_per_s


def _timed(s: DecisionInputs) -> list[int]:
    """Rows of the present batch that this run has timed and can go to, the present one among
    them."""
    batch, layout = s.now.global_batch_size, s.now.layout
    moves = s.rules.relayout and not s.relayouts_ended
    reachable = (
        (row.layout == layout or (moves and row.layout not in s.blocked_layouts))
        and not (row.noise_unmeasurable and policies.needs_noise(s.rules.policy))
        for row in s.rows
    )
    return [
        j
        for j, (row, can) in enumerate(zip(s.rows, reachable))
        if j == s.current or (can and row.global_batch_size == batch and row.source == "measured")
    ]


def _normal_parts(mean: float, sd: float) -> tuple[float, float, float]:
    """E max(X, 0), E max(-X, 0) and P(X < 0) of a normal X."""
    z = mean / sd
    below = 0.5 * math.erfc(z / math.sqrt(2.0))
    density = math.exp(-z * z / 2.0) / math.sqrt(2.0 * math.pi)
    above = sd * density + mean * (1.0 - below)
    return above, above - mean, below


def _rises_to(f: Callable[[float], float], goal: float, *, width: float) -> float:
    """Where a rising function reaches a goal, between -width and width; infinite beyond that."""
    low, high = -width, width
    if f(high) <= goal:
        return math.inf
    while high - low > 1e-4 * width:
        middle = (low + high) / 2
        low, high = (low, middle) if f(middle) > goal else (middle, high)
    return high
