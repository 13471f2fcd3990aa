"""Averages keep what they should and their interval covers the truth."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from copus_ext.gns.estimators import Estimate
from copus_ext.gns.observer import CONTROL, NoiseObserver, NoiseScale
from copus_ext.gns.smoothing import (
    ENOUGH_MEASUREMENTS,
    LARGEST_INTERVAL,
    Z_95,
    Smoothed,
    half_life_of_factor,
    half_life_tokens,
    measuring_interval,
    ratio_interval,
    skewed_bounds,
    student_quantile,
)
from tests.helpers import noise_interval

H = 1000.0


def feed(values: list[tuple[float, float]], *, tokens: float = 100.0, h: float = H) -> Smoothed:
    state = Smoothed()
    for g2, v in values:
        state = state.update(
            Estimate(grad_norm_sq=g2, grad_variance_trace=v), tokens=tokens, half_life=h
        )
    return state


def test_a_constant_is_returned_from_the_first_value_on() -> None:
    for count in (1, 2, 50):
        state = feed([(0.3, 7.0)] * count)
        assert state.grad_norm_sq == pytest.approx(0.3, rel=1e-12)
        assert state.grad_variance_trace == pytest.approx(7.0, rel=1e-12)
        assert state.p_gg == pytest.approx(0, abs=1e-24)


def test_one_step_of_twice_the_tokens_is_two_steps() -> None:
    start = feed([(1.0, 2.0), (3.0, 1.0)])
    new = Estimate(grad_norm_sq=-2.0, grad_variance_trace=5.0)
    twice = start.update(new, tokens=100, half_life=H).update(new, tokens=100, half_life=H)
    once = start.update(new, tokens=200, half_life=H)
    assert (once.grad_norm_sq, once.grad_variance_trace) == pytest.approx(
        (twice.grad_norm_sq, twice.grad_variance_trace), rel=1e-12
    )
    assert once.weight == pytest.approx(twice.weight, rel=1e-12)


def test_half_lives() -> None:
    state = Smoothed(sum_g2=1.0, sum_v=1.0, weight=1.0, weight2=1.0)
    zero = Estimate(grad_norm_sq=0.0, grad_variance_trace=0.0)
    after = state.update(zero, tokens=H, half_life=H)
    assert after.grad_norm_sq == pytest.approx(0.5, abs=1e-12)
    assert half_life_of_factor(0.99, 16 * 2048) == pytest.approx(2.26e6, abs=0.01e6)
    assert half_life_tokens(0, 1) == 16
    assert half_life_tokens(1e6, 1) == 0.25e6
    assert half_life_tokens(4e6, 1) == 0.44e6
    assert half_life_tokens(1e9, 1) == 5e7
    assert half_life_tokens(0, 1e6) == 16e6


def test_the_first_steps_are_forgotten_in_time() -> None:
    """Gradients of the first steps can be a hundred times larger; after ten times as many steps
    they must not show."""
    state, tokens = Smoothed(), 2048.0
    for step in range(1, 301):
        g2 = 100.0 if step <= 30 else 1.0
        half_life = half_life_tokens(step * tokens, tokens)
        state = state.update(
            Estimate(grad_norm_sq=g2, grad_variance_trace=50.0), tokens=tokens, half_life=half_life
        )
    assert state.interval().ratio == pytest.approx(50.0, rel=0.25)


def test_negatives_are_kept_and_clamping_them_would_bias() -> None:
    rng = np.random.default_rng(5)
    draws = rng.normal(1.0, 1.6, 5_000)
    state = feed([(x, 1.0) for x in draws], tokens=1.0, h=1e5)
    clamped = feed([(max(x, 0.0), 1.0) for x in draws], tokens=1.0, h=1e5)
    assert abs(state.grad_norm_sq - 1.0) < 3 * 1.6 / math.sqrt(state.effective_steps)
    assert clamped.grad_norm_sq == pytest.approx(1.26, abs=0.05)


def test_without_signal_only_the_lower_end_is_known() -> None:
    interval = ratio_interval(0.1, 50.0, 1.0, 4.0, 0.0, bounds=(-1.645, 1.645))
    assert interval.high is None and interval.low is not None
    # The lower end is what a signal at its upper end would give.
    assert 50 / (0.1 + 1.645 * 1.1) < interval.low < 50 / (0.1 + 1.645 * 0.9)
    assert ratio_interval(-5.0, 50.0, 1.0, 4.0, 0.0, bounds=(-1.645, 1.645)).high is None
    assert Smoothed().interval().low is None


def test_fieller_is_the_delta_method_where_all_is_known_well() -> None:
    var_g2, var_v, covariance = 0.02**2, 1.0, -0.01
    interval = ratio_interval(1.0, 50.0, var_g2, var_v, covariance, bounds=(-1.0, 1.0))
    assert interval.low and interval.high
    variance = var_v / 50.0**2 + var_g2 - 2 * covariance / 50.0
    assert math.log(interval.high / interval.low) / 2 == pytest.approx(variance**0.5, rel=0.01)


def test_quantiles() -> None:
    tables = {3: 3.182, 5: 2.571, 10: 2.228, 30: 2.042, 120: 1.980}
    for freedom, quantile in tables.items():
        assert student_quantile(Z_95, freedom) == pytest.approx(quantile, rel=0.01)
    assert skewed_bounds(2.0, 0.0) == (-2.0, 2.0)
    for skewness in (-0.6, -0.1, 0.3, 1.2):
        for end, t in zip((-2.0, 2.0), skewed_bounds(2.0, skewness)):
            back = t + skewness * t**2 / 3 + skewness**2 * t**3 / 27 + skewness / 6
            assert back == pytest.approx(end)


def test_the_weights_are_those_of_the_measurements() -> None:
    rng, tokens = np.random.default_rng(3), np.array([100.0, 30.0, 400.0, 100.0, 250.0, 90.0])
    g, v = rng.gamma(0.5, 1.0, 6), rng.gamma(2.0, 30.0, 6)
    state, offs = Smoothed(), []
    for g2, trace, u in zip(g.tolist(), v.tolist(), tokens.tolist()):
        offs.append((g2 - state.near_g2, trace - state.near_v) if state.weight else (0.0, 0.0))
        state = state.update(
            Estimate(grad_norm_sq=g2, grad_variance_trace=trace), tokens=u, half_life=H
        )
    keep = 0.5 ** (tokens / H)
    weights = np.array([(1 - keep[i]) * np.prod(keep[i + 1 :]) for i in range(6)])
    assert [state.weight, state.weight2, state.weight3] == pytest.approx(
        [(weights**k).sum() for k in (1, 2, 3)]
    )
    g_off, v_off = np.array(offs).T
    for name in ("gg", "gv", "vv", "ggg", "ggv", "gvv", "vvv"):
        powers = g_off ** name.count("g") * v_off ** name.count("v")
        assert getattr(state, f"m_{name}") == pytest.approx((weights * powers).sum()), name
    older = state.decay(tokens=H, half_life=H)
    assert (older.grad_norm_sq, older.grad_variance_trace, older.near_g2) == pytest.approx(
        (state.grad_norm_sq, state.grad_variance_trace, state.near_g2)
    )
    assert older.interval().low == pytest.approx(state.interval().low)
    assert older.interval().high == pytest.approx(state.interval().high)


def test_what_changes_slowly_does_not_look_skewed() -> None:
    """|G|^2 falls by a factor of ten: its largest values come first and are no rare events."""
    rng = np.random.default_rng(8)
    values = [(10.0 * 0.98**i * (1 + 0.05 * rng.normal()), 5.0) for i in range(120)]
    interval = feed(values).interval()
    assert interval.ratio and interval.low and interval.high
    assert interval.high / interval.ratio > interval.ratio / interval.low


def test_json_keeps_every_bit() -> None:
    state = feed([(1.0, 5.0), (1.2, 5.5), (0.9, 1 / 3)] * 20)
    assert Smoothed.from_json(json.loads(json.dumps(state.to_json()))) == state


# Each was far to one side with one quantile for both ends, or is an odd length of run.
ONE_SIDED = [
    ("3 directions with 40 %", 2, 32, 16, 60, 16.0),
    ("3 directions with 40 %", 16, 16, 4, 400, 64.0),
    ("30 directions, the k-th with 1/k", 0.25, 64, 2, 60, 16.0),
    ("1 direction with 20 %", 2, 32, 16, 200, 64.0),
    ("400 equal directions", 16, 16, 2, 32, None),
    ("40 equal directions", 2, 32, 4, 60, 16.0),
]


def misses(case: tuple, **more: Any) -> dict[str, float]:
    names = ("spectrum", "noise_scale_over_batch", "batch", "groups", "measurements", "half_life")
    return noise_interval.misses(
        noise_interval.Case(**dict(zip(names, case))), seed=[77], draws=4000, **more
    )


@pytest.mark.parametrize("case", ONE_SIDED, ids=lambda case: f"{case[0]}, {case[1]}, {case[4]}")
def test_both_ends_miss_equally_often(case: tuple) -> None:
    """2.5 % each in theory. Few large directions of the noise make the averages skewed."""
    found = misses(case)
    assert 1.5 <= found["above"] <= 3.5, found
    assert 1.5 <= found["below"] <= 3.5, found
    if case == ONE_SIDED[0]:  # another level
        found = misses(case, z=1.6448536269514722)
        assert 3.5 <= found["above"] <= 6.5 and 3.5 <= found["below"] <= 6.5, found


def test_added_variance_widens_the_interval_and_changes_no_value() -> None:
    state = feed([(1.0, 5.0), (1.2, 5.5), (0.9, 4.8)] * 20)
    base = state.interval()
    for wider in (state.inflate_variance(2), state.add_drift_variance(tokens=500, half_life=H)):
        read = wider.interval()
        assert read.ratio == base.ratio
        assert read.low and base.low and read.high and base.high
        assert read.low < base.low and read.high > base.high


def test_enough_measurements_stay_in_a_half_life() -> None:
    found = set()
    for step in (512.0, 32_768.0, 4e6):
        for consumed in np.geomspace(step, 1e6 * step, 200):
            half_life = half_life_tokens(consumed, step)
            interval = measuring_interval(half_life, step)
            assert interval == 1 or half_life / (interval * step) >= ENOUGH_MEASUREMENTS
            later = half_life_tokens(consumed, interval * step)
            assert later == half_life, "measuring less often makes no average longer"
            found.add(interval)
    assert found == {1, 2, 4, 8, 16} and max(found) == LARGEST_INTERVAL


def test_an_observer_measures_less_often_in_time_and_says_the_same() -> None:
    """A noise scale that stands still, measured in every step or as often as is enough."""
    rng = np.random.default_rng(0)
    values = rng.normal((0.1, 4.0), (0.1, 0.5), size=(20_000, 2))
    often, seldom = NoiseObserver(interval=1), NoiseObserver()
    intervals = []
    for i, (g2, v) in enumerate(values):
        if i == 10_000:
            seldom = NoiseObserver.from_json(
                json.loads(json.dumps(seldom.to_json())), half_life_tokens=None
            )
        intervals.append(seldom.interval_at(8))
        for observer in (often, seldom):
            if (i + 1) % observer.interval_at(8):
                observer.skip(8 * (i + 1))
                continue
            observer.update(
                {CONTROL: Estimate(grad_norm_sq=g2, grad_variance_trace=v)},
                estimator="micro",
                global_batch_size=8,
                consumed_samples=8 * (i + 1),
                tokens=8 * 128.0,
            )
    assert intervals == sorted(intervals) and set(intervals) == {1, 2, 4, 8, 16}
    assert seldom.num_measured < 0.4 * often.num_measured
    one, other = often.noise(), seldom.noise()
    assert other.effective_steps >= ENOUGH_MEASUREMENTS
    assert one.low_samples and one.high_samples
    assert one.phi_samples == pytest.approx(40.0, rel=0.1)
    assert one.low_samples * 0.8 < (other.phi_samples or 0) < one.high_samples * 1.25


def test_the_record_has_the_tokens_of_the_average_and_those_of_the_step() -> None:
    """With padding the loss tokens of a sample differ from step to step."""
    observer = NoiseObserver(interval=1)
    assert observer.noise().step_tokens_per_sample is None
    for step, tokens in enumerate((800.0, 400.0, 600.0)):
        observer.update(
            {CONTROL: Estimate(grad_norm_sq=1.0, grad_variance_trace=4.0)},
            estimator="micro",
            global_batch_size=8,
            consumed_samples=8 * (step + 1),
            tokens=tokens,
        )
        noise = observer.noise()
        assert noise.step_tokens_per_sample == tokens / 8
        assert NoiseScale.from_json(json.loads(json.dumps(noise.to_json()))) == noise
    assert 50.0 < noise.smoothed_tokens_per_sample < 100.0
    assert noise.smoothed_tokens_per_sample != noise.step_tokens_per_sample
    observer.skip(32)
    again = NoiseObserver.from_json(observer.to_json(), half_life_tokens=None)
    assert again.noise().step_tokens_per_sample == 75.0, "of the last measured step"
