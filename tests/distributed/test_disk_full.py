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
from tests.helpers.jobs import losses_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.text import text_prefix

pytestmark = pytest.mark.waits


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


def _saving(line: str) -> int:
    """The iteration of an alert."""
    return int(line.removeprefix("ALERT: saving iteration ").split()[0])


@pytest.mark.parametrize(("mode", "faults"), [("sync", SYNC), ("async", ASYNC)])
def test_whatever_fails_on_one_rank_the_next_save_works_and_three_in_a_row_end_it(
    output: Path, mode: str, faults: dict[int, tuple[str, int]]
) -> None:
    records = read_metrics(output / mode / "run")
    failed = {r["iteration"]: r["reason"] for r in records if r["kind"] == "checkpoint.failed"}
    recovered = [i for i, (fault, _) in faults.items() if mode == "async" and fault in RECOVERED]
    assert list(failed) == [i for i in faults if i not in recovered]
    alerts = [r["iteration"] for r in records if r.get("alert") == "save failed"]
    assert alerts == list(failed)
    said = [line for line in told(output, mode)["said"].splitlines() if "training goes on" in line]
    assert [*map(_saving, said)] == alerts[:-1], "the last one ends the run"
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
