"""Which steps tell the speed of a configuration, and what an outcome is measured over."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from copus_ext.cost_model.conditions import Timings
from copus_ext.goodput.config_change import ConfigChange, config_key
from copus_ext.goodput.messages import summary
from copus_ext.goodput.state import ControllerState
from copus_ext.goodput.step_records import usual_step_s
from copus_ext.monitor.journal import DecisionHistory
from copus_ext.planner.configuration import Configuration
from megatron.trainer.config.layout import Layout

HERE, THERE = "tp1.pp1.dp2", "tp1.pp2.dp1"


def key(batch: int = 8, micro: int = 1, layout: str = HERE) -> str:
    return config_key(layout, micro, batch)


def run(state: ControllerState, times: list[float], *, of: str = "", **more: Any) -> None:
    """Steps of one configuration, of 8 samples or as its key says."""
    of = of or key()
    batch = int(of.split()[2])
    for seconds in times:
        last = state.steps[-1] if state.steps else None
        state.record_step(
            key=of,
            iteration=(last.iteration if last else 0) + 1,
            consumed_samples=(last.consumed_samples if last else 0) + batch,
            batch=batch,
            loss=2.0,
            seconds=seconds,
            **more,
        )


def measured(state: ControllerState, of: str = "") -> tuple[float, float, int] | None:
    layout, micro, batch = (of or key()).split()
    c = Configuration(
        layout=Layout.from_text(layout), micro_batch_size=int(micro), global_batch_size=int(batch)
    )
    return state.measured_step_time(c)


def change(state: ControllerState, to: str, of: str = "", **more: Any) -> ConfigChange:
    last = state.steps[-1]
    sides = [text.split() for text in (of or last.key, to)]
    made = ConfigChange(
        decision=state.num_changes + 1,
        iteration=last.iteration,
        consumed_samples=last.consumed_samples,
        from_batch=int(sides[0][2]),
        to_batch=int(sides[1][2]),
        from_micro_batch=int(sides[0][1]),
        to_micro_batch=int(sides[1][1]),
        from_layout=sides[0][0],
        to_layout=sides[1][0],
        **more,
    )
    state.apply(made, ramp=None)
    return made


@pytest.mark.parametrize("num_slow", [3, 5, 8, 15])
def test_slow_first_steps_are_no_measurement(num_slow: int) -> None:
    """Of a start, a resume, and a change; also where more of them are slow than usual."""
    state = ControllerState()
    run(state, [1.0] * num_slow + [0.1] * 12)
    assert measured(state) == (pytest.approx(0.1), pytest.approx(0.0), 12)
    assert [s.is_timed for s in state.steps] == [False] * num_slow + [True] * 12
    assert not state.watch.reference or max(state.watch.reference) < -2.0
    resumed = ControllerState.from_json(json.loads(json.dumps(state.to_json())))
    resumed.begin_launch(Timings())
    run(resumed, [2.0] * num_slow + [0.1] * 12)
    assert resumed.step_times[key()] == [0.1] * len(resumed.step_times[key()])
    for to in (key(16), key(8, 2), key(layout=THERE)):
        run(resumed, [2.0] * num_slow + [0.2] * 12, of=to)
        assert measured(resumed, to) == (pytest.approx(0.2), pytest.approx(0.0), 12)
    resumed.begin_visit()  # a change of the layout was rolled back
    run(resumed, [3.0] * 3, of=key(layout=THERE))
    assert measured(resumed, key(layout=THERE)) == (pytest.approx(0.2), pytest.approx(0.0), 12)


def test_a_late_slow_step_is_a_time_like_any_other() -> None:
    state = ControllerState()
    run(state, [0.1] * 12 + [1.0] + [0.1] * 10)
    assert state.steps[12].is_timed and len(state.step_times[key()]) == 20


def test_a_step_that_was_skipped_counts_nowhere() -> None:
    state = ControllerState()
    run(state, [0.01] * 20, updated=False)
    due: dict[str, Any] = {"batch": 8, "scheduled": None, "every_samples": 40.0}
    assert not state.step_times and state.steps_after_change == 0
    assert not state.is_due(consumed_samples=160, **due)
    run(state, [0.1] * 4)
    assert not state.is_due(consumed_samples=192, **due), "only 32 samples have trained anything"
    run(state, [0.1] * 4)
    assert measured(state) == (pytest.approx(0.1), pytest.approx(0.0), 8)
    assert state.is_due(consumed_samples=224, **due)
    run(state, [0.1], updated=False)
    assert not state.is_due(consumed_samples=232, **due), "nothing is decided after it"


def test_an_outcome_compares_the_configurations_before_and_after_by_one_clock() -> None:
    state = ControllerState()
    run(state, [0.5] * 30, of=key(4))
    run(state, [0.1] * 10)
    run(state, [9.0], updated=False)
    change(state, key(16), predicted_samples_per_s=100.0)
    run(state, [5.0] * 3 + [0.16] * 20, of=key(16))
    run(state, [8.0], of=key(16), updated=False)
    # The last step of a phase or run may be smaller.
    run(state, [0.01], of=key(6))
    outcome = state.record_outcome(now=True)
    assert outcome is not None and outcome.samples_per_s_before == pytest.approx(80.0)
    assert outcome.timed_before == [34, 40, 7] and outcome.timed_after == [45, 64, 20]
    assert outcome.samples_per_s == pytest.approx(100.0)
    assert outcome.speed_over_predicted == pytest.approx(1.0)
    (_, line) = summary([outcome], mode="act").splitlines()
    assert "80.0 samples/s in steps 34 to 40, then 100.0 samples/s in steps 45 to 64" in line


def test_steps_that_measure_the_noise_count_on_both_sides_or_on_none() -> None:
    for others, speeds in ((5, (80.0, 160.0)), (4, (64.0, 128.0))):
        state = ControllerState()
        run(state, [0.125] * 20, measures_noise=True)
        run(state, [0.1] * 10)
        change(state, key(16))
        run(state, [0.125] * 23, of=key(16), measures_noise=True)
        run(state, [0.1] * others, of=key(16))
        outcome = state.record_outcome(now=True)
        assert outcome is not None
        got = outcome.samples_per_s_before, outcome.samples_per_s
        assert got == pytest.approx(speeds), others


def test_what_nothing_was_timed_of_is_not_compared() -> None:
    state = ControllerState()
    run(state, [0.1] * 2)
    change(state, key(16), predicted_samples_per_s=None, gain=0.5, gain_sd=0.1)
    run(state, [0.2] * 2, of=key(16))
    outcome = state.record_outcome(now=True)
    assert outcome is not None
    assert outcome.samples_per_s is outcome.samples_per_s_before is None
    assert outcome.speed_over_predicted is None
    (_, line) = summary([outcome], mode="act").splitlines()
    assert "measured" not in line and "predicted goodput +50.0 +- 15.0 %" in line
    # 0 where the doubt did not count.
    (_, line) = summary([replace(outcome, gain_sd=0.0)], mode="act").splitlines()
    assert "predicted goodput +50.0 %" in line


def test_a_launch_elsewhere_ends_the_outcome() -> None:
    state = ControllerState()
    run(state, [0.1] * 10)
    change(state, key(16))
    assert not state.has_left(key(16))
    assert all(map(state.has_left, (key(8), key(16, 2), key(16, layout=THERE))))
    state.record_outcome(now=True)
    assert not state.has_left(key(8))


def records() -> list[dict[str, Any]]:
    """A change whose outcome three launches measure, and another that a restart undoes."""
    where = {"from_layout": HERE, "to_layout": HERE, "from_micro_batch": 1, "to_micro_batch": 1}
    outcome = {"kind": "outcome", "decision": 1, "iteration": 10, "from_batch": 8, "to_batch": 16}
    other = {**outcome, "decision": 2, "iteration": 40, "from_batch": 16, "to_batch": 32}
    start = {"kind": "start", "layout": HERE, "mode": "act"}
    return [
        {**start, "iteration": 0},
        {**outcome, **where, "samples_per_s": 1.0},
        {**start, "iteration": 30},
        {**outcome, **where, "samples_per_s": 2.0},
        {**other, **where},
        {**start, "iteration": 20},
        {**outcome, **where, "samples_per_s": 3.0},
    ]


def test_a_change_is_listed_once_over_restarts() -> None:
    history = DecisionHistory()
    for i, record in enumerate(records()):
        history.add(i, record)
    assert [(o.number, o.iteration, o.speed) for o in history.outcomes] == [(1, 10, 3.0)]


def test_a_step_counts_with_the_means_of_whole_periods() -> None:
    steps = [1.0, 1.0, 4.0] * 3 + [1.0, 1.0]
    assert usual_step_s(steps, 3) == pytest.approx(2.0)
    assert usual_step_s([*steps[:5], 50.0, *steps[6:]], 3) == pytest.approx(2.0), "an outlier"
    assert usual_step_s(steps, 1) == 1.0
    assert usual_step_s(steps[:2], 3) == 1.0, "no whole period yet"
