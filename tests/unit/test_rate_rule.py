"""A fork test of the learning rate is made once, in the warm-up, and speaks only if it is sure."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from copus_ext.controller.decision_log import DecisionLog
from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.rate_test import LearningRateTest
from copus_ext.controller.rules import check_run
from copus_ext.goodput import rate_rule as rule
from copus_ext.goodput.fork_result import BranchResult, ForkResult
from copus_ext.goodput.state import ControllerState
from megatron.training.common.errors import UsageError
from megatron.training.config.arguments import parse_args, resolve
from tests.helpers.jobs import TINY
from tests.helpers.launch import ROOT

SITUATION: dict[str, Any] = {
    "global_batch_size": 8,
    "micro_batch_size": 2,
    "warmup_samples": 8 * 600,
    "warmed_samples": 8 * 300,
    "held_out_samples": 5_000,
}


def test_it_is_made_in_the_middle_of_the_warm_up_and_stays_within_it() -> None:
    made = rule.due(**SITUATION)
    assert made is not None and made.samples == 8 * 100 and made.eval_samples == 512
    assert [b.lr_factor for b in made.plan().branches] == [1.0, 0.5, 2.0]
    assert made.plan().keep == 0, "the run goes on with its own rate"
    for warmed in (0, 8 * 269, 8 * 391, 8 * 600, 8 * 1000):
        assert rule.due(**{**SITUATION, "warmed_samples": warmed}) is None
    assert rule.due(**{**SITUATION, "held_out_samples": 0}) is None
    short = {**SITUATION, "warmup_samples": 8 * 80, "warmed_samples": 8 * 40}
    assert rule.due(**short) is None, "50 steps do not fit"
    long = {**SITUATION, "warmup_samples": 8 * 60_000, "warmed_samples": 8 * 30_000}
    assert (found := rule.due(**long)) is not None and found.samples == 8 * 500


@pytest.mark.parametrize("every", [1, 7, 20])
def test_some_decision_of_the_least_warm_up_is_its_turn(every: int) -> None:
    warmup = 8 * rule.LEAST_WARM_UP_STEPS
    for first in range(1, every + 1):
        steps = range(first, rule.LEAST_WARM_UP_STEPS, every)
        situations = [
            {**SITUATION, "warmup_samples": warmup, "warmed_samples": 8 * step} for step in steps
        ]
        assert any(rule.due(**one) is not None for one in situations)


def result(
    own: float | None, half: float | None, twice: float | None, *, samples: int = 512
) -> ForkResult:
    made = rule.due(**SITUATION)
    assert made is not None
    branches = [
        BranchResult(
            branch=branch,
            samples=made.samples,
            steps=100,
            skipped_steps=0,
            loss_last=None,
            loss_averaged=loss,
            averaged_steps=50,
            seconds=1.0,
        )
        for branch, loss in zip(made.plan().branches, (own, half, twice))
    ]
    return ForkResult(
        kind="done",
        iteration=300,
        consumed_samples=2400,
        samples=made.samples,
        eval_samples=samples,
        loss_start=3.0,
        branches=tuple(branches),
        kept=0,
    )


def test_it_says_what_is_plainly_better() -> None:
    for losses, factor, said in (
        ((2.0, 2.1, 1.98), 2.0, "too low; try 2 times"),
        ((2.0, 1.98, 2.1), 0.5, "too high; try 0.5 times"),
        ((2.0, 1.99, 1.99), 1.0, "nothing speaks against --lr"),
        ((2.0, 1.98, 1.97), 2.0, "too low"),
        ((2.0, 1.98, None), 0.5, "diverged with twice"),
        ((None, None, None), 1.0, "the run itself diverged"),
    ):
        found = rule.verdict(result(*losses))
        assert found.factor == factor and said in str(found), losses
    assert rule.verdict(result(2.0, 1.98, 2.1, samples=16)).factor == 1.0, "too few to tell"


@pytest.mark.parametrize("kind", ["done", "refused", "stopped"])
def test_it_is_made_once_in_a_launch_and_once_in_a_run(kind: Any) -> None:
    made, state = rule.due(**SITUATION), ControllerState()
    assert made is not None
    test = LearningRateTest(CopusConfig(copus=True, copus_lr_test="warn"), DecisionLog(None))
    test.pending = {"test": made.to_json(), "at": 2_400}
    assert test._forks is not None
    with patch.object(test._forks, "request") as request, patch("torch.distributed.get_rank"):
        assert test.request(state) is request.return_value and test.request(state) is None
        found = replace(result(2.0, 2.1, 1.9), kind=kind, seconds=9.0)
        request.call_args.kwargs["done"](found)
    assert state.elapsed_s == 9.0 and state.lr_tested_at == (2_400 if kind == "done" else None)
    assert test._is_over
    assert state.last_decision_samples == (2_400 + made.samples if kind == "done" else 0)
    again = ControllerState.from_json(json.loads(json.dumps(state.to_json())))
    assert again.lr_tested_at == state.lr_tested_at


def config(*flags: str) -> Any:
    more = ["--train-samples", "6400", "--global-batch-size", "8", *flags]
    return resolve(parse_args([*TINY.split(), *more]), 2)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lr-warmup-samples", "1192", "--eval-iters", "2"], "--lr-warmup-samples 1200"),
        (["--lr-warmup-samples", "1200", "--eval-iters", "0"], "give --eval-iters"),
    ],
)
def test_one_that_could_not_be_made_is_refused(flags: list[str], said: str) -> None:
    wanted = CopusConfig(copus=True, copus_lr_test="warn")
    with pytest.raises(UsageError, match=said):
        check_run(wanted, config(*flags))
    check_run(wanted, config("--lr-warmup-samples", "1200", "--eval-iters", "2"))


def test_the_threshold_separates_what_was_measured() -> None:
    """In the forks of small runs in the middle of their warm-up: a quarter of the best rate is
    found too low, twice too high, and nothing is said of the best one."""
    rows = json.loads((ROOT / "docs/results/rate_forks.json").read_text())["forks"]
    own = [r for r in rows if "5.00" in r["judge"] and r["batch"] == 32 and r["place"] < 0.2]
    found = {(r["rate"], r["factor"]): r["lower"] for r in own}
    assert found[0.25, 2.0] > rule.NEEDED and found[2.0, 0.5] > rule.NEEDED
    for rate, factor in ((0.5, 2.0), (0.5, 0.5), (1.0, 2.0), (1.0, 0.5), (2.0, 2.0)):
        assert found[rate, factor] < rule.NEEDED
