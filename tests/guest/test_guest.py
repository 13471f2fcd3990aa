"""COPUS in Megatron-LM's own program, unmodified: that of a megatron-core's wheel."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from copus_ext.commands import replay
from megatron.trainer.logging.metrics import read_metrics
from tests.guest.program import HAS_PROGRAM, SPLIT, Runs, steps, train
from tests.helpers.nightly import case

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not HAS_PROGRAM, reason="PYTHONPATH lacks Megatron-LM's own program"),
]
TP2 = "--tensor-model-parallel-size 2"
# Grows at 128 samples and at 256, and a batch of the flags that is too large shrinks.
GROWS = "--copus-policy doubling --copus-max-global-batch-size 32"
SETTINGS = "doubling_first_tokens: 4096\ndoubling_ratio: 2\n"
# Without Transformer Engine and Apex its distributed optimizer cannot load what it has saved.
RESUMED = {"resumed": f"--copus {GROWS}", "watched": "--copus --copus-mode observe"}
RUNS = {
    "plain": ("plain", SPLIT),
    "observed": ("copus", f"{SPLIT} --copus --copus-mode observe"),
    "off": ("copus", SPLIT),
    "grown": ("copus", f"--copus {GROWS} --save-interval 20"),
    "scheduled": ("plain", f"{TP2} --train-iters 12"),
    "scheduled observed": ("copus", f"{TP2} --train-iters 12 --copus --copus-mode observe"),
    "adaptive": ("copus", f"{TP2} --global-batch-size 32 --train-iters 12 --copus"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("guest"), _steps)


def _steps(runs: Runs, name: str) -> list[tuple[float, ...]]:
    """Trains, or resumes from what a run had saved at step 20, under its second batch."""
    settings, own = runs.folder / "settings.yaml", runs.folder / name.replace(" ", "_")
    settings.write_text(SETTINGS)
    if name in RESUMED:
        assert runs["grown"]
        shutil.copytree(runs.folder / "grown" / "iter_0000020", own / "iter_0000020")
        (own / "latest_checkpointed_iteration.txt").write_text("20")
        kind, flags = "copus", f"--load {own} {RESUMED[name]}"
    else:
        kind, flags = RUNS[name]
    more = ["--copus-config", str(settings)] if GROWS in flags or name in RESUMED else []
    more += ["--step-batch-size-schedule", "0:4 1K:8"] if "scheduled" in name else []
    return steps(train(runs.folder, own.name, kind, flags, *more, ranks=2).stdout)


@pytest.mark.parametrize("name", ["observed", case("off", daily=False)])
def test_observing_changes_no_digit(runs: Runs, name: str) -> None:
    assert len(runs["plain"]) == 40
    assert runs[name] == runs["plain"]


@pytest.mark.nightly
def test_a_schedule_of_the_batch_goes_on_when_it_is_watched(runs: Runs) -> None:
    assert [row[3] for row in runs["scheduled"]] == [4] * 8 + [8] * 4
    assert runs["scheduled observed"] == runs["scheduled"]


def test_the_batch_grows_at_its_samples_and_every_sample_counts(runs: Runs) -> None:
    rows = runs["grown"]
    # That loop prints the rate of the step to come, which is the first of the new batch.
    assert rows[:15] == runs["plain"][:15] and rows[15][3:] == runs["plain"][15][3:]
    assert [row[3] for row in rows] == [8] * 16 + [16] * 8 + [32] * 2
    assert rows[-1][1] == 320


def test_a_resumed_run_goes_on_with_its_batch_its_rates_and_its_losses(
    runs: Runs,
) -> None:
    own, whole = runs["resumed"], runs["grown"][20:]
    # That loop prints the mean of two losses at the second step of a launch.
    assert [row[:4] for row in own] == [row[:4] for row in whole]
    assert own[:1] + own[2:] == whole[:1] + whole[2:]


@pytest.mark.nightly
def test_a_run_that_is_watched_from_now_on_has_the_batch_and_rates_of_its_flags(
    runs: Runs,
) -> None:
    rows, plain = runs["watched"], runs["plain"]
    assert {row[3] for row in rows} == {8} and rows[-1][1] == 320
    at = {row[1]: row[2] for row in plain}
    assert all(row[2] == at[row[1]] for row in rows)


def test_the_default_policy_shrinks_a_batch_that_is_too_large(runs: Runs) -> None:
    sizes = [row[3] for row in runs["adaptive"]]
    assert sizes[0] == 32 and min(sizes) < 32
    rows = runs["adaptive"]
    assert rows[-1][1] == sum(sizes)


def test_the_journal_can_be_decided_again(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs["grown"]
    run = runs.folder / "grown"
    assert replay.main([str(run)]) == 0
    assert "0 different" in capsys.readouterr().out
    lines = map(json.loads, (run / "journal.jsonl").read_text().splitlines())
    measured = [r for r in lines if r["kind"] == "decision"][-1]["situation"]["noise"]
    assert measured["grad_norm_sq"] is not None


def test_the_record_has_every_step_and_checkpoint(runs: Runs) -> None:
    assert runs["grown"]
    rows = read_metrics(runs.folder / "grown")
    steps_of = [row for row in rows if row["kind"] == "step"]
    own = [
        (row["iteration"], row["consumed_samples"], row["global_batch_size"]) for row in steps_of
    ]
    assert own == [(row[0], row[1], row[3]) for row in runs["grown"]]
    assert [r["iteration"] for r in rows if r["kind"] == "checkpoint.commit"] == [20, 26]
    assert [r["why"] for r in rows if r["kind"] == "run.end"] == ["done"]


def test_the_program_is_that_of_the_wheel() -> None:
    from importlib.util import find_spec

    spec = find_spec("megatron.training.training")
    assert spec is not None and "megatron-core-" in str(spec.origin)
    assert "guest" in os.environ["PYTHONPATH"]
