"""A warm-up that counts steps: what the controller leaves of the schedule's rate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.rules import warm_up_of
from copus_ext.goodput.lr_scaling import Ramp, RateRules, WarmUp
from copus_ext.goodput.messages import warm_up_line
from copus_ext.monitor.journal import DecisionHistory
from megatron.training.common.step_settings import StepSettings, set_rates
from megatron.training.common.train_state import TrainState
from megatron.training.config.arguments import parse_args, resolve
from megatron.training.config.lengths import USUAL_WARMUP_STEPS, warmup_note
from tests.helpers.jobs import TINY

BATCHES = st.lists(st.tuples(st.integers(1, 64), st.integers(1, 12)), min_size=1, max_size=5)


def warm_up(samples: int = 1000, *, min_steps: int = 0, start: float = 0.0) -> WarmUp:
    return WarmUp(samples=samples, min_steps=min_steps, start=start)


def walk(rule: WarmUp, batches: list[int]) -> list[float]:
    """The part of the largest rate that each step has under a constant schedule."""
    rates, samples = [], 0
    for step, batch in enumerate(batches, start=1):
        schedule = min(samples / rule.samples, 1.0) if rule.samples else 1.0
        rates.append(schedule * rule.factor(batch, steps=step, samples=samples))
        samples += batch
    return rates


@given(st.integers(1, 64), st.integers(1, 3000), st.integers(0, 60), st.integers(1, 200))
def test_while_the_batch_stays_the_schedules_rate_stays_bit_for_bit(
    batch: int, samples: int, min_steps: int, step: int
) -> None:
    rule = warm_up(max(samples, min_steps * batch), min_steps=min_steps)
    assert rule.factor(batch, steps=step, samples=(step - 1) * batch) == 1.0
    # Steps that --iterations-to-skip passes over count, and their samples do not.
    assert rule.factor(batch, steps=step + 3, samples=(step - 1) * batch) == 1.0


@given(BATCHES, st.integers(1, 3000), st.integers(0, 60))
def test_a_warm_up_has_the_steps_that_it_would_have_had_at_the_present_batch(
    parts: list[tuple[int, int]], samples: int, min_steps: int
) -> None:
    batches = [batch for batch, steps in parts for _ in range(steps)]
    rates = walk(warm_up(samples, min_steps=min_steps), batches)
    for step, (batch, rate) in enumerate(zip(batches, rates), start=1):
        done = sum(batches[: step - 1])
        bounds = [1.0, done / samples, step * batch / samples, step / (min_steps or 1e-9)]
        assert rate == pytest.approx(min(bounds), rel=1e-12)


def test_a_shrink_warms_up_again_until_the_steps_are_made_up() -> None:
    # 4 steps of 256 are more samples than the warm-up has: the schedule is at its peak.
    rule = warm_up(1000)
    batches = [256] * 4 + [32] * 40
    rates = walk(rule, batches)
    assert rates[4] == pytest.approx(5 * 32 / 1000)
    assert rates[4:] == sorted(rates[4:]) and rule.steps(32) == 32
    assert rates[30] < 1.0 == rates[31] == rates[40], "step 32 has the full rate"


def test_few_steps_become_the_least_number() -> None:
    rule = warm_up(64, min_steps=50)
    rates = walk(rule, [32] * 60)
    assert rates[2] == pytest.approx(3 / 50) and rates[48] < 1.0 == rates[49]
    assert rule.steps(32) == 50 and walk(warm_up(64), [32] * 60)[2] == 1.0


def test_a_run_without_a_warm_up_is_held_at_no_batch() -> None:
    rule = warm_up(0, min_steps=50)
    assert [rule.factor(batch, steps=3, samples=64) for batch in (16, 32, 64)] == [1.0] * 3


def test_a_warm_up_that_starts_above_zero_is_never_below_its_start() -> None:
    rule = warm_up(1000, start=0.1)
    # The schedule is at .1 + .9 x .5 after 500 samples, and at .1 + .9 x .16 in the fifth step.
    held = rule.factor(32, steps=5, samples=500)
    assert held * (0.1 + 0.9 * 0.5) == pytest.approx(0.1 + 0.9 * 0.16)
    assert rule.factor(32, steps=1, samples=0) == 1.0


def config(more: str = "") -> Any:
    return resolve(parse_args([*TINY.split(), "--train-samples", "6400", *more.split()]), 2)


def test_who_is_held() -> None:
    run = config("--lr-warmup-samples 640 --lr-warmup-init 1e-4")
    rule = warm_up_of(CopusConfig(copus=True), run)
    assert rule == WarmUp(samples=640, min_steps=USUAL_WARMUP_STEPS, start=0.1)
    for policy in ("copus", "static"):
        assert warm_up_of(CopusConfig(copus=True, copus_policy=policy), run) is None
    assert warm_up_of(CopusConfig(copus=True, copus_mode="observe"), run) is None


def test_steps_without_an_update_do_not_count() -> None:
    state = TrainState()
    for updated in (True, False, True):
        state.advance(samples=8, updated=updated, finite_loss=True, flops=0.0)
    assert (state.iteration, state.updates, state.lr_samples) == (3, 2, 16)


@pytest.mark.parametrize(
    ("more", "note"),
    [
        (
            "--lr-warmup-samples 48",
            "warms up in 6 steps; 50 or more are usual: raise --lr-warmup-s",
        ),
        ("--lr-warmup-fraction 0.0075", "in 6 steps; 50 or more are usual: raise --lr-warmup-frac"),
        ("", "does not warm up; 50 steps or more are usual: give --lr-warmup-samples"),
        ("--lr-warmup-samples 392", "warms up in 49 steps"),
        ("--rampup-batch-size 4 4 800 --lr-warmup-samples 100", "warms up in 25 steps"),
        ("--train-samples 1200 --lr-warmup-samples 8", "in 1 step; 37 or more"),
        ("--lr-warmup-samples 400", None),
        ("--train-samples 640", None),
    ],
)
def test_a_short_warm_up_is_named_with_the_flag_that_sets_it(more: str, note: str | None) -> None:
    found = warmup_note(config(more))
    assert found is None if note is None else note in (found or "")


def test_the_note_names_iterations_where_lengths_are_in_iterations() -> None:
    flags = [*TINY.split(), "--train-iters", "800"]
    few = resolve(parse_args([*flags, "--lr-warmup-iters", "6"]), 2)
    assert "in 6 steps; 50 or more are usual: raise --lr-warmup-iters" in (warmup_note(few) or "")
    assert "give --lr-warmup-iters" in (warmup_note(resolve(parse_args(flags), 2)) or "")


def test_status_tells_until_when() -> None:
    line = warm_up_line(0.314, after_shrinking=True, full_at_step=205)
    assert line == (
        "the learning rate warms up again after the batch shrank: 0.31 of its schedule, full at "
        "step 205"
    )
    history = DecisionHistory()
    record = {"kind": "warmup", "factor": 0.314, "after_shrinking": True, "full_at_step": 205}
    history.add(0, record)
    assert history.warm_up == line == history.notes[-1].line
    history.add(1, {"kind": "warmup", "factor": 1.0, "full_at_step": 205})
    assert history.warm_up == "" and "follows its schedule" in history.notes[-1].line
    history.add(2, record)
    history.add(3, {"kind": "start", "iteration": 0})
    assert history.warm_up == "", "the next launch says it again"


@pytest.mark.parametrize("lr", ["sqrt", "linear", "none"])
def test_rates_after_going_up_and_down_equal_those_of_a_run_that_never_changed(lr: Any) -> None:
    rules = RateRules(
        reference_batch=16,
        beta2=0.95,
        lr=lr,
        weight_decay="tokens",
        beta2_rule="tokens",
        ramp_steps=20,
    )
    changing, plain = optimizer_and_schedule(), optimizer_and_schedule()
    ramp: Ramp | None = None
    batch, factor = 16, 1.0
    for iteration, to in enumerate([32] * 30 + [64] * 7 + [2] * 9 + [128] * 40 + [16] * 3):
        if to != batch:
            batch, ramp = to, rules.ramp(to, iteration=iteration, start=factor)
        factor = ramp.at(iteration) if ramp else rules.lr_factor(batch)
        settings = StepSettings(global_batch_size=batch, **rules.at(batch, factor))
        for _, schedule in (changing, plain):
            schedule.step(increment=batch)
        set_rates(*changing, settings, beta2=0.95)
        group = changing[0].param_groups[0]
        assert group["betas"][1] == (0.95 if batch == 16 else settings.beta2)
    assert changing[0].param_groups == plain[0].param_groups


def optimizer_and_schedule() -> tuple[Any, Any]:
    """An optimizer without parameters under the trainer's schedule."""
    group = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "wd_mult": 1.0, "lr_mult": 1.0}
    optimizer = SimpleNamespace(param_groups=[group])
    schedule = OptimizerParamScheduler(
        optimizer,  # type: ignore[arg-type]
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=1e-5,
        lr_warmup_steps=700,
        lr_decay_steps=9000,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.2,
        wd_incr_steps=9000,
        wd_incr_style="cosine",
    )
    return optimizer, schedule
