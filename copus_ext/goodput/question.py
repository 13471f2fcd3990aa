"""The one question of a decision: what does a change win of the rest of the run, in expectation?

X is the logarithm of the cost of a sample's progress in the present configuration over that in
another one, normal around its prediction. Where a speed was not timed here, a few steps tell it,
and a wrong change is left again. So a change wins E max(X, 0) of the rest. It loses the pause,
another one where X < 0, and E max(-X, 0) during the steps that tell. A speed that is known has no
doubt, and then this is X less the pause. It is the rule of Weitzman (Econometrica 1979) for boxes
of unknown content that cost something to open. A later change of the batch is free, so that a
layout is judged by its best batch at each point of the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from copus_ext.goodput.inputs import (
    NEVER_PAYS,
    PRESENT,
    TOO_LITTLE,
    Candidate,
    ConfigThroughput,
    DecisionInputs,
)
from copus_ext.goodput.state import TRIED_STEPS
from megatron.trainer.config.layout import Layout

MARGIN = 0.01
"""Least win, as a share of the rest of the run."""
PAUSES = 5.0
"""How often a pause counts: the best of many predictions is less good than it looks."""
_FAR = 8.0
"""Standard deviations within which a win is looked for."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """ln of the seconds that each row takes for a unit of progress."""

    now: Any
    """[rows] at present."""
    ahead: Any
    """[rows, points] at points of the rest of the run."""
    weights: Any
    """[points] parts of the rest's progress; they add up to 1."""


@dataclass(frozen=True, kw_only=True)
class _Rest:
    """The rest of the run by layout."""

    log_cost: dict[Layout, float]
    """ln of the cost of the whole rest, each point at its best batch."""
    seconds: float
    """That it takes on the present layout."""


def candidates(s: DecisionInputs, costs: Costs, considered: Sequence[int]) -> list[Candidate]:
    """Candidates, those that win enough first; another layout before another batch, over the best
    of which it is judged.

    Args:
        s: the inputs of the decision.
        costs: of all rows; infinite where a row is out of the question.
        considered: rows to choose from, the present one among them.
    """
    if not math.isfinite(costs.now[s.current]):
        return _anything_else(s, costs, considered)
    rest = _rest(s, costs)
    found: list[tuple[tuple, Candidate]] = []
    for i in _best_of_layouts(s, costs, considered):
        c, won = _candidate(s, costs, rest, i)
        fits, is_other = not c.blocked_reason, c.row.layout != s.now.layout
        found.append(((not fits, not (fits and is_other), -won, *_tie_break(s, c.row)), c))
    return [c for _, c in sorted(found, key=lambda pair: pair[0])]


def _anything_else(s: DecisionInputs, costs: Costs, considered: Sequence[int]) -> list[Candidate]:
    """Candidates where the present one is out of the question, so that nothing compares with it:
    those of the present layout come first, then those of least cost."""
    others = [i for i in considered if math.isfinite(costs.now[i])]
    others.sort(key=lambda i: (s.rows[i].layout != s.now.layout, costs.now[i]))
    return [
        *(Candidate(row=s.rows[i], gain=None, needed=None, blocked_reason="") for i in others),
        Candidate(row=s.now, gain=0.0, needed=None, blocked_reason=PRESENT),
    ]


def _rest(s: DecisionInputs, costs: Costs) -> _Rest:
    rows: dict[Layout, list[int]] = {}
    for i, row in enumerate(s.rows):
        if np.isfinite(costs.ahead[i]).all():
            rows.setdefault(row.layout, []).append(i)
    log_cost = {
        layout: math.log(costs.weights @ np.exp(costs.ahead[own].min(axis=0)))
        for layout, own in rows.items()
    }
    staying = math.log(costs.weights @ np.exp(costs.ahead[s.current]))
    faster = math.exp(log_cost[s.now.layout] - staying)
    return _Rest(log_cost=log_cost, seconds=s.samples_left / s.now.samples_per_s * faster)


def _best_of_layouts(s: DecisionInputs, costs: Costs, considered: Sequence[int]) -> list[int]:
    """All rows of the present layout, and of each other one the row that costs least now."""
    best: dict[Layout, int] = {}
    for i in considered:
        known = best.setdefault(s.rows[i].layout, i)
        if costs.now[i] < costs.now[known]:
            best[s.rows[i].layout] = i
    own = [i for i in considered if s.rows[i].layout == s.now.layout]
    return [*own, *(i for layout, i in best.items() if layout != s.now.layout)]


def _candidate(s: DecisionInputs, costs: Costs, rest: _Rest, i: int) -> tuple[Candidate, float]:
    """A row with its gain and the gain that it needs, and what it wins of the rest."""
    row, now = s.rows[i], s.now
    if i == s.current:
        return Candidate(row=row, gain=0.0, needed=None, blocked_reason=PRESENT), 0.0
    mean = float(costs.now[s.current] - costs.now[i])
    pause = 0.0
    if row.layout != now.layout:
        own = [j for j, r in enumerate(s.rows) if r.layout == now.layout]
        here = float(min(costs.now[own]) - costs.now[i])
        mean = min(here, rest.log_cost[now.layout] - rest.log_cost[row.layout])
        pause = PAUSES * s.cost_s(row.layout) / rest.seconds
    # Before the present speed is known, a trial could not be told from it.
    is_trial = now.source == "measured" and row.source != "measured"
    sd = row.relative_sd if is_trial else 0.0
    told = TRIED_STEPS * now.global_batch_size / now.samples_per_s / rest.seconds

    def won(mean: float) -> float:
        above, behind, below = _normal_parts(mean, sd)
        return above - pause * (1.0 + below) - behind * told if sd else mean - pause

    width = _FAR * sd + pause + MARGIN
    needed = _rises_to(won, MARGIN, width=width) if sd else MARGIN + pause
    blocked = "" if won(mean) > MARGIN else TOO_LITTLE
    if needed >= PAUSES:  # a pause longer than the rest is never earned back
        blocked = NEVER_PAYS
    return Candidate(
        row=row,
        gain=math.expm1(mean),
        needed=math.expm1(needed) if needed < PAUSES else None,
        gain_sd=sd,
        blocked_reason=blocked,
    ), won(mean)


def _tie_break(s: DecisionInputs, row: ConfigThroughput) -> tuple:
    """Of equals the present layout, then the faster, the smaller tp, the smaller batch."""
    is_other = row.layout != s.now.layout
    return is_other, -row.samples_per_s, row.layout.tp, row.global_batch_size, row.micro_batch_size


def _normal_parts(mean: float, sd: float) -> tuple[float, float, float]:
    """E max(X, 0), E max(-X, 0) and P(X < 0) of a normal X."""
    if not sd:
        return max(mean, 0.0), max(-mean, 0.0), float(mean < 0)
    z = mean / sd
    below = 0.5 * math.erfc(z / math.sqrt(2.0))
    density = math.exp(-z * z / 2.0) / math.sqrt(2.0 * math.pi)
    above = sd * density + mean * (1.0 - below)
    return above, above - mean, below


def _rises_to(f: Callable[[float], float], goal: float, *, width: float) -> float:
    """Where a rising function reaches a goal, between -width and width."""
    low, high = -width, width
    while high - low > 1e-4 * width:
        middle = (low + high) / 2
        low, high = (low, middle) if f(middle) > goal else (middle, high)
    return high
