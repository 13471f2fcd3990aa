"""Whether the replay of B8 finds what laid losses on one curve."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from copus_ext.simulate.course import GroundTruth, TrainingDynamics
from copus_ext.simulate.schedule import RateSchedule
from tests.unit.test_time_to_loss import bench, recipe

pytestmark = pytest.mark.unit
replay = bench("time_to_loss_replay")
RECIPE = recipe(samples=4096, warmup_part=0.1, evaluations=32, batches=(4, 8, 16, 32))


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer c are tried, for speed."""
    monkeypatch.setattr(replay, "CALIBRATIONS", np.geomspace(0.5, 16, 11))


def loss_at(progress: Any) -> Any:
    return 5.0 - 0.5 * np.log(progress)


def run_of(batch: int, c: float, exponent: float, change: tuple[int, int] | None = None) -> dict:
    """A run of a static batch, or of one that changes once, whose losses lie on one curve over
    progress without noise."""
    truth = GroundTruth(calibration=c, rate_exponent=exponent)
    course = TrainingDynamics(phi_at=lambda p: 2.0 + 0.02 * np.asarray(p), truth=truth, end=4096.0)
    schedule = RateSchedule(
        warmup_samples=409, total_samples=4096, end_part=RECIPE.min_lr_part, exponent=exponent
    )
    ways = [{"samples": 0, "batch": batch}]
    if change:
        ways.append({"samples": change[0], "batch": change[1]})
    progress, done = 0.0, 0
    evaluations, samples, phis = [], [], []
    while done < 4096:
        size = change[1] if change and done >= change[0] else batch
        worth = float(schedule.worth(done + size) - schedule.worth(done))
        progress, done = course.advance(size, progress, worth), done + size
        samples.append(done)
        phis.append(course.phi(progress))
        if not done % 128:
            evaluations.append((done, done / 10, float(loss_at(progress))))
    training = {"samples": samples, "phi": phis}
    return {"policy": "x", "ways": ways, "evaluations": evaluations, "training": training}


@pytest.mark.parametrize("c, exponent", [(2.0, 0.5), (4.0, 0.0), (2.0, 1.0)])
def test_c_and_the_power_of_the_rate_are_found(c: float, exponent: float) -> None:
    runs = [run_of(batch, c, exponent) for batch in (4, 8, 16, 32)]
    found = replay.fitted(runs, runs, RECIPE, [0.0, 0.5, 1.0])
    assert found["exponent"] == exponent
    assert found["c"] == pytest.approx(c)
    assert found["rms"] < 0.01
    wrong = 1.0 if exponent < 0.5 else 0.0
    assert replay.fitted(runs, runs, RECIPE, [wrong])["rms"] > 1.2 * found["rms"]


def test_the_curve_of_static_batches_tells_the_loss_of_one_that_grows() -> None:
    runs = [run_of(batch, 2.0, 0.5) for batch in (4, 8, 16, 32)]
    found, schedule = replay.fitted(runs, runs, RECIPE, [0.5]), replay.schedule_of(RECIPE, 0.5)
    grows = run_of(4, 2.0, 0.5, change=(1024, 16))
    samples = [n for n, _, _ in grows["evaluations"] if n >= 512]
    progress = replay.progress_of(grows, samples, found["c"], found["noise"], schedule)
    told = found["line"](np.log(progress))
    truth = [loss for n, _, loss in grows["evaluations"] if n >= 512]
    assert np.abs(told - truth).max() < 0.02


def test_policies_are_judged_by_the_mean_of_their_seeds() -> None:
    seeds = [
        {"policies": {"a": {"off": 0.02}, "b": {"off": None}, "static_4": {"off": 0.5}}},
        {"policies": {"a": {"off": 0.04}, "b": {"off": 0.01}}},
    ]
    assert replay.by_policy(seeds) == pytest.approx({"b": 0.01, "a": 0.03})


def test_without_a_clock_the_runs_tell_what_a_step_takes() -> None:
    way = {"layout": "tp1.pp1.dp2", "micro_batch": 1, "batch": 4}
    static = {"flags": [], "speeds": [{**way, "steps": 9, "median_s": 1.0}]}
    copus = {"flags": ["--copus"], "speeds": [{**way, "steps": 9, "median_s": 1.011}]}
    once = {"flags": [], "speeds": [{**way, "steps": 1, "median_s": 50.0}]}
    found = replay.own_clock([static, copus, once])
    assert found == pytest.approx({("tp1.pp1.dp2", 1, 4): 1.0})
