"""A run whose samples become longer: one process as three, under any layout, and exact counts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.extras.phases.worker import MOVED_AT, RESUMED
from tests.helpers.on_ranks import ranks_fixture

Runs = dict[str, Any]
LENGTHS, STEPS, SAMPLES = (64, 256, 1024), (6, 6, 3), 960
pytestmark = pytest.mark.timeout(1880)
"""Whichever test comes first waits for all runs: two minutes alone, and more beside others."""

runs = ranks_fixture("tests.extras.phases.worker", 4, timeout_s=1800)


def losses(steps: list[dict[str, Any]]) -> list[float]:
    return [step["loss"] for step in steps]


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


def test_a_checkpoint_tells_the_base_of_its_phase(runs: Runs) -> None:
    assert runs["stored bases"] == [10000, 40000, 160000]


def test_a_phase_begins_after_a_step_that_is_left_out(runs: Runs) -> None:
    steps = runs["skipped"]
    assert [step["consumed_samples"] for step in steps] == [
        *range(64, 321, 64),
        *range(448, 961, 64),
    ]
    assert steps[5]["seq_length"] == 256
    assert losses(steps)[:5] == losses(runs["live"])[:5]


def test_after_a_failed_change_the_phase_goes_on_in_the_old_layout(runs: Runs) -> None:
    assert losses(runs["a change that fails"]) == pytest.approx(losses(runs["live"]), rel=1e-5)
    assert losses(runs["a change that fails"]) != losses(runs["live"]), "sums in another order"


def test_a_checkpoint_is_there_before_the_layout_changes(runs: Runs) -> None:
    """One that is written while training goes on is waited for before the clock starts."""
    assert runs["async"] == runs["live"]
    order = [tuple(event) for event in runs["order of async"]]
    begin, commit = "relayout.begin", "checkpoint.commit"
    assert order == [(commit, 6), (begin, 6), (commit, 12), (begin, 12), (commit, 15)]
    assert len(runs["predicted pauses"]) == 2 and min(runs["predicted pauses"]) > 0


def test_the_layout_of_a_ramp_changes_with_the_batch(runs: Runs) -> None:
    plain, moved = runs["ramp"], runs["ramp that moves"]
    assert [step["global_batch_size"] for step in moved] == [16] * 8 + [32] * 4
    assert losses(moved) == pytest.approx(losses(plain), rel=1e-5)
    assert losses(moved)[:8] == losses(plain)[:8]
    assert losses(moved)[8:] != losses(plain)[8:], "sums in another order"
    order = [tuple(event) for event in runs["order of ramp"]]
    kinds = ("phase", "checkpoint.commit", "relayout.begin", "layout")
    assert order == [*[(kind, 8) for kind in kinds], ("checkpoint.commit", 12)]
    assert losses(runs["ramp resumed"]) == pytest.approx(losses(plain)[8:], rel=1e-5)


def test_a_controller_changes_the_layout_inside_a_phase(runs: Runs) -> None:
    moved, plain = runs["moved inside"], runs["not moved"]
    assert losses(moved) == pytest.approx(losses(plain), rel=1e-5)
    order = [tuple(event) for event in runs["order of moved inside"]]
    commit, layout = "checkpoint.commit", "layout"
    at = MOVED_AT
    assert order == [(commit, at), (layout, at), (commit, 12), (layout, 12), (commit, 15)]
    assert all(runs["exact steps"]), "a view passes on what the controller asks for"
    assert runs["old models"] == [False, False], "a view keeps the old model"


def test_the_journal_has_both_changes_where_they_were(runs: Runs) -> None:
    made = [r for r in runs["relayouts"] if r["kind"] == "relayout"]
    asked = [r for r in runs["relayouts"] if r["kind"] == "relayout.requested"]
    for records in (made, asked):
        assert [r["iteration"] for r in records] == [MOVED_AT, 12]
        assert [r["consumed_samples"] for r in records] == [64 * MOVED_AT, 64 * 12]
        assert [r["to"] for r in records] == ["tp2.pp1.dp2", "tp2.cp2.pp1.dp1"]
    assert made[0]["number"] is not None and made[1]["number"] is None
    pauses = [record["outcome"]["pause_s"] for record in made]
    assert runs["costs"] == [2, pytest.approx(sum(pauses))]


def test_orders_of_blends_are_shared_and_found_again(runs: Runs) -> None:
    assert runs["blend"] == runs["blend again"]
    # Windows of two, two and one data sets, and two arrays for each of the two blends.
    assert runs["index files"] == 5 + 4


@pytest.mark.parametrize("way", ["", " per token"])
def test_a_step_that_masked_samples_fill_up_weighs_the_others_alike(runs: Runs, way: str) -> None:
    filled, whole = runs[f"four replicas{way}"], runs[f"one replica{way}"]
    for name in ("loss", "grad_norm"):
        ours, theirs = ([step[name] for step in steps] for steps in (filled, whole))
        assert ours == pytest.approx(theirs, rel=1e-5), name
    assert runs[f"reads of four replicas{way}"] == [[382, 2], [384, 80]]
    assert filled[0]["consumed_samples"] == 384


def test_a_controller_crosses_every_boundary_exactly(runs: Runs) -> None:
    steps, position = runs["controlled"], 0
    for step in steps:
        position += step["global_batch_size"] * step["seq_length"] // 64
        assert step["consumed_samples"] == position
        assert step["seq_length"] == LENGTHS[(position > 384) + (position > 768)]
    assert {384, 768} <= {step["consumed_samples"] for step in steps}
    assert position == SAMPLES
    tokens = [step["global_batch_size"] * step["seq_length"] for step in steps]
    assert max(tokens) > tokens[0], "the batch has grown"
    assert tokens[0] == 64 * 64


def test_the_batch_of_a_controller_keeps_its_tokens(runs: Runs) -> None:
    records = [record for record in runs["journal"] if record["kind"] == "segment"]
    assert [record["consumed_samples"] for record in records] == [384, 768]
    assert [record["seq_length"] for record in records] == [256, 1024]
    changes = [r for r in runs["journal"] if r["kind"] == "decision" and r["applied"]]
    assert changes
    tokens = [record["global_batch_size"] * record["seq_length"] for record in records]
    before = [r["decision"]["to"] for r in changes if r["consumed_samples"] < 384]
    assert tokens[0] == before[-1]["global_batch_size"] * 64


def test_the_noise_scale_starts_afresh_in_a_phase(runs: Runs) -> None:
    first = dict.fromkeys(LENGTHS)
    for step, noise in zip(runs["controlled"], runs["noise"], strict=True):
        if first[step["seq_length"]] is None:
            first[step["seq_length"]] = noise
    for length, noise in first.items():
        assert noise is not None
        assert noise["smoothed_tokens_per_sample"] in (0.0, length)
        assert noise["effective_steps"] <= 1.0
    assert max(noise["effective_steps"] for noise in runs["noise"]) > 1.0


def test_a_controller_goes_on_inside_a_phase(runs: Runs) -> None:
    resumed, whole = runs["controlled resumed"], runs["controlled"]
    assert resumed == whole[-len(resumed) :]
    assert resumed[0]["seq_length"] == 256
