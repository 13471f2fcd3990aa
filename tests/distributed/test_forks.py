"""A fork test of a running job leaves no trace, or the run goes on from the branch that it kept as
from steps of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from copus_ext.controller.decision_log import NAME, read_journal
from copus_ext.goodput.fork_result import ForkResult
from tests.distributed.worker_forks import EVAL_SAMPLES, KEPT_FROM, LAST, SAMPLES, VARIANTS
from tests.helpers.jobs import ENDLESS, TINY, losses_of, train
from tests.helpers.launch import ROOT, run_ranks
from tests.helpers.on_ranks import on_ranks

pytestmark = pytest.mark.timeout(640)

KINDS = ["refused", "done", "done", "failed", "refused", "stopped"]
"""What the tests of a run come to, in order."""
NEXT = KEPT_FROM + SAMPLES // 16 + 1
"""The first step after the branch that is kept."""
RELAUNCH = 85


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forks")
    on_ranks("worker_forks", folder, 4, timeout_s=600)
    return folder


@pytest.fixture(params=list(VARIANTS))
def ranks(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Any]]:
    """Both runs of a variant, of every rank."""
    return json.loads((folder / "result.json").read_text())[request.param]


def results_of(row: dict[str, Any]) -> list[ForkResult]:
    return [ForkResult.from_json(data) for data in row["forked"]["results"]]


def test_all_ranks_come_to_the_same(ranks: list[dict[str, Any]]) -> None:
    for row in ranks:
        assert row["forked"]["results"] == ranks[0]["forked"]["results"]
    assert [result.kind for result in results_of(ranks[0])] == KINDS


def test_what_is_not_kept_changes_nothing(ranks: list[dict[str, Any]]) -> None:
    """Weights, moments, rates, loss scale, random streams, counters and the noise scale are those
    from before the test, bit for bit."""
    assert [row["forked"]["changed"] for row in ranks] == [[]] * len(ranks)


def test_the_run_goes_on_as_if_it_had_taken_the_steps_of_the_kept_branch(
    ranks: list[dict[str, Any]],
) -> None:
    for row in ranks:
        plain, forked = row["plain"]["end"], row["forked"]["end"]
        assert plain.keys() == forked.keys()
        # The steps of a branch measure no noise.
        assert [name for name in plain if plain[name] != forked[name]] == ["noise"]
    fields = ["losses", "grad_norm", "learning_rate", "loss_scale", "consumed_samples"]
    fields += ["global_batch_size", "micro_batch_size", "updated"]
    plain, forked = (
        {s["iteration"]: {f: s[f] for f in fields} for s in ranks[0][name]["steps"]}
        for name in ("plain", "forked")
    )
    assert list(plain) == list(range(1, LAST + 1))
    assert list(forked) == [*range(1, KEPT_FROM + 1), *range(NEXT, LAST + 1)]
    # A change of settings also sets the rate that this step's record names.
    for steps in (plain, forked):
        steps[KEPT_FROM].pop("learning_rate")
    assert forked == {iteration: plain[iteration] for iteration in forked}


def test_a_stop_is_obeyed_after_the_next_step(ranks: list[dict[str, Any]]) -> None:
    stopped = results_of(ranks[0])[-1]
    assert stopped.iteration == LAST - 1 and stopped.branches == ()
    assert stopped.loss_start is not None
    assert f"stopped after iteration {LAST}: SIGTERM" in ranks[0]["forked"]["out"]


def test_the_same_branch_from_the_same_state_is_the_same(ranks: list[dict[str, Any]]) -> None:
    first, again = results_of(ranks[0])[1].branches
    assert replace(again, seconds=first.seconds) == first
    assert None not in (first.loss_last, first.loss_averaged)
    same, other = results_of(ranks[0])[2].branches
    assert [(b.steps, b.averaged_steps) for b in (same, other)] == [(6, 3), (3, 2)]
    assert same.loss_last != other.loss_last


def test_losses_are_those_of_the_weights(ranks: list[dict[str, Any]]) -> None:
    """The average is taken by hand from the weights of the run without tests."""
    kept, by_hand = results_of(ranks[0])[2], ranks[0]["plain"]["losses"]
    assert kept.kept == 1 and kept.eval_samples == EVAL_SAMPLES
    assert kept.branches[1].loss_last == by_hand["last"]
    assert kept.branches[1].loss_averaged == pytest.approx(by_hand["averaged"], abs=1e-6)
    assert abs(by_hand["averaged"] - by_hand["last"]) > 1e-3


def test_evaluations_and_callbacks_see_no_step_of_a_branch(ranks: list[dict[str, Any]]) -> None:
    plain, forked = (ranks[0][name]["evaluations"] for name in ("plain", "forked"))
    # Of the turns at 24, 48 .. samples, two fall into the kept branch and the last into the stop.
    assert len(plain) == 5 and forked == [plain[0], plain[3]]
    for row in ranks:
        events = row["forked"]["events"]
        assert events["grads"] == LAST - SAMPLES // 16
        assert events["evaluated batches"] == 2 * len(forked)
        saved = {name for name in events if name.startswith("saved")}
        # A turn to save that a kept branch has passed is made up for behind it.
        assert saved == {f"saved {NEXT - 1}", f"saved {LAST}"}


def test_the_watchdog_is_fed(ranks: list[dict[str, Any]]) -> None:
    for row in ranks:
        for result, beats in zip(results_of(row), row["forked"]["beats"], strict=True):
            assert beats >= sum(branch.steps for branch in result.branches)
        # The heartbeat names the step of the run, not of a branch.
        assert row["forked"]["shown"] == [results_of(row)[1].iteration]


def test_the_journal_has_every_test_with_all_numbers(folder: Path) -> None:
    found = json.loads((folder / "result.json").read_text())
    for name, rows in found.items():
        records = list(read_journal(folder / f"{name}-forked" / NAME))
        forks = [r["outcome"] for r in records if r["kind"] == "fork"]
        assert forks == rows[0]["forked"]["results"]
        assert [r["kind"] for r in records][:2] == ["fork.begin", "fork"]


def test_what_cannot_be_is_one_line_and_an_error_ends_the_tests(
    ranks: list[dict[str, Any]],
) -> None:
    refused, *_, failed, ended, _ = results_of(ranks[0])
    assert "TooLarge" in refused.reason and refused.branches == ()
    assert "broken on purpose" in failed.reason and failed.branches == ()
    assert ended.reason == "a fork test of this launch has failed"
    lines = [line for line in ranks[0]["forked"]["out"].splitlines() if "note: fork test" in line]
    # Once there are no more, nothing is said.
    assert [line.split(":")[1].split()[-1] for line in lines] == ["refused", "failed"]


@pytest.mark.waits
def test_a_rank_that_dies_or_fails_alone_sends_the_run_back_to_its_last_checkpoint(
    tmp_path: Path, uninterrupted: list[float]
) -> None:
    worker = ROOT / "tests" / "distributed" / "worker_forks.py"
    save, run = tmp_path / "save", tmp_path / "run"
    flags = [*ENDLESS, "--exit-interval", "6", "--eval-iters", "1", "--eval-interval", "100"]
    flags += ["--save", str(save), "--load", str(save), "--save-interval", "2"]
    for kind, at, codes in (("kill", 3, [RELAUNCH, -9]), ("raise", 5, [RELAUNCH, RELAUNCH])):
        case = {"at": at, "topic": "branch 0: step 3", "rank": 1, "kind": kind}
        program = [worker, json.dumps(case), *TINY.split(), *flags, "--run-dir", run]
        broken = run_ranks(program, 2, timeout_s=120, ends_all=False)
        assert list(broken.codes) == codes, broken.tail()
        # Nothing was saved inside of the test.
        latest = (save / "latest_checkpointed_iteration.txt").read_text().strip()
        assert latest == str(at - 1), broken.tail()
    train(flags, 2, run).check()
    assert losses_of(run) == uninterrupted[:6]
    kinds = [record["kind"] for record in read_journal(run / NAME)]
    assert kinds == ["fork.begin", "fork.begin"]
