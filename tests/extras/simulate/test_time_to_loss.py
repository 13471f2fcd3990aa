"""The arithmetic of time to loss on a virtual clock."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.support import RESULTS, interval, interval_of_few
from bench.time_to_loss import cells, results
from bench.time_to_loss.unprofiled import Machine
from bench.time_to_loss.yardsticks import yardsticks
from copus_ext.extras.simulate.scenario import preset
from copus_ext.goodput.belief import published_critical_batch_size
from copus_ext.goodput.state import MIN_TIMED_STEPS, WARM_UP_STEPS

HEADROOM_CASE = "16xh100-13b"


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
    results.save(path, {"S7": {"hindsight": 0.01, "commit": "a"}})
    rows = [{"same_s": math.inf, "of": (1.0, math.nan)}]
    results.save(path, {"S1": {"rows": rows, "commit": "b"}})
    found = json.loads(path.read_text(), parse_constant=refuse)
    assert found["S7"] == {"hindsight": 0.01, "commit": "a"}
    assert found["S1"] == {"rows": [{"same_s": None, "of": [1.0, None]}], "commit": "b"}


def test_committed_results_are_strict_json_and_say_what_made_them() -> None:
    found = json.loads((RESULTS / results.FILE).read_text(), parse_constant=refuse)
    assert {"seeds", "command", "commit", "rows"} <= found["virtual_clock"].keys()
    rows = found["virtual_clock"]["rows"]
    assert len(rows) == found["common_sense"]["runs"]
    mean_of_rows = mean([row["common_sense"] for row in rows])
    assert found["common_sense"]["mean"] == pytest.approx(mean_of_rows)


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


def test_yardsticks_are_ordered_and_those_of_closed_forms() -> None:
    s = preset(HEADROOM_CASE)
    for seed in (10, 11):
        marks = yardsticks(s, machine(seed))
        assert marks.oracle_s is not None
        assert marks.oracle_s <= marks.best_static_s <= marks.common_sense_s
        assert all(marks.static_s[b] <= marks.planned_s[b] for b in marks.static_s)
        assert marks.oracle_s <= marks.law_schedule * marks.best_static_s
    right = yardsticks(s, machine(10, 0.0))
    assert right.static_s == pytest.approx(right.planned_s)
    speed = s.speeds.fastest(64).samples_per_s
    assert right.static_s[64] == pytest.approx(s.dynamics.samples(64, s.last) / speed)


def test_cells_are_dealt_in_equal_numbers_and_never_twice() -> None:
    dealt = cells.cells([1, 2])
    assert len({*dealt}) == len(dealt) == 2 * len(cells.CLUSTERS) * len(cells.TRUTHS) * 4
    for name in ("level", "multiplier", "error", "hours"):
        counts = Counter((c.seed, getattr(c, name)) for c in dealt)
        assert max(counts.values()) - min(counts.values()) <= 1
    assert cells.cells([2]) == [c for c in dealt if c.seed == 2]


@pytest.mark.parametrize("truth", ["P^.46", "P^1", "flat", "levels off", "falls late"])
def test_a_truth_has_its_course_and_its_level(truth: str) -> None:
    (cell,) = [
        c
        for c in cells.cells([3])
        if (c.cluster, c.truth, c.start) == ("7b 32xMI210", truth, "law")
    ]
    s = cells.scenario(cell)
    law = published_critical_batch_size(cells.CLUSTERS[cell.cluster]().tokens / 2048, 2048)
    for share in (0.01, 0.3, 1.0):
        want = cell.level * law * float(cells.TRUTHS[truth](np.array(share)))
        critical = cell.multiplier * s.trajectory.phi_at(share * s.last)
        assert critical == pytest.approx(want, rel=0.02), share


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
