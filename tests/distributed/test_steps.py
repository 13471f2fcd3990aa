"""Steps that go wrong are skipped on every rank and counted; the batch follows its plan."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron.trainer.logging.metrics import read_metrics
from tests.distributed.worker_steps import SPOILT
from tests.helpers.on_ranks import on_ranks


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    on_ranks("worker_steps", folder, 2, timeout_s=600)
    return folder


@pytest.fixture(scope="module")
def runs(output: Path) -> dict[str, Any]:
    return json.loads((output / "result.json").read_text())


@pytest.mark.parametrize("name", ["dp2", "tp2", "pp2", "loss-dp2", "loss-pp2"])
def test_a_number_that_is_not_finite_on_one_rank_changes_nothing_anywhere(
    runs: dict[str, Any], name: str
) -> None:
    run = runs[name]
    assert [step["updated"] for step in run["steps"]] == [i != SPOILT for i in range(1, 7)]
    bad = SPOILT - 1
    assert run["sums"][bad] == run["sums"][bad - 1] != run["sums"][bad + 1]
    finite = [math.isfinite(step["losses"].get("lm loss", math.inf)) for step in run["steps"]]
    assert finite == [i != SPOILT or "loss" not in name for i in range(1, 7)]
    assert [step["consumed_samples"] for step in run["steps"]] == [8, 16, 24, 32, 40, 48]
    assert run["lr_samples"] == [8, 16, 16, 24, 32, 40]
    assert run["steps"][bad]["skipped_iterations"] == 1


def test_ten_bad_steps_in_a_row_end_the_run_and_say_how_to_go_on(output: Path) -> None:
    errors = json.loads((output / "abort.json").read_text())
    assert errors[0] is not None and errors == [errors[0]] * 2
    assert "iterations 3 to 12, samples 16 to 95" in errors[0]
    skip = " ".join(map(str, range(3, 13)))
    assert f"--load {output / 'save'} --ckpt-step 2 --iterations-to-skip {skip}" in errors[0]
    records = read_metrics(output / "abort")
    steps = [record for record in records if record["kind"] == "step"]
    assert [step["iteration"] for step in steps if not step["updated"]] == [*range(3, 13)]
    told = [record for record in records if record["kind"] in ("alert", "fault")]
    assert [(record["kind"], record["iteration"]) for record in told] == [
        ("alert", 3),
        ("fault", 12),
    ]


def test_a_slow_rank_is_named(output: Path) -> None:
    records = read_metrics(output / "slow")
    told = [r for r in records if r["kind"] == "alert" and r["iteration"] > 3]
    assert [(r["iteration"], r["alert"]) for r in told] == [(6, "slow rank")]
    assert "rank 1 (" in told[0]["line"]


def test_fp16_overflows_lower_the_scale_until_steps_are_taken(runs: dict[str, Any]) -> None:
    steps = runs["fp16"]["steps"]
    updated = [step["updated"] for step in steps]
    first = updated.index(True)
    assert 0 < first < 29 and not any(updated[:first])
    scales = [step["loss_scale"] for step in steps]
    assert scales[0] == 2.0**40 and scales[first] < scales[0]
    assert scales == sorted(scales, reverse=True)
    assert runs["fp16"]["lr_samples"][-1] == 8 * sum(updated)


def test_the_batch_grows_as_planned_and_the_samples_are_used_up(runs: dict[str, Any]) -> None:
    steps = runs["ramp"]["steps"]
    sizes = [step["global_batch_size"] for step in steps]
    assert (
        sizes == sorted(sizes) and sizes[0] == 2 and sizes[-1] == 8 and set(sizes) == {2, 4, 6, 8}
    )
    assert sum(sizes) == steps[-1]["consumed_samples"] <= 56 < sum(sizes) + 8
    ends = [step["consumed_samples"] for step in steps]
    assert ends == [sum(sizes[: i + 1]) for i in range(len(sizes))]


def test_iterations_that_are_left_out_use_their_samples(runs: dict[str, Any]) -> None:
    steps, plain = runs["skip"]["steps"], runs["plain"]["steps"]
    assert [step["iteration"] for step in steps] == [1, 3, 5, 6]
    assert [step["consumed_samples"] for step in steps] == [8, 24, 40, 48]
    assert [step["skipped_samples"] for step in steps] == [0, 8, 16, 16]
    assert steps[0]["losses"] == plain[0]["losses"]
    assert steps[1]["losses"] != plain[2]["losses"], "its weights have one step less"
