"""Averages keep what they should and their interval covers the truth."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from copus_ext.noise.estimators import Estimate
from copus_ext.noise.observer import CONTROL, NoiseObserver
from copus_ext.noise.smoothing import (
    ENOUGH_MEASUREMENTS,
    LARGEST_INTERVAL,
    Z_95,
    Smoothed,
    half_life_of_factor,
    half_life_tokens,
    measuring_interval,
    ratio_interval,
)

H = 1000.0
Z_90 = 1.6448536269514722


def feed(values: list[tuple[float, float]], *, tokens: float = 100.0, h: float = H) -> Smoothed:
    state = Smoothed()
    for g2, v in values:
        state = state.update(Estimate(g2=g2, v=v), tokens=tokens, half_life=h)
    return state


def test_a_constant_is_returned_from_the_first_value_on() -> None:
    for count in (1, 2, 50):
        state = feed([(0.3, 7.0)] * count)
        assert state.g2 == pytest.approx(0.3, rel=1e-12)
        assert state.v == pytest.approx(7.0, rel=1e-12)
        assert state.p_gg == pytest.approx(0, abs=1e-24)


def test_one_step_of_twice_the_tokens_is_two_steps() -> None:
    start = feed([(1.0, 2.0), (3.0, 1.0)])
    new = Estimate(g2=-2.0, v=5.0)
    twice = start.update(new, tokens=100, half_life=H).update(new, tokens=100, half_life=H)
    once = start.update(new, tokens=200, half_life=H)
    assert (once.g2, once.v) == pytest.approx((twice.g2, twice.v), rel=1e-12)
    assert once.weight == pytest.approx(twice.weight, rel=1e-12)


def test_after_a_half_life_a_value_counts_half() -> None:
    state = Smoothed(sum_g2=1.0, sum_v=1.0, weight=1.0, weight2=1.0)
    after = state.update(Estimate(g2=0.0, v=0.0), tokens=H, half_life=H)
    assert after.g2 == pytest.approx(0.5, abs=1e-12)


def test_half_lives() -> None:
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
        state = state.update(Estimate(g2=g2, v=50.0), tokens=tokens, half_life=half_life)
    assert state.read().ratio == pytest.approx(50.0, rel=0.25)


def test_negatives_are_kept_and_clamping_them_would_bias() -> None:
    rng = np.random.default_rng(5)
    draws = rng.normal(1.0, 1.6, 20_000)
    state = feed([(x, 1.0) for x in draws], tokens=1.0, h=1e5)
    clamped = feed([(max(x, 0.0), 1.0) for x in draws], tokens=1.0, h=1e5)
    assert abs(state.g2 - 1.0) < 3 * 1.6 / math.sqrt(state.effective_steps)
    assert clamped.g2 == pytest.approx(1.26, abs=0.05)


@pytest.mark.parametrize("relative", [0.14, 0.26])
def test_the_interval_covers_the_truth(relative: float) -> None:
    """Nominally 95 % by default, and 90 % where asked for."""
    rng = np.random.default_rng(int(1000 * relative))
    runs, steps, covered = 1500, 60, {Z_90: 0, Z_95: 0}
    # Weights of an exponential average over about three half-lives.
    one = relative * math.sqrt(feed([(1, 1)] * steps, tokens=50).effective_steps)
    for _ in range(runs):
        g2 = rng.normal(1.0, one, steps)
        v = rng.normal(50.0, 5.0, steps) - 2.0 * (g2 - 1.0)
        state = feed(list(zip(g2, v)), tokens=50)
        for z in covered:
            interval = state.read(z)
            assert interval.low is not None
            covered[z] += interval.low <= 50 and (interval.high is None or interval.high >= 50)
    assert 0.86 <= covered[Z_90] / runs <= 0.935, covered
    assert 0.92 <= covered[Z_95] / runs <= 0.98, covered


def test_without_signal_only_the_lower_end_is_known() -> None:
    interval = ratio_interval(0.1, 50.0, 1.0, 4.0, 0.0, z=1.645)
    assert interval.high is None and interval.low is not None
    # The lower end is what a signal at its upper end would give.
    assert 50 / (0.1 + 1.645 * 1.1) < interval.low < 50 / (0.1 + 1.645 * 0.9)
    assert ratio_interval(-5.0, 50.0, 1.0, 4.0, 0.0, z=1.645).high is None
    assert Smoothed().read().low is None


def test_delta_method_and_fieller_agree_when_all_is_known_well() -> None:
    interval = ratio_interval(1.0, 50.0, 0.02**2, 1.0, -0.01, z=1.0)
    assert interval.log_variance is not None and interval.low and interval.high
    half_width = math.log(interval.high / interval.low) / 2
    assert half_width == pytest.approx(math.sqrt(interval.log_variance), rel=0.01)


def test_doubt_and_drift_widen_and_change_no_value() -> None:
    state = feed([(1.0, 5.0), (1.2, 5.5), (0.9, 4.8)] * 20)
    base = state.read()
    for wider in (state.doubt(2), state.drift(tokens=500, half_life=H)):
        read = wider.read()
        assert read.ratio == base.ratio
        assert read.low and base.low and read.high and base.high
        assert read.low < base.low and read.high > base.high


def test_the_state_survives_json_bit_for_bit() -> None:
    state = feed([(0.1, 7.3), (0.7, 1 / 3)])
    assert Smoothed.from_json(json.loads(json.dumps(state.to_json()))) == state


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
            observer.take(
                {CONTROL: Estimate(g2=g2, v=v)},
                estimator="micro",
                global_batch_size=8,
                consumed_samples=8 * (i + 1),
                tokens=8 * 128.0,
            )
    assert intervals == sorted(intervals) and set(intervals) == {1, 2, 4, 8}
    assert seldom.num_measured < 0.4 * often.num_measured
    one, other = often.noise(), seldom.noise()
    assert other.effective_steps >= ENOUGH_MEASUREMENTS
    assert one.low_samples and one.high_samples
    assert one.phi_samples == pytest.approx(40.0, rel=0.1)
    assert one.low_samples * 0.8 < (other.phi_samples or 0) < one.high_samples * 1.25
