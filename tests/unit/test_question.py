"""What a change wins in expectation, against drawn runs and sums by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from copus_ext.goodput import question
from copus_ext.goodput.inputs import DecisionInputs
from copus_ext.goodput.question import Costs
from copus_ext.goodput.state import TRIED_STEPS
from tests.helpers.recorded import row
from tests.unit.test_decide import situation

ALL = {"copus_layouts": "all"}


def costs(s: DecisionInputs) -> Costs:
    """All batches need the same: only throughput counts."""
    cost = -np.log([r.samples_per_s for r in s.rows])
    return Costs(now=cost, ahead=cost[:, None], weights=np.ones(1))


def needed(s: DecisionInputs, i: int = 1) -> float:
    found = question.candidates(s, costs(s), range(len(s.rows)))
    value = next(c.needed for c in found if c.row == s.rows[i])
    assert value is not None
    return value


@pytest.mark.parametrize("sd", [0.05, 0.2])
@pytest.mark.parametrize(("cost_s", "left"), [(0.0, 20_000), (60.0, 500_000), (300.0, 200_000)])
@pytest.mark.parametrize("dp", [1, 2])
def test_a_change_pays_where_drawn_ones_do(cost_s: float, left: int, sd: float, dp: int) -> None:
    """The gain that a change to what was not timed needs, against the mean of drawn speeds: the
    run stays where it is faster, and goes back after some steps where it is not."""
    untimed = dataclasses.replace(row(16, 10.0, micro=8, sd=sd, dp=dp), source="predicted")
    more: dict[str, Any] = {"relayout_cost_s": cost_s, "consumed_samples": 1_000_000 - left}
    s = situation(16, rows=[row(16, 10.0), untimed], flags=ALL, **more)
    logs = math.log1p(needed(s)) + sd * np.random.default_rng(0).standard_normal(400_000)
    rest_s, paused = left / 10.0, question.PAUSES * cost_s * (dp == 1)
    lost_s = paused * (1.0 + (logs < 0)) + np.maximum(-logs, 0.0) * TRIED_STEPS * 1.6
    won = float(np.mean(np.maximum(logs, 0.0) - lost_s / rest_s))
    assert won == pytest.approx(question.MARGIN, abs=4 * sd / math.sqrt(400_000) + 1e-4)


def test_a_speed_that_is_known_needs_the_margin_and_its_pauses() -> None:
    rows = [row(16, 10.0), row(16, 11.0, micro=8, sd=0.3), row(16, 12.0, dp=1)]
    s = situation(16, rows=rows, flags=ALL, relayout_cost_s=50.0)
    assert needed(s, 1) == pytest.approx(math.expm1(question.MARGIN))
    # On the present layout the rest takes 500,000 / 11 seconds.
    pauses = question.PAUSES * 50.0 / (500_000 / 11.0)
    assert needed(s, 2) == pytest.approx(math.expm1(question.MARGIN + pauses))


def test_a_layout_is_judged_by_its_best_batch_over_the_rest() -> None:
    """The other layout is 30 % faster at the present batch, but the present one is as fast at
    another batch to which it can go for nothing."""
    rows = [row(16, 10.0), row(32, 13.0), row(16, 13.0, dp=1)]
    s = situation(16, rows=rows, flags=ALL, relayout_cost_s=1.0)
    found = question.candidates(s, costs(s), range(3))
    assert found[0].row == rows[1]
    other = next(c for c in found if c.row == rows[2])
    assert other.gain == pytest.approx(0.0) and other.blocked_reason
    better = dataclasses.replace(rows[2], samples_per_s=15.0)
    s = dataclasses.replace(s, rows=(*rows[:2], better))
    first = question.candidates(s, costs(s), range(3))[0]
    assert first.row == better and first.gain == pytest.approx(15.0 / 13.0 - 1.0)


def test_what_is_better_only_later_waits() -> None:
    rows = [row(16, 10.0), row(16, 10.0, dp=1)]
    s = situation(16, rows=rows, flags=ALL, relayout_cost_s=1.0)
    later = np.array([[0.0, 0.0], [0.1, -0.5]])
    both = Costs(now=later[:, 0], ahead=later[:, 1:], weights=np.ones(1))
    assert question.candidates(s, both, range(2))[1].blocked_reason
    now = dataclasses.replace(both, now=-later[:, 0] * 2)
    assert not question.candidates(s, now, range(2))[0].blocked_reason


def test_where_the_present_is_out_of_the_question_anything_is_taken() -> None:
    rows = [row(16, 10.0), row(32, 13.0), row(32, 20.0, dp=1)]
    s = situation(16, rows=rows, flags=ALL)
    cost = np.array([math.inf, -math.log(13.0), -math.log(20.0)])
    forced = Costs(now=cost, ahead=cost[:, None], weights=np.ones(1))
    found = question.candidates(s, forced, range(3))
    assert [c.row for c in found] == [rows[1], rows[2], rows[0]]
    assert found[0].gain is None and not found[0].blocked_reason
