"""What the gradient tap measures is a property of batch and weights, not of the layout, and
measuring changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.worker_noise import FAMILIES, SPOILT, STEPS, case_name, cases
from tests.helpers.nightly import case as parameter
from tests.helpers.on_ranks import ranks_fixture

CASES = [
    parameter(one, daily=daily, id=case_name(*one))
    for daily in (True, False)
    for one in cases(daily=daily)
]
FIRST = case_name(*cases(daily=True)[0])

runs = ranks_fixture("worker_noise", 4, timeout_s=1000, has_nightly=True)


@pytest.mark.timeout(1040)
@pytest.mark.parametrize("case", CASES)
def test_squared_norms_do_not_depend_on_the_layout(runs: dict[str, Any], case: Any) -> None:
    model, estimator, group, _ = case
    run = runs[case_name(*case)]
    first = runs[case_name(model, estimator, group, FAMILIES[model, estimator, group][0])]
    assert len(run["noise"]) == STEPS and run["same_on_all_ranks"]
    assert not run["broken"]
    for noise, reference in zip(run["noise"], first["noise"], strict=True):
        assert noise["measured"] and noise["estimator"] == estimator
        shared = noise["squares"]["big"].keys() & reference["squares"]["big"].keys()
        assert {"attention", "mlp"} <= shared
        for size in ("small", "big"):
            got, want = ({n: x["squares"][size][n] for n in shared} for x in (noise, reference))
            # Adam divides by small moments, which enlarges rounding in the second step.
            assert got == pytest.approx(want, rel=3e-5), size
        assert noise["step"]["layers"]["grad_variance_trace"] > 0 or estimator == "half"
        assert noise["step"]["layers"] == pytest.approx(reference["step"]["layers"], rel=1e-3)
        assert (noise["smoothed_tokens_per_sample"] < 32) is ("masked" in group)


def test_sums_over_ranks_that_share_samples_go_in_bounded_pieces(runs: dict[str, Any]) -> None:
    assert len(runs["pieces"]) == 12
    wrong = [piece for piece in runs["pieces"] if not piece[2]]
    assert not wrong, "bit for bit what one large buffer gives"


def test_the_small_groups_are_what_they_are_said_to_be(runs: dict[str, Any]) -> None:
    """Same batch, same weights: the more samples, the smaller the norm."""
    families = [("llama", "micro", "1"), ("llama", "rank", "4 one by one")]
    one, four = (
        runs[case_name(*family, FAMILIES[family][0])]["noise"][0]["squares"] for family in families
    )
    for group in ("attention", "mlp"):
        assert one["small"][group] > four["small"][group] > four["big"][group]


def test_micro_batches_of_one_sample_are_per_sample_gradients(runs: dict[str, Any]) -> None:
    """Brute force: the optimizer's norm of steps of one sample each, with weights held still."""
    alone = runs["alone"]["grad_norms"]
    measured = runs[FIRST]["noise"][0]["squares"]["small"]
    assert len(alone) == 8
    want = sum(norm**2 for norm in alone) / 8
    assert sum(measured.values()) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("estimator", ["micro", "rank", "half"])
def test_observing_changes_no_bit(runs: dict[str, Any], estimator: str) -> None:
    plain, observed = runs["plain"], runs[f"observed {estimator}"]
    assert observed["losses"] == plain["losses"]
    assert observed["grad_norms"] == plain["grad_norms"]
    assert all(noise["measured"] for noise in observed["noise"])


def test_one_collective_per_measured_step_and_none_otherwise(runs: dict[str, Any]) -> None:
    plain = runs["plain"]["collectives"]
    assert runs["observed micro"]["collectives"] == plain + 4
    assert runs["every second"]["collectives"] == plain + 2
    assert [n["measured"] for n in runs["every second"]["noise"]] == [False, True] * 2
    ages = [n["age_tokens"] for n in runs["every second"]["noise"]]
    assert ages == pytest.approx([0, 0, 8 * 32, 0], rel=0.1)


def test_a_step_with_a_bad_gradient_is_not_measured(runs: dict[str, Any]) -> None:
    run = runs["spoilt"]
    assert run["same_on_all_ranks"] and not run["broken"]
    assert [n["measured"] for n in run["noise"]] == [i != SPOILT for i in range(1, 5)]
    before, after = run["states"][SPOILT - 2], run["states"][SPOILT - 1]
    assert after["averages"] == before["averages"]
    assert after["num_skipped"] == before["num_skipped"] + 1


@pytest.mark.parametrize(("name", "tolerance"), [("bf16", 0.1), ("fp16 8", 0.03)])
def test_half_precision_measures_the_same(
    runs: dict[str, Any], name: str, tolerance: float
) -> None:
    assert not runs[name]["broken"]
    for noise, reference in zip(runs[name]["noise"], runs["fp32"]["noise"], strict=True):
        assert noise["measured"]
        for size in ("small", "big"):
            got, want = (x["squares"][size]["mlp"] for x in (noise, reference))
            assert got == pytest.approx(want, rel=tolerance)


def test_the_loss_scale_cancels(runs: dict[str, Any]) -> None:
    for a, b in zip(runs["fp16 8"]["noise"], runs["fp16 12"]["noise"], strict=True):
        for size in ("small", "big"):
            assert a["squares"][size] == pytest.approx(b["squares"][size], rel=1e-2)


def test_auto_takes_what_the_layout_allows(runs: dict[str, Any]) -> None:
    assert {n["estimator"] for n in runs["auto 1"]["noise"]} == {"micro"}
    assert {n["estimator"] for n in runs["auto 2"]["noise"]} == {"rank"}
    blind = runs["blind"]["noise"]
    assert {(n["status"], n["estimator"], n["measured"]) for n in blind} == {
        ("none", "none", False)
    }


def test_the_state_moves_to_another_layout(runs: dict[str, Any]) -> None:
    stored, moved, unmoved = runs["first half"], runs["moved"], runs["unmoved"]
    assert moved["at_setup"] == stored["states"][-1]
    assert moved["states"][-1]["num_measured"] == 4
    got, want = (run["states"][-1]["averages"]["layers"] for run in (moved, unmoved))
    assert got == pytest.approx(want, rel=1e-4)
    got, want = (run["noise"][-1]["phi_samples"] for run in (moved, unmoved))
    assert got == pytest.approx(want, rel=1e-4)


def test_norms_counted_on_every_rank_would_be_found(runs: dict[str, Any]) -> None:
    """The comparison of layouts can fail."""
    right = runs[FIRST]["noise"][0]["squares"]
    wrong = runs["wrong"]["noise"][0]["squares"]
    assert wrong["big"]["mlp"] == pytest.approx(right["big"]["mlp"], rel=1e-5)
    for size in ("small", "big"):
        assert wrong[size]["vectors"] == pytest.approx(4 * right[size]["vectors"], rel=1e-5)


def test_squares_of_parts_of_samples_would_be_found(runs: dict[str, Any]) -> None:
    """Ranks that share samples must add up their gradients before they are squared."""
    family = ("llama", "rank", "4 one by one")
    right = squares_of(runs[case_name(*family, FAMILIES[family][0])])["small"]
    assert runs["parts squared"]["broken"], "the run itself sees the contradiction"
    wrong = squares_of(runs["parts let pass"])["small"]
    for group in ("attention", "mlp"):
        assert abs(wrong[group] / right[group] - 1) > 0.1


def squares_of(run: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Of the first step."""
    return run["noise"][0]["squares"]


def test_an_expert_averages_the_samples_of_the_replicas_that_share_it(runs: dict[str, Any]) -> None:
    """Over two replicas with one sample each as in a micro-batch of two; other groups do not."""
    shared, two, one = (
        squares_of(runs[case_name(*family, FAMILIES[family][0])])["small"]
        for family in (
            ("moe", "micro", "1, experts 2"),
            ("moe", "micro", "2"),
            ("moe", "micro", "1"),
        )
    )
    assert shared["experts"] == pytest.approx(two["experts"], rel=1e-5)
    assert shared["experts"] < 0.95 * one["experts"]
    for group in ("attention", "mlp"):
        assert shared[group] == pytest.approx(one[group], rel=1e-5)
        assert shared[group] > 1.05 * two[group]


def test_experts_are_measured_only_where_samples_are_whole(runs: dict[str, Any]) -> None:
    parts, whole = (runs[name]["noise"][0]["step"] for name in ("parts", "whole"))
    for step in (parts, whole):
        assert "attention" in step and not {"experts", "layers", "all"} & step.keys()
    assert "router" in whole, "no tensor parallelism cuts its tokens"
    assert "router" not in parts
