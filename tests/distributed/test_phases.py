"""A run whose samples become longer: one process as three, under any layout, and exact counts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.worker_phases import RESUMED
from tests.helpers.on_ranks import on_ranks

Runs = dict[str, Any]
LENGTHS, STEPS, SAMPLES = (64, 256, 1024), (6, 6, 3), 960


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return on_ranks("worker_phases", tmp_path_factory.mktemp("phases"), 4, timeout_s=500)


def losses(steps: list[dict[str, Any]]) -> list[float]:
    return [step["loss"] for step in steps]


@pytest.mark.timeout(540)
def test_each_phase_has_its_length_and_the_same_tokens_a_step(runs: Runs) -> None:
    steps = runs["live"]
    lengths = [length for length, n in zip(LENGTHS, STEPS, strict=True) for _ in range(n)]
    assert [step["seq_length"] for step in steps] == lengths
    assert [step["global_batch_size"] * step["seq_length"] for step in steps] == [64 * 64] * 15
    assert [step["consumed_samples"] for step in steps] == list(range(64, SAMPLES + 1, 64))


def test_one_process_equals_three_that_are_started_by_hand(runs: Runs) -> None:
    by_hand = [loss for number in range(3) for loss in losses(runs[f"hand {number}"])]
    assert losses(runs["live"]) == pytest.approx(by_hand, rel=1e-5)
    assert losses(runs["live"]) == by_hand, "weights and moments move bit for bit"


def test_it_does_so_without_a_change_of_layout(runs: Runs) -> None:
    by_hand = [step for number in range(3) for step in runs[f"same by hand {number}"]]
    assert runs["same layout"] == by_hand


def test_layouts_of_phases_give_the_losses_of_one_layout(runs: Runs) -> None:
    assert losses(runs["live"]) == pytest.approx(losses(runs["same layout"]), rel=1e-5)


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_goes_on_inside_any_phase_under_any_layout(runs: Runs, name: str) -> None:
    done = RESUMED[name][0]
    assert losses(runs[name]) == pytest.approx(losses(runs["live"])[done:], rel=1e-5)


def test_stale_rotary_tables_give_other_losses(runs: Runs) -> None:
    stale, right = losses(runs["stale tables"]), losses(runs["one length"])
    assert stale[:6] == right[:6]
    assert all(abs(a - b) > 1e-6 for a, b in zip(stale[7:12], right[7:12], strict=True))


def test_rates_are_those_of_one_schedule_in_tokens(runs: Runs) -> None:
    rates = [step["learning_rate"] for step in runs["live"]]
    assert rates == [step["learning_rate"] for step in runs["plain"]]
    assert len(set(rates)) == 15


def test_an_evaluation_has_the_length_of_its_phase(runs: Runs) -> None:
    found = runs["evaluations"]
    assert found == [[5, "valid", 64], [10, "valid", 256], [15, "valid", 1024], [15, "test", 1024]]


@pytest.mark.parametrize("way", ["", " per token"])
def test_a_step_that_masked_samples_fill_up_weighs_the_others_alike(runs: Runs, way: str) -> None:
    filled, whole = runs[f"four replicas{way}"], runs[f"one replica{way}"]
    for name in ("loss", "grad_norm"):
        ours, theirs = ([step[name] for step in steps] for steps in (filled, whole))
        assert ours == pytest.approx(theirs, rel=1e-5), name
    assert runs[f"reads of four replicas{way}"] == [[382, 2], [384, 80]]
    assert filled[0]["consumed_samples"] == 384
