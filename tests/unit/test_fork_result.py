"""What a fork test tries, what it refuses, and how its result is kept."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from copus_ext.controller import fork_test
from copus_ext.goodput.fork_result import Branch, BranchResult, ForkPlan, ForkResult
from copus_ext.monitor.forks import fork_record
from megatron.training.common.step_settings import StepSettings
from megatron.training.config.layout import Layout
from megatron.training.train.job import RunServices


def test_factors_of_a_branch_multiply_those_of_the_run() -> None:
    now = StepSettings(lr_factor=2.0, weight_decay_factor=0.5, beta2=0.9)
    branch = Branch(global_batch_size=16, micro_batch_size=4, lr_factor=1.5)
    assert branch.settings(now) == StepSettings(
        global_batch_size=16,
        micro_batch_size=4,
        lr_factor=3.0,
        weight_decay_factor=0.5,
        beta2=0.9,
    )


@pytest.mark.parametrize(
    "wrong", [{"global_batch_size": 0}, {"micro_batch_size": 0}, {"lr_factor": 0.0}, {"beta2": 1.0}]
)
def test_a_branch_that_no_step_can_be_taken_in_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Branch(**{"global_batch_size": 8, "micro_batch_size": 1, **wrong})


def test_samples_are_a_whole_number_of_steps() -> None:
    branch = Branch(global_batch_size=16, micro_batch_size=4)
    assert branch.num_steps(48) == 3
    for samples in (0, 8, 40):
        with pytest.raises(ValueError, match="no multiple"):
            branch.num_steps(samples)


def result(**changes: Any) -> ForkResult:
    branch = BranchResult(
        branch=Branch(global_batch_size=8, micro_batch_size=1, lr_factor=2.0),
        samples=48,
        steps=6,
        skipped_steps=1,
        loss_last=None,
        loss_averaged=2.25,
        averaged_steps=3,
        seconds=1.5,
    )
    about: dict[str, Any] = {
        "kind": "done",
        "iteration": 10,
        "consumed_samples": 80,
        "samples": 48,
        "eval_samples": 12,
        "loss_start": 2.5,
        "branches": (branch,),
        "kept": 0,
        "seconds": 3.0,
    }
    return ForkResult(**{**about, **changes})


def test_a_result_comes_back_from_json() -> None:
    text = json.dumps(result().to_json(), allow_nan=False)
    assert ForkResult.from_json(json.loads(text)) == result()


TOLD = "fork test over 48 samples: batch 8 at 2 times the rate loss 2.2500"


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (result(), f"{TOLD}; branch 0 kept"),
        (result(kept=None), f"{TOLD}; discarded"),
        (result(kind="refused", reason="no memory"), "fork test refused: no memory"),
    ],
)
def test_the_report_says_what_came_of_it(found: ForkResult, line: str) -> None:
    assert str(fork_record({"outcome": found.to_json()})) == line


@pytest.mark.parametrize(
    ("plan", "of_run", "problem"),
    [
        ({}, {}, None),
        ({"branches": ()}, {}, "no branch"),
        ({"keep": 2}, {}, "no branch 2"),
        ({"samples": 40}, {}, "no multiple of a batch of 16"),
        ({"eval_samples": 33}, {}, "33 of 32 validation samples"),
        ({}, {"held_out": 0}, "no validation samples"),
        ({}, {"left": 63}, "63 training samples are left"),
        ({}, {"left": 64}, None),
        # Steps 11 to 16, if the run may go on from them.
        ({"keep": 0}, {"exit": 16}, "--exit-interval"),
        ({"keep": 0}, {"exit": 17}, None),
        ({"keep": 1}, {"exit": 16}, None),
        ({"keep": 0}, {"skips": [11]}, "--iterations-to-skip"),
        ({"keep": 0}, {"skips": [10, 17]}, None),
        ({}, {"exit": 16, "skips": [11]}, None),
        ({}, {"rank": 4}, "keep state"),
        ({"branches": (Branch(global_batch_size=6, micro_batch_size=2),)}, {}, "divisible"),
    ],
)
def test_a_plan_says_why_a_run_cannot_make_it(
    plan: dict[str, Any], of_run: dict[str, Any], problem: str | None
) -> None:
    run: dict[str, Any] = {
        "left": 200,
        "held_out": 32,
        "exit": None,
        "skips": [],
        "rank": 0,
        **of_run,
    }
    batch = SimpleNamespace(exit_interval=run["exit"], iterations_to_skip=run["skips"])
    parallel = SimpleNamespace(grad_compression_rank=run["rank"], pipeline_message_rank=None)
    config: Any = SimpleNamespace(
        batch=batch, layout=Layout(dp=2), batch_rules={}, parallel=parallel
    )
    branches = tuple(Branch(global_batch_size=n, micro_batch_size=2) for n in (8, 16))
    about: dict[str, Any] = {"branches": branches, "samples": 48, "eval_samples": 32, **plan}
    found = ForkPlan(**about).problem(
        config, iteration=10, samples_left=run["left"], held_out_samples=run["held_out"]
    )
    assert found == problem if problem is None else problem in (found or "")


def test_steps_of_a_branch_need_no_exact_gradient() -> None:
    """Nobody measures them, so that messages may be as short as in any step."""
    names = ("callbacks", "rank_times", "watchdog")
    job: Any = SimpleNamespace(
        **dict.fromkeys(names),
        context=SimpleNamespace(needs_exact_step=True),
        outside=RunServices(),
    )
    with fork_test._unseen(job):
        assert not job.context.needs_exact_step
    assert job.context.needs_exact_step
