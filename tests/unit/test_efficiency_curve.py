"""The efficiency curve on published runs: the numbers that the documentation quotes."""

from __future__ import annotations

import pytest

from bench import efficiency_curve as bench


def test_the_fit_is_exact_on_its_own_curve() -> None:
    batches = [16, 64, 100, 1000]
    tokens = [bench.needed(b, (3e6, 80.0)) for b in batches]
    assert bench.fit(batches, tokens) == pytest.approx((3e6, 80.0), rel=1e-9)


def test_a_target_is_met_between_two_evaluations() -> None:
    curve = [(1.0, 5.0), (2.0, 4.0), (3.0, 4.5), (4.0, 3.0)]
    assert bench.tokens_to(curve, 4.25) == pytest.approx(1.75)
    assert bench.tokens_to(curve, 4.0) == 2.0
    assert bench.tokens_to(curve, 2.9) is None


def test_published_runs_are_predicted_without_their_batch() -> None:
    found = {target: bench.at_target(bench.curves(), target) for target in (2.69, 2.70)}
    medians = [1.171, 1.188, 1.183, 1.190, 1.197, 1.212, 1.225, 1.290, 1.388]
    ours = [tokens / 1e9 for tokens in found[2.69]["median_tokens"].values()]
    assert ours == pytest.approx(medians, rel=0.005)
    assert sum(found[2.69]["runs"].values()) == 117
    assert found[2.69]["b_c_tokens"] == pytest.approx(4.37e7, rel=0.02)
    assert found[2.69]["worst_left_out"] <= 0.025
    assert found[2.70]["worst_left_out"] <= 0.035
