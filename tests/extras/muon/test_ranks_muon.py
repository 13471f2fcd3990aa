"""Muon: its formula, the same under every layout, after a checkpoint, and through a relayout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.extras import terms_of
from copus_ext.cost_model.megatron_flags import spec_of_flags
from copus_ext.planner.space import Limits, enumerate_points, to_config_batch
from megatron.trainer.common.core_version import since
from tests.distributed.worker_relayout import BEFORE
from tests.extras.muon.worker import BY_HAND, RUNS, SAVED, STEPS, VARIANTS, WEIGHED
from tests.helpers.on_ranks import ranks_fixture

pytestmark = [
    pytest.mark.skipif(not since("0.18"), reason="megatron-core before 0.18 has another Muon"),
    pytest.mark.timeout(400),
]
WORKER = "tests.extras.muon.worker"
CLOSE = 1e-5
ROUNDED = 1e-3
"""Where factors of Newton-Schulz steps, or weights, are rounded to bf16."""

rows = ranks_fixture(WORKER, 2, timeout_s=380)

moved = ranks_fixture(WORKER, 2, *VARIANTS, timeout_s=380)


@pytest.mark.parametrize("name", BY_HAND)
def test_steps_are_those_by_hand(rows: dict[str, Any], name: str) -> None:
    # Two layers of the first stage, four matrices each.
    assert len(rows[name]) == STEPS * 2 * 4
    assert max(rows[name]) < 2e-4


@pytest.mark.parametrize("name", [n for n in RUNS if "dp2" not in n and n != "tp2 blockwise"])
def test_no_layout_counts(rows: dict[str, Any], name: str) -> None:
    own, first = rows[name], name.split()[0]
    other = rows[f"{first} dp2"] if f"{first} dp2" in RUNS else rows["dp2"]
    close = ROUNDED if first in ("rounded", "bf16") else CLOSE
    assert len(own["losses"]) == STEPS
    assert own["losses"] == pytest.approx(other["losses"], rel=close)
    assert own["grad_norms"] == pytest.approx(other["grad_norms"], rel=20 * close)


def test_blocks_of_tensor_parallel_ranks_count(rows: dict[str, Any]) -> None:
    own, other = rows["tp2 blockwise"]["losses"], rows["dp2"]["losses"]
    assert max(abs(a / b - 1) for a, b in zip(own, other, strict=True)) > 10 * CLOSE


def test_state_that_is_to_be_split_stays_whole(rows: dict[str, Any]) -> None:
    assert rows["dp2 asked to split"] == rows["dp2"]


def test_a_resumed_run_goes_on_as_the_one_that_saved(rows: dict[str, Any]) -> None:
    whole, begun = rows["dp2"], rows["begun"]
    for name in ("losses", "grad_norms"):
        assert begun[name] == whole[name][:SAVED]
        assert rows["resumed"][name] == whole[name][SAVED:]
        for layout in ("pp2", "tp2", "converted"):
            own = rows[f"resumed as {layout}"][name]
            assert own == pytest.approx(whole[name][SAVED:], rel=20 * CLOSE)


@pytest.mark.parametrize("name", WEIGHED)
def test_the_planner_knows_its_matrices(rows: dict[str, Any], name: str) -> None:
    base, _ = RUNS[name]
    model, cluster = spec_of_flags(f"{base} --optimizer muon".split()), preset("a100-80g:1")
    batch = to_config_batch(model, cluster, enumerate_points(model, cluster, 8, Limits()))
    (saved,) = {float(x) for x in np.broadcast_to(-terms_of(batch).layer_bytes, len(batch))}
    positions = 4 * model.learned_positions * model.hidden_size
    assert rows[f"{name} momenta"] == model.num_layers * saved + positions


def test_its_checkpoint_is_inspected(rows: dict[str, Any]) -> None:
    code, record = rows["inspected"]
    assert code == 0 and record["verified"] and record["problem"] is None
    assert record["loads_under"]["tp"] == [1, 2, 4]


@pytest.mark.parametrize(
    ("name", "saved", "flag"),
    [
        ("muon after adam", "adam", "--optimizer"),
        ("adam after muon", "begun", "--optimizer"),
        ("adam whole after split", "adam", "--use-distributed-optimizer"),
    ],
)
def test_another_optimizer_goes_on_from_the_weights(
    rows: dict[str, Any], name: str, saved: str, flag: str
) -> None:
    refused = rows[f"{name} refused"]
    assert refused.startswith(f"{flag} is ") and "--no-load-optim" in refused
    after, before = rows[name]["losses"], rows[saved]["losses"]
    assert len(before) == SAVED and len(after) == STEPS - SAVED
    # It goes on where the weights are, below where they began.
    assert after[0] < before[0]


def test_adam_goes_on_with_the_values_of_its_checkpoint(rows: dict[str, Any]) -> None:
    whole = rows["adam whole"]["losses"]
    assert rows["adam"]["losses"] + rows["adam resumed"]["losses"] == whole


def test_a_relayout_after_a_resume_keeps_the_values_of_the_checkpoint(
    moved: dict[str, Any],
) -> None:
    """Whatever the flags of the resume say."""
    result, unbroken = moved["resumed"], moved["unbroken"]
    for before, after in (row["rest"] for rows in result["rows"] for row in rows):
        assert before == after
        assert before["kept"] == ["[(0.9, 0.999), 1e-08, None]", "[None, None, 0.9]"]
    losses, whole = ([loss for loss, *_ in result["losses"][x]] for x in ("moved", "whole"))
    assert moved["first"] + whole == unbroken
    assert moved["first"] + losses == pytest.approx(unbroken, rel=CLOSE)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_relayout_changes_no_element(moved: dict[str, Any], name: str) -> None:
    result = moved[name]
    for rows in result["rows"]:
        assert {row["kind"] for row in rows} == {"moved"}
        assert [row for row in rows if not (row["is_equal"] and row["is_own_equal"])] == []
        for before, after in (row["rest"] for row in rows):
            assert before == after and before["steps"] == [BEFORE]
        assert all(row["wire_bytes"] == row["minimum_bytes"] for row in rows)
        held = [row["held_bytes"] for row in rows]
        assert [planned for _, planned in held] == [real for real, _ in held]


@pytest.mark.parametrize("name", VARIANTS)
def test_training_goes_on_after_it(moved: dict[str, Any], name: str) -> None:
    losses, whole = (moved[name]["losses"][label] for label in ("moved", "whole"))
    close = ROUNDED if name == "bf16" else CLOSE
    assert losses[:BEFORE] == whole[:BEFORE]
    for (loss, norm, *counts), (want, want_norm, *want_counts) in zip(losses, whole, strict=True):
        assert counts == want_counts
        assert loss == pytest.approx(want, rel=close)
        assert norm == pytest.approx(want_norm, rel=20 * close)
