"""Runs on the virtual clock: what is claimed of them, and that nobody beats the oracle."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from copus_ext.commands import replay
from copus_ext.controller.decision_log import NAME, DecisionLog, read_journal
from copus_ext.extras.simulate import command
from copus_ext.extras.simulate.compare import best_moves, compare, optima, optimum
from copus_ext.extras.simulate.contenders import contenders
from copus_ext.extras.simulate.noise_trajectory import (
    NoiseEstimatorModel,
    power_law,
)
from copus_ext.extras.simulate.run import simulate
from copus_ext.extras.simulate.scenario import Scenario, preset, presets
from copus_ext.extras.simulate.speeds import Speeds
from copus_ext.extras.simulate.training_dynamics import GroundTruth, RateSchedule, TrainingDynamics
from copus_ext.goodput.costs import Machine, pause_s
from copus_ext.goodput.headroom import Trajectory, estimate
from copus_ext.goodput.inputs import ConfigThroughput
from copus_ext.planner.configuration import Configuration
from megatron.trainer.config.layout import Layout
from tests.helpers.launch import ROOT
from tests.helpers.noise_theory import predicted_spread

SHORT = {"a": 2_000.0, "b": 8_000.0, "c": 15_000.0}


def small(**values: Any) -> Scenario:
    """A short run of few batches on a cluster where the fastest layout goes with the batch."""
    trajectory = power_law(end=15_000.0, phi_end=values.pop("phi_end", 200.0), exponent=0.8)
    known: dict[str, Any] = {
        "batches": (16, 32, 64, 128),
        "targets": SHORT,
        "total_samples": 40_000,
        "warmup_samples": 500,
        "trajectory": trajectory,
        "truth": GroundTruth(noise_scale_multiplier=2.0),
        "relayout_cost_s": 5.0,
    }
    return preset("8xh100-3b").change(**{**known, **values})


def row(sizes: tuple[int, int, int, int], batch: int, speed: float) -> ConfigThroughput:
    layout = Layout(**dict(zip(("tp", "pp", "vpp", "dp"), sizes)))
    return ConfigThroughput(
        configuration=Configuration(layout=layout, micro_batch_size=1, global_batch_size=batch),
        samples_per_s=speed,
        relative_sd=0.0,
        source="profiled",
    )


@pytest.mark.parametrize("name", presets())
def test_a_preset_can_be_run(name: str) -> None:
    scenario = preset(name)
    first = scenario.speeds.fastest(scenario.batches[0])
    last = scenario.speeds.fastest(scenario.batches[-1])
    assert last.samples_per_s > first.samples_per_s
    assert list(scenario.targets.values()) == sorted(scenario.targets.values())


def test_a_truth_is_the_curve_that_published_runs_follow() -> None:
    truth = GroundTruth(noise_scale_multiplier=2.0)
    for batch, phi in ((16, 10.0), (512, 100.0)):
        assert truth.per_sample(batch, phi) == pytest.approx(1 / (1 + batch / (2 * phi)))


@pytest.mark.parametrize("batch", [16, 64])
def test_a_static_batch_takes_the_sum_of_its_intervals(batch: int) -> None:
    scenario = small()
    run = simulate(scenario, contenders(scenario.batches)[f"static_{batch}"], seed=0)
    dynamics, speed = scenario.dynamics, scenario.speeds.fastest(batch).samples_per_s
    for target, end in SHORT.items():
        seconds = 0.0
        for low, high, phi in zip(dynamics.edges, dynamics.edges[1:], dynamics.phis):
            share = max(min(high, end) - low, 0.0)
            seconds += share * (1 + batch / (2 * phi)) / speed
        assert run.times_s[target] == pytest.approx(seconds, rel=1e-12)


def test_a_schedule_says_what_samples_are_worth() -> None:
    flat = RateSchedule(warmup_samples=100, total_samples=1100, end_part=1.0, exponent=1.0)
    assert float(flat.worth(100)) == pytest.approx(50.0, rel=1e-3)
    assert float(flat.worth(1100)) == pytest.approx(1050.0, rel=1e-3)
    decaying = dataclasses.replace(flat, end_part=0.1)
    assert float(decaying.rate(100)) == 1.0
    assert float(decaying.rate(1100)) == pytest.approx(0.1)
    assert float(decaying.worth(1100)) == pytest.approx(50 + 1000 * 0.55, rel=1e-3)
    for worth in (3.0, 50.0, 400.0):
        assert float(decaying.worth(decaying.samples(worth))) == pytest.approx(worth)
    assert decaying.samples(601.0) == float("inf")
    blind = dataclasses.replace(decaying, exponent=0.0)
    assert (blind.worth(37), blind.samples(1e9)) == (37, 1e9)


def test_a_sample_of_a_low_rate_gets_less_far() -> None:
    truth = GroundTruth(noise_scale_multiplier=2.0, rate_exponent=0.5)
    scenario, without = small(truth=truth), small()
    who = contenders(scenario.batches)["static_16"]
    dynamics, times = scenario.dynamics, simulate(scenario, who, seed=0).times_s
    speed = scenario.speeds.fastest(16).samples_per_s
    samples = 0
    progress = 0.0
    while progress < SHORT["a"]:  # step by step, each at its own rate
        rate = float(scenario.schedule.rate(samples + 0.5))
        progress = dynamics.advance(16, progress, rate**0.5)
        samples += 1
    assert times["a"] == pytest.approx(samples / speed, rel=1e-3)
    after, before = times["a"], simulate(without, who, seed=0).times_s["a"]
    assert after is not None and before is not None and after > 1.02 * before


def test_a_controller_that_stays_is_the_static_batch_at_every_rate() -> None:
    from copus_ext.controller.flags import CopusConfig
    from copus_ext.extras.simulate.contenders import Contender

    truth = GroundTruth(noise_scale_multiplier=2.0, rate_exponent=1.0)
    scenario = small(truth=truth)
    flags = CopusConfig(copus=True, copus_policy="static", copus_max_global_batch_size=128)
    stays = simulate(scenario, Contender(name="stays", flags=flags), seed=0)
    static = simulate(scenario, contenders(scenario.batches)["static_16"], seed=0)
    assert stays.resizes == stays.relayouts == 0
    for target, seconds in static.times_s.items():
        assert seconds is not None and stays.times_s[target] == pytest.approx(seconds, rel=1e-3)


def test_the_oracle_refuses_a_schedule() -> None:
    truth = GroundTruth(noise_scale_multiplier=2.0, rate_exponent=0.5)
    with pytest.raises(ValueError, match="schedule of the learning rate"):
        optima(small(truth=truth))


def test_progress_does_not_depend_on_how_it_is_cut() -> None:
    dynamics = small().dynamics
    once = dynamics.advance(32, 123.0, 5000.0)
    parts = 123.0
    for samples in (1.0, 999.0, 4000.0):
        parts = dynamics.advance(32, parts, samples)
    assert parts == pytest.approx(once, rel=1e-12)
    assert dynamics.samples(32, once) - dynamics.samples(32, 123.0) == pytest.approx(5000.0)


def test_the_oracle_is_the_best_of_all_ways() -> None:
    layouts = [(1, 1, 1, 4), (1, 4, 1, 1), (2, 2, 1, 1)]
    random = np.random.default_rng(0)
    for cost in (0.0, 3.0, 1e6):
        speeds = Speeds(
            [row(w, b, float(random.uniform(50, 100))) for w in layouts for b in (16, 64)]
        )
        scenario = small(relayout_cost_s=cost, batches=(16, 64))
        dynamics = TrainingDynamics(
            phi_at=scenario.trajectory.phi_at, truth=GroundTruth(), end=16_000.0, num_intervals=6
        )
        scenario.__dict__["dynamics"] = dynamics
        target = 15_000.0
        ends = [*dynamics.edges[1:-1], target]
        lengths = [b - a for a, b in zip(dynamics.edges, ends)]
        best = min(
            sum(
                length
                / max(
                    float(dynamics.truth.per_sample(b, phi))
                    * speeds.true(row(w, b, 1)).samples_per_s
                    for b in (16, 64)
                )
                for length, phi, w in zip(lengths, dynamics.phis, way)
            )
            + cost * sum(a != b for a, b in itertools.pairwise(way))
            for way in itertools.product(layouts, repeat=len(lengths))
        )
        assert optimum(scenario, speeds, target) == pytest.approx(best, rel=1e-12)


def test_the_oracle_without_pauses_saves_the_headroom() -> None:
    scenario = small(relayout_cost_s=0.0)
    dynamics, speeds, target = scenario.dynamics, scenario.speeds, scenario.last
    lengths = np.clip(target - np.array(dynamics.edges[:-1]), 0.0, np.diff(dynamics.edges))
    noise = scenario.truth.noise_scale_multiplier * np.array(dynamics.phis)
    trajectory = Trajectory(progress=lengths, critical_batch_size=noise)
    rows = list(speeds.actual.values())
    for at in (0, len(rows) // 2, len(rows) - 1):
        present = rows[at].global_batch_size, rows[at].samples_per_s
        seconds = dynamics.samples(present[0], target) / present[1]
        found = estimate(rows, at, [trajectory], source="measured").together.likely
        saved = 1 - optimum(scenario, speeds, target) / seconds
        assert found == pytest.approx(saved, abs=1e-9) and saved > 0.01


@pytest.mark.parametrize(("cost", "phi_end"), [(0.0, 2000.0), (5.0, 60.0)])
def test_nobody_beats_the_oracle(cost: float, phi_end: float) -> None:
    scenario = small(relayout_cost_s=cost, phi_end=phi_end)
    best = optima(scenario)
    for contender in contenders(scenario.batches).values():
        run = simulate(scenario, contender, seed=1)
        for target, seconds in run.times_s.items():
            if seconds is not None:
                assert seconds >= best[target] * (1 - 1e-12), contender.name


def test_the_same_seed_gives_the_same_run() -> None:
    who = contenders(small().batches)["adaptive"]
    one, again = (simulate(small(), who, seed=3) for _ in range(2))
    assert one == again
    assert (
        NoiseEstimatorModel(3).draw(50.0, 16, 4)
        == NoiseEstimatorModel(3).draw(50.0, 16, 4)
        != NoiseEstimatorModel(4).draw(50.0, 16, 4)
    )


def test_decisions_of_a_simulation_replay(tmp_path: Path) -> None:
    scenario = small()
    # A pipeline is the fastest for small batches, replicas for large ones.
    pipeline = zip(scenario.batches, (55.0, 60.0, 62.0, 63.0))
    replicas = zip(scenario.batches, (40.0, 68.0, 84.0, 94.0))
    known = [row((1, 4, 1, 2), batch, speed) for batch, speed in pipeline]
    known += [row((1, 1, 1, 8), batch, speed) for batch, speed in replicas]
    scenario = scenario.change(measured=Speeds(known))
    who = contenders(scenario.batches)["adaptive"]
    run = simulate(scenario, who, seed=0, journal=DecisionLog(tmp_path))
    assert run.resizes and run.relayouts
    records = list(read_journal(tmp_path / NAME))
    assert len(records) == run.decisions
    assert all(replay.replayed(record, {})[0] for record in records)
    record = next(r for r in records if r["decision"]["gain_sd"] is not None)
    spoilt = {**record, "decision": {**record["decision"], "gain_sd": 0.5}}
    assert not replay.replayed(spoilt, {})[0]


def test_what_is_measured_has_the_spread_of_an_estimator() -> None:
    phi, batch, groups = 400.0, 32, 16
    estimator = NoiseEstimatorModel(0)
    drawn = [estimator.draw(phi, batch, groups) for _ in range(20_000)]
    g2, v = np.array([[e.grad_norm_sq, e.grad_variance_trace] for e in drawn if e is not None]).T
    expected = predicted_spread(
        v=1.0,
        along_gradient=1 / phi / estimator.dimension,
        effective_dimension=estimator.dimension,
        batch=batch,
        group=batch / groups,
        num_groups=groups,
    )
    assert abs(g2.mean() * phi - 1) < 4 * g2.std() * phi / len(g2) ** 0.5
    assert abs(v.mean() - 1) < 4 * v.std() / len(v) ** 0.5
    assert g2.var() == pytest.approx(expected.grad_norm_sq, rel=0.05)
    assert v.var() == pytest.approx(expected.grad_variance_trace, rel=0.05)
    assert estimator.draw(phi, batch, 1) is None


def test_savings_are_over_the_fastest_baseline() -> None:
    scenario = small()
    everybody = contenders(scenario.batches)
    who = [everybody[name] for name in ("static_16", "static_64", "adaptive")]
    result = compare(scenario, who, seeds=(0, 1))
    name = "adaptive"
    score = result.score(name)
    for i, saved in enumerate(score.saved):
        times = {one: runs[i].times_s for one, runs in result.runs.items()}
        base = [min(times[f"static_{b}"][t] or np.inf for b in (16, 64)) for t in SHORT]
        own = [times[name][t] or np.inf for t in SHORT]
        assert saved == pytest.approx(np.mean([1 - o / b for o, b in zip(own, base)]))
    assert score.mean_saved is not None and score.mean_saved <= (result.oracle_saved or 0.0)
    json.dumps(result.to_json())


def test_the_command_shows_a_table(tmp_path: Path, capsys) -> None:
    out = tmp_path / "out.json"
    flags = ["--preset", "32xh100-32b", "--policies", "static_64", "--seeds", "1"]
    assert command.main([*flags, "--output", str(out)]) == 0
    text = capsys.readouterr().out
    assert "oracle" in text and "static_64 *" in text and "cbs_small *" in text
    assert json.loads(out.read_text())["scenario"] == "32xh100-32b"


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ([], 2, "give --preset"),
        (["--preset", "nowhere"], 2, "known: "),
        (["--preset", "8xh100-3b", "--policies", "magic"], 2, "magic is unknown"),
        (["--preset", "8xh100-3b", "--seeds", "0"], 2, "--seeds 0"),
        (["--preset", "8xh100-3b", "--relayout-cost-s", "-1"], 2, "--relayout-cost-s -1"),
        (["--preset", "8xh100-3b", "--relayout-cost-s", "nan"], 2, "--relayout-cost-s nan"),
        (["--preset", "8xh100-3b", "--lst"], 2, "did you mean --list?"),
        (["--preset", "8xh100-3b", "--wrong"], 2, "--wrong"),
    ],
)
def test_wrong_usage_gets_one_line(capsys, flags: list[str], code: int, said: str) -> None:
    assert command.main(flags) == code
    error = capsys.readouterr().err
    assert error.startswith("copus simulate: error: ") and error.count("\n") == 1 and said in error


def test_best_moves_equal_brute_force() -> None:
    rng = np.random.default_rng(3)
    for _ in range(60):
        segments, layouts = int(rng.integers(1, 7)), int(rng.integers(1, 5))
        times = rng.uniform(1, 10, (segments, layouts)).tolist()
        costs = rng.uniform(0, 6, (layouts, layouts))
        np.fill_diagonal(costs, 0.0)

        def total(path: tuple[int, ...], times: list, costs: Any) -> float:
            moves = sum(costs[a, b] for a, b in itertools.pairwise(path))
            return sum(times[i][j] for i, j in enumerate(path)) + moves

        every = itertools.product(range(layouts), repeat=segments)
        least = min(total(path, times, costs) for path in every)
        path, seconds = best_moves(times, costs.tolist())
        assert seconds == pytest.approx(least)
        assert total(tuple(path), times, costs) == pytest.approx(least)


def test_waiting_can_be_better_than_two_moves() -> None:
    # The second layout wins now by little, the third from the next segment on by much.
    times = [[10.0, 99.0, 99.0], [10.0, 9.0, 14.0], [10.0, 9.0, 2.0], [10.0, 9.0, 2.0]]
    costs = [[0.0 if i == j else 3.0 for j in range(3)] for i in range(3)]
    assert best_moves(times, costs)[0] == [0, 0, 2, 2]


def test_a_pause_is_that_of_its_pair_of_layouts_unless_given() -> None:
    scenario = preset("8xh100-3b")
    machine = Machine.of(scenario.cluster)
    layouts = scenario.speeds.layouts
    found = {pair: scenario.pause_s(*pair) for pair in itertools.permutations(layouts, 2)}
    assert len({round(s, 6) for s in found.values()}) > 3
    for pair, seconds in found.items():
        assert seconds == pause_s(scenario.pauses.moved(*pair), machine)
    assert scenario.pause_range_s() == (min(found.values()), max(found.values()))
    given = scenario.change(relayout_cost_s=43.0)
    assert {given.pause_s(*pair) for pair in found} == {43.0}
    assert given.pause_s(layouts[0], layouts[0]) == 0.0


def test_a_simulation_needs_no_torch() -> None:
    code = "import sys; from copus_ext.extras.simulate import command, compare, report; "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
