"""Runs without a name of their own get directories of their own, also in one second."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import datetime, timezone, tzinfo
from pathlib import Path

import pytest

from megatron.trainer.common.control import LOCK_FILE
from megatron.trainer.common.errors import UsageError
from megatron.trainer.config import Config
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.train import run_directory
from megatron.trainer.train.run_directory import hold_run
from tests.helpers.jobs import TINY
from tests.helpers.one_rank import world_of_one

NAME = "20300102-030405"


class OneSecond(datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> OneSecond:
        return cls(2030, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    """Of a run of one rank that names no directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_directory, "datetime", OneSecond)
    with world_of_one():
        yield resolve(parse_args([*TINY.split(), "--train-iters", "1"]), 1)


def test_runs_of_one_second_have_directories_of_their_own(config: Config) -> None:
    runs = Path("runs")
    with hold_run(config) as first, hold_run(config) as second, hold_run(config) as third:
        paths = [run.path for run in (first, second, third)]
        assert paths == [runs / NAME, runs / f"{NAME}-2", runs / f"{NAME}-3"]
        assert all((path / LOCK_FILE).is_file() for path in paths)
        (second.path / "metrics.jsonl").touch()
    assert [path.name for path in runs.iterdir()] == [f"{NAME}-2"], "no empty ones are left"
    (runs / NAME).mkdir()
    with hold_run(config) as later:
        assert later.path == runs / f"{NAME}-3", "of a run that is over, too"


def test_no_two_that_look_at_once_get_the_same(config: Config) -> None:
    names, gate = list[Path](), threading.Barrier(8, timeout=60)

    def start() -> None:
        gate.wait()
        with run_directory._new_directory() as path:
            names.append(path)
            gate.wait()

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(names)) == 8


def test_where_none_can_be_made_the_line_names_the_flag(config: Config) -> None:
    Path("runs").symlink_to("nowhere")
    with pytest.raises(UsageError, match="give another --run-dir"), hold_run(config):
        pass


@pytest.mark.parametrize("flag", ["--save", "--tensorboard-dir", "--run-dir"])
def test_the_line_names_the_flag_that_was_given(config: Config, flag: str) -> None:
    Path("file").touch()
    named = resolve(parse_args([*TINY.split(), "--train-iters", "1", flag, "file"]), 1)
    with pytest.raises(UsageError, match=f"give another {flag}"), hold_run(named):
        pass


def test_a_named_directory_is_taken_as_it_is(config: Config, tmp_path: Path) -> None:
    named = resolve(parse_args([*TINY.split(), "--train-iters", "1", "--run-dir", "here"]), 1)
    Path("here").mkdir()
    with hold_run(named) as run:
        assert run.path == Path("here")
        with pytest.raises(UsageError, match="--run-dir here is being written"), hold_run(named):
            pass
