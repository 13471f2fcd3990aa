"""Which steps count as bad, how many end a run, and what is said about them."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.trainer.checkpoint import files
from megatron.trainer.train.nan_guard import MAX_IN_A_ROW, WINDOW, BadSteps, explain, is_bad
from tests.helpers.steps import step_info


def ends(bad: set[int], steps: int) -> list[int]:
    """The iteration after which a run ends, and the bad steps it is ended for."""
    watch = BadSteps()
    for i in range(1, steps + 1):
        found = watch.add(step_info(i), bad=i in bad)
        if found:
            return [i, *(s.iteration for s in found)]
    return []


@pytest.mark.parametrize(
    ("changes", "can_lower_scale", "bad"),
    [
        ({}, False, False),
        ({"loss": math.nan}, True, True),
        ({"loss": math.inf, "updated": False, "grad_norm": None}, True, True),
        ({"grad_norm": math.nan, "updated": False}, False, True),
        ({"grad_norm": None, "updated": False}, True, False),
        ({"grad_norm": None, "updated": False}, False, True),
    ],
)
def test_an_overflow_is_no_fault_while_the_scale_can_fall(
    changes: dict[str, Any], can_lower_scale: bool, bad: bool
) -> None:
    assert is_bad(step_info(**changes), can_lower_scale=can_lower_scale) is bad


def test_ten_in_a_row_end_a_run_and_nine_do_not() -> None:
    row = set(range(5, 5 + MAX_IN_A_ROW))
    assert ends(row, 100) == [14, *range(5, 15)]
    assert ends(row - {9}, 100) == []


def test_one_in_a_hundred_ends_a_run_that_has_done_a_thousand_steps() -> None:
    every = set(range(7, 5000, 100))
    assert ends(every, 4000) == [1007, *range(107, 1008, 100)]
    assert ends(set(range(7, 5000, 112)), 4000) == []
    assert ends({i for i in every if i < WINDOW}, 4000) == [], (
        "the tenth came before there were many"
    )


def test_the_last_good_checkpoint_is_the_one_before_the_first_bad_step(tmp_path: Path) -> None:
    config: Any = SimpleNamespace(checkpoint=SimpleNamespace(save=str(tmp_path)))
    bad = [step_info(i) for i in (41, 42, 43)]
    assert "no checkpoint is saved" in explain(bad, config)
    for iteration in (30, 40, 42):
        folder = files.begin(tmp_path, iteration)
        (folder / files.CORE_MARK).write_text("{}")
        files.finish(tmp_path, iteration, {})
    line = explain(bad, config)
    assert "iterations 41 to 43, samples 320 to 343" in line
    assert line.endswith(f"--load {tmp_path} --ckpt-step 40 --iterations-to-skip 41 42 43")
    files.remove(tmp_path, 42)
    files.write_atomically(tmp_path / files.TRACKER, "40\n")
    assert explain(bad, config).endswith(f"--load {tmp_path} --iterations-to-skip 41 42 43")
