"""A checkpoint that cannot be written to its end leaves the one before it latest."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training import checkpoint_files as files
from tests.helpers.launch import run_ranks

REPOSITORY = Path(__file__).resolve().parents[2]
FLAGS = [
    "--num-layers",
    "2",
    "--hidden-size",
    "64",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "32",
    "--max-position-embeddings",
    "32",
    "--micro-batch-size",
    "2",
    "--global-batch-size",
    "8",
    "--lr",
    "1e-3",
    "--train-iters",
    "6",
    "--tokenizer-type",
    "NullTokenizer",
    "--vocab-size",
    "127",
    "--mock-data",
    "--eval-iters",
    "0",
]
TOO_SMALL_BYTES = 300_000


def train(save: Path, *flags: str, limit_bytes: int | None = None) -> tuple[int, str]:
    """Runs one rank, its files held to a size; returns exit code and standard error."""

    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    command = [sys.executable, "pretrain_gpt.py", *FLAGS, "--save", str(save), *flags]
    result = subprocess.run(
        [*command, "--run-dir", str(save / "run")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=limit,
    )
    return result.returncode, result.stderr


@pytest.mark.parametrize("mode", [(), ("--async-save",)], ids=["sync", "async"])
def test_a_failed_write_is_one_line_and_the_previous_checkpoint_stays(
    tmp_path: Path, mode: tuple[str, ...]
) -> None:
    code, errors = train(tmp_path, "--exit-interval", "2", *mode)
    assert code == 0, errors
    flags = ("--load", str(tmp_path), "--save-interval", "4", *mode)
    code, errors = train(tmp_path, *flags, limit_bytes=TOO_SMALL_BYTES)
    line = errors.strip().splitlines()[-1]
    assert code == 1 and "--save" in line and "iteration 4" in line, errors
    assert "the last complete checkpoint is iteration 2" in line
    assert "Traceback" not in errors
    assert files.read_latest(tmp_path) == 2
    assert files.complete_iterations(tmp_path) == [2]
    assert files.damage(files.folder_of(tmp_path, 2)) == []


def test_when_one_rank_cannot_write_all_are_told(tmp_path: Path) -> None:
    worker = Path(__file__).parent / "worker_failed_saves.py"
    run_ranks([worker, tmp_path], 2, timeout_s=240, launcher="direct").check()
    told = json.loads((tmp_path / "result.json").read_text())
    assert len(told) == 6
    for case, errors in told.items():
        assert errors[0] is not None and errors == [errors[0]] * 2, case
        assert "iteration 4" in errors[0] and "iteration 2;" in errors[0], errors[0]
        assert files.read_latest(tmp_path / case) == 2
        assert files.complete_iterations(tmp_path / case) == [2]
        assert [p.name for p in (tmp_path / case).glob("iter_*")] == ["iter_0000002"], case
