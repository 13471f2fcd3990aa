"""The controller changes a running job, in step on all ranks, and can account for it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from copus_ext.commands import replay
from copus_ext.goodput.headroom import Headroom
from megatron.trainer.logging.metrics import read_metrics
from tests.helpers.on_ranks import on_ranks

pytestmark = pytest.mark.timeout(640)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("controller")
    on_ranks("worker_controller", folder, 2, timeout_s=600)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def column(result: dict[str, Any], name: str) -> list[Any]:
    return [step[name] for step in result["steps"]]


def kinds(result: dict[str, Any]) -> list[str]:
    return [r["kind"] for r in result["journal"]]


def test_a_schedule_is_followed_to_the_sample(results: dict[str, Any]) -> None:
    steps = results["doubling"]["steps"]
    starts = [s["consumed_samples"] - s["global_batch_size"] for s in steps]
    for start, batch in zip(starts, column(results["doubling"], "global_batch_size")):
        want = 8 * 2 ** sum(start >= at for at in (64, 128, 256))
        assert batch == min(want, 360 - start), start
    ends = column(results["doubling"], "consumed_samples")
    assert starts == [0, *ends[:-1]] and ends[-1] == 360


def test_the_sinks_count_what_the_journal_has(folder: Path, results: dict[str, Any]) -> None:
    """Also after a resume, and the change whose outcome only the end of the run makes known."""
    for name, before in (("doubling", 0), ("resumed", 2)):
        journal = results[name]["journal"]
        made = [r["iteration"] for r in journal if r["kind"] == "decision" and r["applied"]]
        counts, last, outcomes = 0.0, dict[str, float](), list[float | None]()
        for record in read_metrics(folder / name):
            last |= record.get("extra", {})
            counts = last.get("copus/changes", 0.0)
            outcomes.append(record.get("extra", {}).get("copus/samples-per-s"))
            if record["kind"] == "step":
                assert counts == before + sum(at <= record["iteration"] for at in made)
        assert counts == before + len(made) == 3
        known = [r["samples_per_s"] for r in journal if r["kind"] == "outcome"]
        assert [x for x in outcomes if x is not None] == [x for x in known if x is not None]


def test_the_log_tells_each_decision_once(results: dict[str, Any]) -> None:
    observed = results["observed"]
    decisions = [r["decision"] for r in observed["journal"] if r["kind"] == "decision"]
    news = [line for line in observed["told"] if line.startswith(" copus: ")]
    steps = [line for line in observed["told"] if line.startswith(" [")]
    assert len(observed["steps"]) == len(steps) > 2 * len(decisions) > 0, "a line for every step"
    assert all(" | noise scale" in line and line.endswith(" |") for line in steps)
    assert not [line for line in observed["told"] if line.startswith(" noise scale")]
    assert len(news) == len(decisions)
    assert all(decision["reason"] in line for decision, line in zip(decisions, news))
    changes = [line for line in results["doubling"]["told"] if "copus: batch" in line]
    changes = [line for line in changes if "->" in line]
    assert len(changes) == 3 and changes[0] == "copus: batch 8 -> 16"


def test_log_and_journal_tell_what_there_is_to_gain(results: dict[str, Any]) -> None:
    observed = results["observed"]
    known = [r["headroom"] for r in observed["journal"] if r["kind"] in ("start", "decision")]
    lines = [f"copus: {Headroom.from_json(h)}" for h in known if h is not None]
    told = [line for line in observed["told"] if line in lines]
    assert known[0] is not None and told[0] == lines[0] and len(told) <= 2


def test_the_log_tells_where_training_ends_after_a_change(results: dict[str, Any]) -> None:
    lines = [line for line in results["doubling"]["told"] if "measured in samples" in line]
    assert "its 360 samples now end at step 27 instead of 45" in lines[0] and len(lines) == 3
    assert f"now end at step {len(results['doubling']['steps'])} " in lines[-1]


def test_the_learning_rate_follows_the_batch(results: dict[str, Any]) -> None:
    steps = results["doubling"]["steps"]
    by_batch = {s["global_batch_size"]: s["learning_rate"] for s in steps[:-1]}
    rates = column(results["doubling"], "learning_rate")
    # The rate of a record is that of the next step: the eighth tells the ramp's first.
    assert rates[2:7] == [1e-3] * 5 and rates[7] == pytest.approx(1e-3 * 2**0.05)
    assert rates[2:] == sorted(rates[2:])
    # Ten steps of ramp are asked for: a batch is left before its end.
    assert 1e-3 < by_batch[16] < 1e-3 * 2
    assert max(rates) <= 1e-3 * 8**0.5


def test_at_the_end_the_batch_grows_in_place_of_a_falling_rate(results: dict[str, Any]) -> None:
    whole, resumed = results["annealed"]["steps"], results["annealed resumed"]["steps"]
    begun = [s for s in whole if s["consumed_samples"] >= 180]
    first = begun[0]["global_batch_size"]
    # A kill in the middle changes nothing: batch and rate at the start are in the checkpoint.
    assert 0 < len(resumed) < len(begun)
    assert resumed == whole[-len(resumed) :], "bit-equal"
    for steps in (begun, resumed):
        sizes = [s["global_batch_size"] for s in steps[:-1]]
        assert sizes == sorted(sizes) and sizes[-1] == 64 > first
        rates = [s["learning_rate"] for s in steps[:-1]]
        assert rates == sorted(rates), "a way up from before may end"
        assert rates[-1] == pytest.approx(1e-3 * (first / 8) ** 0.5), "that of the first of them"
        assert steps[-1]["consumed_samples"] == 360
    start = resumed[0]["consumed_samples"] - resumed[0]["global_batch_size"]
    assert start in [s["consumed_samples"] for s in begun]


def test_a_shrink_leaves_the_warm_up_where_it_is(results: dict[str, Any]) -> None:
    shrunk = results["shrunk"]
    assert column(shrunk, "global_batch_size")[:15] == [32] * 4 + [8] * 9 + [32] * 2
    # The rate of a record is that of the next step.
    rates = [1e3 * rate for rate in column(shrunk, "learning_rate")]
    large = [min(32 * steps / 200, 1.0) for steps in (1, 2, 3)]
    small = [0.5 * (128 + 8 * steps) / 200 for steps in range(9)]
    assert rates[:12] == pytest.approx([*large, *small], rel=1e-12)
    # A twentieth of the decay is 18 samples: the rate follows a larger batch at once.
    assert rates[12] == pytest.approx(1.0)
    assert results["shrunk resumed"]["steps"] == shrunk["steps"][8:], "bit-equal"


def test_every_change_has_an_outcome(results: dict[str, Any]) -> None:
    for name in ("doubling", "adaptive", "paper"):
        journal = results[name]["journal"]
        applied = [r for r in journal if r["kind"] == "decision" and r["applied"]]
        outcomes = [r for r in journal if r["kind"] == "outcome"]
        assert [o["decision"] for o in outcomes] == [d["number"] for d in applied] != []
        for outcome, decision in zip(outcomes, applied):
            assert outcome["to_batch"] == decision["decision"]["to"]["global_batch_size"]
        assert kinds(results[name])[0] == "start" and kinds(results[name])[-1] == "end"


@pytest.mark.parametrize("name", ["doubling", "adaptive", "paper", "observed", "paused"])
def test_the_journal_can_be_decided_again(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert replay.main([str(folder / name)]) == 0
    out = capsys.readouterr().out
    assert "0 different" in out and not out.startswith("0 decisions")


def test_a_changed_journal_is_found_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (folder / "adaptive" / "journal.jsonl").read_text().splitlines()
    changed = [line.replace('"kind": "batch"', '"kind": "stay"') for line in lines]
    assert changed != lines
    (tmp_path / "journal.jsonl").write_text("\n".join(changed))
    assert replay.main([str(tmp_path)]) == 1
    (tmp_path / "journal.jsonl").write_text('{"kind": "decision", "version": 3}\n')
    assert replay.main([str(tmp_path)]) == 5
    assert "replay.py: error" in capsys.readouterr().err


def test_all_ranks_come_to_the_same(results: dict[str, Any]) -> None:
    for name in ("doubling", "observed", "adaptive", "failed"):
        first, second = results[name]["states"]
        assert first == second and first, name


def test_a_resumed_run_goes_on_with_the_same_decisions(results: dict[str, Any]) -> None:
    whole, again = results["doubling"], results["resumed"]
    assert again["steps"] == whole["steps"][15:]
    numbers = [r["number"] for r in whole["journal"] if r["kind"] == "decision"]
    later = [r["number"] for r in again["journal"] if r["kind"] == "decision"]
    assert later and later == numbers[-len(later) :]
    # Its last lines tell of this launch: what was changed before is in the journal.
    listed = [[s for s in run["told"] if s.startswith("  step ")] for run in (whole, again)]
    assert 0 < len(listed[1]) < len(listed[0])
    assert any(s.startswith("copus: ") and " in this launch; " in s for s in again["told"])


def test_a_state_of_another_version_does_not_end_a_resumed_run(results: dict[str, Any]) -> None:
    whole, again = results["doubling"]["steps"], results["another version"]["steps"]
    assert len(again) == 2
    for name in ("consumed_samples", "global_batch_size", "micro_batch_size", "loss"):
        assert again[0][name] == whole[10][name], "weights, data position and batch are as saved"


def test_a_run_that_is_resumed_with_a_lower_maximum_keeps_to_it(results: dict[str, Any]) -> None:
    narrowed = results["narrowed"]
    before = results["doubling"]["steps"][9]
    assert before["global_batch_size"] == 16 and before["learning_rate"] > 1e-3
    assert set(column(narrowed, "global_batch_size")) == {8}
    # The rate of a record is that of the next step.
    assert set(column(narrowed, "learning_rate")) == {1e-3}
    notes = [line for line in narrowed["told"] if "in place of" in line]
    assert notes == ["copus: batch 8 in place of 16, as --copus-max-global-batch-size is 8"]
    # The outcome of the change that a lower bound has undone is as far known as it went.
    assert kinds(narrowed)[:2] == ["outcome", "start"]
    start = narrowed["journal"][1]
    assert (start["global_batch_size"], start["micro_batch_size"]) == (8, 1)
    first, second = narrowed["states"]
    assert first == second


def test_what_fails_on_rank_0_at_the_start_ends_all_ranks(results: dict[str, Any]) -> None:
    failed = "setting up the controller failed: LookupError: no such package"
    assert results["unable"] == [failed] * 2


def test_observing_changes_no_bit(results: dict[str, Any]) -> None:
    assert results["observed"]["steps"] == results["plain"]["steps"]
    decisions = [r for r in results["observed"]["journal"] if r["kind"] == "decision"]
    assert any(r["decision"]["kind"] == "batch" for r in decisions)
    assert not any(r["applied"] for r in decisions)


def test_growth_is_at_most_fourfold_and_twofold_in_the_paper(results: dict[str, Any]) -> None:
    for name, most in (("adaptive", 4), ("paper", 2)):
        sizes = column(results[name], "global_batch_size")
        # The last step takes what is left.
        assert max(sizes) > 8
        assert all(b <= most * a for a, b in itertools.pairwise(sizes[:-1]))
        assert column(results[name], "consumed_samples")[-1] == 360
    assert max(column(results["adaptive"], "global_batch_size")) <= 64


def test_an_operator_can_pause_it(results: dict[str, Any]) -> None:
    assert set(column(results["paused"], "global_batch_size")) == {8}
    assert "paused" in kinds(results["paused"])


def test_a_bug_in_the_controller_ends_its_decisions_and_not_the_run(
    results: dict[str, Any],
) -> None:
    failed = results["failed"]
    assert column(failed, "consumed_samples")[-1] == 360
    failure = next(r for r in failed["journal"] if r["kind"] == "failure")
    assert "ZeroDivisionError: a bug" in failure["error"]
    assert kinds(failed).count("decision") == 1
    assert set(column(failed, "global_batch_size")[8:-1]) == {16}
    # The ramp of ten steps that was under way goes on to its end.
    rates, at = column(failed, "learning_rate"), failure["iteration"]
    assert rates[at - 2] < rates[at - 1] < rates[-1] == 1e-3 * 2**0.5


def test_without_the_controller_a_run_goes_back_to_its_flags(results: dict[str, Any]) -> None:
    assert set(column(results["resumed plain"], "global_batch_size")) == {8}
    rates = column(results["resumed plain"], "learning_rate")
    assert set(rates) == {1e-3}
