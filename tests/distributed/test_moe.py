"""Mixtures of experts: the same numbers under every layout, and a balance loss that no layout and
no cutting of the batch changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.worker_moe import (
    BALANCE_CASES,
    BIASED_CASES,
    BY_SAMPLE_CASES,
    CORE_CASES,
    DAILY,
    LAYOUT_CASES,
    RESUMED,
    STEPS,
)
from tests.helpers.nightly import case
from tests.helpers.on_ranks import ranks_fixture

Steps = list[dict[str, Any]]

runs = ranks_fixture("worker_moe", 4, timeout_s=1600, has_nightly=True)


def named(kind: str, flags: list[str]) -> list[Any]:
    return [case(f, daily=f"{kind} {f}" in DAILY) for f in flags]


def pairs(cases: list[tuple[str, str]]) -> list[Any]:
    return [case(*c, daily=" ".join(c) in DAILY) for c in cases]


def numbers(steps: Steps) -> list[float]:
    """Losses, norms of gradient and weights, and loads of all steps in one row."""
    found: list[float] = []
    for step in steps:
        found += [*step["losses"].values(), step["grad_norm"], step["params_norm"]]
        found.append(step["max_expert_load"])
    return found


@pytest.mark.timeout(1680)
@pytest.mark.parametrize(("model", "layout"), pairs([c for c in LAYOUT_CASES if c[1] != "dp4"]))
def test_numbers_equal_those_of_plain_data_parallelism(
    runs: dict[str, Steps], model: str, layout: str
) -> None:
    whole, own = runs[f"{model} dp4"][:STEPS], runs[f"{model} {layout}"]
    assert len(own) == STEPS
    assert numbers(own) == pytest.approx(numbers(whole), rel=1e-5), "rounding grows"
    assert own[0]["losses"] == pytest.approx(whole[0]["losses"], rel=1e-6), "weights are equal"


def assert_equal_losses_and_gradients(own: Steps, whole: Steps) -> None:
    """To 1e-6, of steps that leave the weights alone."""
    assert len(own) == len(whole) > 0
    assert {step["params_norm"] for step in own} == {own[0]["params_norm"]}
    for step, reference in zip(own, whole, strict=True):
        assert step["losses"] == pytest.approx(reference["losses"], rel=1e-6)
        assert step["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-6)
        assert step["max_expert_load"] == reference["max_expert_load"]
    got, want = (torch.tensor(s[-1]["routers"], dtype=torch.float64) for s in (own, whole))
    assert (got - want).norm() <= 1e-6 * want.norm(), "element by element"


@pytest.mark.parametrize(("mode", "flags"), pairs([c for c in BALANCE_CASES if c[1]]))
def test_the_balance_loss_depends_on_no_layout_and_no_cutting(
    runs: dict[str, Steps], mode: str, flags: str
) -> None:
    assert_equal_losses_and_gradients(runs[f"{mode} {flags}"], runs[f"{mode} "])


@pytest.mark.parametrize("flags", named("by sample", BY_SAMPLE_CASES[1:]))
def test_losses_of_samples_and_tokens_depend_on_no_layout_and_no_cutting(
    runs: dict[str, Steps], flags: str
) -> None:
    assert_equal_losses_and_gradients(runs[f"by sample {flags}"], runs["by sample "])


@pytest.mark.parametrize("flags", named("biased", BIASED_CASES[1:]))
def test_losses_beside_a_bias_depend_on_no_layout_and_no_cutting(
    runs: dict[str, Steps], flags: str
) -> None:
    assert_equal_losses_and_gradients(runs[f"biased {flags}"], runs["biased "])


PLAIN_CASES = [
    *BALANCE_CASES,
    *(("by sample", flags) for flags in BY_SAMPLE_CASES),
    *(("biased", flags) for flags in BIASED_CASES),
]


@pytest.mark.parametrize(("name", "flags"), pairs(PLAIN_CASES))
def test_losses_and_gradients_are_those_of_plain_torch(
    runs: dict[str, Steps], name: str, flags: str
) -> None:
    own, plain = runs[f"{name} {flags}"], runs[f"plain {name}"]
    assert len(own) == len(plain) > 0
    for step, want in zip(own, plain, strict=True):
        assert step["losses"] == pytest.approx(want["losses"], rel=1e-6)
        assert step["grad_norm"] == pytest.approx(want["grad_norm"], rel=2e-6)
        assert step["max_expert_load"] == want["max_expert_load"]
        got, exact = (torch.tensor(s["routers"], dtype=torch.float64) for s in (step, want))
        assert (got - exact).norm() <= 3e-6 * exact.norm(), "element by element"


def test_the_balance_loss_decides_what_is_compared(runs: dict[str, Steps]) -> None:
    lagged, exact = ([step["grad_norm"] for step in runs[f"{m} "]] for m in ("lagged", "exact"))
    assert min(lagged[1], *exact) > 2 * lagged[0], "the first step knows no earlier batch"
    assert lagged[1] != pytest.approx(exact[1], rel=1e-2)


def test_evaluation_leaves_the_routers_alone(runs: dict[str, Steps]) -> None:
    assert numbers(runs["evaluated"]) == numbers(runs["bias ep2"])


def test_a_first_pass_that_counts_adds_no_loss(runs: dict[str, Steps]) -> None:
    exact, lagged = (runs[name][0]["losses"] for name in ("further exact", "further ep2"))
    assert exact["mtp_1 loss"] == pytest.approx(lagged["mtp_1 loss"], rel=1e-6)


def test_a_skipped_step_leaves_fractions_and_biases(runs: dict[str, Any]) -> None:
    first, second, third, fourth = runs["spoilt"]
    assert first[0] == [] and second[0]
    assert third == second, "the second step was skipped"
    assert fourth[0] != third[0] and fourth[1] != third[1]


@pytest.mark.parametrize("kind", CORE_CASES)
def test_losses_of_megatron_core_depend_on_the_layout(runs: dict[str, Steps], kind: str) -> None:
    # The reason why `--copus-mode act` refuses them.
    norms = [runs[f"{kind} {flags}"][0]["grad_norm"] for flags in CORE_CASES[kind]]
    assert max(norms) > 1.05 * min(norms)


@pytest.mark.parametrize(("model", "layout"), RESUMED.items())
def test_a_run_goes_on_from_its_checkpoint(runs: dict[str, Steps], model: str, layout: str) -> None:
    saved = runs[f"{model} dp4"][2:]
    assert runs[f"{model} dp4 resumed"] == saved, "fractions and biases are of the checkpoint"
    assert numbers(runs[f"{model} {layout} resumed"]) == pytest.approx(numbers(saved), rel=1e-5)
