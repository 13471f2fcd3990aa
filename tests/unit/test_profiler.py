"""Traces of steps by torch's profiler."""

from __future__ import annotations

import contextlib
import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.trace import Trace
from megatron.trainer.config import LoggingConfig
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.distributed.stragglers import StepClock
from megatron.trainer.logging.profiler import open_trace
from tests.helpers.jobs import TINY


class Broken:
    """A profiler that cannot go on."""

    def __init__(self, profiler: Any) -> None:
        self.stop = profiler.stop

    def step(self) -> None:
        raise RuntimeError("no room")


def opened(run: Path, *, rank: int = 0, **flags: Any) -> Trace:
    logging_config = LoggingConfig(profile=True, **flags)
    about = {"world_size": 2, "is_cuda": False}
    return open_trace(logging_config, run, launch="a.0.0", rank=rank, **about)


def ran(trace: Trace, steps: range) -> None:
    """Steps as the loop takes them."""
    with trace:
        for done in steps:
            trace.step(done)
            with trace.span(f"of step {done + 1}"), trace.span("inner"):
                time.sleep(1e-4)


def events_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        return json.load(file)["traceEvents"]


def test_the_steps_of_the_flags_are_traced_and_no_other(tmp_path: Path) -> None:
    ran(opened(tmp_path, profile_step_start=2, profile_step_end=4), range(6))
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name == "a.0.0.rank0.steps3-4.json.gz"
    named = {e["name"]: e for e in events_of(path) if e.get("cat") == "user_annotation"}
    assert {n for n in named if n.startswith("of step")} == {"of step 3", "of step 4"}
    outer, inner = named["of step 4"], named["inner"]
    assert outer["ts"] <= inner["ts"] <= inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        (range(0, 1), None),
        (range(0, 3), "steps3-3"),
        (range(3, 9), "steps4-4"),
        (range(4, 9), None),
        (range(0, 9, 3), "steps4-4"),
    ],
    ids=str,
)
def test_a_launch_that_has_some_of_them_traces_those(
    steps: range, name: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ran(opened(tmp_path, profile_step_start=2, profile_step_end=4), steps)
    names = [path.name for path in tmp_path.glob("traces/*")]
    assert names == ([] if name is None else [f"a.0.0.rank0.{name}.json.gz"])
    assert ("--profile-step-start 2" in caplog.text) == (name is None)


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_wait_once_for_those_that_write(rank: int, tmp_path: Path) -> None:
    told: list[str] = []

    @contextlib.contextmanager
    def busy() -> Iterator[None]:
        told.append("busy")
        yield
        told.append("free")

    trace = open_trace(
        LoggingConfig(profile=True, profile_step_start=2, profile_step_end=4),
        tmp_path,
        launch="a.0.0",
        rank=rank,
        world_size=2,
        is_cuda=False,
        busy=busy,
        meet=lambda: told.append(f"{len(list(tmp_path.glob('traces/*')))} written"),
    )
    with trace:
        for done in range(4):
            trace.step(done)
        assert not told
        for done in range(4, 7):
            trace.step(done)
    assert told == ["busy", f"{1 - rank} written", "free"]


def test_a_trace_that_is_lost_leaves_no_profiler_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace: Any = opened(tmp_path, profile_step_start=2, profile_step_end=6)
    with trace:
        for done in range(4):
            trace.step(done)
        monkeypatch.setattr(trace, "_profiler", Broken(trace._profiler))
        trace.step(4)
        assert not torch.autograd._profiler_enabled()
        trace.step(5)


def test_without_the_flag_and_on_other_ranks_nothing_is_made(tmp_path: Path) -> None:
    config, about = LoggingConfig(), {"world_size": 2, "is_cuda": False}
    none = open_trace(config, tmp_path, launch="a.0.0", rank=0, **about)
    for trace in (none, opened(tmp_path, rank=1)):
        ran(trace, range(20))
        assert trace.span("a") is trace.span("b")
    assert not list(tmp_path.iterdir())


def test_a_rank_that_a_smaller_launch_lacks_costs_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened(tmp_path, profile_ranks=(0, 5))
    assert "--profile-ranks 5" in caplog.text


def test_a_run_that_fails_leaves_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(MemoryError), opened(tmp_path, profile_step_start=0) as trace:
        trace.step(0)
        raise MemoryError
    assert not list(tmp_path.iterdir()) and "lost" in caplog.text


def test_what_cannot_be_written_costs_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "traces").write_text("in the way")
    ran(opened(tmp_path, profile_step_start=0, profile_step_end=1), range(3))
    assert "--profile" in caplog.text and len(caplog.records) == 1


def test_the_reduction_of_gradients_is_a_phase(tmp_path: Path) -> None:
    trace = opened(tmp_path, profile_step_start=0, profile_step_end=1)
    clock = StepClock(is_cuda=False)
    with trace:
        trace.step(0)
        clock.start(trace)
        assert clock.stopped_by(lambda value: value + 1)(1) == 2
    (path,) = (tmp_path / "traces").iterdir()
    assert "reduce" in {event["name"] for event in events_of(path)}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--profile-step-start 5 --profile-step-end 5", "--profile-step-end 5 must be above"),
        ("--profile-step-start -1", "--profile-step-start -1 must be at least 0"),
        ("--profile-ranks 0 -1", "--profile-ranks must be at least 0"),
    ],
)
def test_flags_that_trace_nothing_are_refused(flags: str, words: str) -> None:
    given = [*TINY.split(), "--train-iters", "9", *flags.split()]
    assert resolve(parse_args(given), 2).logging.profile is False
    with pytest.raises(UsageError, match=words):
        resolve(parse_args([*given, "--profile", "--use-pytorch-profiler"]), 2)
