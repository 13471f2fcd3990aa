"""A lasting change of step times is noticed soon; noise and outliers are not one."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from copus_ext.goodput.step_time_watch import (
    FIRST_STEPS,
    MIN_STEPS,
    StepTimeShift,
    StepTimeWatch,
)

pytestmark = pytest.mark.unit


def noisy(seed: int, steps: int, *, sd: float = 0.05, outliers: float = 0.01) -> np.ndarray:
    random = np.random.default_rng(seed)
    seconds = np.exp(sd * random.standard_normal(steps))
    seconds[random.random(steps) < outliers] *= 3.0
    return seconds


def first(
    seconds: np.ndarray, watch: StepTimeWatch | None = None
) -> tuple[int, StepTimeShift] | None:
    watch = watch or StepTimeWatch()
    for i, value in enumerate(seconds.tolist()):
        if found := watch.add("one", value):
            return i, found
    return None


@pytest.mark.parametrize("seed", range(12))
def test_noise_and_outliers_are_no_change(seed: int) -> None:
    assert first(noisy(seed, 10_000)) is None


@pytest.mark.parametrize("factor", [1.1, 1 / 1.1, 1.3, 4.0, 0.25])
def test_a_change_is_noticed_within_sixty_steps(factor: float) -> None:
    for seed in range(25):
        start = 40 + 13 * seed
        seconds = noisy(seed, start + 61)
        seconds[start:] *= factor
        found = first(seconds)
        assert found is not None and start <= found[0] < start + 60
        assert found[1].ratio == pytest.approx(factor, rel=0.06)
        assert found[1].steps >= 2 * MIN_STEPS // 3


def test_a_short_disturbance_is_no_change() -> None:
    for seed in range(20):
        seconds = noisy(seed, 600)
        seconds[300 : 300 + MIN_STEPS // 3] *= 2.5
        assert first(seconds) is None


def test_the_way_back_is_a_change_too() -> None:
    watch, ratios = StepTimeWatch(), []
    seconds = noisy(5, 900)
    seconds[300:600] *= 2.0
    for value in seconds.tolist():
        if found := watch.add("one", value):
            ratios.append(found.ratio)
    assert ratios == [pytest.approx(2.0, rel=0.05), pytest.approx(0.5, rel=0.05)]


def test_another_configuration_starts_anew() -> None:
    watch = StepTimeWatch()
    for key, scale in (("one", 1.0), ("two", 5.0), ("one", 3.0)):
        for value in (scale * noisy(1, 2 * FIRST_STEPS)).tolist():
            assert watch.add(key, value) is None
        assert watch.key == key


def test_steps_without_scatter_that_hardly_change_are_no_change() -> None:
    watch = StepTimeWatch()
    values = [1.0] * 200 + [1.03] * 200
    assert not any(watch.add("one", value) for value in values)
    assert first(np.array([1.0] * 200 + [1.06] * 60)) is not None


@pytest.mark.parametrize("drift", [1.03, 0.97])
def test_a_change_after_a_small_drift_is_noticed_as_soon_and_as_large(drift: float) -> None:
    watch, seconds = StepTimeWatch(), noisy(3, 460, sd=0.003, outliers=0.0)
    seconds[200:] *= drift
    seconds[400:] *= 1.2
    found = first(seconds, watch)
    assert found is not None and 400 <= found[0] < 430
    assert found[1].ratio == pytest.approx(1.2, rel=0.02)


def test_small_drifts_that_add_up_are_a_change() -> None:
    watch, ratios = StepTimeWatch(), []
    seconds = noisy(4, 1400, sd=0.003, outliers=0.0)
    seconds[200:] *= np.exp(np.minimum(np.arange(1200) / 1000, 1.0) * np.log(1.15))
    for value in seconds.tolist():
        if found := watch.add("one", value):
            ratios.append(found.ratio)
    assert 1.1 < np.prod(ratios) < 1.17
    assert StepTimeWatch.from_json(json.loads(json.dumps(dataclasses.asdict(watch)))) == watch


def test_the_state_survives_as_json() -> None:
    seconds = noisy(7, 200)
    seconds[150:] *= 1.1
    whole = StepTimeWatch()
    for value in seconds[:155].tolist():
        whole.add("one", value)
    again = StepTimeWatch.from_json(json.loads(json.dumps(dataclasses.asdict(whole))))
    assert first(seconds[155:], again) == first(seconds[155:], whole) is not None
