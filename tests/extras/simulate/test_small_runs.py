"""The rule on small runs that train, and the static batches that they are held against."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest

from bench.support import RESULTS
from bench.time_to_loss import results, small_runs
from bench.time_to_loss.small_gpt import Recipe


def test_samples_between_lengths_follow_a_curve_over_the_loss() -> None:
    """Losses 1 + 200 / sqrt(samples): a power law, as of real runs."""

    def loss_at(samples: float) -> float:
        return 1.0 + 200 / math.sqrt(samples)

    rows = [
        {"kind": "static", "batch": 64, "total_samples": n, "loss": loss_at(n) + of_seed}
        for n in (32_768, 49_152, 65_536)
        for of_seed in (-0.01, 0.01)
    ]
    lengths = small_runs.static_lengths(rows)[64]
    for samples, off in ((32_768, 1e-9), (40_000, 2e-3), (58_000, 2e-3), (65_536, 1e-9)):
        found = small_runs.samples_to(loss_at(samples), lengths)
        assert found == pytest.approx(samples, rel=off)
    for samples in (20_000, 75_000):
        found = small_runs.samples_to(loss_at(samples), lengths)
        assert found is not None and found < samples, "the static batch looks better than it is"
    assert small_runs.samples_to(1.3, lengths) is None


def test_a_run_ends_at_its_samples_and_every_step_counts() -> None:
    overhead, total = 32.0, 600
    recipe = Recipe(total_samples=total, learning_rate=0.016, warmup=0.3, seed=0)
    row = small_runs.live_run(overhead, 128, recipe)
    changes = [*row["changes"], (total, 0)]
    assert len(changes) > 2, "a batch of 128 is too large for 600 samples"
    parts = [(math.ceil((b - a) / size), size) for (a, size), (b, _) in itertools.pairwise(changes)]
    assert row["steps"] == sum(steps for steps, _ in parts)
    time = sum(steps * (overhead + size) for steps, size in parts)
    assert time < row["time"] <= time * (1 + results.MEASURING) * (1 + 1e-9)
    assert 2.5 < row["loss"] < math.log(256)


def test_the_committed_figures_are_those_of_the_recorded_runs() -> None:
    atlas: dict[str, Any] = json.loads((RESULTS / results.FILE).read_text())["atlas"]
    rows = small_runs.read(RESULTS / small_runs.RUNS)
    lengths = small_runs.static_lengths(rows)
    for rate, figures in ((1.0, atlas), (0.5, atlas["half_rate"])):
        runs = (r for r in rows if r["kind"] == "controller" and r["rate"] == rate)
        ratios = [small_runs.outcome(row, lengths)["ratio"] for row in runs]
        assert len(ratios) == figures["runs"]
        assert max(ratios) == pytest.approx(figures["worst"])
        assert sum(ratios) / len(ratios) == pytest.approx(figures["mean"])
