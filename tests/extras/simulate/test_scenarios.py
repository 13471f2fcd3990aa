"""The arithmetic of the scenarios of time to loss."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.support import RESULTS, interval, interval_of_few
from bench.time_to_loss import scenarios
from bench.time_to_loss.unprofiled import Machine
from copus_ext.extras.simulate.run import Run
from copus_ext.extras.simulate.scenario import Scenario, preset
from copus_ext.goodput.state import MIN_TIMED_STEPS, WARM_UP_STEPS

HEADROOM_CASE = "16xh100-13b"


def test_a_sweep_halves_its_batches_and_trains_the_best_to_its_end() -> None:
    # 88 of all to an eighth, 24 of two to a quarter, then the best alone; the last never arrives.
    times = {16: 16.0, 8: 8.0, 32: 32.0, 64: math.inf}
    assert scenarios.sweep_seconds(times) == 88 / 8 + 24 / 8 + 8 / 4 + 8 / 2
    assert scenarios.sweep_seconds({8: 5.0}) == 5.0


def mean(values: Any) -> float:
    return sum(values) / len(values)


def test_an_interval_spans_what_other_seeds_might_have_given() -> None:
    assert interval([2.0, 2.0, 2.0], mean) == [2.0, 2.0]
    low, high = interval([1.0, 2.0, 3.0], mean)
    assert 1.0 <= low < 2.0 < high <= 3.0


def test_an_interval_of_a_few_seeds_is_wider_than_their_range() -> None:
    low, high = interval_of_few([1.0, 2.0, 3.0], mean) or (2.0, 2.0)
    assert (low, high) == pytest.approx((2 - 4.303 / math.sqrt(3), 2 + 4.303 / math.sqrt(3)))
    assert interval_of_few([1.0], mean) is None


def test_an_interval_over_clusters_is_as_wide_as_they_differ() -> None:
    cells = [(cluster, seed, float(cluster)) for cluster in (1, 2, 3) for seed in range(20)]

    def figure(some: Any) -> float:
        return mean([value for *_, value in some])

    by_cluster, by_seed = operator.itemgetter(0), operator.itemgetter(1)
    assert interval(cells, figure, [by_seed]) == [2.0, 2.0]
    low, high = interval(cells, figure, [by_cluster, by_seed])
    assert low == 1.0 and high == 3.0


def refuse(name: str) -> float:
    raise AssertionError(f"{name} is not valid JSON")


def test_results_are_strict_json_and_those_of_other_scenarios_stay(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    scenarios.save(path, {"S7": {"hindsight": 0.01, "commit": "a"}})
    rows = [{"same_s": math.inf, "of": (1.0, math.nan)}]
    scenarios.save(path, {"S1": {"rows": rows, "commit": "b"}})
    found = json.loads(path.read_text(), parse_constant=refuse)
    assert found["S7"] == {"hindsight": 0.01, "commit": "a"}
    assert found["S1"] == {"rows": [{"same_s": None, "of": [1.0, None]}], "commit": "b"}


def test_committed_results_are_strict_json_and_say_what_made_them() -> None:
    text = (RESULTS / scenarios.FILE).read_text()
    for name, found in json.loads(text, parse_constant=refuse).items():
        assert {"seeds", "command"} <= found.keys(), name
        assert {"commit", "commits"} & found.keys(), name


def test_seven_runs_the_seeds_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def simulated(s: Scenario, who: Any, *, seed: int) -> Run:
        return Run(name=who.name, times_s={}, seconds=1000.0 + seed, decisions=10, paused_s=5.0)

    monkeypatch.setattr(scenarios, "simulate", simulated)
    row = scenarios.of_batch(16, [10, 12])
    extra = 10 * scenarios.DECIDING_S
    assert row["seeds"] == [10, 12]
    assert row["controller_s"] == pytest.approx([1010.0 + extra, 1012.0 + extra])
    assert row["overhead"] == pytest.approx([(extra + 5) / (s + extra) for s in (1010, 1012)])


def test_overhead_is_all_that_is_no_training() -> None:
    run = Run(name="", times_s={}, seconds=100.0, decisions=5, measured_s=50.0, paused_s=5.0)
    extra = 5 * scenarios.DECIDING_S + 50 * scenarios.MEASURING
    assert scenarios.overhead(run) == pytest.approx((extra + 5) / (100 + extra))


@cache
def machine(seed: int, error_sd: float = 0.1) -> Machine:
    return Machine(preset(HEADROOM_CASE), seed, error_sd)


def test_an_unprofiled_run_starts_in_the_configuration_that_is_predicted_to_be_fastest() -> None:
    first = preset(HEADROOM_CASE).speeds.fastest(16).configuration
    for seed in (10, 11, 12):
        assert machine(seed).unprofiled().speeds.fastest(16).configuration == first
    true = [machine(seed).true(first) for seed in (10, 11, 12)]
    assert len({*true}) == 3
    assert Machine(preset(HEADROOM_CASE), 10).true(first) == true[0]
    quadratic = preset(HEADROOM_CASE).with_noisy_quadratic()
    assert Machine(quadratic, 10).true(first) == true[0]


def test_without_errors_the_machine_is_as_predicted() -> None:
    right = machine(0, 0.0)
    for row in right.predicted:
        assert right.true(row.configuration) == pytest.approx(row.samples_per_s)
    known, plain = (s.speeds.fastest(64) for s in (right.known_afterwards(), right._scenario))
    assert known.configuration == plain.configuration


def test_static_runs_are_the_faster_the_more_is_known_of_them() -> None:
    s = preset(HEADROOM_CASE)
    for seed in (10, 11):
        one = scenarios.one_start(s, "progress", 64, seed, machine(seed))
        assert one.best_s <= one.best_planned_s <= one.same_s
    right = scenarios.one_start(s, "progress", 64, 10, machine(10, 0.0))
    assert right.best_s == pytest.approx(right.best_planned_s)


def test_errors_have_their_spread() -> None:
    ratios = [
        math.log(one.true(row.configuration) / row.samples_per_s)
        for one in map(machine, range(10, 30))
        for row in one.predicted
        if row.configuration.num_microbatches == 4
    ]
    assert np.std(ratios) == pytest.approx(0.1, rel=0.15)


def test_an_unprofiled_run_knows_a_speed_once_it_has_timed_it() -> None:
    one = machine(10)
    speeds = one.unprofiled().speeds
    now = speeds.fastest(16)
    wrong = one.true(now.configuration)

    def table() -> tuple[Any, dict[Any, Any]]:
        rows, where = speeds.table([16, 32], set(), speeds.layouts, now)
        at = where[now.layout, 16]
        return rows[at], {r.configuration: r.samples_per_s for r in rows}

    own, before = table()
    assert own.samples_per_s == pytest.approx(now.samples_per_s) and own.relative_sd == 0.0
    assert own.source == "predicted"
    for _ in range(WARM_UP_STEPS + MIN_TIMED_STEPS):
        assert speeds.true(now).samples_per_s == wrong
    own, after = table()
    assert own.source == "measured" and own.relative_sd == 0.0
    assert own.samples_per_s == pytest.approx(wrong, rel=0.02)
    # What was timed corrects its kin.
    kin = dataclasses.replace(now.configuration, global_batch_size=32)
    assert abs(after[kin] / one.true(kin) - 1) < abs(before[kin] / one.true(kin) - 1)
    sizes = {c.micro_batch_size for c in after if c.layout == now.layout}
    assert len(sizes) > 1
