"""A checkpoint that cannot be written to its end leaves the one before it latest, and training goes
on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.training.checkpoint import files
from megatron.training.logging.metrics import read_metrics
from tests.distributed.worker_failed_saves import FAULTS
from tests.helpers.jobs import TINY
from tests.helpers.launch import RanksResult, run_ranks
from tests.helpers.on_ranks import on_ranks

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
    on_ranks("worker_failed_saves", folder, 2, timeout_s=800)
    return folder


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_whatever_fails_on_one_rank_the_next_save_works_and_three_in_a_row_end_it(
    output: Path, mode: str
) -> None:
    records = read_metrics(output / mode / "run")
    failed = {r["iteration"]: r["reason"] for r in records if r["kind"] == "checkpoint.failed"}
    assert list(failed) == list(FAULTS)
    for iteration, (fault, rank) in FAULTS.items():
        said = {"killed": f"rank {rank}", "results": f"rank {rank}", "hung": "has not ended"}
        assert said.get(fault, "No space left") in failed[iteration], failed[iteration]
    good = [i for i in range(1, max(FAULTS)) if i not in FAULTS]
    assert [r["iteration"] for r in records if r["kind"] == "checkpoint.commit"] == good
    assert files.complete_iterations(output / mode) == good
    assert not list((output / mode).glob("*.unfinished"))
    assert [files.damage(files.folder_of(output / mode, i)) for i in good] == [[]] * len(good)
    errors = json.loads((output / "result.json").read_text())[mode]
    assert errors[0] is not None and errors == [errors[0]] * 2
    assert "3 times in a row" in errors[0] and "iteration 15;" in errors[0]
    assert "--on-save-failure" in errors[0]


def test_told_to_go_on_a_run_only_fails_when_its_last_save_does(output: Path) -> None:
    errors = json.loads((output / "result.json").read_text())["last"]
    assert errors[0] is not None and errors == [errors[0]] * 2
    assert "saving iteration 5" in errors[0] and "iteration 1;" in errors[0]
    assert files.read_latest(output / "last") == 1
