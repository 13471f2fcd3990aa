"""Mixtures of experts: the same numbers under every layout, and a balance loss that no layout and
no cutting of the batch changes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.worker_moe import (
    BALANCE_CASES,
    BY_SAMPLE_CASES,
    CORE_CASES,
    LAYOUT_CASES,
    RESUMED,
)
from tests.helpers.on_ranks import on_ranks

Runs = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return on_ranks("worker_moe", tmp_path_factory.mktemp("moe"), 4, timeout_s=800)


def numbers(steps: list[dict[str, Any]]) -> list[float]:
    """Losses, norms of gradient and weights, and loads of all steps in one row."""
    found: list[float] = []
    for step in steps:
        found += [*step["losses"].values(), step["grad_norm"], step["params_norm"]]
        found.append(step["max_expert_load"])
    return found


@pytest.mark.timeout(840)
@pytest.mark.parametrize(("model", "layout"), [c for c in LAYOUT_CASES if c[1] != "dp4"])
def test_numbers_equal_those_of_plain_data_parallelism(runs: Runs, model: str, layout: str) -> None:
    whole, own = runs[f"{model} dp4"], runs[f"{model} {layout}"]
    assert len(own) == 3
    assert numbers(own) == pytest.approx(numbers(whole), rel=1e-5)
    assert own[0]["losses"]["lm loss"] == pytest.approx(whole[0]["losses"]["lm loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("mode", "layout", "more"), [c for c in BALANCE_CASES if c[1:] != ("dp4", "")]
)
def test_the_balance_loss_depends_on_no_layout_and_no_cutting(
    runs: Runs, mode: str, layout: str, more: str
) -> None:
    whole, own = runs[f"{mode} dp4 "], runs[f"{mode} {layout} {more}"]
    assert numbers(own) == pytest.approx(numbers(whole), rel=1e-5)


@pytest.mark.parametrize(("layout", "more"), BY_SAMPLE_CASES[1:])
def test_losses_of_samples_and_tokens_depend_on_no_layout_and_no_cutting(
    runs: Runs, layout: str, more: str
) -> None:
    whole, own = runs["by sample dp4 "], runs[f"by sample {layout} {more}"]
    assert numbers(own) == pytest.approx(numbers(whole), rel=1e-5)


def test_evaluation_leaves_the_routers_alone(runs: Runs) -> None:
    assert numbers(runs["evaluated"]) == numbers(runs["bias ep2"])


def test_a_first_pass_that_counts_adds_no_loss(runs: Runs) -> None:
    exact, lagged = (runs[name][0]["losses"] for name in ("further exact", "further ep2"))
    assert exact["mtp_1 loss"] == pytest.approx(lagged["mtp_1 loss"], rel=1e-6)


def test_a_skipped_step_leaves_fractions_and_biases(runs: Runs) -> None:
    states: Any = runs["spoilt"]
    first, second, third, fourth = states
    assert first[0] == [] and second[0]
    assert third == second, "the second step was skipped"
    assert fourth[0] != third[0] and fourth[1] != third[1]


def test_the_balance_loss_has_a_say(runs: Runs) -> None:
    norms = [runs[f"{mode} dp4 "][1]["grad_norm"] for mode in ("lagged", "exact")]
    assert norms[0] != pytest.approx(norms[1], rel=1e-2)


@pytest.mark.parametrize("kind", ["aux_loss", "global_aux_loss"])
def test_losses_of_megatron_core_depend_on_the_layout(runs: Runs, kind: str) -> None:
    # The reason why `--copus-mode act` refuses them.
    norms = [
        runs[f"{kind} {layout} {more}"][1]["grad_norm"]
        for k, layout, more in CORE_CASES
        if k == kind
    ]
    assert max(norms) > 1.05 * min(norms)


@pytest.mark.parametrize(("model", "layout"), RESUMED)
def test_a_run_goes_on_from_its_checkpoint(runs: Runs, model: str, layout: str) -> None:
    saved = runs[f"{model} saved"][2:]
    assert runs[f"{model} dp4 resumed"] == saved, "fractions and biases are of the checkpoint"
    assert numbers(runs[f"{model} {layout} resumed"]) == pytest.approx(numbers(saved), rel=1e-5)
