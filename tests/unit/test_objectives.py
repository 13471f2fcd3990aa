"""Objectives, rates and switch rules have the properties that are claimed of them."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from copus_ext.goodput import lr_scaling, switch_rule
from copus_ext.goodput.objectives import OBJECTIVES, goodput, sensitivity

FINE = np.exp(np.linspace(math.log(0.5), math.log(1e5), 400_001))


def best(objective: str, noise: float, half: float | None, reference: float = 16.0) -> float:
    """The best batch where T = B / (B + half), or flat."""
    speed = np.ones_like(FINE) if half is None else FINE / (FINE + half)
    return float(FINE[np.argmax(goodput(objective, speed, FINE, noise, reference_batch=reference))])


@pytest.mark.parametrize(
    ("half", "noise", "ours", "papers"),
    [(32, 64, 45.3, 139.9), (32, 256, 90.5, 356.9), (128, 256, 181.0, 559.7)],
)
def test_best_batches_of_saturating_throughput(
    half: float, noise: float, ours: float, papers: float
) -> None:
    assert best("goodput", noise, half) == pytest.approx(ours, abs=0.06)
    assert best("copus", noise, half) == pytest.approx(papers, abs=0.06)


@pytest.mark.parametrize(
    ("half", "noise", "want"),
    [(32, 16, 0.413), (32, 64, 0.587), (32, 256, 0.763), (32, 1024, 0.904), (8, 256, 0.904)],
)
def test_elasticity_of_the_best_batch(half: float, noise: float, want: float) -> None:
    for objective, wanted in (("copus", want), ("goodput", 0.5)):
        up, down = best(objective, noise * 1.05, half), best(objective, noise / 1.05, half)
        assert math.log(up / down) / (2 * math.log(1.05)) == pytest.approx(wanted, abs=2e-3)


def test_flat_throughput() -> None:
    for noise in (3.0, 64.0, 900.0):
        assert best("copus", noise, None) == pytest.approx(noise, rel=1e-3)
        assert best("goodput", noise, None) == FINE[0]
    # A doubling passes the paper's tenth from a critical batch size of 2.5 batches on.
    for ratio, passes in ((2.49, False), (2.51, True)):
        now, then = goodput("copus", 1.0, np.array([8.0, 16.0]), 8 * ratio, reference_batch=8)
        assert (then / now - 1 > 0.10) == passes


@pytest.mark.parametrize(("r0", "want"), [(1.0, 69.2), (0.5, 134.3)])
def test_the_learning_rate_model(r0: float, want: float) -> None:
    speed = FINE / (FINE + 32)
    values = goodput("lr_model", speed, FINE, 256.0, reference_batch=16, tuned=r0)
    assert FINE[np.argmax(values)] == pytest.approx(want, rel=1e-3)
    k = r0 / (16 + 256)
    beyond = 2 / k - 256 < FINE
    assert (values[beyond] <= 0).all() and (values[~beyond][:-1] > 0).all()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_goodput_does_not_depend_on_units(objective: str) -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        speed, batch = rng.uniform(1, 100, 8), np.exp(rng.uniform(0, 6, 8))
        noise, reference, unit = np.exp(rng.uniform(0, 6)), 4.0, 2048.0
        plain = goodput(objective, speed, batch, noise, reference_batch=reference)
        tokens = goodput(
            objective, 7 * speed, unit * batch, unit * noise, reference_batch=unit * reference
        )
        assert (np.argsort(plain) == np.argsort(tokens)).all()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_more_noise_never_asks_for_a_smaller_batch(objective: str) -> None:
    rng = np.random.default_rng(2)
    for _ in range(30):
        batch = 2.0 ** np.arange(12)
        speed = np.maximum.accumulate(rng.uniform(0.5, 1.0, 12) * batch / (batch + 40))
        sizes = [
            batch[np.argmax(goodput(objective, speed, batch, noise, reference_batch=16.0))]
            for noise in np.exp(np.linspace(0, 8, 40))
        ]
        assert sizes == sorted(sizes)


@pytest.mark.parametrize("objective", ["copus", "goodput"])
def test_sensitivity_to_the_noise_scale(objective: str) -> None:
    for batch, noise in itertools.product((4.0, 64.0), (10.0, 500.0)):
        got = sensitivity(objective, batch, noise, reference_batch=16.0)
        assert got == pytest.approx(-noise / (batch + noise), abs=1e-6)


PAPER_SWITCHES = [
    # minutes in, minutes paused, cost in s, minutes left, gain asked for, break even (in percent)
    (3.0, 0.0, 30.0, 51.9, 28.3, 0.97),
    (22.0, 0.5, 56.0, 32.9, 17.3, 2.92),
    (20.0, 0.0, 42.0, 61.4, 13.9, 1.15),
    (37.0, 0.0, 52.0, 39.5, 12.6, 2.24),
    (15.0, 0.0, 49.0, 48.7, 16.0, 1.71),
]


@pytest.mark.parametrize(("at", "paused", "cost", "left", "paper", "even"), PAPER_SWITCHES)
def test_what_the_papers_switches_had_to_gain(
    at: float, paused: float, cost: float, left: float, paper: float, even: float
) -> None:
    got = switch_rule.paper_needed(cost_s=cost, elapsed_s=60 * at, paused_s=60 * paused)
    assert 100 * got == pytest.approx(paper, abs=0.06)
    assert 100 * switch_rule.break_even(cost, 60 * left) == pytest.approx(even, abs=0.05)


def test_a_late_switch_is_refused_by_forward_and_not_by_the_paper() -> None:
    gain, late = 0.20, {"elapsed_s": 54 * 60.0, "paused_s": 86.0, "cost_s": 30.0}
    assert gain > switch_rule.paper_needed(**late)
    needed = switch_rule.forward_needed(cost_s=30, remaining_s=60, log_sd=0.0, margin=0.01)
    assert gain < needed
    assert math.isinf(switch_rule.break_even(60.0, 60.0))


def test_certainty_is_part_of_what_is_needed() -> None:
    plain = switch_rule.forward_needed(cost_s=0, remaining_s=60, log_sd=0.0, margin=0.02)
    assert plain == pytest.approx(math.expm1(0.02))
    unsure = switch_rule.forward_needed(cost_s=0, remaining_s=60, log_sd=0.1, margin=0.02)
    assert unsure == pytest.approx(math.expm1(0.02 + 0.128))


def test_cool_down_and_budget_of_pauses() -> None:
    blocked = switch_rule.relayout_blocked_reason
    quiet = {"cost_s": 30.0, "elapsed_s": 9000.0, "paused_s": 30.0}
    assert not blocked(**quiet, steps_since=None, seconds_since=None)
    assert not blocked(**quiet, steps_since=200, seconds_since=300.0)
    assert blocked(**quiet, steps_since=199, seconds_since=9999.0)
    assert blocked(**quiet, steps_since=9999, seconds_since=299.0)
    assert not blocked(**quiet, steps_since=100, seconds_since=300.0, run_steps=1000.0)
    assert blocked(**quiet, steps_since=99, seconds_since=300.0, run_steps=100.0)
    assert blocked(
        cost_s=30.0, elapsed_s=1000.0, paused_s=51.0, steps_since=None, seconds_since=None
    )


def test_rates_go_with_the_absolute_batch() -> None:
    rules = lr_scaling.RateRules(
        reference_batch=16,
        beta2=0.95,
        lr="sqrt",
        weight_decay="tokens",
        beta2_rule="tokens",
        ramp_steps=20,
    )
    assert [rules.lr_factor(b) for b in (16, 32, 64, 16)] == [1.0, 2**0.5, 2.0, 1.0]
    assert dataclasses.replace(rules, lr="linear").lr_factor(64) == 4.0
    assert rules.at(32, 2**0.5)["weight_decay_factor"] == pytest.approx(2**0.5)
    betas = [rules.at(batch, 1.0)["beta2"] for batch in (16, 32, 128)]
    assert betas == [None, pytest.approx(0.9025), 0.9]
    constant = dataclasses.replace(rules, weight_decay="const", beta2_rule="const")
    plain = {"lr_factor": 2**0.5, "weight_decay_factor": 1.0, "beta2": None}
    assert constant.at(32, 2**0.5) == plain


def test_the_ramp() -> None:
    assert lr_scaling.ramp_steps(0.95) == 20 and lr_scaling.ramp_steps(0.999) == 100
    ramp = lr_scaling.Ramp(start_iteration=100, num_steps=20, start=1.0, end=2**0.5)
    factors = [ramp.at(100 + k) for k in range(25)]
    assert factors == sorted(factors) and factors[0] > 1.0
    assert factors[18] < 2**0.5 == factors[19] == factors[24]
    assert [ramp.is_over(100 + k) for k in (0, 18, 19)] == [False, False, True]
    ratios = [b / a for a, b in itertools.pairwise(factors[:20])]
    assert ratios == pytest.approx([ratios[0]] * 19)
    shrink = lr_scaling.Ramp(start_iteration=5, num_steps=20, start=2.0, end=1.0)
    assert shrink.at(5) == 1.0 and shrink.is_over(5)
    jump = lr_scaling.Ramp(start_iteration=5, num_steps=0, start=1.0, end=2.0)
    assert jump.at(5) == 2.0
