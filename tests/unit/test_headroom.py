"""The headroom of a run agrees with its closed form, with brute force, and with what it claims."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from copus_ext.goodput.belief import Belief, Look, published_critical_batch_size
from copus_ext.goodput.headroom import (
    WORTH,
    Headroom,
    Trajectory,
    estimate,
    fixed_cost_samples,
    of_inputs,
    of_plans,
    of_rows,
    trajectories,
)
from copus_ext.goodput.inputs import ConfigThroughput
from tests.helpers.recorded import row
from tests.unit.test_decide import situation

FINE = [round(64 * 2 ** (k / 6)) for k in range(120)]


def affine(h: float, batches: Any = FINE, **more: Any) -> list[ConfigThroughput]:
    """A step of B samples takes h + B."""
    return [row(b, b / (h + b), **more) for b in batches]


def found(rows: list[ConfigThroughput], *trajectories: Trajectory, at: int = 0) -> Headroom:
    return estimate(rows, at, trajectories, source="published")


def closed_form(h: float, trajectory: Trajectory) -> float:
    share = trajectory.progress / trajectory.progress.sum()
    mean = float(share @ (1 / trajectory.critical_batch_size))
    m = float(share @ trajectory.critical_batch_size**-0.5) / math.sqrt(mean)
    k = math.sqrt(h * mean)
    return 2 * k * (1 - m) / (1 + k) ** 2


def some_course(rng: np.random.Generator, intervals: int) -> Trajectory:
    phi = np.exp(rng.uniform(math.log(2000), math.log(5e5), intervals))
    return Trajectory(progress=rng.uniform(0.1, 1, intervals), critical_batch_size=phi)


@pytest.mark.parametrize("h", [200.0, 5000.0, 100_000.0])
def test_adapting_saves_what_the_closed_form_says(h: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        trajectory = some_course(rng, 40)
        assert found(affine(h), trajectory).adapting.likely == pytest.approx(
            closed_form(h, trajectory), abs=5e-4
        )


@pytest.mark.parametrize(
    ("exponent", "percent"), [(0.46, 2.2), (0.63, 5.3), (0.9, 15.0), (1.0, 19.0)]
)
def test_most_that_can_be_saved_where_the_critical_batch_size_grows(
    exponent: float, percent: float
) -> None:
    """Over all h, and progress from the first 40,000th on."""
    edges = np.geomspace(2.5e-5, 1.0, 301)
    middle = np.sqrt(edges[1:] * edges[:-1])
    trajectory = Trajectory(progress=np.diff(edges), critical_batch_size=1e6 * middle**exponent)
    most = max(
        found(affine(h), trajectory).adapting.likely for h in np.geomspace(3e3, 1e6, 8).tolist()
    )
    assert 100 * most == pytest.approx(percent, abs=0.6)


def test_it_is_what_trying_everything_finds() -> None:
    rng = np.random.default_rng(1)
    for _ in range(12):
        rows = [
            row(b, float(rng.uniform(1, 5)), micro=micro, tp=tp)
            for b, micro, tp in itertools.product((8, 16, 32), (1, 2), (1, 2))
        ]
        trajectory = Trajectory(
            progress=rng.uniform(0.1, 1, 3), critical_batch_size=np.exp(rng.uniform(1, 5, 3))
        )

        def seconds(
            some: tuple[ConfigThroughput, ...], trajectory: Trajectory = trajectory
        ) -> float:
            return sum(
                w * (1 + r.global_batch_size / phi) / r.samples_per_s
                for r, w, phi in zip(some, trajectory.progress, trajectory.critical_batch_size)
            )

        now = rows[int(rng.integers(len(rows)))]
        h = found(rows, trajectory, at=rows.index(now))
        own = [r for r in rows if r.layout == now.layout]
        same = [r for r in rows if r.global_batch_size == now.global_batch_size]
        here = max((r for r in own if r in same), key=lambda r: r.samples_per_s)
        free = min(seconds(s) for s in itertools.product(own, repeat=3))
        fixed = min(own, key=lambda r: seconds((r,) * 3))
        assert h.adapting.likely == pytest.approx(1 - free / seconds((fixed,) * 3), abs=1e-12)
        assert h.batch.likely == pytest.approx(1 - free / seconds((here,) * 3), abs=1e-12)
        every = min(seconds(s) for s in itertools.product(rows, repeat=3))
        assert h.together.likely == pytest.approx(1 - every / seconds((now,) * 3), abs=1e-12)
        best = max(same, key=lambda r: r.samples_per_s)
        assert h.layout == pytest.approx(1 - here.samples_per_s / best.samples_per_s)
        assert h.micro_batch == pytest.approx(1 - now.samples_per_s / here.samples_per_s)
        assert (h.best_batch, h.best_layout) == (fixed.global_batch_size, str(best.layout))


def test_units_change_nothing_and_without_a_fixed_cost_the_smallest_batch_is_best() -> None:
    rng = np.random.default_rng(2)
    trajectory = some_course(rng, 20)
    one = found(affine(3000.0), trajectory)
    faster = [dataclasses.replace(r, samples_per_s=60 * r.samples_per_s) for r in affine(3000.0)]
    slower = dataclasses.replace(trajectory, progress=7 * trajectory.progress)
    assert found(faster, slower).batch.likely == pytest.approx(one.batch.likely)
    flat = found([row(b, 1.0) for b in FINE], trajectory)
    assert flat.adapting.likely == flat.batch.likely == 0.0 and flat.best_batch == min(FINE)


@pytest.mark.parametrize("h", [0.0, 3.0, 40.0, 5000.0])
def test_samples_that_the_fixed_cost_is_worth(h: float) -> None:
    sizes = [4, 8, 32, 256]
    times = [0.01 * (h + b) for b in sizes]
    assert fixed_cost_samples(sizes, times) == pytest.approx(h, abs=1e-6)
    assert found(affine(h, sizes), some_course(np.random.default_rng(3), 5)).fixed_cost_samples == (
        pytest.approx(h, abs=1e-6)
    )
    assert fixed_cost_samples([8, 8], [1.0, 1.1]) is None
    assert fixed_cost_samples([8, 16], [2.0, 1.0]) is None


def believed(law: float, end: float, *looks: Look) -> Belief:
    return Belief(law=law, end=end, multiplier=8.0, looks=looks)


def test_trajectories_are_those_of_the_belief_and_hold_the_same_samples() -> None:
    belief = believed(64.0, 1e5, Look(samples=4000.0, noise_scale=4.0, log_variance=0.01))
    courses = trajectories(belief, start=5000, batch=32)
    for course, sds in zip(courses, (0.0, -1.0, 1.0)):
        for at, place in ((5000 * 20 ** (0.5 / 300), 0), (1e5 / 20 ** (0.5 / 300), -1)):
            mean, sd = belief.log_critical_batch_size(at)
            want = math.exp(mean[0] + sds * sd[0])
            assert course.critical_batch_size[place] == pytest.approx(want, rel=1e-6)
        samples = course.progress @ (1 + 32 / course.critical_batch_size)
        assert samples == pytest.approx(95_000, rel=1e-9)
    # A law of tokens: twice the tokens a sample for half the samples halves the batch.
    law = published_critical_batch_size(100_000, 2048.0)
    assert published_critical_batch_size(50_000, 4096.0) == pytest.approx(law / 2)
    with pytest.raises(ValueError, match="nothing is left"):
        trajectories(belief, start=1e5, batch=1)


def test_a_plan_is_compared_with_what_is_best_for_the_whole_run() -> None:
    def plans(batches: list[int]) -> Any:
        """A step of B samples takes 2000 + B."""
        return [
            SimpleNamespace(
                ranked=[
                    SimpleNamespace(
                        configuration=r.configuration,
                        against_rel_sd=None,
                        prediction=SimpleNamespace(
                            samples_per_s=r.samples_per_s, step_rel_sd=0.1, source="predicted"
                        ),
                    )
                ]
            )
            for r in affine(2000.0, batches)
        ]

    length = {"total_samples": 1e8, "tokens_per_sample": 2048.0}
    h = of_plans(plans([*range(4, 64), *FINE]), **length)
    assert h is not None and h.source == "published"
    belief = believed(published_critical_batch_size(1e8, 2048.0), 1e8)
    courses = trajectories(belief, start=0, batch=h.best_batch)
    saved = [closed_form(2000.0, course) for course in courses]
    wanted = (saved[0], min(saved), max(saved))
    assert dataclasses.astuple(h.adapting) == pytest.approx(wanted, abs=5e-4)
    assert h.adapting == h.batch and h.together == h.batch
    assert f"{h.best_batch} on tp1.pp1.dp2" in h.of_a_plan()
    assert of_plans(plans([64]), **length) is None


def test_what_a_decision_knows() -> None:
    s = situation(16, 64.0, consumed_samples=16_000)
    h = of_inputs(s)
    assert h is not None and h.source == "measured" and h.num_layouts == 1
    assert h.adapting.low <= h.adapting.likely <= h.adapting.high <= h.batch.high
    assert h.fixed_cost_samples == pytest.approx(24.0, rel=1e-6)
    early = of_inputs(dataclasses.replace(s, looks=()))
    assert early is not None and early.source == "published"
    assert early.batch.low > h.batch.low, "the law asks for more than this noise scale"
    assert of_inputs(dataclasses.replace(s, consumed_samples=s.total_samples)) is None
    # An assumed throughput says nothing.
    guessed = tuple(dataclasses.replace(r, source="assumed") for r in s.rows)
    assert of_inputs(dataclasses.replace(s, rows=guessed)) is None


def test_a_fixed_cost_of_no_samples_is_not_told() -> None:
    h = of_inputs(situation(16, 64.0, consumed_samples=16_000))
    assert h is not None
    for samples, words in ((0.02, ""), (0.3, "the time of 0.3 samples"), (24.0, "of 24 samples")):
        line = dataclasses.replace(h, fixed_cost_samples=samples).of_a_plan()
        assert words in line and ("fixed cost" in line) == bool(words)


def test_it_survives_json_and_says_what_is_worth_it() -> None:
    s = situation(64, 64.0)
    other = [
        row(b, 1.2 * r.samples_per_s, tp=2, sd=0.03) for r in s.rows for b in [r.global_batch_size]
    ]
    h = of_rows([*s.rows, *other], s.current, believed(600.0, 1e6), start=5e5)
    assert h is not None and h.batch_is_worth_it
    assert Headroom.from_json(json.loads(json.dumps(h.to_json()))) == h
    assert "over the best fixed batch" in str(h) and "24 samples" in str(h)
    assert "the layout 17 +- 2.5 %" in str(h) and h.layout == pytest.approx(1 / 6)
    known = believed(2000.0, 10_000)
    # Compute-bound: a step's cost is that of its samples, and the batch is small already.
    bound = of_rows(
        affine(0.01, (8, 16, 32)),
        0,
        known,
        start=1000,
    )
    assert bound is not None and bound.batch.high < WORTH and not bound.batch_is_worth_it
    assert "only layout and micro-batch are worth changing" in str(bound)
    # A start that is too large is worth leaving, however little adapting brings.
    large = of_rows(
        affine(0.01, (8, 16, 4096)),
        2,
        known,
        start=1000,
    )
    assert large is not None and large.batch_is_worth_it and large.adapting.high < WORTH
