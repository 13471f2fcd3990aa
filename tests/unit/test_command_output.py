"""Standard output that cannot take an answer: one line or none, and never a fault of the files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from copus_ext.commands.main import main
from megatron.trainer.common import program
from tests.helpers.launch import ROOT
from tests.helpers.written_runs import usual_run

FULL = Path("/dev/full")
COPUS = (sys.executable, "-m", "copus_ext.commands.main")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return usual_run(tmp_path_factory.mktemp("runs") / "usual", steps=20).path


def ended(*words: object, output: int, **settings: str) -> tuple[int, str]:
    """Exit code and standard error of a program with this standard output."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **settings},
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", ["status", "replay", "plan", "status.py", "--help"])
def test_an_output_that_fails_is_told_as_such_or_has_no_reader(command: str, run: Path) -> None:
    words: list[object] = [command, run]
    if command == "plan":
        words = ["plan", "--model", "llama-7b", "--cluster", "h100-80g:8"]
        words += ["--global-batch-size", 64]
    program = [sys.executable, ROOT / "tools" / command, run]
    if not command.endswith(".py"):
        program = [*COPUS, *words]
    name = "copus" if command == "--help" else f"copus {command}"
    name = command if command.endswith(".py") else name
    with FULL.open("wb") as full:
        found = ended(*program, output=full.fileno())
    assert found == (1, f"{name}: error: standard output: No space left on device\n")
    end, pipe = os.pipe()
    os.close(end)
    assert ended(*program, output=pipe) == (0, "")
    os.close(pipe)


def test_what_the_output_cannot_encode_is_replaced(tmp_path: Path) -> None:
    name = usual_run(tmp_path / os.fsdecode(b"d\xc3\xa9 \xff"), steps=20).path
    with (tmp_path / "out").open("wb") as out:
        code, err = ended(*COPUS, "status", name, output=out.fileno(), PYTHONIOENCODING="ascii")
    assert (code, err) == (0, "")
    assert "d? ?" in (tmp_path / "out").read_text(encoding="ascii")


def test_an_error_of_the_output_wins_over_a_command_that_catches_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prints() -> int:
        try:
            print("x", flush=True)
        except Exception:
            return 5
        return 0

    class Bad:
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

        def flush(self) -> None:
            pass

        def fileno(self) -> int:
            raise OSError

    bad = Bad()
    monkeypatch.setattr(sys, "stdout", bad)
    assert program.with_output("x.py", prints) == 1
    assert capsys.readouterr().err == "x.py: error: standard output: Input/output error\n"
    assert sys.stdout is bad


def test_a_job_keeps_its_exit_code_whoever_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise AssertionError

    monkeypatch.setattr("copus_ext.commands.main.with_output", refuse)
    assert main(["launch", "--nnodes", "0", "--", "--lr", "1"]) == 2
