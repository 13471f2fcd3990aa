"""Trainings that a runner steps: progress turned to losses, and the runs of before."""

from __future__ import annotations

import dataclasses

import pytest

from copus_ext.extras.simulate.contenders import contenders
from copus_ext.extras.simulate.run import simulate
from copus_ext.extras.simulate.scenario import preset
from copus_ext.extras.simulate.training import loss_curve

PRESET = preset("32xmi210-7b")
_ONE = """
doubling_small 0.0 503.550256 1153.868096 1813.303611 2775.752559 3132
cbs_small 0.0 503.550256 1151.153609 1813.657575 2787.439823 3057
doubling_small 0.5 567.362232 1229.189082 1923.684022 3054.653371 3784
cbs_small 0.5 567.362232 1222.695305 1916.611353 3048.422318 3565
"""
"""Policy, power of the rate that a sample is worth, seconds to four losses, steps: of a runner that
knew one truth only; with cbs_small of today's, which measures less often, and with a backward pass
of attention of 2.5 forward ones."""


@pytest.mark.parametrize("line", _ONE.split("\n")[1:-1])
def test_runs_are_those_of_a_runner_of_one_truth(line: str) -> None:
    name, power, *times, steps = line.split()
    truth = dataclasses.replace(PRESET.truth, rate_exponent=float(power))
    run = simulate(PRESET.change(truth=truth), contenders(PRESET.batches)[name], seed=0)
    # The constants of the machine are fitted anew now and then.
    assert list(run.times_s.values())[:4] == pytest.approx(list(map(float, times)), rel=5e-3)
    assert run.steps == int(steps)


def test_a_loss_curve_is_a_power_law_through_its_targets() -> None:
    for name in ("8xh100-3b", "32xh100-32b", "32xmi210-7b"):
        scenario = preset(name)
        curve = loss_curve(scenario.targets)
        for loss, progress in scenario.targets.items():
            assert curve.loss(progress) == pytest.approx(float(loss), abs=0.1)
    unnamed = loss_curve({"a": 10.0, "b": 1000.0})
    assert unnamed.loss(1000.0) == pytest.approx(1.0)
    assert unnamed.loss(0.0) == unnamed.loss(0.1) > unnamed.loss(10.0)


def test_a_target_is_passed_once_its_progress_is_made() -> None:
    training = PRESET.training()
    training.train(64, 10)
    at_ten = training.progress
    training.train(64, 10)
    assert training.passed(training.progress * 1.001) is None
    share = training.passed(at_ten)
    assert share == pytest.approx(0.0, abs=1e-9)
    middle = PRESET.training()
    middle.train(64, 15)
    assert training.passed(middle.progress) == pytest.approx(0.5)


def test_a_training_ends_at_the_length_of_its_schedule() -> None:
    training = PRESET.training()
    training.train(1024, PRESET.total_samples)
    assert training.samples == PRESET.total_samples
