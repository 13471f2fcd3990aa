"""Micro-batches of a replica: equal to trying every sum, and what the command says."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.models import PRESETS
from copus_ext.cost_model.spec_file import SpecError
from copus_ext.extras.micro_split.split import (
    best_split,
    best_tail,
    seconds_by_size,
    unequal_micro_batches,
)
from copus_ext.planner.search import Planner
from copus_ext.planner.space import Limits
from tests.unit.test_plan_command import MIXTRAL, SEVEN, json_of, run
from tests.unit.test_planner_moe import CLUSTER, MODEL

times = st.dictionaries(st.integers(1, 7), st.floats(0.01, 10), min_size=1)


@given(st.integers(1, 14), times)
def test_it_equals_trying_every_sum(samples: int, seconds: dict[int, float]) -> None:
    sums = [
        sizes
        for count in range(1, samples + 1)
        for sizes in itertools.combinations_with_replacement(sorted(seconds), count)
        if sum(sizes) == samples
    ]
    if not sums:
        with pytest.raises(ValueError, match="not a sum"):
            best_split(samples, seconds)
        return
    found = best_split(samples, seconds)
    least = min(sum(seconds[n] for n in sizes) for sizes in sums)
    assert sum(found.sizes) == samples and found.seconds == pytest.approx(least)
    assert sum(seconds[n] for n in found.sizes) == pytest.approx(found.seconds)


@given(st.integers(1, 30), st.integers(1, 8), st.floats(0, 5), st.floats(0.1, 2))
def test_a_tail_is_one_of_the_sums(samples: int, most: int, start: float, each: float) -> None:
    seconds = {n: start + each * n for n in range(1, most + 1)}
    tail, free = best_tail(samples, seconds), best_split(samples, seconds)
    assert sum(tail.sizes) == samples and len(set(tail.sizes[:-1])) <= 1
    # Where only their number costs, nothing beats full ones and a rest.
    assert tail.seconds == pytest.approx(free.seconds)
    even = [n for n in seconds if samples % n == 0]
    assert tail.seconds <= min(samples // n * seconds[n] for n in even) * (1 + 1e-12)


def test_text() -> None:
    assert str(best_split(10, {4: 1.0, 2: 0.9, 1: 0.8})) == "4x2+2"
    assert str(best_split(4, {4: 1.0})) == "4"


def test_the_planner_offers_what_a_prime_batch_needs() -> None:
    limits = Limits(fixed={"pp": 1, "tp": 4, "cp": 1})
    planner = Planner(PRESETS["llama-2-7b"], preset("h100-80g:8"), limits=limits)
    plan = planner.rank([2 * 37], top=50)[0]
    assert {r.configuration.num_microbatches for r in plan.ranked} <= {1, 37}
    found = unequal_micro_batches(planner, plan)
    assert found
    for one in found:
        assert sum(one.split.sizes) == 37 and one.saved_s > 0
        assert one.free.seconds <= one.split.seconds * (1 + 1e-12)
        assert "--allow-uneven-micro-batches" in one.flags and "%" in str(one)
        seconds = seconds_by_size(planner, one.configuration, 37)
        assert max(one.split.sizes) in seconds


def test_the_command_tells_the_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    command = f"micro-batches {SEVEN} --fix cp=1,pp=1,tp=4 --top 3"
    code, text, _ = run(capsys, f"{command} --global-batch-size 74")
    assert code == 0 and "rank 1 micro-batches 19+18: " in text and "--micro-batch-size 19" in text
    code, text, _ = run(capsys, f"{command} --global-batch-size 26")
    assert code == 0 and "unequal micro-batches make nothing" in text
    splits = json_of(capsys, f"{command} --global-batch-size 74")["micro_splits"]
    assert splits[0]["sizes"] == [19, 18]


def test_it_refuses_mixtures(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, f"micro-batches {MIXTRAL}")
    assert code == 2 and err.count("\n") == 1
    assert "`micro-batches` does not know mixtures" in err
    planner = Planner(MODEL, CLUSTER)
    with pytest.raises(SpecError, match="does not know mixtures of experts"):
        unequal_micro_batches(planner, planner.rank([256], top=1)[0])
