"""What a layout should give each rank is what the live model holds there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.worker_ownership import CASES, MISTAKES, NUM_DAILY
from tests.helpers.nightly import case, words_of
from tests.helpers.on_ranks import on_ranks

NUMBERS = [
    case(world, number, daily=number < NUM_DAILY, id=f"{world}-{one}")
    for world, cases in CASES.items()
    for number, one in enumerate(cases)
]
ConfigBatch = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[ConfigBatch]]:
    found = {}
    for world in CASES:
        output = tmp_path_factory.mktemp(f"ownership{world}")
        words = words_of(request)
        found[world] = on_ranks("worker_ownership", output, world, *words, timeout_s=300)
    return found


@pytest.mark.timeout(640)
@pytest.mark.parametrize(("world", "number"), NUMBERS)
def test_the_twin_is_the_live_model(
    results: dict[int, list[ConfigBatch]], world: int, number: int
) -> None:
    rows = results[world][number]
    assert len(rows) == world
    live = [row["live"] for row in rows]
    assert [row["twin"] for row in rows] == live
    assert all(row["all"] == live for row in rows)
    assert all(row["in_order"] for row in rows)
    assert all(row["covered"] for row in rows), "records do not fill the live shards"


@pytest.mark.parametrize(("world", "number"), NUMBERS)
def test_no_two_ranks_hold_the_same(
    results: dict[int, list[ConfigBatch]], world: int, number: int
) -> None:
    tp, pp, _, base, more = CASES[world][number]
    live = [row["live"] for row in results[world][number]]
    if "--use-distributed-optimizer" in more:
        assert len(set(live)) == world
    elif base != "moe":  # experts have other replicas than the rest
        # Replicas but the first hold the same.
        assert len(set(live)) == tp * pp * min(2, world // (tp * pp))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(results: dict[int, list[ConfigBatch]], mistake: str) -> None:
    seen = [
        any(row["mistakes"][mistake] != row["live"] for row in rows)
        for cases in results.values()
        for rows in cases
    ]
    assert any(seen)
    if mistake in ("order", "sharded", "tied", "rows"):
        assert all(seen), "these change every layout"
