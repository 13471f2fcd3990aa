"""When short messages between stages are tried, and how surely a trial that takes them is right."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from copus_ext.controller.decision_log import DecisionLog
from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.message_trials import MessageTrials
from copus_ext.controller.rules import check, check_run
from copus_ext.goodput import message_rule as rule
from copus_ext.goodput.fork_result import BranchResult, ForkResult
from copus_ext.goodput.message_rule import MessageTrial, trial, verdict
from copus_ext.goodput.state import ControllerState
from megatron.training.common.errors import UsageError
from megatron.training.config.arguments import parse_args, resolve
from tests.helpers.jobs import TINY

pytestmark = pytest.mark.unit


def due(**more: Any) -> MessageTrial | None:
    """At 10 % of a long run over a link on which short messages save a third."""
    values: dict[str, Any] = {
        "global_batch_size": 16,
        "micro_batch_size": 4,
        "step_s": 1.0,
        "saved_s": 0.4,
        "exact_share": 0.1,
        "loss_slope": -1e-4,
        "held_out_samples": 400,
        "consumed_samples": 20_000,
        "samples_left": 180_000,
        "trials_at": [],
        **more,
    }
    return trial(**values)


def test_a_trial_is_long_enough_to_tell_and_pays_for_itself() -> None:
    found = due()
    assert found is not None and found.samples % 16 == 0 and found.eval_samples == 256
    assert found.predicted_saving == pytest.approx(0.36)
    slower = due(loss_slope=-2e-5)
    assert slower is not None and slower.samples > 2 * found.samples
    for nothing in (
        {"saved_s": 0.05},
        {"exact_share": 0.9},
        {"loss_slope": None},
        {"loss_slope": 1e-6},
        {"loss_slope": -1e-7},
        {"samples_left": 5_000},
        {"consumed_samples": 2_000},
        {"held_out_samples": 0},
    ):
        assert due(**nothing) is None, nothing


def test_trials_are_few_and_far_between() -> None:
    at: list[int] = []
    for consumed in itertools.accumulate(itertools.repeat(1_000, 179)):
        if due(consumed_samples=consumed, samples_left=10**6, trials_at=at) is not None:
            at.append(consumed)
    assert len(at) == rule.MOST_TRIALS
    assert all(b >= rule.WAIT * a for a, b in itertools.pairwise(at))


def outcome(*, start: float | None, whole: float, short: float, speed: float) -> ForkResult:
    made = due()
    assert made is not None
    branches = tuple(
        BranchResult(
            branch=branch,
            samples=made.samples,
            steps=40,
            skipped_steps=0,
            loss_last=loss,
            loss_averaged=loss,
            averaged_steps=20,
            seconds=seconds,
        )
        for branch, loss, seconds in zip(made.plan().branches, (whole, short), (speed, 1.0))
    )
    return ForkResult(
        kind="done",
        iteration=100,
        consumed_samples=20_000,
        samples=made.samples,
        eval_samples=made.eval_samples,
        loss_start=start,
        branches=branches,
    )


def test_a_clear_gain_is_taken_and_measured_steps_count_as_whole() -> None:
    made = due()
    assert made is not None
    found = verdict(outcome(start=3.0, whole=2.9, short=2.9, speed=2.0), made)
    assert found.pays and found.progress == pytest.approx(1.0)
    assert found.speed == pytest.approx(2.0 / (0.1 * 2.0 + 0.9 * 1.0))
    assert made.plan().keep(outcome(start=3.0, whole=2.9, short=2.9, speed=2.0)) == 1  # pyright: ignore[reportOptionalCall, reportCallIssue]


@pytest.mark.parametrize(
    "losses",
    [
        {"start": 3.0, "whole": 2.9, "short": 2.95, "speed": 2.0},
        {"start": 3.0, "whole": 2.9, "short": 2.9, "speed": 1.0},
        {"start": 3.0, "whole": 2.995, "short": 2.95, "speed": 2.0},
        {"start": None, "whole": 2.9, "short": 2.9, "speed": 2.0},
        {"start": 3.0, "whole": 2.0, "short": 2.1, "speed": 3.0},
    ],
)
def test_what_is_not_sure_stays_whole(losses: dict[str, Any]) -> None:
    made = due()
    assert made is not None
    assert not verdict(outcome(**losses), made).pays


def test_a_slow_moment_of_whole_messages_is_no_gain() -> None:
    made = due()
    assert made is not None
    found = outcome(start=3.0, whole=2.9, short=2.9, speed=60.0)
    # 40 steps of one second are usual; the short ones take as long as that.
    whole, short = found.branches
    found = replace(found, branches=(whole, replace(short, seconds=40.0)))
    assert verdict(found, made).speed == pytest.approx(1.0) and not verdict(found, made).pays


@pytest.mark.parametrize("fall", [0.05, 0.1, 0.5])
@pytest.mark.parametrize("progress", [0.6, 0.96, 1.0])
def test_what_gains_nothing_is_taken_in_at_most_one_of_twenty_trials(
    progress: float, fall: float
) -> None:
    """The two losses scatter as the rule assumes, and the progress per second is that of whole
    messages. The bound is one of 95 %."""
    made, random, draws = due(), np.random.default_rng(0), 4_000
    assert made is not None
    exact, sd = made.exact_share, rule._loss_sd(made.eval_samples)
    # The seconds of short steps with which both are as fast, measuring steps included.
    short_s = (progress - exact) / (1.0 - exact)
    taken = 0
    for of_whole, of_short in random.normal(0.0, sd, size=(draws, 2)):
        found = outcome(
            start=3.0,
            whole=3.0 - fall + of_whole,
            short=3.0 - progress * fall + of_short,
            speed=1.0 / short_s,
        )
        taken += verdict(found, made).pays
    assert taken < 0.05 * draws + 3.0 * (0.05 * draws) ** 0.5


@pytest.mark.parametrize("kind", ["done", "refused", "stopped"])
def test_only_trials_that_were_made_count_and_in_present_samples(kind: Any) -> None:
    """The run counts in samples of which four are one of the phase."""
    made, taken, state = due(), [], ControllerState(step_times={"tp1.pp2.dp1 4 16": [1.0]})
    assert made is not None
    trials = MessageTrials(CopusConfig(copus=True, copus_message_bits="try"), DecisionLog(None))
    trials.pending = {"trial": made.to_json(), "at": 5_000}
    assert trials._forks is not None
    with patch.object(trials._forks, "request") as request, patch("torch.distributed.get_rank"):
        assert trials.request(state, taken=lambda: taken.append(1)) is request.return_value
        assert trials.request(state, taken=lambda: None) is None
        result = outcome(start=3.0, whole=2.9, short=2.9, speed=2.0)
        request.call_args.kwargs["done"](replace(result, kind=kind, kept=1, seconds=9.0))
    assert state.elapsed_s == 9.0
    if kind != "done":
        assert not (state.message_trials_at or taken or state.pipeline_message_bits)
        return
    assert state.message_trials_at == [5_000] and taken == [1]
    assert state.last_decision_samples == 5_000 + made.samples
    assert state.pipeline_message_bits == trials.bits(state) == 8 and not state.step_times


def config(*flags: str) -> Any:
    return resolve(parse_args([*TINY.split(), "--train-iters", "100", *flags]), 2)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--pipeline-message-bits", "8"], "--pipeline-message-bits"),
        (["--pipeline-message-rank", "4"], "--pipeline-message-rank"),
        (["--eval-iters", "0"], "--eval-iters"),
        (["--pipeline-model-parallel-size", "1"], "needs a pipeline"),
    ],
)
def test_trials_that_could_not_be_made_are_refused(flags: list[str], said: str) -> None:
    wanted = CopusConfig(copus=True, copus_message_bits="try")
    more = ["--pipeline-model-parallel-size", "2", "--eval-iters", "2", *flags]
    with pytest.raises(UsageError, match=said):
        check_run(wanted, config(*more))
    check_run(wanted, config(*more[:4]))
    with pytest.raises(UsageError, match="this trainer"):
        check(wanted, changes_layout=False)
