"""The first batch is the one that ends soonest by the published law, found by brute force."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from copus_ext.goodput.belief import published_critical_batch_size
from copus_ext.goodput.first_batch import (
    EXPONENT,
    HABITUAL_TOKENS,
    LEVEL_SD,
    FirstBatch,
    doublings,
    first_batch,
)
from copus_ext.goodput.inputs import ConfigThroughput
from tests.helpers.recorded import row

LENGTH: dict[str, float] = {"total_samples": 1e7, "tokens_per_sample": 2048}
GRID = [2**k for k in range(3, 15)]
LEVEL = published_critical_batch_size(1e7, 2048)


def affine(h: float, batches: Any = GRID, **more: Any) -> list[ConfigThroughput]:
    """A step of B samples takes h + B."""
    return [row(b, b / (h + b), **more) for b in batches]


def chosen(rows: list[ConfigThroughput], **more: float) -> FirstBatch:
    found = first_batch(rows, **{**LENGTH, **more})
    assert found is not None
    return found


def seconds(batch: float, h: float, level: float) -> float:
    """Time of a run at one batch, step by step along its progress, which ends at a level."""
    progress = (np.arange(20_000) + 0.5) / 20_000
    return float(np.mean(1.0 + batch / (level * progress**EXPONENT)) * (h + batch) / batch)


@pytest.mark.parametrize("h", [0.0, 30.0, 400.0, 5000.0, 1e5])
def test_it_ends_soonest_over_all_that_may_be_true(h: float) -> None:
    """The mean of runs at many levels, drawn as the law is uncertain."""
    factors = np.exp(LEVEL_SD * np.random.default_rng(1).standard_normal(4000))
    # The time is straight in 1 / level, so that its mean stands for all of them.
    level = LEVEL / float(np.mean(1.0 / factors))
    assert level == pytest.approx(LEVEL / math.exp(LEVEL_SD**2 / 2), rel=0.1)
    every = {batch: seconds(batch, h, level) for batch in GRID}
    found = chosen(affine(h))
    assert every[found.batch] <= 1.005 * min(every.values())
    assert found.batch == GRID[0] if h == 0.0 else found.batch > GRID[0]


@pytest.mark.parametrize("h", [0.0, 400.0, 5000.0])
def test_the_range_holds_what_is_as_good_somewhere(h: float) -> None:
    found = chosen(affine(h))
    for factor in (1 / 4, 1.0, 4.0):
        every = {batch: seconds(batch, h, factor * LEVEL) for batch in GRID}
        best = min(every.values())
        good = [batch for batch in GRID if every[batch] < 1.02 * best]
        assert found.least <= min(good) and max(good) <= found.most
    least_level, most_level = (
        {b: seconds(b, h, factor * LEVEL) for b in GRID} for factor in (1 / 4, 4.0)
    )
    assert found.most == GRID[-1] or any(
        every[found.most * 2] > 1.03 * min(every.values()) for every in (most_level,)
    )
    assert found.least == GRID[0] or (
        least_level[found.least // 2] > 1.03 * min(least_level.values())
    )


def test_the_habitual_batch_costs_what_a_run_of_it_takes() -> None:
    found = chosen(affine(30.0))
    habitual = HABITUAL_TOKENS // 2048
    assert found.habitual_batch == habitual
    cost = found.habitual_cost
    assert cost is not None
    for share, factor in ((cost.likely, 1.0), (cost.high, 1 / 4), (cost.low, 4.0)):
        ratio = seconds(habitual, 30.0, factor * LEVEL) / seconds(found.batch, 30.0, factor * LEVEL)
        assert share == pytest.approx(ratio - 1.0, abs=0.01)
    assert f"4M tokens (2,048) would take about {100 * cost.likely:.0f} %" in found.of_a_plan()
    level = replace(found, habitual_cost=replace(cost, low=-0.06, likely=-0.02, high=0.1))
    assert "would take about as long (-6 to 10 % more by" in level.of_a_plan()
    level = replace(found, habitual_cost=replace(cost, low=-0.001, likely=0.2, high=0.9))
    assert "about 20 % more time (0 to 90 by the critical" in level.of_a_plan()


def test_the_fastest_layout_of_each_batch_counts_and_no_assumed_speed() -> None:
    rows = [*affine(400.0), *(row(b, 2 * b / (400.0 + b), dp=1) for b in GRID)]
    assert chosen(rows).row.layout.pp == 2
    assert chosen(rows).batch == chosen(affine(400.0)).batch
    assumed = [dataclasses.replace(row(8, 1e9), source="assumed")]
    assert chosen([*assumed, *affine(400.0)]) == chosen(affine(400.0))
    assert first_batch(assumed, **LENGTH) is None


def test_a_run_that_is_shorter_than_a_batch_does_not_take_it() -> None:
    found = chosen(affine(1e5), total_samples=1000.0)
    assert found.most <= 512 and found.habitual_batch is None and found.habitual_cost is None
    assert "habitual" not in found.of_a_plan()
    assert first_batch(affine(10.0, [2048]), total_samples=1000.0, tokens_per_sample=32) is None


def test_the_batches_worth_pricing_hold_the_plausible_ones() -> None:
    sizes = doublings(24, **LENGTH)
    assert sizes == [24 * 2**k for k in range(len(sizes))]
    assert sizes[-1] <= 4 * LEVEL < 2 * sizes[-1]
    assert doublings(2, total_samples=100.0, tokens_per_sample=32) == [2, 4, 8, 16, 32, 64]
    assert doublings(128, total_samples=100.0, tokens_per_sample=32) == [128]
    habitual = doublings(1, total_samples=1e6, tokens_per_sample=2048)
    assert 2048 in habitual and 4096 not in habitual


def test_the_batch_of_a_user_is_told_beside_the_first_one() -> None:
    found = replace(chosen(affine(24.0)), least=64, most=256)
    own = found.batch
    assert found.of_own(own) == f"your {own:,} is this one"
    apart = replace(found, row=row(128, 1.0))
    assert apart.of_own(256) == "your 256 is one of those that may prove as good"
    assert apart.of_own(32) == "your 32 is below what may prove as good"
    assert apart.of_own(1536) == "your 1,536 is above what may prove as good"
