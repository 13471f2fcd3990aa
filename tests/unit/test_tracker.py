"""The record of a run and the sinks beside it."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import sys
import threading
import time
import types
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.trainer.common.file_limits import STALL_VARIABLE, refuse_while_stuck
from megatron.trainer.config import LoggingConfig
from megatron.trainer.logging import metrics
from megatron.trainer.logging.log_line import StepReport
from megatron.trainer.logging.metrics import (
    METRICS_FILE,
    decode,
    encode,
    launch_id,
    previous_launches,
    read_metrics,
)
from megatron.trainer.logging.sinks import TensorBoardSink, open_sinks
from megatron.trainer.logging.tracker import NullTracker, Tracker, step_scalars

NOW = datetime(2025, 3, 4, 5, 6, 7, tzinfo=timezone.utc)


def report(iteration: int = 1, **changes: Any) -> StepReport:
    values: dict[str, Any] = dict(
        iteration=iteration,
        train_iterations=10,
        consumed_samples=16 * iteration,
        elapsed_per_iteration_ms=1500.0,
        learning_rate=1e-3,
        global_batch_size=16,
        losses={"lm loss": 5.0 / iteration},
        grad_norm=2.0,
    )
    return StepReport(**{**values, **changes})


class ListSink:
    """Keeps what it is given; raises while `broken`."""

    name = "list"

    def __init__(self, interval: int = 1) -> None:
        self.interval = interval
        self.seen: list[tuple[int, int, dict[str, float]]] = []
        self.num_calls = 0
        self.broken = False
        self.closed = False

    def scalars(
        self, values: Mapping[str, float], *, iteration: int, consumed_samples: int
    ) -> None:
        self.num_calls += 1
        if self.broken:
            raise OSError("no space")
        self.seen.append((iteration, consumed_samples, dict(values)))

    def close(self) -> None:
        self.closed = True
        if self.broken:
            raise OSError("no space")


def launch(run: Path, name: str, start: int, stop: int, loss: float = 1.0) -> None:
    with Tracker(run, launch=name) as tracker:
        tracker.event("run.start", start, 16 * start)
        for i in range(start + 1, stop + 1):
            tracker.step(report(i, losses={"lm loss": loss}))
        tracker.event("run.end", stop, 16 * stop)


def test_records_carry_the_common_fields_and_times_that_do_not_go_back(tmp_path: Path) -> None:
    before = time.time()
    launch(tmp_path / "new" / "run", "job.0.0", 0, 3)
    records = read_metrics(tmp_path / "new" / "run")
    assert [r["kind"] for r in records] == ["run.start", "step", "step", "step", "run.end"]
    assert all(r["v"] == 1 and r["launch"] == "job.0.0" for r in records)
    assert [r["m"] for r in records] == sorted(r["m"] for r in records)
    assert before - 1 <= records[0]["t"] <= time.time() + 1
    assert records[2]["iteration"] == 2 and records[2]["consumed_samples"] == 32
    assert records[2]["losses"] == {"lm loss": 1.0} and records[2]["grad_norm"] == 2.0


def test_every_record_is_readable_before_the_tracker_is_closed(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, launch="a.0.0")
    for i in range(1, 4):
        tracker.step(report(i))
        assert len(read_metrics(tmp_path)) == i
    tracker.close()
    tracker.close()


texts = st.text(max_size=8).filter(lambda text: text not in ("NaN", "Infinity", "-Infinity"))
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@given(st.dictionaries(st.text(max_size=6), values, max_size=4))
def test_any_record_is_one_line_of_strict_json_and_comes_back(record: dict[str, Any]) -> None:
    line = encode(record)
    assert "\n" not in line and "\r" not in line

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    json.loads(line, parse_constant=refuse)
    decoded = decode(line)
    assert decoded is not None and same(record, decoded)


def test_numbers_of_other_libraries_and_odd_values_are_written() -> None:
    @dataclass
    class Point:
        x: float

    record = {
        "a": np.float32(0.5),
        "b": np.float32("nan"),
        "c": np.array([1, 2]),
        "d": Path("/x"),
        "e": Point(x=math.inf),
        "f": {3, 1},
        "g": types.MappingProxyType({"k": np.int64(7)}),
        (1, 2): object,
    }
    decoded = decode(encode(record))  # type: ignore[arg-type]
    assert decoded is not None
    assert decoded["a"] == 0.5 and math.isnan(decoded["b"]) and decoded["c"] == [1, 2]
    assert decoded["d"] == "/x" and decoded["e"] == {"x": math.inf} and decoded["f"] == [1, 3]
    assert decoded["g"] == {"k": 7} and "(1, 2)" in decoded


@given(cut=st.integers(0, 400))
def test_a_record_cut_anywhere_loses_the_last_line_at_most(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    run = tmp_path_factory.mktemp("run")
    launch(run, "a.0.0", 0, 4)
    file = run / METRICS_FILE
    data = file.read_bytes()
    file.write_bytes(data[: len(data) - min(cut, len(data))])
    whole = file.read_bytes().count(b"\n")
    assert whole <= len(read_metrics(run)) <= whole + 1

    with Tracker(run, launch="a.1.0") as tracker:
        tracker.event("signal", 4, 64, name="SIGTERM")
    assert whole + 1 <= len(read_metrics(run)) <= whole + 2
    assert read_metrics(run)[-1]["name"] == "SIGTERM"


def test_a_repeated_iteration_is_the_newer_launchs(tmp_path: Path) -> None:
    launch(tmp_path, "a.0.0", 0, 10, loss=1.0)
    launch(tmp_path, "a.1.0", 6, 8, loss=2.0)
    steps = [r for r in read_metrics(tmp_path) if r["kind"] == "step"]
    assert [r["iteration"] for r in steps] == list(range(1, 9))
    assert [r["losses"]["lm loss"] for r in steps] == [1.0] * 6 + [2.0] * 2
    everything = read_metrics(tmp_path, superseded=True)
    assert len([r for r in everything if r["kind"] == "step"]) == 12
    assert [r["kind"] for r in read_metrics(tmp_path)].count("run.end") == 2


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), min_size=1, max_size=6))
def test_committed_history_is_what_replaying_the_launches_gives(
    launches: list[tuple[int, int]],
) -> None:
    records: list[dict[str, Any]] = []
    expected: dict[int, str] = {}
    for n, (wanted, length) in enumerate(launches):
        start = min(wanted, max(expected, default=0))
        name = f"a.{n}.0"
        expected = {i: owner for i, owner in expected.items() if i <= start}
        records.append({"kind": "run.start", "launch": name, "iteration": start})
        for i in range(start + 1, start + length + 1):
            records.append({"kind": "step", "launch": name, "iteration": i})
            expected[i] = name
    history = metrics.committed_history(records)
    assert {r["iteration"]: r["launch"] for r in history if r["kind"] == "step"} == expected
    assert len([r for r in history if r["kind"] == "step"]) == len(expected)
    assert [r for r in records if r in history] == history


@pytest.mark.parametrize("steps_between", [0, 3])
def test_a_launch_that_nothing_came_of_supersedes_nothing(steps_between: int) -> None:
    """The second goes on from step 20 and dies; the third has the first one's checkpoint of 25."""
    records: list[dict[str, Any]] = []
    for name, start, length in (("a", 0, 28), ("b", 20, steps_between), ("c", 25, 5)):
        records.append({"kind": "run.start", "launch": name, "iteration": start})
        steps = range(start + 1, start + length + 1)
        records += [{"kind": "step", "launch": name, "iteration": i} for i in steps]
    history = metrics.committed_history(records)
    found = [(r["iteration"], r["launch"]) for r in history if r["kind"] == "step"]
    assert found == [(i, "a") for i in range(1, 26)] + [(i, "c") for i in range(26, 31)]


def test_launches_never_repeat(tmp_path: Path) -> None:
    slurm = {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "2"}
    names: list[str] = []
    for env in ({}, {}, slurm, slurm, slurm, {"SLURM_JOB_ID": "77"}):
        names.append(launch_id(env, NOW, previous_launches(tmp_path)))
        launch(tmp_path, names[-1], 0, 1)
    assert names == [
        "20250304T050607Z.0.0",
        "20250304T050607Z.0.1",
        "77.2.0",
        "77.2.1",
        "77.2.2",
        "77.0.0",
    ]
    assert previous_launches(tmp_path) == names
    assert previous_launches(tmp_path / "none") == []


def test_a_supervisor_names_the_launch_once(tmp_path: Path) -> None:
    env = {"COPUS_LAUNCH": "77.0.4", "SLURM_JOB_ID": "77"}
    for name in ("77.0.4", "77.0.5"):
        assert launch_id(env, NOW, previous_launches(tmp_path)) == name
        launch(tmp_path, name, 0, 1)


def test_commits_wait_for_the_disk_and_steps_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(metrics.os, "fsync", synced.append)
    with Tracker(tmp_path, launch="a.0.0") as tracker:
        tracker.step(report())
        assert not synced
        tracker.event("checkpoint.commit", 1, 16)
        assert len(synced) == 1
        tracker.event("decision", 1, 16, durable=True)
        assert len(synced) == 2


def test_what_a_full_disk_does_not_take_is_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = os.write

    def half(file: int, data: bytes) -> int:
        return write(file, data[: len(data) // 2])

    def none(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(metrics, "_MAX_HELD", 3)
    with Tracker(tmp_path, launch="a.0.0") as tracker:
        for iteration, writes in enumerate([write, half, none, write, none, none, none, none], 1):
            monkeypatch.setattr(metrics.os, "write", writes)
            tracker.event("fault", iteration, 16)
        monkeypatch.setattr(metrics.os, "write", write)
    assert [r["iteration"] for r in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 7, 8]
    assert [METRICS_FILE in record.message for record in caplog.records] == [True] * 3
    assert "2 records held back are in it, 0 are lost" in caplog.text


def test_a_disk_that_does_not_answer_holds_no_record_up_and_gets_all_once_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, answers = os.write, threading.Event()

    def held(file: int, data: bytes) -> int:
        answers.wait()
        return write(file, data)

    monkeypatch.setenv(STALL_VARIABLE, "0.2")
    with Tracker(tmp_path, launch="a.0.0") as tracker:
        tracker.event("fault", 1, 16)
        monkeypatch.setattr(metrics.os, "write", held)
        for iteration in (2, 3, 4):
            tracker.event("checkpoint.commit", iteration, 16)
        assert [r["iteration"] for r in read_metrics(tmp_path)] == [1]
        answers.set()
    assert [r["iteration"] for r in read_metrics(tmp_path)] == [1, 2, 3, 4]
    (line,) = [record.message for record in caplog.records]
    assert METRICS_FILE in line and "has not answered for 0.2 s" in line
    refuse_while_stuck(0.0)  # no save waits for the record


def test_a_record_that_a_disk_holds_to_the_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()
    monkeypatch.setenv(STALL_VARIABLE, "0.1")
    with Tracker(tmp_path, launch="a.0.0") as tracker:
        monkeypatch.setattr(metrics.os, "write", lambda file, data: answers.wait() and len(data))
        for iteration in (1, 2):
            tracker.event("fault", iteration, 16)
    answers.set()
    assert "the last 2 records are lost" in caplog.records[-1].message


def test_a_sink_is_switched_off_after_three_failures_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = ListSink(), ListSink()
    bad.broken = True
    with (
        caplog.at_level(logging.WARNING),
        Tracker(tmp_path, launch="a.0.0", sinks=[bad, good]) as tracker,
    ):
        for i in range(1, 8):
            tracker.step(report(i))
        assert bad.num_calls == 3 and len(good.seen) == 7
        assert len([r for r in caplog.records if "switched off" in r.message]) == 1
    assert good.closed and bad.closed
    assert len(read_metrics(tmp_path)) == 7


def test_sinks_get_megatrons_tags_at_their_interval(tmp_path: Path) -> None:
    sink = ListSink(interval=2)
    with Tracker(
        tmp_path, launch="a.0.0", sinks=[sink], timers_to_sinks=True, ppl_to_sinks=True
    ) as tracker:
        for i in range(1, 5):
            tracker.step(report(i, throughput_tflops_per_gpu=7.0), extra={"world-size": 4})
        tracker.evaluation(iteration=3, consumed_samples=48, losses={"lm loss": 2.0})
    assert [(i, samples) for i, samples, _ in sink.seen] == [(2, 32), (4, 64), (3, 48)]
    assert sink.seen[0][2] == {
        "learning-rate": 1e-3,
        "batch-size": 16,
        "lm loss": 2.5,
        "loss-scale": 1.0,
        "grad-norm": 2.0,
        "iteration-time": 1.5,
        "throughput": 7.0,
        "world-size": 4,
    }
    assert sink.seen[2][2] == {
        "lm loss validation": 2.0,
        "lm loss validation ppl": pytest.approx(math.exp(2.0)),
    }
    assert read_metrics(tmp_path)[-1]["split"] == "valid"


def test_what_comes_seldom_waits_for_a_sink_that_is_not_due(tmp_path: Path) -> None:
    sinks = ListSink(interval=4), ListSink()
    decided = {2: {"copus/decisions": 1.0, "copus/next-gain": 0.5}, 3: {"copus/decisions": 2.0}}
    decided |= {6: {"copus/changes": 1.0}, 9: {"copus/changes": 2.0}}
    with Tracker(tmp_path, launch="a.0.0", sinks=sinks) as tracker:
        for i in range(1, 10):
            tracker.step(report(i), extra={"noise-scale/x": float(i), **decided.get(i, {})})
    of_decisions = [
        [(i, n, {t: v for t, v in values.items() if "copus/" in t}) for i, n, values in sink.seen]
        for sink in sinks
    ]
    assert of_decisions[0] == [
        (4, 64, decided[3]),
        (8, 128, decided[6]),
        (9, 144, decided[9]),
    ]
    assert of_decisions[1] == [(i, 16 * i, decided.get(i, {})) for i in range(1, 10)]
    assert [values.get("noise-scale/x") for _, _, values in sinks[0].seen] == [4.0, 8.0, None]


def test_absent_numbers_have_no_tag() -> None:
    tags = step_scalars(report(grad_norm=None))
    assert not {"grad-norm", "num-zeros", "params-norm", "skipped-train-samples"} & tags.keys()
    assert step_scalars(report(num_zeros=0))["num-zeros"] == 0


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with NullTracker() as tracker:
        tracker.event("run.start", 0, 0, anything=1)
        tracker.step(report(), extra={"world-size": 1})
        tracker.evaluation(iteration=1, consumed_samples=16, losses={"lm loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def logging_flags(**changes: Any) -> LoggingConfig:
    return LoggingConfig(tensorboard_queue_size=10, **changes)


def test_without_flags_there_are_no_sinks(tmp_path: Path) -> None:
    assert open_sinks(logging_flags(), tmp_path) == []


def test_tensorboard_files_hold_every_tag_by_steps_and_by_samples(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (sink,) = open_sinks(logging_flags(tensorboard_dir=str(tmp_path / "tb")), tmp_path)
    assert isinstance(sink, TensorBoardSink)
    with Tracker(tmp_path, launch="a.0.0", sinks=[sink]) as tracker:
        for i in range(1, 4):
            tracker.step(report(i))
    events = accumulator.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("lm loss")] == [
        (i, pytest.approx(5.0 / i)) for i in (1, 2, 3)
    ]
    assert [e.step for e in events.Scalars("lm loss vs samples")] == [16, 32, 48]
    tags = set(events.Tags()["scalars"])
    assert tags == {f"{t}{s}" for t in step_scalars(report()) for s in ("", " vs samples")}


def test_wandb_gets_project_folder_and_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[tuple[dict[str, float], int]] = []
    started: list[dict[str, Any]] = []
    run = types.SimpleNamespace(
        log=lambda values, step: logged.append((values, step)), finish=lambda: started.append({})
    )

    def init(**options: Any) -> Any:
        started.append(options)
        return run

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    flags = logging_flags(wandb_project="p", wandb_exp_name="e")
    sinks = open_sinks(flags, tmp_path, config={"lr": 1.0})
    with Tracker(tmp_path, launch="a.0.0", sinks=sinks) as tracker:
        tracker.step(report(2))
    assert started[0]["project"] == "p" and started[0]["name"] == "e"
    assert started[0]["config"] == {"lr": 1.0} and Path(started[0]["dir"]).is_dir()
    assert "mode" not in started[0], "WANDB_MODE must stay with the library"
    assert logged[0][1] == 2 and logged[0][0]["lm loss"] == 2.5 and len(started) == 2


@pytest.mark.parametrize("broken", ["missing", "refuses"])
def test_a_sink_that_cannot_start_costs_one_line(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(**options: Any) -> None:
        raise RuntimeError("no API key")

    module = None if broken == "missing" else types.SimpleNamespace(init=refuse)
    monkeypatch.setitem(sys.modules, "wandb", module)
    assert open_sinks(logging_flags(wandb_project="p"), tmp_path) == []
    assert len(caplog.records) == 1 and "--wandb-project" in caplog.text
    assert ('".[wandb]"' if broken == "missing" else "no API key") in caplog.text
