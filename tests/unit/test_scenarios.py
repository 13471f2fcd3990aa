"""The arithmetic of the scenarios of time to loss, and of small runs against the atlas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from bench.time_to_loss import scenarios, small_runs
from bench.time_to_loss.atlas import LONG, SHORT
from copus_ext.simulate.scenario import preset

pytestmark = pytest.mark.unit
HEADROOM_CASE = "16xh100-13b"


def test_a_sweep_halves_its_batches_and_trains_the_best_to_its_end() -> None:
    # 88 of all to an eighth, 24 of two to a quarter, then the best alone; the last never arrives.
    times = {16: 16.0, 8: 8.0, 32: 32.0, 64: math.inf}
    assert scenarios.sweep_seconds(times) == 88 / 8 + 24 / 8 + 8 / 4 + 8 / 2
    assert scenarios.sweep_seconds({8: 5.0}) == 5.0


def test_an_interval_spans_what_other_seeds_might_have_given() -> None:
    def mean(values: Any) -> float:
        return sum(values) / len(values)

    assert scenarios.interval([2.0, 2.0, 2.0], mean) == [2.0, 2.0]
    low, high = scenarios.interval([1.0, 2.0, 3.0], mean)
    assert 1.0 <= low < 2.0 < high <= 3.0


@pytest.mark.parametrize("growth", scenarios.GROWTHS.values())
def test_growths_keep_the_mean_of_the_inverse_critical_batch_size(
    growth: tuple[float, ...],
) -> None:
    progress = np.linspace(0.0005, 0.9995, 1000)

    def mean_inverse(s: Any) -> float:
        return float(np.mean(1 / np.asarray(s.trajectory.phi_at(progress * s.last))))

    s = scenarios.growing(HEADROOM_CASE, *growth)
    late = s.trajectory.phi_at(np.array([0.5, 1.0]) * s.last)
    exponent, *levels = growth
    assert late[1] / late[0] == pytest.approx(1.0 if levels else 2**exponent, rel=0.02)
    assert mean_inverse(s) == pytest.approx(mean_inverse(preset(HEADROOM_CASE)), rel=0.35)


def row(cell: str, loss: float, *, steps: int, samples: int = SHORT) -> tuple[str, dict[str, Any]]:
    spec = {"kind": "cosine", "total_samples": samples}
    return f"cosine {samples} [{cell}]", {"mean_loss": loss, "steps": steps, "spec": spec}


ATLAS = dict(
    [
        row("32", 1.6, steps=1024),
        row("32", 1.4, steps=2048, samples=LONG),
        row("16,0.1:64", 1.6, steps=700),
        row("64", 1.7, steps=512),
    ]
)


def test_a_schedule_saves_against_the_best_static_batch_of_its_loss() -> None:
    static = SHORT + 32 * 1024
    assert small_runs.best_static(ATLAS, 32, 1.6) == pytest.approx(static)
    assert small_runs.best_static(ATLAS, 32, 1.0) is None
    saved = small_runs.schedule_savings(ATLAS, 32)
    assert saved == {f"cosine {SHORT} [16,0.1:64]": pytest.approx(1 - (SHORT + 32 * 700) / static)}


def test_figures_of_small_runs_come_from_their_ratios() -> None:
    rows = []
    for spec in small_runs.specs():
        static = small_runs.best_static(ATLAS, spec.overhead, 1.6)
        assert static is not None
        ratio = 0.9 + 0.1 * (spec.rate < 0)
        rows.append({"key": spec.key, "loss": 1.6, "time": ratio * static})
    found = small_runs.outcomes(rows, ATLAS)
    figures = small_runs.s10(found)
    assert figures["mean"] == pytest.approx(0.95) and figures["worst"] == pytest.approx(1.0)
    assert figures["means"]["rate 0"] == pytest.approx(0.9) and figures["runs"] == 48
    share = small_runs.s5(found, ATLAS)
    assert share is not None
    hindsight = sum(max(small_runs.schedule_savings(ATLAS, h).values()) for h in (8, 32, 128, 512))
    assert share["figure"] == pytest.approx(0.4 / hindsight)
    assert small_runs.s5(found[:1], ATLAS) is None
