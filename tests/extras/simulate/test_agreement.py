"""What the agreement of simulator and real clock rests on: the fit, and the seconds of a step."""

from __future__ import annotations

import numpy as np
import pytest

from bench.time_to_loss import agreement
from bench.time_to_loss.agreement import Noise, fit, line_of, progress_of, schedule_of
from bench.time_to_loss.real_clock import S4
from bench.time_to_loss.real_clock_figures import Curve
from copus_ext.extras.simulate.noise_trajectory import NoiseTrajectory
from copus_ext.extras.simulate.training_dynamics import GroundTruth, TrainingDynamics
from copus_ext.planner.configuration import Configuration
from megatron.trainer.config.layout import Layout

WARMUP = 3000


def planted(multiplier: float, exponent: float) -> tuple[dict[int, Curve], Noise]:
    """Static runs of a known truth, and the noise scale that one of them measures."""
    progress = (10.0, 100.0, 1000.0, 20_000.0)
    truth = GroundTruth(noise_scale_multiplier=multiplier, rate_exponent=exponent)
    trajectory = NoiseTrajectory(progress=progress, phi=tuple(p**0.5 / 2 for p in progress))
    dynamics = TrainingDynamics(phi_at=trajectory.phi_at, truth=truth, end=2.0 * S4.samples)
    schedule = schedule_of(exponent, WARMUP)
    samples = list(range(320, S4.samples + 1, 320))
    curves = {}
    for batch in (8, 16, 32):
        at = progress_of(batch, samples, dynamics, schedule)
        losses = [4.0 - 0.3 * np.log(p) for p in at]
        curves[batch] = Curve(samples=samples, seconds=samples, losses=losses)
    at = progress_of(32, samples, dynamics, schedule)
    return curves, Noise(samples=samples, phi=[float(trajectory.phi_at(p)) for p in at])


@pytest.mark.parametrize(("multiplier", "exponent"), [(8.0, 0.25), (2.0, 0.0)])
def test_the_fit_finds_what_was_planted(multiplier: float, exponent: float) -> None:
    curves, noise = planted(multiplier, exponent)
    found = fit(curves, noise, 32, WARMUP)
    assert found.exponent == exponent
    assert found.multiplier == pytest.approx(multiplier, rel=0.2)
    assert found.rms < 0.003
    wrong = {8: curves[32], 16: curves[16], 32: curves[8]}
    assert fit(wrong, noise, 32, WARMUP).rms > 5 * found.rms


def test_steps_that_were_not_timed_lie_on_the_line_of_their_micro_batch() -> None:
    def step_s(b: int, batch: int) -> float:
        return 0.2 + batch / 2 / b * (0.01 + 0.006 * b + 0.002 * (b == 4))

    known = [(1, 2), (2, 8), (4, 8), (4, 32), (8, 32), (16, 64)]
    seconds = line_of({("tp1.pp1.dp2", b, batch): step_s(b, batch) for b, batch in known})

    def of(b: int, batch: int) -> float:
        c = Configuration(layout=Layout(dp=2), micro_batch_size=b, global_batch_size=batch)
        return seconds(c)

    assert [of(b, batch) for b, batch in known] == [step_s(b, batch) for b, batch in known]
    assert of(4, 64) == pytest.approx(step_s(4, 64), rel=0.03), "of a timed micro-batch"
    assert of(32, 64) == pytest.approx(step_s(32, 64), rel=0.05), "of another one"
    assert agreement.STEP_NOISE < 0.1
