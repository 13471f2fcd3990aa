"""The formulas that the published times to a loss rest on."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.time_to_loss import clock, curves, policies, real, replay
from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.rules import rate_rules_of
from copus_ext.simulate.training_dynamics import GroundTruth, TrainingDynamics

SAMPLES = [100 * i for i in range(1, 33)]
RECIPE = policies.Recipe()


def curve(drop: float) -> curves.Curve:
    """A loss that falls with the logarithm of the samples."""
    losses = [4.0 - drop * math.log(s / 100) for s in SAMPLES]
    return curves.Curve(samples=SAMPLES, seconds=[s / 10 for s in SAMPLES], losses=losses)


def test_time_to_a_target_lies_on_the_line_between_two_evaluations() -> None:
    c = curves.Curve(samples=[1, 2, 3, 4], seconds=[10, 20, 30, 40], losses=[4.0, 3.0, 3.5, 1.0])
    assert c.time_to(3.25) == pytest.approx(17.5), "the first crossing counts"
    assert c.time_to(2.25) == pytest.approx(35.0)
    assert c.time_to(9.0) == 10, "met before the first evaluation"
    assert c.time_to(0.5) is None


def test_targets_are_what_static_runs_have_in_common() -> None:
    statics = {
        "static_2": [curve(0.60), curve(0.62)],
        "static_4": [curve(0.70), curve(0.66)],
        "static_8": [curve(0.50), curve(0.55)],
        "static_16": [curve(0.20), curve(0.25)],
    }
    goals = curves.targets(statics, 5)
    assert goals == sorted(goals, reverse=True) and len(set(goals)) == 5
    reach = [
        name for name, cs in statics.items() if all(c.time_to(goals[-1]) is not None for c in cs)
    ]
    assert reach == ["static_2", "static_4"], "half of them reach the lowest in every seed"
    early = [np.interp(SAMPLES[-1] / 8, c.samples, c.losses) for cs in statics.values() for c in cs]
    assert goals[0] == pytest.approx(min(early))


def test_savings_are_over_the_fastest_baseline_of_each_target() -> None:
    found: curves.Times = {
        "ours": {1: [10.0, 20.0, 40.0], 2: [10.0, 22.0, 40.0]},
        "early": {1: [12.0, 50.0, None], 2: [13.0, 50.0, None]},
        "late": {1: [20.0, 40.0, 50.0], 2: [20.0, 44.0, None]},
    }
    assert curves.fastest(found, ["early", "late"]) == ["early", "late", None]
    easy = {**found, "easy seed only": {1: [1.0, 2.0, 3.0]}}
    assert curves.fastest(easy, [*easy][1:]) == ["early", "late", None]
    rows = curves.saved_over_fastest(found, "ours", ["early", "late"])
    assert rows[0] == pytest.approx([1 - 10 / 12, 1 - 10 / 13])
    assert rows[1] == pytest.approx([0.5, 0.5])
    assert rows[2] == [], "a seed without the target leaves it out"
    result = curves.summary(rows)
    assert result and result["mean"] == pytest.approx(np.mean([*rows[0], *rows[1]]))
    assert result["best"] == pytest.approx(0.5) and result["targets"] == 2


def test_the_clock_stands_while_a_run_evaluates() -> None:
    def record(kind: str, m: float, samples: int) -> dict[str, Any]:
        return {"kind": kind, "m": m, "consumed_samples": samples, "losses": {"lm loss": 2.0}}

    records = [
        record("run.start", 100.0, 0),
        record("step", 103.0, 8),
        record("eval", 113.0, 8),
        record("step", 114.5, 16),
        record("eval", 120.0, 16),
    ]
    evaluations = real.clocked(records)
    assert [r["clock"] for r in records if r["kind"] == "step"] == [3.0, 4.5]
    assert evaluations == [(8, 3.0, 2.0), (16, 4.5, 2.0)]


def test_static_batches_have_the_rates_that_the_controller_would_give_them() -> None:
    run = {"initial_global_batch_size": 4, "step_batch_size_schedule": None}
    config: Any = SimpleNamespace(
        batch=SimpleNamespace(**run), optim=SimpleNamespace(adam_beta2=0.95)
    )
    for batch in (2, 4, 16):
        rules = rate_rules_of(CopusConfig(copus=True), config)
        at = rules.at(batch, rules.lr_factor(batch))
        words = dict(zip(RECIPE.rates(batch)[::2], RECIPE.rates(batch)[1::2]))
        assert float(words["--lr"]) == pytest.approx(5e-4 * at["lr_factor"])
        assert float(words["--min-lr"]) == pytest.approx(5e-5 * at["lr_factor"])
        assert float(words["--weight-decay"]) == pytest.approx(0.01 * at["weight_decay_factor"])


def test_a_slow_spell_of_the_machine_is_not_counted_but_pauses_are() -> None:
    way = {"layout": "tp1.pp1.dp2", "micro_batch": 2}
    run = {
        "set_up_s": 5.0,
        "flags": [],
        "ways": [{**way, "samples": 0, "batch": 4}, {**way, "samples": 400, "batch": 8}],
        "speeds": [{**way, "batch": 4, "median_s": 0.5}, {**way, "batch": 8, "median_s": 0.75}],
        "moves": [{"consumed_samples": 400, "pause_s": 3.0}],
        "decisions": [{"samples": 400}, {"samples": 600}],
        "deciding_s": 0.5,
        "seconds": 200.0,
        "evaluations": [(200, 99.0, 3.0), (400, 120.0, 2.5), (800, 200.0, 2.0)],
    }
    steady = clock.steadied(run, {})
    before = 5 + 100 * 0.5
    clocks = [5 + 50 * 0.5, before, before + 3 + 0.25 + 50 * 0.75 + 0.25]
    assert [e[1] for e in steady["evaluations"]] == pytest.approx(clocks)
    assert (steady["seconds"], steady["as_it_ran_s"]) == (pytest.approx(clocks[-1]), 200.0)
    fast = clock.steadied(run, {("tp1.pp1.dp2", 2, 8): 0.25})
    clocks[2] -= 50 * 0.5
    assert [e[1] for e in fast["evaluations"]] == pytest.approx(clocks), "as timed on the link"
    measuring = clock.steadied({**run, "flags": ["--copus"], "moves": [], "decisions": []}, {})
    assert measuring["seconds"] == steady["seconds"] - 3.5, "its own medians have it already"
    timed = {("tp1.pp1.dp2", 2, b): s for b, s in ((4, 0.5), (8, 0.75))}
    longer = clock.steadied({**run, "flags": ["--copus"], "moves": [], "decisions": []}, timed)
    steps_s = measuring["seconds"] - 5
    assert longer["seconds"] - 5 == pytest.approx((1 + clock.MEASURING) * steps_s)


def test_a_round_slow_for_all_and_a_disturbed_configuration_change_no_ratio() -> None:
    truth, rounds = [1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 1.2, 1.1]
    rows = [["tp1.pp1.dp2", 1, n, [t * r for r in rounds]] for n, t in enumerate(truth)]
    rows[1][-1][-1] *= 4
    known = {"clock": {"ways": rows}}
    found = list(clock.clock_of(known).values())
    assert [t / found[0] for t in found] == pytest.approx(truth)
    assert clock.scatter_of(known) == pytest.approx(math.log(4) / 15**0.5)
    rows[0][-1].append(1.0)
    with pytest.raises(ValueError, match="different rounds"):
        clock.clock_of(known)


def run_of(batch: int, c: float, exponent: float) -> dict[str, Any]:
    """A run whose losses lie on one curve over progress, with a noise scale that grows."""
    truth = GroundTruth(noise_scale_multiplier=c)
    course = TrainingDynamics(phi_at=lambda p: 2.0 + 0.02 * np.asarray(p), truth=truth, end=4096.0)
    schedule, progress = replay.schedule_of(RECIPE, exponent), 0.0
    evaluations, samples, phis = [], [], []
    for done in range(batch, 4097, batch):
        worth = float(schedule.worth(done) - schedule.worth(done - batch))
        progress = course.advance(batch, progress, worth)
        samples.append(done)
        phis.append(course.phi(progress))
        if not done % 128:
            evaluations.append((done, done / 10, 2.0 + 3.0 * float(progress + 30) ** -0.3))
    ways = [{"samples": 0, "batch": batch}]
    training = {"samples": samples, "phi": phis}
    return {"policy": "x", "ways": ways, "evaluations": evaluations, "training": training}


@pytest.mark.parametrize("c, exponent", [(2.0, 0.5), (4.0, 0.0)])
def test_c_and_the_power_of_the_rate_are_found(
    c: float, exponent: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "CALIBRATIONS", np.geomspace(0.5, 16, 11))
    runs = [run_of(batch, c, exponent) for batch in (4, 8, 16, 32)]
    found = replay.fitted(runs, runs, RECIPE, [0.0, 0.5])
    assert (found["exponent"], found["c"]) == (exponent, pytest.approx(c))
    assert found["rms"] < 0.01
