"""A checkpoint that cannot be written to its end leaves the one before it latest, and training goes
on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.trainer.checkpoint import files
from megatron.trainer.logging.metrics import read_metrics
from tests.distributed.worker_failed_saves import ASYNC, RECOVERED, SAID, SYNC
from tests.helpers.jobs import TINY, losses_of
from tests.helpers.launch import RanksResult, run_ranks
from tests.helpers.on_ranks import on_ranks
from tests.helpers.text import text_prefix

pytestmark = pytest.mark.waits

WORKER = Path(__file__).with_name("worker_small_files.py")
FLAGS = [*TINY.split(), "--train-iters", "6"]
TOO_SMALL_BYTES = 300_000


def train(save: Path, *flags: str, limit_bytes: int = 1 << 30) -> RanksResult:
    """Runs one rank, its files held to a size."""
    program = [WORKER, str(limit_bytes), *FLAGS, "--save", save, "--run-dir", save / "run", *flags]
    return run_ranks(program, 1, timeout_s=120)


@pytest.mark.parametrize("mode", [(), ("--async-save",)], ids=["sync", "async"])
def test_a_failed_write_stops_no_training_and_the_previous_checkpoint_stays(
    tmp_path: Path, mode: tuple[str, ...]
) -> None:
    train(tmp_path, "--exit-interval", "2", *mode).check()
    flags = ("--load", str(tmp_path), "--save-interval", "4", *mode)
    failed = train(tmp_path, *flags, limit_bytes=TOO_SMALL_BYTES)
    code, out, errors = failed.returncode, failed.stdout, failed.stderr
    alerts = [line for line in out.splitlines() if line.startswith("ALERT: saving iteration 4")]
    assert len(alerts) == 1 and "training goes on" in alerts[0], out
    line = errors.strip().splitlines()[-1]
    assert code == 1 and "--save" in line and "iteration 6" in line, errors
    assert "the last complete checkpoint is iteration 2" in line
    assert "Traceback" not in errors
    records = read_metrics(tmp_path / "run")
    assert [r["iteration"] for r in records if r["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
    for kind in ("checkpoint.failed", "alert"):
        assert [r["iteration"] for r in records if r["kind"] == kind] == [4, 6]
    assert files.read_latest(tmp_path) == 2
    assert files.complete_iterations(tmp_path) == [2]
    assert files.damage(files.folder_of(tmp_path, 2)) == []


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the worker's runs have left."""
    folder = tmp_path_factory.mktemp("failed")
    text_prefix()  # for the ranks
    on_ranks("worker_failed_saves", folder, 2, timeout_s=800)
    return folder


def told(output: Path, case: str) -> dict[str, Any]:
    """What its ranks were told."""
    return json.loads((output / "result.json").read_text())[case]


@pytest.mark.parametrize(("mode", "faults"), [("sync", SYNC), ("async", ASYNC)])
def test_whatever_fails_on_one_rank_the_next_save_works_and_three_in_a_row_end_it(
    output: Path, mode: str, faults: dict[int, tuple[str, int]]
) -> None:
    records = read_metrics(output / mode / "run")
    failed = {r["iteration"]: r["reason"] for r in records if r["kind"] == "checkpoint.failed"}
    recovered = [i for i, (fault, _) in faults.items() if mode == "async" and fault in RECOVERED]
    assert list(failed) == [i for i in faults if i not in recovered]
    for iteration, reason in failed.items():
        fault, rank = faults[iteration]
        assert SAID[mode].get(fault, "No space left").format(rank=rank) in reason
    good = [i for i in range(1, max(faults)) if i not in failed]
    assert [r["iteration"] for r in records if r["kind"] == "checkpoint.commit"] == good
    assert files.complete_iterations(output / mode) == good
    assert not list((output / mode).glob("*.unfinished"))
    assert [files.damage(files.folder_of(output / mode, i)) for i in good] == [[]] * len(good)
    errors = told(output, mode)["errors"]
    assert errors[0] is not None and errors == [errors[0]] * 2
    assert "3 times in a row" in errors[0] and f"iteration {good[-1]};" in errors[0]
    assert "--on-save-failure" in errors[0]


def test_a_process_that_dies_or_stands_still_costs_no_save_and_the_record_says_so(
    output: Path,
) -> None:
    notes = {"killed": "ended with -9", "unreachable": None}
    for mode, faults in (("async", ASYNC), ("gathered", {2: ("killed", 0)})):
        records = read_metrics(output / mode / "run")
        found = {
            r["iteration"]: r.get("notes", []) for r in records if r["kind"] == "checkpoint.commit"
        }
        for iteration, (fault, rank) in faults.items():
            if fault not in RECOVERED:
                continue
            note = notes.get(fault, "has not moved on for 1 s")
            assert iteration in found
            if note is None:
                assert found[iteration] == [], "another process wrote it"
            else:
                assert f"rank {rank}" in found[iteration][0] and note in found[iteration][0]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_no_failed_save_changes_what_is_trained(output: Path, mode: str) -> None:
    plain = losses_of(output / "plain" / "run")
    found = losses_of(output / mode / "run")
    assert len(found) >= 14 and found == plain[: len(found)]


def test_a_save_starts_no_process_but_the_one_that_writes_where_it_is_asked_to(
    output: Path,
) -> None:
    assert told(output, "plain")["started"] == told(output, "sync")["started"] == [[], []]
    for events in told(output, "async")["started"]:
        # Again after one was killed; a new interpreter, and no copy of the rank.
        assert events and all(
            e.startswith("subprocess.Popen") and "writer_process" in e for e in events
        )


def test_told_to_go_on_a_run_only_fails_when_its_last_save_does(output: Path) -> None:
    errors = told(output, "last")["errors"]
    assert errors[0] is not None and errors == [errors[0]] * 2
    assert "saving iteration 5" in errors[0] and "iteration 1;" in errors[0]
    assert files.read_latest(output / "last") == 1
