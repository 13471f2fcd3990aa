"""The controller's state and journal: what they keep, what they grade, and how they are stored."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from copus_ext.controller.decision_log import (
    NAME,
    DecisionLog,
    read_journal,
)
from copus_ext.cost_model.conditions import Timings
from copus_ext.cost_model.constants import USUAL, PartFactors
from copus_ext.goodput.conditions import Conditions
from copus_ext.goodput.config_change import ConfigChange
from copus_ext.goodput.costs import MAX_FAILURES, LayoutChangeCosts, PendingRelaunch
from copus_ext.goodput.lr_scaling import Ramp
from copus_ext.goodput.messages import summary
from copus_ext.goodput.state import (
    TIMED_STEPS,
    VERSION,
    WINDOW_STEPS,
    ControllerState,
    config_key,
)
from copus_ext.monitor.journal import DecisionHistory
from copus_ext.planner.configuration import Configuration
from megatron.trainer.common.train_state import TrainState
from megatron.trainer.config.layout import Layout
from tests.helpers.recorded import record_decisions

EIGHT = Configuration(layout=Layout(dp=2), micro_batch_size=1, global_batch_size=8)


def filled(number: int, *, state: ControllerState | None = None, **how: Any) -> ControllerState:
    """A state after some more steps of 8 samples with a loss near 3, unless `how` differs."""
    state = state or ControllerState()
    batch, loss, seconds = how.get("batch", 8), how.get("loss", 3.0), how.get("seconds", 0.1)
    at = state.steps[-1].consumed_samples if state.steps else 0
    for i in range(number):
        state.record_step(
            key=config_key("tp1.pp1.dp2", 1, batch),
            consumed_samples=at + (i + 1) * batch,
            batch=batch,
            loss=loss + 0.01 * (i % 2),
            seconds=seconds,
            end_s=how.get("end_s"),
        )
    return state


def grown(state: ControllerState, **values: Any) -> ControllerState:
    """The same after a growth from 8 to 16."""
    known: dict[str, Any] = {"from_batch": 8, "to_batch": 16, "predicted_samples_per_s": 100.0}
    known |= {"from_layout": "tp1.pp1.dp2", "to_layout": "tp1.pp1.dp2"}
    known |= {"from_micro_batch": 1, "to_micro_batch": 1, "consumed_samples": 480, "gain": 0.1}
    ramp = Ramp(start_iteration=60, num_steps=20, start=1.0, end=2**0.5)
    change = ConfigChange(**{"decision": 1, **known, **values})
    state.apply(change, ramp=ramp)
    return state


def test_step_times_need_a_warm_up_and_some_steps_and_few_are_kept() -> None:
    assert filled(7).measured_step_time(EIGHT) is None
    state = filled(8)
    assert state.measured_step_time(EIGHT) == (pytest.approx(0.1), pytest.approx(0), 5)
    filled(500, state=state)
    assert (
        len(state.steps) <= 2 * WINDOW_STEPS
        and len(state.step_times["tp1.pp1.dp2 1 8"]) == TIMED_STEPS
    )
    # The first steps of a launch are not timed.
    resumed = ControllerState.from_json(json.loads(json.dumps(state.to_json())))
    filled(3, state=resumed, seconds=30.0)
    assert resumed.measured_step_time(EIGHT) == state.measured_step_time(EIGHT)
    assert state.timed_layouts == [Layout(dp=2)]


def test_the_end_of_a_step_is_known_as_its_time_is_and_forgotten_with_the_conditions() -> None:
    assert filled(7, end_s=0.02).end_share(EIGHT) is None and filled(8).end_share(EIGHT) is None
    state = filled(8, state=filled(20, end_s=0.03), end_s=0.02)
    resumed = ControllerState.from_json(json.loads(json.dumps(state.to_json())))
    assert resumed.end_share(EIGHT) == state.end_share(EIGHT) == pytest.approx(0.3)
    filled(500, state=state, end_s=0.02)
    assert state.end_share(EIGHT) == pytest.approx(0.2)
    # No clock gives an end that is longer than the step, or none at all.
    assert filled(8, end_s=0.1).end_share(EIGHT) is None
    slow = PartFactors(dp=2.0)
    state.set_conditions(slow, {}, present=config_key("tp1.pp1.dp2", 1, 8), shift=None)
    assert state.measured_step_time(EIGHT) is not None and state.end_share(EIGHT) is None


def test_the_outcome_of_a_change_is_measured_when_enough_steps_have_followed() -> None:
    state = grown(filled(60))
    assert (state.global_batch_size, state.num_changes) == (16, 1)
    assert state.is_in_ramp(61) and not state.is_in_ramp(79)
    filled(WINDOW_STEPS - 1, state=state, batch=16, loss=2.9, seconds=0.2)
    assert state.record_outcome() is None
    filled(1, state=state, batch=16, loss=2.9, seconds=0.2)
    outcome = state.record_outcome()
    assert outcome is not None and state.record_outcome() is None
    assert outcome.samples_per_s_before == pytest.approx(80.0)
    assert outcome.samples_per_s == pytest.approx(80.0)
    assert outcome.speed_over_predicted == pytest.approx(0.8)
    assert outcome.loss_rise == pytest.approx(-0.095, abs=0.01)
    json.dumps(outcome.to_json(), allow_nan=False)
    assert state.changes == [outcome]
    lines = summary(state.changes, mode="act").splitlines()
    assert lines[0] == "copus: 1 change decided" and len(lines) == 2
    resumed = summary(state.changes, mode="act", num_before=1)
    assert resumed == "copus: nothing was changed in this launch; 1 change before"


def test_a_change_whose_outcome_is_measured_after_a_resume_is_none_of_that_launch() -> None:
    state = grown(filled(60), iteration=60)
    filled(10, state=state, batch=16, loss=2.9, seconds=0.2)
    state = ControllerState.from_json(json.loads(json.dumps(state.to_json())))
    filled(10, state=state, batch=16, loss=2.9, seconds=0.2)
    assert state.record_outcome(now=True) is not None
    told = summary(state.changes, mode="act", num_before=1)
    assert told == "copus: nothing was changed in this launch; 1 change before"
    assert len(summary(state.changes, mode="act", num_before=0).splitlines()) == 2


@pytest.mark.parametrize(
    ("pending", "line"),
    [
        (False, "copus: nothing was changed in this launch; 1 change before"),
        (True, "copus: 1 change decided"),
    ],
)
def test_a_change_belongs_to_the_launch_that_made_it_or_was_started_for_it(
    pending: bool, line: str
) -> None:
    """A launch may begin at the very step before which another has changed and stopped."""
    state = grown(filled(60), iteration=60)
    if pending:
        sizes = {"start": "tp1.pp1.dp2", "to": "tp2.pp1.dp1"}
        state.layout_costs.pending_relaunch = PendingRelaunch(number=1, time=0.0, **sizes)
    state = ControllerState.from_json(json.loads(json.dumps(state.to_json())))
    before = state.num_changes_before
    filled(10, state=state, batch=16, loss=2.9, seconds=0.2)
    state.record_outcome(now=True)
    assert summary(state.changes, mode="act", num_before=before).splitlines()[0] == line


def test_what_is_no_longer_kept_of_changes_still_counts() -> None:
    state = grown(filled(60), iteration=60)
    state.record_outcome(now=True)
    told = summary(state.changes, mode="act", num_before=500, total=501).splitlines()
    assert told[0] == "copus: 1 change decided in this launch; 500 changes before"
    assert len(told) == 2


def test_one_step_is_no_outcome() -> None:
    state = grown(filled(60))
    filled(4, state=state, batch=16, seconds=2.0)
    outcome = state.record_outcome(now=True)
    assert outcome is not None and outcome.steps == 4
    # The warm-up, and one slow step that nothing confirms.
    assert (outcome.samples_per_s, outcome.timed_after) == (None, [])
    assert outcome.speed_over_predicted is None
    assert outcome.samples_per_s_before == pytest.approx(80.0)
    assert "then too few steps to tell" in summary([outcome], mode="act")


def held(state: ControllerState) -> int | None:
    """Until when a spike holds the direction of the batch, after the last step."""
    found = state.hold_batch_after_spike(
        consumed_samples=600, half_life_samples=1000.0, total_samples=10**6
    )
    if found is None:
        return None
    return state.hold_growth_until_samples if found.grew else state.hold_shrinking_until_samples


def test_a_loss_spike_after_growth_holds_growth_and_the_second_one_for_good() -> None:
    assert held(filled(60)) is None
    state = grown(filled(60))
    assert held(filled(3, state=state, batch=16, loss=3.02)) is None
    assert held(filled(1, state=state, batch=16, loss=3.6)) == 2600
    assert held(state) is None, "a spike counts once"
    state.record_outcome(now=True)
    grown(filled(60, state=state, batch=16), from_batch=16, to_batch=32)
    assert held(filled(1, state=state, batch=32, loss=math.nan)) == 10**6
    outcome = state.record_outcome(now=True)
    assert outcome is not None and outcome.spiked
    json.dumps(outcome.to_json(), allow_nan=False)


def test_a_spike_counts_whatever_else_changes_after_the_batch_and_across_a_checkpoint() -> None:
    state = filled(12, state=grown(filled(60)), batch=16)
    trial = {"from_batch": 16, "to_batch": 16, "to_micro_batch": 2, "decision": 2}
    state.record_outcome(now=True)
    grown(state, **trial)
    state = ControllerState.from_json(json.loads(json.dumps(state.to_json())))
    assert held(filled(7, state=state, batch=16)) is None
    assert held(filled(1, state=state, batch=16, loss=3.6)) == 2600
    assert [c.spiked for c in state.changes] == [True], "of the growth"
    assert state.open_change is not None and not state.open_change.spiked


def test_calm_growth_ends_a_row_of_spikes() -> None:
    for calm, until in ((25, 2600), (10, 10**6)):
        state = grown(filled(60))
        assert held(filled(1, state=state, batch=16, loss=3.6)) == 2600
        grown(filled(60, state=state, batch=16), from_batch=16, to_batch=32, decision=2)
        assert held(filled(calm, state=state, batch=32)) is None
        grown(state, from_batch=32, to_batch=64, decision=3)
        assert held(filled(1, state=state, batch=64, loss=3.9)) == until


def test_a_spike_after_a_shrink_holds_shrinking_alone() -> None:
    shrink: dict[str, Any] = {"from_batch": 32, "to_batch": 8}
    state = grown(filled(60, batch=32), **shrink)
    assert held(filled(1, state=state, loss=3.02)) is None
    assert held(filled(1, state=state, loss=3.6)) == 2600
    assert state.hold_growth_until_samples == 0 and state.consecutive_spikes == 0


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("growth", "the loss spiked after the batch grew; no growth until sample 600"),
        ("shrinking", "the loss spiked after the batch shrank; no shrinking until sample 600"),
    ],
)
def test_the_report_says_what_a_spike_holds_back(name: str, line: str) -> None:
    history = DecisionHistory()
    history.add(0, {"kind": "spike", "iteration": 7, f"hold_{name}_until_samples": 600})
    assert [note.line for note in history.notes] == [line]


def test_times_of_a_slow_launch_do_not_count_in_the_next() -> None:
    for factors, known in ((USUAL, True), (dataclasses.replace(USUAL, compute=1.5), False)):
        state = filled(20)
        state.conditions.factors, state.conditions.num_changes = factors, 1
        state.begin_launch(Timings())
        assert (state.measured_step_time(EIGHT) is not None) == known
        assert state.conditions == Conditions()


def test_a_change_of_layout_costs_the_most_of_the_last_three() -> None:
    costs = LayoutChangeCosts(prior_s=7.0)
    assert costs.seconds == 7.0
    for seconds in (9.0, 1.0, 2.0, 3.0):
        costs.record_success(seconds=seconds)
    assert costs.seconds == 3.0
    assert costs.paused_s == 15.0


def test_failures_block_the_pair_and_then_every_change_of_layout() -> None:
    a, b, costs = Layout(dp=4), Layout(pp=2, dp=2), LayoutChangeCosts()
    costs.record_failure(a, b, "no room", seconds=2.0)
    assert costs.blocked_layouts(a) == (Layout(pp=2, dp=2),)
    assert costs.blocked_layouts(b) == () and not costs.has_given_up
    for _ in range(MAX_FAILURES - 1):
        costs.record_failure(a, b, "no room", seconds=2.0)
    assert costs.has_given_up and costs.paused_s == 2.0 * MAX_FAILURES
    assert LayoutChangeCosts.from_json(json.loads(json.dumps(asdict(costs)))) == costs
    costs.forget_failures()
    assert not costs.has_given_up and costs.blocked_layouts(a) == ()
    costs.block(b, "the run crashed in it")
    assert costs.blocked_layouts(a) == costs.blocked_layouts(b) == (Layout(pp=2, dp=2),)


def test_a_checkpoint_holds_the_state_as_plain_json() -> None:
    state = filled(5, state=grown(filled(60)), batch=16)
    state.layout_costs.record_failure(Layout(dp=4), Layout(pp=2, dp=2), "no room", seconds=2.0)
    train_state = TrainState(callbacks={"copus_control": state})
    stored = json.loads(json.dumps(train_state.to_json()))["callbacks"]["copus_control"]
    assert ControllerState.from_json(stored) == state
    for other in (0, VERSION - 1, VERSION + 1, None):
        words = f"it has version {other}, and this copus reads {VERSION}"
        with pytest.raises(ValueError, match=words):
            ControllerState.from_json({**stored, "version": other})


def test_a_journal_outlives_a_line_cut_short(tmp_path: Path) -> None:
    journal = DecisionLog(tmp_path)
    assert journal.path is not None
    journal.write("start", iteration=0)
    with journal.path.open("a") as file:
        file.write('{"kind": "decisi')
    journal.write("end", iteration=5)
    assert [r["kind"] for r in read_journal(journal.path)] == ["start", "end"]
    with pytest.raises(ValueError):
        journal.write("decision", gain=math.inf)
    journal.note("decision", gain=math.inf)
    assert [r["kind"] for r in read_journal(journal.path)] == ["start", "end"]
    DecisionLog(None).write("start")
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_numbers_for_the_sinks_are_worth_no_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **named: Any) -> dict[str, float]:
        raise OverflowError("math range error")

    for name in ("decision_scalars", "outcome_scalars"):
        monkeypatch.setattr(f"copus_ext.controller.decision_log.{name}", broken)
    log = record_decisions(tmp_path)
    kinds = [record["kind"] for record in read_journal(tmp_path / NAME)]
    assert kinds == ["start", "decision", "outcome", "decision"]
    assert log.take_scalars() == {} and "math range error" in caplog.text


def test_decisions_are_due_after_an_interval_and_where_a_schedule_asks() -> None:
    state = ControllerState()
    state.record_decision(consumed_samples=32, scheduled=None)
    assert state.num_decisions == 1
    due: dict[str, Any] = {"batch": 8, "every_samples": 100}
    assert not state.is_due(consumed_samples=131, scheduled=None, **due)
    assert state.is_due(consumed_samples=132, scheduled=None, **due)
    assert state.is_due(consumed_samples=40, scheduled=16, **due)
    state.postpone(consumed_samples=40, scheduled=16)
    assert not state.is_due(consumed_samples=48, scheduled=16, **due)
