"""The controller's answer to steps that have become slower: timed links, parts, journal, table."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from copus_ext.controller import conditions_check
from copus_ext.controller.conditions_check import have_conditions_changed
from copus_ext.controller.decision_log import NAME, DecisionLog, read_journal
from copus_ext.controller.link_timing import Link
from copus_ext.controller.throughput_table import ThroughputTable
from copus_ext.cost_model.conditions import Timings
from copus_ext.cost_model.constants import USUAL, PartFactors
from copus_ext.goodput.conditions import CHECK_STEPS, Conditions
from copus_ext.goodput.messages import conditions_line
from copus_ext.goodput.state import ControllerState, key_of
from copus_ext.monitor.journal import DecisionHistory
from copus_ext.planner.profile import ProfileStore, Timing
from megatron.trainer.config.layout import Layout
from tests.unit.test_controller_parts import config, flags

pytestmark = pytest.mark.unit
USUAL_TIMES = Timings(ring_s=0.01, compute_s=0.01)
HERE, THERE = Layout(dp=2), Layout(pp=2)


def table(factors: PartFactors = USUAL, **more: Any) -> ThroughputTable:
    """Two nodes of one rank."""
    link = Link(bytes_per_s=1e6)
    return ThroughputTable(
        config(), flags(copus_layouts="all", **more), gpu=None, link=link, factors=factors
    )


def rows(one: ThroughputTable, state: ControllerState) -> dict[Layout, Any]:
    found, _ = one.rows(
        [8],
        micro_batch_size=1,
        global_batch_size=8,
        measured=state.measured_step_time,
        visited=state.timed_layouts,
        earlier_s=state.conditions.earlier_s,
    )
    return {row.layout: row for row in found if row.micro_batch_size == 1}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[Timings]:
    """One rank; the timings of the machine come from this list."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    timings: list[Timings] = []
    monkeypatch.setattr(conditions_check, "time_machine", lambda device: timings.pop(0))
    monkeypatch.setattr(conditions_check, "broadcast_from_rank0", lambda value: value)
    monkeypatch.setattr(conditions_check.dist, "get_rank", lambda: 0)
    return timings


def train(
    state: ControllerState, now: ThroughputTable, log: DecisionLog, key: str, seconds: list[float]
) -> int:
    """Steps until conditions have changed; how many were taken."""
    for i, step_s in enumerate(seconds):
        state.record_step(key=key, consumed_samples=8 * i, batch=8, loss=1.0, seconds=step_s)
        if have_conditions_changed(state, now, log, key=key, iteration=i, device="cpu"):
            return i + 1
    return len(seconds)


def test_a_slow_network_is_noticed_timed_and_taken_into_every_prediction(
    alone: list[Timings], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    usual, slow = table(), replace(USUAL, across=4.0)
    here, there = map(usual.configuration_of, ["tp1.pp1.dp2 1 8", "tp1.pp2.dp1 1 8"])
    assert (here.layout, there.layout) == (HERE, THERE)
    times = {c: usual.raw_step_s(c, USUAL) for c in (here, there)}
    state, log = ControllerState(), DecisionLog(tmp_path)
    state.conditions = Conditions(usual=USUAL_TIMES)
    state.step_times = {key_of(there): [2 * times[there]] * 9}  # slower than predicted
    assert train(state, usual, log, key_of(here), [times[here]] * 50) == 50
    before = rows(usual, state)

    alone.append(replace(USUAL_TIMES, ring_s=0.04))
    after_s = usual.raw_step_s(here, slow)
    assert train(state, usual, log, key_of(here), [after_s] * 50) <= 20
    assert state.conditions.factors == slow
    expected = 2 * usual.raw_step_s(there, slow)
    assert state.conditions.earlier_s == {key_of(there): pytest.approx(expected)}
    assert set(state.step_times) == {key_of(here)}

    now = usual.under(state.conditions.factors)
    after = rows(now, state)
    assert after == rows(table(state.conditions.factors), state)
    assert 8 / after[HERE].samples_per_s == pytest.approx(after_s, rel=0.02)
    assert 8 / after[THERE].samples_per_s == pytest.approx(expected, rel=0.1)
    assert after[HERE].source == "measured" != after[THERE].source
    assert before[THERE].source == "measured"
    record = list(read_journal(tmp_path / NAME))[-1]
    assert record["kind"] == "conditions" and record["factors"] == asdict(slow)
    assert record["after_s"] == pytest.approx(after_s)
    line = capsys.readouterr().out.strip()
    assert line.startswith("copus: steps took ") and line.count("\n") == 0
    assert line.endswith("links were timed again: the network 4.00 times the usual time")
    # While it lasts links are timed again and again; when they are as usual, all is.
    alone.append(USUAL_TIMES)
    assert train(state, now, log, key_of(here), [after_s] * CHECK_STEPS) == CHECK_STEPS
    assert state.conditions.factors == USUAL and not alone
    back = 2 * usual.raw_step_s(there, USUAL)
    assert state.conditions.earlier_s[key_of(there)] == pytest.approx(back)
    num = 2 * CHECK_STEPS  # nothing is timed any more
    assert train(state, usual, log, key_of(here), [after_s] * num) == num
    history = DecisionHistory()
    for place, one in enumerate(read_journal(tmp_path / NAME)):
        history.add(place, one)
    assert [f"copus: {note.line}" for note in history.notes][:1] == [line]


@pytest.mark.parametrize("ratio", [1.06, 1 / 1.06])
def test_after_a_small_change_of_all_steps_what_was_timed_stays_measured(
    alone: list[Timings], tmp_path: Path, ratio: float
) -> None:
    usual = table()
    here, there = map(usual.configuration_of, ["tp1.pp1.dp2 1 8", "tp1.pp2.dp1 1 8"])
    times = {c: usual.raw_step_s(c, USUAL) for c in (here, there)}
    state, log = ControllerState(), DecisionLog(tmp_path)
    state.conditions = Conditions(usual=USUAL_TIMES, earlier_s={"tp2.pp1.dp1 1 8": 4.0})
    state.step_times = {key_of(there): [2 * times[there]] * 9}
    assert train(state, usual, log, key_of(here), [times[here]] * 50) == 50
    before = rows(usual, state)
    alone.append(USUAL_TIMES)
    assert train(state, usual, log, key_of(here), [ratio * times[here]] * 50) == 50
    assert not alone and state.conditions.factors == USUAL and not state.conditions.num_changes
    assert state.conditions.earlier_s == {"tp2.pp1.dp1 1 8": pytest.approx(4.0 * ratio)}
    after = rows(usual, state)
    for layout in (HERE, THERE):
        assert after[layout].source == "measured"
        assert before[layout].samples_per_s / after[layout].samples_per_s == pytest.approx(
            ratio, rel=0.005
        )
    assert list(read_journal(tmp_path / NAME))[-1]["kind"] == "conditions"


def test_links_that_are_timed_again_as_they_were_change_nothing(
    alone: list[Timings], tmp_path: Path
) -> None:
    slow = replace(USUAL, across=1.3)
    one, key = table(slow), "tp1.pp1.dp2 1 8"
    state, log = ControllerState(), DecisionLog(tmp_path)
    state.conditions = Conditions(usual=USUAL_TIMES, factors=slow)
    state.step_times["tp1.pp2.dp1 1 8"] = [1.0] * 9
    alone += [replace(USUAL_TIMES, ring_s=0.01 * x) for x in (1.33, 1.25, 1.2)]
    num = 3 * CHECK_STEPS
    assert train(state, one, log, key, [1.0] * num) == num and not alone
    assert state.conditions.factors == slow and len(state.step_times) == 2
    alone.append(replace(USUAL_TIMES, ring_s=0.0113))
    assert train(state, one, log, key, [1.0] * CHECK_STEPS) == CHECK_STEPS
    assert state.conditions.factors == USUAL and set(state.step_times) == {key}


def test_a_change_that_is_under_way_when_links_are_due_counts_once(
    alone: list[Timings], tmp_path: Path
) -> None:
    """The network is back six steps before links would have been timed again."""
    slow = replace(USUAL, across=4.0)
    now, log = table(slow), DecisionLog(tmp_path)
    here, there = map(now.configuration_of, ["tp1.pp1.dp2 1 8", "tp1.pp2.dp1 1 8"])
    state = ControllerState()
    state.conditions = Conditions(usual=USUAL_TIMES, factors=slow)
    state.step_times[key_of(there)] = [1.0] * 9
    before_s, after_s = (now.raw_step_s(here, f) for f in (slow, USUAL))
    alone.append(USUAL_TIMES)
    seconds = [before_s] * (CHECK_STEPS - 6) + [after_s] * 60
    taken = train(state, now, log, key_of(here), seconds)
    assert CHECK_STEPS < taken < CHECK_STEPS + 25 and not alone
    assert state.conditions.factors == USUAL
    expected = now.raw_step_s(there, USUAL) / now.raw_step_s(there, slow)
    assert state.conditions.earlier_s == {key_of(there): pytest.approx(expected)}
    assert state.step_times[key_of(here)][-1] == pytest.approx(after_s)


def test_an_error_leaves_predictions_as_they_are(
    alone: list[Timings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **more: Any) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(conditions_check, "factors_after", broken)
    state, alone[:] = ControllerState(), [USUAL_TIMES]
    state.conditions = Conditions(usual=USUAL_TIMES)
    state.step_times["tp1.pp2.dp1 1 8"] = [1.0] * 9
    log, key = DecisionLog(tmp_path), "tp1.pp1.dp2 1 8"
    assert train(state, table(), log, key, [1.0] * 50 + [2.0] * 50) < 75
    assert state.conditions.factors == USUAL and set(state.step_times) == {key}


def test_a_run_without_predictions_forgets_what_it_measured_before(
    alone: list[Timings], tmp_path: Path
) -> None:
    state, alone[:] = ControllerState(), [USUAL_TIMES]
    state.step_times["tp1.pp1.dp2 1 16"] = [1.0] * 9
    key = "tp1.pp1.dp2 1 8"
    unknown = ThroughputTable(config(), flags(), gpu=("Unheard-of GPU", 1000.0))
    log = DecisionLog(tmp_path)
    assert train(state, unknown, log, key, [1.0] * 50 + [2.0] * 50) < 75
    assert set(state.step_times) == {key}


def test_a_profile_of_usual_conditions_is_expected_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    usual, slow = table(), replace(USUAL, across=4.0)
    assert usual.planner is not None
    store = ProfileStore(
        tmp_path / "profile.jsonl",
        {"world_size": 2, "gpu": "CPU-rank", "model": usual.planner.model.to_json()},
    )
    c = usual.configuration_of("tp1.pp1.dp2 1 8")
    store.add(Timing(configuration=c, step_s=3.0, num_steps=5))
    known = table(slow, copus_profile=str(store.path))
    ratio = usual.raw_step_s(c, slow) / usual.raw_step_s(c, USUAL)
    assert [t.step_s for t in known.profiled] == [pytest.approx(3.0 * ratio)]
    plain = table(copus_profile=str(store.path))
    assert [t.step_s for t in plain.profiled] == [3.0]


def test_the_line_names_what_is_slow() -> None:
    usual = asdict(USUAL)
    line = conditions_line(before_s=1.0, after_s=2.0, factors={**usual, "compute": 2.0})
    assert line == (
        "steps took 2 s instead of 1 s; links were timed again: computation 2.00 times the "
        "usual time"
    )
    small = conditions_line(before_s=1.0, after_s=1.05, factors=usual)
    assert small.endswith("s instead of 1 s; links were timed again: no part of a step stands out")
    again = conditions_line(before_s=None, after_s=None, factors=usual)
    assert again == "links were timed again: all is as usual"
