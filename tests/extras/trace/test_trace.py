"""Traces of decisions, on the clock of torch's profiler."""

from __future__ import annotations

import gzip
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from copus_ext.controller.decision_log import NAME as JOURNAL
from copus_ext.extras.trace import command as trace_tool
from megatron.trainer.logging.metrics import METRICS_FILE
from tests.helpers.written_runs import WrittenRun, usual_run
from tests.unit.test_output_file import through_pipe
from tests.unit.test_profiler import opened, ran
from tests.unit.test_run_files import ODD, link, others, write_odd_run

DECISIONS_TRACK = 0


def course_of(run: Path) -> list[dict[str, Any]]:
    assert trace_tool.main([str(run)]) == 0
    return json.loads((run / "traces" / "decisions.json").read_text())["traceEvents"]


def test_decisions_and_changes_are_events_with_their_reason(tmp_path: Path) -> None:
    run = usual_run(tmp_path / "run").path
    events = course_of(run)
    records = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    decided = [r for r in records if r["kind"] == "decision"]
    shown = [e for e in events if e.get("ph") == "i" and e["tid"] == DECISIONS_TRACK]
    for event, record in zip(shown, decided, strict=True):  # the name has the sizes of a change
        assert record["decision"]["reason"].endswith(event["args"]["reason"])
        assert event["args"]["reason"]
    assert [e["args"]["step"] for e in shown] == [r["iteration"] for r in decided]
    (relayout,) = [r for r in records if r["kind"] == "relayout"]
    (whole,) = [e for e in events if e["name"] == f"{relayout['start']} to {relayout['to']}"]
    assert whole["dur"] == 1e6 * relayout["outcome"]["pause_s"]
    phases = [e for e in events if e["name"] in relayout["outcome"]["phases"]]
    assert [e["dur"] for e in phases] == [125e3, 250e3, 62.5e3, 1.4375e6]
    assert phases[0]["ts"] == whole["ts"]
    assert phases[-1]["ts"] + phases[-1]["dur"] == whole["ts"] + whole["dur"]


def test_both_are_on_one_clock(tmp_path: Path) -> None:
    before = time.time()
    run = WrittenRun(tmp_path)
    ran(opened(tmp_path, profile_step_start=0, profile_step_end=1), range(3))
    ran(opened(tmp_path, profile_step_start=1, profile_step_end=2), range(3))
    run.step(20)
    run.decide()
    assert trace_tool.main([str(tmp_path), "-o", str(tmp_path / "whole.json.gz")]) == 0
    with gzip.open(tmp_path / "whole.json.gz") as file:
        trace = json.load(file)
    base_s = trace["baseTimeNanoseconds"] / 1e9
    events = trace["traceEvents"]
    times = {e["name"]: base_s + e["ts"] / 1e6 for e in events if "ts" in e}
    (decision,) = [
        base_s + e["ts"] / 1e6
        for e in events
        if e.get("cat") == "copus" and e["tid"] == DECISIONS_TRACK
    ]
    assert before - 0.01 < times["of step 1"] < times["of step 2"] < decision + 0.01
    assert decision < time.time() + 0.01
    # The two traces are of one process, and would be one there.
    assert len({e["pid"] for e in events if e["name"].startswith("of step")}) == 2


def test_a_run_that_was_killed_has_its_decisions(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path)
    run.step(20)
    run.decide(reason="\ud800 </script>")
    assert run.journal.path is not None
    with run.journal.path.open("a") as file:
        file.write('{"kind": "decision", "num')
    traces = tmp_path / "traces"
    traces.mkdir()
    (traces / "a.0.0.rank0.steps1-2.json.gz").write_bytes(gzip.compress(b"{}")[:-9])
    assert [e for e in course_of(tmp_path) if "</script>" in e.get("args", {}).get("reason", "")]
    assert trace_tool.main([str(tmp_path), "-o", str(tmp_path / "all.json")]) == 0
    assert len(json.loads((tmp_path / "all.json").read_text())["traceEvents"]) > 8


def test_where_no_run_is_the_exit_code_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trace_tool.main([str(tmp_path)]) == trace_tool.main([str(tmp_path / "none")]) == 5
    assert not list(tmp_path.iterdir())
    capsys.readouterr()
    path = tmp_path / JOURNAL
    path.write_text('{"kind": "start", "version": 4}\n')
    assert trace_tool.main([str(path)]) == 5
    assert f"RUN {path} is not a directory" in capsys.readouterr().err
    assert trace_tool.main([str(tmp_path)]) == 5
    assert f"error: {path} is a journal of version 4" in capsys.readouterr().err


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    run, pipe = usual_run(tmp_path / "run", steps=20).path, tmp_path / "pipe"
    data = through_pipe(pipe, lambda: trace_tool.main([str(run), "-o", str(pipe)]))
    assert len(json.loads(data)["traceEvents"]) > 8


DECISIONS = Path("traces") / "decisions.json"


def own_link(path: Path) -> None:
    path.symlink_to(path.parents[2] / "foreign")


@pytest.mark.parametrize("name", [DECISIONS.name, f"unfinished.{DECISIONS.name}"])
@pytest.mark.parametrize("lay", [own_link, os.mkfifo], ids=["link", "pipe"])
def test_what_lies_in_the_way_is_neither_followed_nor_waited_for(
    lay: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    (tmp_path / "foreign").write_text("kept")
    run = usual_run(tmp_path / "run", steps=20).path
    (run / "traces").mkdir()
    lay(run / "traces" / name)
    assert len(course_of(run)) > 8
    assert (run / DECISIONS).is_file() and not (run / DECISIONS).is_symlink()
    assert (tmp_path / "foreign").read_text() == "kept"


def test_a_folder_of_traces_that_is_a_link_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = usual_run(tmp_path / "run", steps=20).path
    (tmp_path / "foreign").mkdir()
    (run / "traces").symlink_to(tmp_path / "foreign")
    assert trace_tool.main([str(run)]) == 5
    assert trace_tool.main([str(run), "-o", str(tmp_path / "x.json")]) == 5
    assert capsys.readouterr().err.count("it is a link") == 2
    assert not list((tmp_path / "foreign").iterdir())


def test_a_file_in_place_of_the_folder_of_traces_is_told(tmp_path: Path) -> None:
    (tmp_path / "traces").write_text("in the way")
    assert trace_tool.main([str(usual_run(tmp_path).path)]) == 5


@pytest.mark.parametrize("name", [METRICS_FILE, JOURNAL])
@pytest.mark.parametrize("make", [link, os.mkfifo], ids=["link", "pipe"])
def test_a_record_that_is_no_plain_file_is_named(
    make: Callable[[Path], None], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = usual_run(tmp_path / "run", steps=20).path
    (run / name).unlink()
    make(run / name)
    assert trace_tool.main([str(run)]) == 5
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: str(odd)[:6])
def test_records_with_anything_in_them_are_shown(odd: Any, tmp_path: Path) -> None:
    write_odd_run(tmp_path, odd)
    assert trace_tool.main([str(tmp_path), "-o", str(tmp_path / "x.json")]) == 0


def steps_with(run: Path, data: str) -> list[dict[str, Any]]:
    """The events of a run beside a trace of steps that holds this."""
    folder, whole = run / "traces", run / "whole.json"
    folder.mkdir(exist_ok=True)
    (folder / "a.0.0.rank0.steps1-2.json.gz").write_bytes(gzip.compress(data.encode()))
    assert trace_tool.main([str(run), "-o", str(whole)]) == 0
    return json.loads(whole.read_text(), parse_constant=pytest.fail)["traceEvents"]


def test_a_trace_of_steps_with_anything_in_it_is_shown(tmp_path: Path) -> None:
    usual_run(tmp_path, steps=20)
    event = {"ph": "M", "name": "process_name", "args": {"name": "x"}, "pid": 1, "ts": 1, "id": 2}
    steps = {"baseTimeNanoseconds": 1, "traceEvents": [event]}
    assert steps_with(tmp_path, json.dumps(steps))[-1]["args"]["name"].endswith("steps1-2 x")
    nines = 10**4299 * 9
    for odd in [*ODD, math.inf, [1], -nines, nines]:
        for changed in others(steps, odd):
            steps_with(tmp_path, json.dumps(changed))
    steps_with(tmp_path, json.dumps(steps).replace('"ts": 1', '"ts": 1e999'))
    for depth in range(10, 1200, 70):
        deep = "[" * depth + "]" * depth
        steps_with(tmp_path, json.dumps(steps).replace('"ts": 1', f'"x": {deep}'))


@pytest.mark.parametrize("make", [link, os.mkfifo, Path.mkdir], ids=["link", "pipe", "folder"])
def test_a_trace_of_steps_that_is_no_plain_file_is_left_out(
    make: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    usual_run(run, steps=20)
    (run / "traces").mkdir()
    make(run / "traces" / "a.0.0.rank0.steps1-2.json.gz")
    assert trace_tool.main([str(run), "-o", str(tmp_path / "whole.json")]) == 0
    assert "steps1-2.json.gz is left out" in capsys.readouterr().err
