"""When a part of the machine becomes slow, the run learns which, and takes the layout that is best
then; and it comes back."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import asdict, astuple, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from copus_ext.cost_model.cluster_spec import preset as cluster
from copus_ext.cost_model.conditions import (
    Timed,
    Timings,
    explanations,
    factors_after,
    judged,
)
from copus_ext.cost_model.constants import USUAL, Constants, PartFactors
from copus_ext.cost_model.models import PRESETS
from copus_ext.cost_model.step import min_step_s, step_time
from copus_ext.goodput.conditions import CHECK_STEPS, Conditions, earlier_times
from copus_ext.goodput.state import TIMED_STEPS, ControllerState
from copus_ext.goodput.step_time_watch import FIRST_STEPS, MIN_STEPS
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.search import Planner
from copus_ext.planner.space import points_of, to_config_batch
from megatron.trainer.config.layout import Layout

pytestmark = pytest.mark.unit
PARTS = ("compute", "tp", "pp", "dp")


def seconds(parts: np.ndarray, factors: PartFactors) -> np.ndarray:
    """Of rows of a synthetic table."""
    return parts @ np.array(astuple(factors)[: len(PARTS)])


@pytest.mark.parametrize("part", PARTS)
def test_the_layout_after_a_part_became_slow_is_the_best_of_the_true_table(part: str) -> None:
    right = []
    for seed in range(150):
        random = np.random.default_rng([seed, PARTS.index(part)])
        num = int(random.integers(4, 10))
        compute = random.uniform(0.95, 1.25, (num, 1))
        messages = random.exponential(0.25, (num, 3)) * (random.random((num, 3)) < 0.7)
        table = np.hstack([compute, messages])
        now = int(np.argmin(table.sum(axis=1)))
        truth = replace(USUAL, **{part: 4.0})
        ratio = float(seconds(table[now], truth) / table[now].sum())
        if math.log(ratio) < 0.04:
            continue  # nobody would notice
        timed = Timed(
            link=4.0 if part in ("pp", "dp") else 1.0, compute=4.0 if part == "compute" else 1.0
        )
        noise = math.exp(0.01 * random.standard_normal())
        found = judged(
            explanations(
                lambda f, now=now, table=table: float(seconds(table[now], f)),
                ratio=ratio * noise,
                timed=timed,
            )
        )
        chosen = int(np.argmin(seconds(table, found)))
        right.append(chosen == int(np.argmin(seconds(table, truth))))
    assert len(right) > 40
    assert np.mean(right) >= 0.9


def test_what_one_number_cannot_tell_is_shared() -> None:
    """Nothing was timed, and two kinds of messages take as long."""
    shares = np.array([0.4, 0.0, 0.3, 0.3])
    ways = explanations(lambda f: float(seconds(shares, f)), ratio=1.6)
    found = judged(ways)
    assert ways[0].weight < 0.5 and sum(way.weight for way in ways) == pytest.approx(1.0)
    alone = 1 + 0.6 / 0.3  # if it were one of them
    assert 1.1 < found.pp < 0.8 * alone and 1.1 < found.dp < 0.8 * alone
    told = Timed(link=alone, compute=1.0)
    sure = judged(explanations(lambda f: float(seconds(shares, f)), ratio=1.6, timed=told))
    assert max(sure.pp, sure.dp) == pytest.approx(alone, rel=0.01)


def test_the_way_back_is_the_way_to_usual_conditions() -> None:
    shares = np.array([0.6, 0.1, 0.1, 0.2])
    slow = replace(USUAL, dp=4.0)

    def predict(f: PartFactors) -> float:
        return float(seconds(shares, f))

    back = predict(USUAL) / predict(slow)
    usual = Timings(ring_s=1.0, compute_s=1.0)
    found = factors_after(predict, ratio=back, now=slow, timings=usual, usual=usual)
    assert found == USUAL


def test_a_timed_link_explains_what_it_can() -> None:
    planner = Planner(
        PRESETS["llama-3.2-3b"].with_seq_length(2048),
        replace(cluster("h100-80g:16"), gpus_per_node=8),
    )
    c = Configuration(
        layout=Layout(tp=2, dp=8),
        micro_batch_size=1,
        global_batch_size=32,
        recompute="none",
        sequence_parallel=True,
        use_distributed_optimizer=True,
    )
    usual, slow = Timings(ring_s=1.0, compute_s=1.0), Timings(ring_s=4.0, compute_s=1.0)

    def predict(f: PartFactors) -> float:
        return planner.raw_step_s(c, f)

    truth = replace(USUAL, across=4.0)
    ratio = predict(truth) / predict(USUAL)
    assert ratio > 1.2
    assert factors_after(predict, ratio=ratio, now=USUAL, timings=slow, usual=usual) == truth
    # The same without a change of steps, and the way back.
    assert factors_after(predict, ratio=None, now=USUAL, timings=slow, usual=usual) == truth
    assert factors_after(predict, ratio=None, now=truth, timings=usual, usual=usual) == USUAL
    within = replace(slow, is_one_node=True)
    found = factors_after(predict, ratio=None, now=USUAL, timings=within, usual=usual)
    assert found == replace(USUAL, within=4.0)


@pytest.mark.parametrize(("timed", "is_back"), [(1.0, True), (1.02, True), (1.12, False)])
def test_computation_is_back_when_the_product_takes_what_it_did(
    timed: float, is_back: bool
) -> None:
    """A run may have changed to another configuration meanwhile, whose steps do not tell."""
    slow = replace(USUAL, compute=1.12)
    usual, now = Timings(ring_s=1.0, compute_s=1.0), Timings(ring_s=1.0, compute_s=timed)
    found = factors_after(lambda f: f.compute, ratio=None, now=slow, timings=now, usual=usual)
    assert found == (USUAL if is_back else slow)


def test_a_link_that_turns_out_slow_is_not_counted_twice() -> None:
    """The ring was fast when steps became slower, and messages of replicas were blamed."""
    blamed = replace(USUAL, dp=3.0)
    usual, now = Timings(ring_s=1.0, compute_s=1.0), Timings(ring_s=3.0, compute_s=1.0)
    found = factors_after(lambda f: f.dp, ratio=None, now=blamed, timings=now, usual=usual)
    assert found == replace(USUAL, across=3.0)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([(1, 1, 1, 16), (2, 1, 1, 8), (1, 4, 1, 4), (2, 2, 2, 4), (8, 2, 1, 1)]),
    st.sampled_from([f.name for f in dataclasses.fields(PartFactors)]),
    st.floats(1.1, 8.0),
    st.booleans(),
)
def test_the_cost_model_prices_a_slow_part(
    sizes: tuple[int, int, int, int], part: str, factor: float, sharded: bool
) -> None:
    tp, pp, vpp, dp = sizes
    c = Configuration(
        layout=Layout(tp=tp, pp=pp, vpp=vpp, dp=dp),
        micro_batch_size=1,
        global_batch_size=64,
        recompute="none",
        sequence_parallel=tp > 1,
        use_distributed_optimizer=sharded,
    )
    machine, model = (
        replace(cluster("h100-80g:16"), gpus_per_node=8),
        PRESETS["llama-3.2-3b"].with_seq_length(2048),
    )
    rows = to_config_batch(model, machine, points_of([c]))
    plain = machine.load_constants()
    now = plain.under(replace(USUAL, **{part: factor}))
    before, after = step_time(rows, plain), step_time(rows, now)
    assert min_step_s(rows, now)[0] <= after.step_s[0] * (1 + 1e-9)
    assert before.step_s[0] <= after.step_s[0] <= factor * before.step_s[0] * (1 + 1e-9)
    if part in ("compute", "tp") and pp == 1:
        assert after.parts[part][0] == pytest.approx(factor * before.parts[part][0])
    if part == "dp" and dp == 1:
        assert after.step_s[0] == before.step_s[0]
    assert plain.under(USUAL) == plain and Constants.from_json(now.to_json() and plain.to_json())


def test_everything_slower_by_one_factor_is_slower_by_it() -> None:
    machine, model = cluster("h100-80g:16"), PRESETS["llama-3.2-3b"].with_seq_length(2048)
    planner = Planner(model, machine)
    c = planner.rank([64], top=5)[0].ranked[0].configuration
    every = PartFactors(compute=3.0, tp=3.0, pp=3.0, dp=3.0)
    assert planner.raw_step_s(c, every) == pytest.approx(3 * planner.raw_step_s(c, USUAL))


def test_times_from_before_are_expected_anew_and_no_longer_measured() -> None:
    state = ControllerState()
    here, there = "tp1.pp1.dp2 1 8", "tp2.pp1.dp1 1 8"
    state.step_times = {here: [1.0] * 9, there: [2.0, 2.2, 1.9], "gone 1 8": [5.0]}
    ratios = {there: 3.0}
    earlier = earlier_times(
        state.step_times, {"older 1 8": 4.0}, present=here, ratio=lambda k: ratios.get(k)
    )
    assert earlier == {there: 6.0}
    for i in range(FIRST_STEPS + 10 + 2 * MIN_STEPS):
        slow = i >= FIRST_STEPS + 10
        state.record_step(
            key=here,
            consumed_samples=8 * i,
            batch=8,
            loss=1.0,
            seconds=(3.0 if slow else 1.0) * (1.01 if i % 2 else 0.99),
        )
        if shift := state.take_shift():
            break
    assert shift is not None and shift.ratio == pytest.approx(3.0, rel=0.05)
    assert state.take_shift() is None
    state.set_conditions(replace(USUAL, dp=4.0), earlier, present=here, shift=shift)
    assert set(state.step_times) == {here} and len(state.step_times[here]) <= TIMED_STEPS
    assert min(state.step_times[here]) > 2.5
    again = ControllerState.from_json(json.loads(json.dumps(state.to_json())))
    assert asdict(again) == asdict(state) and again.conditions.factors.dp == 4.0


def test_links_are_timed_again_only_while_something_is_slow() -> None:
    one = Conditions(steps_since_timed=10 * CHECK_STEPS)
    assert not one.is_check_due
    one.factors = replace(USUAL, across=4.0)
    assert one.is_check_due
    one.steps_since_timed = CHECK_STEPS - 1
    assert not one.is_check_due


def test_timing_links_again_and_again_takes_a_hundredth_of_the_time() -> None:
    one = Conditions(factors=replace(USUAL, across=4.0))
    one.timed(0.4)
    steps = 0
    while not one.is_check_due:
        one.add_step(0.05)
        steps += 1
    assert steps in (800, 801)
    assert Conditions.from_json(json.loads(json.dumps(asdict(one)))) == one


def test_a_launch_begins_without_the_usual_steps_of_another_machine() -> None:
    before, here = Timings(ring_s=1.0, compute_s=1.0), "tp1.pp1.dp2 1 8"
    for now, is_kept in ((before, True), (replace(before, ring_s=2.5), False)):
        state = ControllerState()
        state.begin_launch(before)
        for i in range(60):
            step: dict[str, Any] = {"consumed_samples": 8 * i, "batch": 8, "loss": 1.0}
            state.record_step(key=here, seconds=1.0, **step)
        state.begin_launch(now)
        assert (here in state.step_times) == is_kept
        for _ in range(60):
            state.record_step(key=here, seconds=2.0, **step)
            assert state.take_shift() is None


def test_nothing_is_decided_while_step_times_may_just_be_changing() -> None:
    state = ControllerState()
    for i in range(60):
        at: dict[str, Any] = {"consumed_samples": 8 * (i + 1), "batch": 8}
        state.record_step(key="one", loss=1.0, seconds=2.0 if i >= 54 else 1.0, **at)
    assert state.watch.is_unsure
    assert not state.is_due(scheduled=None, every_samples=8, **at)
    assert state.is_due(scheduled=16, every_samples=8, **at)
