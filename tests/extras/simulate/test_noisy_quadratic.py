"""The noisy quadratic: its closed forms, the critical batch that comes out, what growing saves."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from copus_ext.controller.decision_log import NAME, DecisionLog, read_journal
from copus_ext.extras.simulate.contenders import contenders
from copus_ext.extras.simulate.noisy_quadratic import NoisyQuadratic, QuadraticTraining
from copus_ext.extras.simulate.run import simulate
from copus_ext.extras.simulate.scenario import preset
from copus_ext.extras.simulate.training_dynamics import RateSchedule, ScheduleKind
from copus_ext.extras.simulate.tuned_statics import Tuned, Tuner

PROBLEM = NoisyQuadratic()
GOAL = 0.02


def schedule(total: int = 80_000, kind: ScheduleKind = "cosine") -> RateSchedule:
    return RateSchedule(warmup_samples=total // 50, total_samples=total, end_part=0.05, kind=kind)


def trained(batch: int, peak: float, total: int, *, at_once: bool) -> QuadraticTraining:
    training = QuadraticTraining(PROBLEM, schedule(total), peak=peak)
    if at_once:
        training.train(batch, total)
    while training.samples < total:
        training.train(batch)
    return training


@functools.cache
def found() -> list[Tuned]:
    sizes = [round(2 ** (k / 2)) for k in range(7, 20)]
    return Tuner(PROBLEM, schedule()).tuned(sizes, GOAL, peaks=(0.5, 1.0, 2.0))


def test_a_rate_schedule_has_the_shape_of_its_name() -> None:
    shapes: dict[ScheduleKind, list[float]] = {
        "cosine": [0.5, 1.0, 0.525, 0.05],
        "constant": [0.5, 1.0, 1.0, 1.0],
    }
    for kind, rates in shapes.items():
        found = schedule(1000, kind).rate([10, 20, 510, 1000])
        assert found.tolist() == pytest.approx(rates), kind


def test_mean_squares_are_those_of_the_update() -> None:
    gain, batch = 0.3, 16.0
    squares = PROBLEM.start
    for _ in range(7):
        keep = 1 - gain * PROBLEM.curvatures
        squares = keep**2 * squares + gain**2 * PROBLEM.noise / batch
    assert PROBLEM.moved(PROBLEM.start, gain, 7, batch) == pytest.approx(squares, rel=1e-10)
    half = PROBLEM.moved(PROBLEM.start, gain, 3.5, batch)
    assert PROBLEM.moved(half, gain, 3.5, batch) == pytest.approx(squares, rel=1e-10)


@pytest.mark.parametrize(("batch", "peak"), [(16, 0.5), (64, 1.0), (64, 3.0)])
def test_chunks_are_close_to_a_recursion_step_by_step(batch: int, peak: float) -> None:
    """With the r of each step's start; at a peak of 3 the sharpest direction is unstable."""
    total = 40_000
    squares, rates = PROBLEM.start, schedule(total)
    for samples in range(0, total, batch):
        gain = peak * float(rates.rate(samples + batch / 2)) / PROBLEM.norm(squares, batch)
        keep = 1 - gain * PROBLEM.curvatures
        squares = keep**2 * squares + gain**2 * PROBLEM.noise / batch
    exact = float(PROBLEM.loss(squares))
    assert trained(batch, peak, total, at_once=False).loss() == pytest.approx(exact, rel=5e-3)
    assert trained(batch, peak, total, at_once=True).loss() == pytest.approx(exact, rel=5e-3)
    (column,) = Tuner(PROBLEM, rates).final_losses([batch], [peak], total)
    assert float(column[0]) == pytest.approx(exact, rel=5e-3)


def test_chunks_of_half_the_size_change_no_loss() -> None:
    some = found()[::6]
    batches = [one.batch for one in some]
    peaks, lengths = [[one.peak] for one in some], [[one.samples] for one in some]
    coarse, fine = (
        Tuner(PROBLEM, schedule(), parts=parts).final_losses(batches, peaks, lengths).ravel()
        for parts in (1, 2)
    )
    assert coarse == pytest.approx(GOAL, rel=2e-3)
    assert coarse == pytest.approx(fine, rel=1e-3)


def test_a_loss_is_passed_within_a_step() -> None:
    training = QuadraticTraining(PROBLEM, schedule(), peak=1.0)
    training.train(32, 300)
    before = training.loss()
    training.train(32, 300)
    assert training.passed(training.loss() - 1e-6) is None
    assert training.passed((before + training.loss()) / 2) == pytest.approx(0.5)
    assert training.progress == training.loss() < before


def test_a_critical_batch_comes_out() -> None:
    """Small batches need the same samples, large ones the same steps; the best rate goes with the
    root of a small batch, and with no large one."""
    fixed = found()
    samples = [one.samples for one in fixed]
    assert samples == sorted(samples)
    small = samples[2] / samples[0], fixed[4].peak / fixed[0].peak
    assert small[0] < 1.1
    assert small[1] == pytest.approx(2.0, rel=0.3)  # Of a batch four times as large.
    assert fixed[-1].samples / fixed[-3].samples > 1.4  # Of a batch twice as large.
    assert fixed[-1].peak / fixed[-5].peak < 1.7
    # The batch of twice the samples is within a few times the noise scale near the end.
    critical = next(one.batch for one in fixed if one.samples > 2 * samples[0])
    assert 0.1 < critical / fixed[0].noise_scale < 3


def test_a_loss_that_no_length_reaches_takes_for_ever() -> None:
    tuner = Tuner(PROBLEM, schedule(1000))
    least = tuner.shortest([16], [1.0], 1e-6, low=[1000.0], high=[1100.0])
    assert least.tolist() == [[float("inf")]]


@pytest.mark.parametrize("kind", ["cosine", "constant"])
def test_a_small_batch_has_the_least_rate_of_a_run(kind: ScheduleKind) -> None:
    plan, total = schedule(kind=kind), 80_000
    trainings = [QuadraticTraining(PROBLEM, plan, peak=1.0) for _ in range(2)]
    for samples in (0.25 * plan.warmup_samples, 0.5 * total, 0.99 * total, total):
        rate = float(plan.rate(samples))
        least = 0.0 if kind == "constant" else 0.05 * min(samples / plan.warmup_samples, 1.0)
        for factor in (0.01, 0.35, 1.0, 4.0):
            expected = max(factor * rate, least if factor < 1.0 else 0.0)
            assert plan.rate_of(samples, factor) == pytest.approx(expected, rel=1e-12)
    for training, factor in zip(trainings, (0.01, 0.02)):
        training.train(8, total // 8 - 1)
        training.train(8, lr_factor=factor)
    is_same = trainings[0].loss() == trainings[1].loss()
    assert is_same == (kind != "constant"), "both are at the least rate in the end"


def test_the_controller_runs_on_a_noisy_quadratic() -> None:
    scenario = preset("32xmi210-7b").change(total_samples=8_000, batches=(16, 32))
    scenario = scenario.with_noisy_quadratic()
    assert scenario.truth_name == "noisy_quadratic"
    assert scenario.training().loss() == pytest.approx(10.8)
    everybody = contenders(scenario.batches)
    run = simulate(scenario, everybody["doubling_small"], seed=0)
    assert run.resizes
    fixed = simulate(scenario, everybody["static_16"], seed=0)
    # Its target is what the first batch reaches at 0.8 of the length, by the chunks of a tuner.
    speed = scenario.speeds.fastest(16).samples_per_s
    assert fixed.times_s["2.8"] == pytest.approx(0.8 * 8_000 / speed, rel=5e-3)
    again = simulate(scenario, everybody["doubling_small"], seed=0)
    assert again == run


def test_a_preset_has_a_quadratic_near_its_own_truth() -> None:
    scenario = preset("32xmi210-7b")
    quadratic, dynamics = scenario.with_noisy_quadratic(), scenario.dynamics
    times = {
        batch: dynamics.samples(batch, scenario.last) / scenario.speeds.fastest(batch).samples_per_s
        for batch in scenario.batches
    }
    speeds = {batch: scenario.speeds.fastest(batch).samples_per_s for batch in scenario.batches}
    (found,) = quadratic.tuned_statics.values()
    tuned = min(found, key=lambda one: one.samples / speeds[one.batch])
    # Its best static batch is nearly the best one of the first truth.
    assert times[tuned.batch] < 1.12 * min(times.values())
    critical = scenario.truth.noise_scale_multiplier * dynamics.phi(scenario.last)
    assert 0.3 < tuned.noise_scale / critical < 4


def test_decisions_see_the_schedule_of_the_run(tmp_path: Path) -> None:
    scenario = preset("32xmi210-7b").change(total_samples=40_000, lr_schedule="constant")
    everybody = contenders(scenario.batches)
    simulate(scenario, everybody["doubling_small"], seed=0, journal=DecisionLog(tmp_path))
    inputs = [record["situation"] for record in read_journal(tmp_path / NAME)]
    assert len(inputs) > 10
    assert {one["lr_decay_factor"] for one in inputs} == {1.0}
