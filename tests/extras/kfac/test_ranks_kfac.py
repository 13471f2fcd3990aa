"""K-FAC: the same under every layout and micro-batch size, and after a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from tests.extras.kfac.worker import BY_HAND, INTERVAL, RUNS, SAVED, STEPS
from tests.helpers.on_ranks import ranks_fixture

CLOSE = 1e-4

rows = ranks_fixture("tests.extras.kfac.worker", 2, timeout_s=300)


@pytest.mark.timeout(340)
@pytest.mark.parametrize("name", BY_HAND)
def test_gradients_are_those_by_hand(rows: dict[str, Any], name: str) -> None:
    own = rows[name]
    assert own["matrices"] == 4 * 4
    assert max(own["off"]) < (1e-2 if "reduced in bf16" in name else 1e-4)
    if name == "hand":
        assert len(own["off"]) == own["matrices"] and own["own"] == 2 * own["matrices"]
    else:
        # One matrix of a bucket at most lies on both ranks.
        buckets = len(own["gathered"])
        assert 0 < len(own["off"]) < own["matrices"] <= own["own"] <= own["matrices"] + buckets


def test_buckets_are_gathered_where_a_cut_matrix_is_half_of_them(rows: dict[str, Any]) -> None:
    assert rows["dp2"]["gathered"] == [False]
    assert set(rows["hand in buckets"]["gathered"]) == {True, False}
    assert rows["dp2 whole"]["gathered"] == rows["pp2"]["gathered"] == []


@pytest.mark.parametrize("name", [n for n in RUNS if n not in ("dp2", "gpt2 dp2", "latent dp2")])
def test_neither_layout_nor_micro_batch_counts(rows: dict[str, Any], name: str) -> None:
    own = rows[name]
    first = name.split()[0]
    other = rows[f"{first} dp2" if first in ("gpt2", "latent") else "dp2"]
    assert len(own["losses"]) == STEPS
    assert own["losses"] == pytest.approx(other["losses"], rel=CLOSE)
    assert own["grad_norms"] == pytest.approx(other["grad_norms"], rel=20 * CLOSE)


def test_a_move_and_a_checkpoint_begin_anew(rows: dict[str, Any]) -> None:
    first, second = ["tp1.pp1.dp2"], ["tp1.pp2.dp1"]
    early = INTERVAL - 1
    assert rows["moved"]["layouts"] == first * INTERVAL + second * (STEPS - INTERVAL)
    assert rows["moved early"]["layouts"] == first * early + second * (STEPS - early)
    refreshed = {name: rows[name]["refreshed"] for name in rows}
    for name in ("dp2", "pp2 recomputed", "moved"):
        assert refreshed[name] == [1, 1 + INTERVAL, 1 + 2 * INTERVAL]
    assert refreshed["moved early"] == [1, 1 + early, 1 + early + INTERVAL]
    assert refreshed["whole"] == [1, 1 + INTERVAL, 1 + SAVED], "at once after a checkpoint"
    assert refreshed["begun"] == [1, 1 + INTERVAL] and refreshed["resumed"] == [1]
    assert refreshed["interval 1"] == [*range(1, STEPS + 1)] and refreshed["off"] == []


def test_compressing_layers_count_too(rows: dict[str, Any]) -> None:
    # Four layers of seven matrices; one more with its projection for the further token.
    assert rows["latent dp2"]["matrices"] == 5 * 7 + 1


def test_it_changes_the_training_but_no_norm(rows: dict[str, Any]) -> None:
    own, off = rows["dp2"], rows["off"]
    assert own["grad_norms"][0] == pytest.approx(off["grad_norms"][0], rel=1e-5)
    assert own["losses"][0] == off["losses"][0]
    apart = [abs(a / b - 1) for a, b in zip(own["losses"][1:], off["losses"][1:], strict=True)]
    assert max(apart) > 10 * CLOSE
    every = rows["interval 1"]["losses"]
    assert every[:2] == own["losses"][:2] and every != own["losses"]


def test_a_resumed_run_goes_on_as_the_one_that_saved(rows: dict[str, Any]) -> None:
    whole, begun, resumed = (rows[name]["losses"] for name in ("whole", "begun", "resumed"))
    assert len(begun) == SAVED and begun == whole[:SAVED]
    assert resumed == whole[SAVED:]
