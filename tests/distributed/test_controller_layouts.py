"""The controller moves a running job to another layout, in step on all ranks, and accounts for
it."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from copus_ext.commands import replay
from tests.helpers.of_extras import of_extra
from tests.helpers.on_ranks import on_ranks

pytestmark = pytest.mark.timeout(640)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    on_ranks("worker_controller_layouts", folder, 2, timeout_s=600)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def of_kind(result: dict[str, Any], *kinds: str) -> list[dict[str, Any]]:
    return [r for r in result["journal"] if r["kind"] in kinds]


def test_the_faster_layout_is_taken_once(results: dict[str, Any]) -> None:
    (relayout,) = of_kind(results["moved"], "relayout")
    assert relayout["start"] == "tp1.pp1.dp2" and ".pp2." in relayout["to"]
    assert relayout["outcome"]["kind"] == "moved"
    assert relayout["outcome"]["wire_bytes"] == relayout["outcome"]["minimum_bytes"] > 0
    (outcome,) = of_kind(results["moved"], "outcome")
    assert (outcome["from_layout"], outcome["to_layout"]) == (relayout["start"], relayout["to"])


def test_it_is_written_before_it_is_done(results: dict[str, Any]) -> None:
    kinds = [r["kind"] for r in results["moved"]["journal"] if r["kind"] != "decision"]
    order = [
        "start",
        "relayout.requested",
        "relayout.begin",
        "relayout.commit",
        "relayout",
        "outcome",
    ]
    assert kinds == [*order, "end"]


def test_every_sample_is_read_once_and_the_losses_stay(results: dict[str, Any]) -> None:
    moved, plain = results["moved"]["steps"], results["plain"]["steps"]
    starts = [s["consumed_samples"] - s["global_batch_size"] for s in moved]
    assert starts == [0, *(s["consumed_samples"] for s in moved)][:-1]
    assert len(moved) == len(plain)
    for a, b in zip(moved, plain):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["learning_rate"] == b["learning_rate"]
        assert a["consumed_samples"] == b["consumed_samples"]


def test_all_ranks_keep_the_same_account(results: dict[str, Any]) -> None:
    for name in ("moved", "rolled back", "resumed"):
        first, *others = results[name]["states"]
        assert first and all(other == first for other in others)


def test_the_noise_scale_goes_on(results: dict[str, Any]) -> None:
    noise = json.loads(results["moved"]["states"][0][1])
    assert noise["num_measured"] >= 27


def test_observing_changes_nothing(results: dict[str, Any]) -> None:
    observed, plain = results["observed"], results["plain"]
    assert [s["loss"] for s in observed["steps"]] == [s["loss"] for s in plain["steps"]]
    kinds = [r["decision"]["kind"] for r in of_kind(observed, "decision")]
    assert "relayout" in kinds and not of_kind(observed, "relayout", "relayout.requested")


def test_a_failed_change_leaves_the_run_as_it_was(results: dict[str, Any]) -> None:
    failed, plain = results["rolled back"], results["plain"]
    assert [s["loss"] for s in failed["steps"]] == [s["loss"] for s in plain["steps"]]
    relayouts = of_kind(failed, "relayout")
    assert relayouts and {s["outcome"]["kind"] for s in relayouts} == {"rolled_back"}
    assert all("no room" in s["outcome"]["reason"] for s in relayouts)
    targets = [s["to"] for s in relayouts]
    assert len(set(targets)) == len(targets), "the same change was tried again"


def test_a_resumed_run_knows_of_the_change(results: dict[str, Any]) -> None:
    account = json.loads(results["resumed"]["states"][0][0])["layout_costs"]
    (relayout,) = of_kind(results["moved"], "relayout")
    assert account["pauses_s"][0] == relayout["outcome"]["pause_s"]


@pytest.mark.parametrize("name", ["moved", "observed", "rolled back"])
def test_the_journal_can_be_decided_again(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert replay.main([str(folder / name)]) == 0
    assert "0 different" in capsys.readouterr().out


def test_decisions_are_numbered(results: dict[str, Any]) -> None:
    for name in ("moved", "rolled back"):
        numbers = [r["number"] for r in of_kind(results[name], "decision")]
        assert numbers == list(range(1, len(numbers) + 1))
        asked = [r["number"] for r in of_kind(results[name], "relayout.requested")]
        done = [r["number"] for r in of_kind(results[name], "relayout")]
        assert asked == done
        assert all(a < b for a, b in itertools.pairwise(asked))


def test_the_phases_are_in_the_trace_of_each_rank_and_the_decision_beside_them(
    folder: Path, results: dict[str, Any], tmp_path: Path
) -> None:
    run = folder / "moved"
    (relayout,) = of_kind(results["moved"], "relayout")
    for rank in (0, 1):
        (path,) = (run / "traces").glob(f"*.rank{rank}.steps7-10.json.gz")
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
        named = {e["name"] for e in events if e.get("cat") == "user_annotation"}
        assert {"data", "forward and backward", "reduce", "optimizer", "saving"} <= named
        assert {f"layout: {phase}" for phase in relayout["outcome"]["phases"]} <= named
    trace = of_extra("copus_ext.extras.trace.command")
    assert trace.main([str(run), "-o", str(tmp_path / "whole.json")]) == 0
    events = json.loads((tmp_path / "whole.json").read_text())["traceEvents"]
    spans = [e for e in events if e["name"] == f"{relayout['start']} to {relayout['to']}"]
    moves = [e for e in events if e["name"] == "changing the layout"]
    decisions = [e for e in events if e.get("ph") == "i" and relayout["to"] in e["name"]]
    (span,), (decision, *_) = spans, decisions
    assert decision["args"]["reason"] and decision["args"]["outcome"]
    # The journal has milliseconds, and writes them when all is done.
    slack_us = 1e6
    assert len(moves) == 2 and len({e["pid"] for e in moves}) == 2
    for move in moves:
        assert decision["ts"] < move["ts"] + slack_us
        assert abs(span["ts"] - move["ts"]) < slack_us + 0.5 * move["dur"]
