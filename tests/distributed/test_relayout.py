"""A running job goes from layout to layout and back: nothing changes but the layout."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.distributed.worker_relayout import BEFORE, DAILY, SHARING, VARIANTS
from tests.helpers.nightly import case, words_of
from tests.helpers.on_ranks import on_ranks

pytestmark = pytest.mark.timeout(840)


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """All variants in two launches, or those of every commit in one."""
    found: dict[str, Any] = {}
    chosen = VARIANTS if words_of(request) else DAILY
    for ranks in (4, 3):
        names = [name for name in chosen if (name == "three") == (ranks == 3)]
        if not names:
            continue
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        found |= on_ranks("worker_relayout", folder, ranks, *names, timeout_s=800)
    return found


@pytest.fixture(params=[case(name, daily=name in DAILY) for name in VARIANTS])
def result(request: pytest.FixtureRequest, results: dict[str, Any]) -> dict[str, Any]:
    return {**results[request.param], "name": request.param}


def test_every_way_was_gone(result: dict[str, Any]) -> None:
    _, path, last = VARIANTS[result["name"]]
    for rows in result["rows"]:
        assert len(rows) == len(path) and last != path[0]
        assert all(a["to"] == b["from"] for a, b in itertools.pairwise(rows))
        assert {row["kind"] for row in rows} == {"moved"}
    if result["name"] == "llama":
        gone = {(row["from"], row["to"]) for row in result["rows"][0][:-1]}
        layouts = {row["to"] for row in result["rows"][0]}
        assert gone == set(itertools.permutations(layouts, 2)) and len(layouts) == 5


def test_no_element_changes(result: dict[str, Any]) -> None:
    for rows in result["rows"]:
        assert [row for row in rows if not row["is_equal"]] == []


def test_a_layout_comes_back_as_it_was(result: dict[str, Any]) -> None:
    """Every layout is entered at least twice, from another each time."""
    for rows in result["rows"]:
        assert [row for row in rows if not row["is_own_equal"]] == []


def test_counts_rates_and_loss_scale_stay(result: dict[str, Any]) -> None:
    for rows in result["rows"]:
        for before, after in (row["rest"] for row in rows):
            assert before == after
            assert before["steps"] == [BEFORE]
    if "fp16" in result["name"]:
        assert result["rows"][0][0]["rest"][0]["scale"] == 1024.0


def test_only_what_must_goes_over_the_wire(result: dict[str, Any]) -> None:
    for row in result["rows"][0]:
        assert row["wire_bytes"] == row["minimum_bytes"]
    assert any(row["wire_bytes"] for row in result["rows"][0])


def test_groups_descriptors_and_threads_do_not_pile_up(result: dict[str, Any]) -> None:
    for rows in result["rows"]:
        if result["name"].endswith("kept"):
            # Some twenty groups, by release, for the layout in use and for each of two others.
            assert max(row["num_groups"] for row in rows) <= 3 * 24 + 2
            assert any(row["built_ahead"] for row in rows)
            continue
        assert not any(row["built_ahead"] for row in rows)
        # A rank is in more groups under some layouts than under others.
        for name, most in (("num_groups", 0), ("num_fds", 4), ("num_threads", 4)):
            by_layout: dict[str, list[int]] = {}
            for row in rows[len(rows) // 3 :]:
                by_layout.setdefault(row["to"], []).append(row[name])
            assert any(len(seen) > 1 for seen in by_layout.values())
            assert all(max(seen) - min(seen) <= most for seen in by_layout.values()), by_layout


def test_training_goes_on_as_if_nothing_had_been(result: dict[str, Any]) -> None:
    whole = result["losses"]["whole"]
    relative = 1e-3 if "bf16" in result["name"] or result["name"] == "three" else 1e-5
    if "fp16" in result["name"]:
        relative = 1e-3
    losses = result["losses"]["moved"]
    assert len(losses) == len(whole)
    for (loss, norm, *counts), (want, want_norm, *want_counts) in zip(losses, whole):
        assert counts == want_counts
        assert loss == pytest.approx(want, rel=relative)
        assert norm == pytest.approx(want_norm, rel=20 * relative)
    assert losses[:BEFORE] == whole[:BEFORE]


@pytest.mark.nightly
def test_sharing_samples_or_not_moves_no_state(results: dict[str, Any]) -> None:
    rows = results["context"]["rows"][0]
    gone = [row for row in rows if row["from"] in SHARING and row["to"] in SHARING]
    assert len(gone) == 6 and not any(row["wire_bytes"] for row in gone)
