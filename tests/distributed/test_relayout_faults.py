"""Whatever goes wrong in a change of layout: the job trains on as if it had never tried, or it
leaves to be started again and goes on from its last checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.worker_relayout_faults import BEFORE, EXPERTS, WRONG, topics
from tests.helpers.on_ranks import on_ranks
from tests.helpers.relayout_cases import Case, drawn, run_chain, uninterrupted

pytestmark = pytest.mark.waits


def launched(what: str, folder: Path) -> dict[str, Any]:
    return on_ranks("worker_relayout_faults", folder, 2, what, timeout_s=800)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return launched("many", tmp_path_factory.mktemp("many"))


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return launched("wrong", tmp_path_factory.mktemp("wrong"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Steps of the run that never tries."""
    return uninterrupted(tmp_path_factory.mktemp("whole"))


def assert_untouched(row: dict[str, Any]) -> None:
    assert row["is_equal"] and row["is_rest_equal"] and row["is_layout_kept"], row


@pytest.mark.parametrize("name", ["broken", "experts broken"])
def test_what_fails_on_one_rank_leaves_the_job_as_it_was(many: dict[str, Any], name: str) -> None:
    untouched = ("prepare", "drain", "extract")
    for rows in many[name]["rows"]:
        assert {row["case"][0] for row in rows} == set(topics(waiting=False))
        for row in rows:
            topic, rank, _ = row["case"]
            assert_untouched(row)
            kind = "cancelled" if topic.startswith(untouched) else "rolled_back"
            assert row["kind"] == kind, row
            assert f"rank {rank}: " in row["reason"] and "on purpose" in row["reason"]


def test_and_it_trains_on_as_if_it_had_never_tried(many: dict[str, Any]) -> None:
    assert many["broken"]["steps"] == many["whole"]["steps"]
    assert many["experts broken"]["steps"] == many["experts whole"]["steps"]


def test_a_layout_that_cannot_cut_a_later_batch_is_refused_at_once(
    many: dict[str, Any],
) -> None:
    for (row,) in many["uncut"]["rows"]:
        assert_untouched(row)
        assert row["kind"] == "cancelled", row
        assert "--global-batch-size 6 is not divisible" in row["reason"]
    assert many["uncut"]["steps"] == many["uncut whole"]["steps"]


def test_failed_changes_leave_nothing_behind(many: dict[str, Any]) -> None:
    for rows in many["broken"]["rows"]:
        assert len({row["num_groups"] for row in rows}) == 1
        assert rows[-1]["num_threads"] <= rows[0]["num_threads"]
        assert rows[-1]["num_fds"] <= rows[0]["num_fds"] + 2


def test_after_a_failed_change_the_next_can_succeed(many: dict[str, Any]) -> None:
    for rows in many["moved"]["rows"]:
        assert [row["kind"] for row in rows] == ["cancelled", "moved"]
    losses, expected = (
        [step[0]["lm loss"] for step in many[name]["steps"]] for name in ("moved", "whole")
    )
    assert losses[:BEFORE] == expected[:BEFORE]
    assert losses == pytest.approx(expected, rel=1e-5)


def test_a_state_that_came_out_wrong_is_seen_and_never_trained_on(wrong: dict[str, Any]) -> None:
    rows = [row for part in wrong.values() for ranks in part["rows"] for row in ranks]
    assert {row["case"] for row in rows} == {*WRONG, "replica"}
    for row in rows:
        assert row["kind"] == "rolled_back", row
        assert row["reason"].startswith("verify: rank ") and "Mismatch: " in row["reason"], row
        assert_untouched(row)


@pytest.mark.timeout(1000)
def test_broken_so_that_nobody_can_go_on_it_leaves_and_goes_on_from_the_last_checkpoint(
    tmp_path: Path, whole: list[Any]
) -> None:
    chain = [
        Case(topic="transfer together", kind="kill", rank=1, to="tp", is_async=True),
        Case(topic="groups together", kind="raise", rank=1, to="pp"),
        Case(topic="back: model", back_from="verify", kind="kill", rank=1, to="tp"),
        Case(topic="commit together", kind="kill", rank=0, to="pp", is_late=True),
        Case(topic="resume", kind="raise", rank=1, to="tp"),
    ]
    rows = run_chain(chain, tmp_path / "run", whole)
    assert [row["problems"] for row in rows] == [[]] * len(chain)
    assert all(row["orphans"] == 0 for row in rows if row["kind"] != "kill")


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_run_with_experts_goes_on_after_a_kill_in_the_middle(tmp_path: Path) -> None:
    whole = uninterrupted(tmp_path / "whole", more=EXPERTS)
    chain = [
        Case(topic="transfer together", kind="kill", rank=1, to="ep"),
        Case(topic="weights together", kind="kill", rank=0, to="tp and ep", is_late=True),
    ]
    rows = run_chain(chain, tmp_path / "run", whole, more=EXPERTS)
    assert [row["problems"] for row in rows] == [[]] * len(chain)


@pytest.mark.timeout(600)
def test_a_rank_that_hangs_is_not_waited_for(tmp_path: Path, whole: list[Any]) -> None:
    case = Case(topic="optimizer", kind="hang", rank=1)
    (row,) = run_chain([case], tmp_path / "run", whole)
    assert row["problems"] == []
    stacks = sorted((tmp_path / "run" / "0" / "stacks").iterdir())
    assert [path.name for path in stacks] == ["relayout-1-rank0.txt", "relayout-1-rank1.txt"]
    assert "strike" in stacks[1].read_text()


def test_kills_are_drawn_over_all_places(many: dict[str, Any]) -> None:
    cases = drawn(0, 60)
    assert cases == drawn(0, 60) and cases != drawn(1, 60)
    places = {case.topic for case in cases}
    assert places == set(many["topics"])
    assert {*topics(waiting=True), *topics(waiting=False)} <= places
    assert {case.rank for case in cases} == {0, 1} and len(places) > 30
