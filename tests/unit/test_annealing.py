"""Under a constant learning rate the batch can grow at the end in place of the rate's decay."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from copus_ext.controller import rules
from copus_ext.controller.flags import CopusConfig
from copus_ext.goodput.decide import decide
from copus_ext.goodput.inputs import DecisionInputs
from copus_ext.goodput.state import ControllerState
from megatron.trainer.common.errors import UsageError
from tests.unit.test_decide import GRID, situation

SHARE, TOTAL = 0.2, 1_000_000


def annealing(left: float, **more: Any) -> DecisionInputs:
    """A run whose goodput is best at a batch of 32, with this part of its last fifth left."""
    values: dict[str, Any] = {"annealing_from": 32, **more}
    consumed = round(TOTAL * (1 - SHARE * left))
    return situation(
        values.pop("batch", 32),
        0.01,
        rules={"anneal_share": SHARE},
        consumed_samples=consumed,
        total_samples=TOTAL,
        **values,
    )


@pytest.mark.parametrize(("left", "times"), [(1.0, 1), (0.5, 4), (0.25, 16), (0.125, 64)])
def test_the_batch_grows_as_a_rate_that_falls_to_zero_would_have_it(left: float, times: int):
    s = annealing(left)
    assert s.annealing_batch == pytest.approx(32 * times, rel=1e-4)
    asked, decision = min(32 * times, GRID[-1]), decide(s)
    assert decision.to.global_batch_size == asked, "also more than fourfold at once"
    assert (f"annealing at the end asks for batch {32 * times}" in decision.reason) == (times > 1)
    before = dataclasses.replace(s, annealing_from=None)
    assert before.annealing_batch == 0.0 and decide(before).to.global_batch_size <= 32


def test_the_last_sample_asks_for_a_number() -> None:
    assert 0 < annealing(0.0).annealing_batch < float("inf")
    assert decide(annealing(1e-5)).to.global_batch_size == GRID[-1]


def test_what_holds_growth_back_for_safety_still_does() -> None:
    held = decide(annealing(0.25, hold_growth_until_samples=TOTAL))
    assert held.kind == "stay" and "loss spike" in held.candidates[0].blocked_reason


def test_the_batch_at_the_start_of_annealing_is_kept_and_its_rate_with_it() -> None:
    state = ControllerState()
    for consumed, batch, known in ((700, 16, None), (800, 32, 32), (900, 64, 32)):
        state.begin_annealing(SHARE, batch=batch, consumed_samples=consumed, total_samples=1000)
        assert state.annealing_from == known
    assert [state.batch_of_rate(b) for b in (16, 32, 512)] == [16, 32, 32]
    assert ControllerState.from_json(state.to_json()).annealing_from == 32
    without = ControllerState()
    without.begin_annealing(0.0, batch=8, consumed_samples=1000, total_samples=1000)
    assert without.annealing_from is None and without.batch_of_rate(512) == 512


def test_decisions_keep_up_with_the_end() -> None:
    flags = CopusConfig(copus=True, copus_anneal_by_batch=SHARE)
    config: Any = SimpleNamespace(batch=SimpleNamespace(train_samples=TOTAL, seq_length=32))
    for last, samples in ((100_000, 20 * 64), (996_000, 500), (999_900, 64)):
        found = rules.samples_to_decision(
            flags, config, 64, ControllerState(last_decision_samples=last)
        )
        assert found == samples


@pytest.mark.parametrize(
    ("flags", "style", "says"),
    [
        ({"copus_anneal_by_batch": 1.0}, "constant", "at least 0 and below 1"),
        ({"copus_anneal_by_batch": -0.1}, "constant", "at least 0 and below 1"),
        ({"copus_anneal_by_batch": 0.1, "copus_policy": "static"}, "constant", "--copus-policy"),
        ({"copus_anneal_by_batch": 0.1}, "cosine", "--lr-decay-style constant"),
    ],
)
def test_it_is_for_constant_rates(flags: dict[str, Any], style: str, says: str) -> None:
    given = CopusConfig(copus=True, **flags)
    config: Any = SimpleNamespace(
        batch=SimpleNamespace(step_batch_size_schedule=None, rampup_batch_size=None),
        optim=SimpleNamespace(lr_decay_style=style),
    )
    with pytest.raises(UsageError, match=says) as error:
        rules.check(given)
        rules.check_run(given, config)
    assert "anneal_by_batch" in str(error.value) and "\n" not in str(error.value)
