"""Files of a run that somebody else has put there, and one reading of them by screen and report."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from copus_ext.commands import replay, report, status
from copus_ext.controller.decision_log import NAME as JOURNAL
from copus_ext.controller.decision_log import VERSION, DecisionLog, read_journal
from copus_ext.monitor.report import Report, render, report_of
from copus_ext.monitor.run_files import RunReader
from copus_ext.monitor.run_status import read_status, status_of
from copus_ext.monitor.terminal import screen
from copus_ext.reshard.checked import read_value
from megatron.trainer.logging.metrics import METRICS_FILE
from megatron.trainer.logging.tail_reader import Tail, last_lines
from megatron.trainer.logging.tracker import Tracker
from tests.helpers.launch import ROOT
from tests.helpers.recorded import record_decisions, record_run
from tests.helpers.written_runs import LAYOUTS, WrittenRun, usual_run, write_change


def link(path: Path) -> None:
    usual_run(path.parent / "elsewhere", steps=20)
    path.symlink_to(path.parent / "elsewhere" / METRICS_FILE)


@pytest.mark.parametrize("make", [link, os.mkfifo, Path.mkdir], ids=["link", "pipe", "folder"])
def test_what_is_no_plain_file_is_not_read(make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    make(path)
    assert list(Tail(path).records()) == list(last_lines(path, 1000)) == []
    with pytest.raises(OSError):
        list(Tail(path).lines())
    assert Tail(path).line_at(0) == b""
    with pytest.raises(ValueError, match=METRICS_FILE):
        read_value(path, lambda value: value)


@pytest.mark.parametrize("name", [METRICS_FILE, JOURNAL])
@pytest.mark.parametrize("make", [link, os.mkfifo], ids=["link", "pipe"])
def test_the_commands_name_what_is_no_plain_file(
    make: Callable[[Path], None], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    usual_run(run, steps=20)
    (run / name).unlink()
    make(run / name)
    assert status.main([str(run)]) == 5
    assert report.main([str(run), "-o", str(tmp_path / "x.html")]) == 5
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all(name in line for line in said), said


def test_a_journal_that_the_user_names_may_be_a_link(tmp_path: Path) -> None:
    usual_run(tmp_path / "run", steps=20)
    (tmp_path / "kept.jsonl").symlink_to(tmp_path / "run" / JOURNAL)
    page = tmp_path / "x.html"
    assert report.main([str(tmp_path / "kept.jsonl"), "-o", str(page)]) == 0
    assert "Decision 1 after step 20. " in page.read_text()


def others(value: Any, odd: Any) -> Iterator[Any]:
    """The value with one of its parts replaced, in turn; of a list the first entry."""
    yield odd
    if isinstance(value, dict) or (isinstance(value, list) and value):
        for key in value if isinstance(value, dict) else [0]:
            for part in others(value[key], odd):
                changed = copy.copy(value)
                changed[key] = part
                yield changed


ODD = [None, "x", -1, 1e308, math.nan, 10**400, -(10**400), [], {"a": [1]}, True, "[/x]"]


def with_odd(records: list[dict[str, Any]], odd: Any) -> Iterator[dict[str, Any]]:
    """A record of each kind with each part replaced in turn; the start of a launch as a whole."""
    for record in {record["kind"]: record for record in records}.values():
        if record["kind"] == "decision":
            situation = record["situation"]
            situation |= {"rows": situation["rows"][-2:], "current": 0}
        if record["kind"] == "run.start":
            yield {name: odd for name in record if name != "kind"} | {"kind": "run.start"}
        else:
            yield from others(record, odd)


def write_odd_run(run: Path, odd: Any) -> None:
    """A run whose files have each record again, with each part of it replaced in turn."""
    usual_run(run, steps=80)
    with Tracker(run, launch="job.0.0") as tracker:
        tracker.event("alert", 80, 640, alert="save failed", line="x")
    for name in (METRICS_FILE, JOURNAL):
        path = run / name
        records = [json.loads(line) for line in path.read_text().splitlines()]
        changed = list(with_odd(records, odd))
        assert len(changed) > 50
        with path.open("a") as file:
            file.writelines(json.dumps(one) + "\n" for one in [*changed, [1], "x"])


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: str(odd)[:6])
def test_records_with_anything_in_them_are_shown(odd: Any, tmp_path: Path) -> None:
    write_odd_run(tmp_path, odd)
    reader = RunReader(tmp_path)
    assert render(report_of(reader))
    steps = [step.iteration for step in reader.history().steps]
    assert odd is True or {*range(1, 81)} <= {*steps}
    Console(file=io.StringIO(), width=60).print(screen(read_status(tmp_path)))
    # The last decision is looked at more closely.
    path, lines = tmp_path / JOURNAL, (tmp_path / JOURNAL).read_text().splitlines(keepends=True)
    decisions = [line for line in lines if '"decision"' in line[:40]]
    for line in decisions[:: max(len(decisions) // 20, 1)]:
        path.write_text(lines[0] + line)
        read_status(tmp_path)


def changes_of(run: Path) -> list[tuple[str, str]]:
    """What the screen says of the last changes: to which configuration, and how it stands."""
    deciding = read_status(run).controller
    assert deciding is not None
    return [(change.to, change.state) for change in deciding.changes]


def batches_made(report: Report) -> list[float | None]:
    """The batches of the changes that the page marks as made."""
    (chart,) = [chart for chart in report.charts if chart.title == "Batch"]
    return [y for series in chart.series if series.name == "change" for y in series.y]


def test_a_change_that_a_restart_has_undone_is_no_change(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path)
    run.step(60)
    write_change(run.journal, 4, 30, batch=16)
    write_change(run.journal, 5, 50, batch=64)
    sizes = {"to_batch": 64, "to_micro_batch": 2, "from_layout": "x", "to_layout": "x"}
    speeds = {"samples_per_s": 1.0, "predicted_samples_per_s": 10.0, "speed_over_predicted": 0.1}
    run.journal.write("outcome", decision=5, iteration=50, **sizes, **speeds, steps=50)
    run.relaunch("job.0.1", iteration=40, samples=320)
    assert changes_of(tmp_path) == [("batch 16 in 2", "being measured")]
    run.step(5)
    write_change(run.journal, 5, 45, batch=32)
    run.step(5)
    assert changes_of(tmp_path)[-1] == ("batch 32 in 2", "being measured")
    report = report_of(RunReader(tmp_path))
    assert batches_made(report) == [16, 32]
    (told,) = [line for line in report.journal if line.why == "for 64"]
    assert "undone" in told.outcome and "1 samples/s" in told.outcome


def test_only_a_layout_that_was_reached_is_a_change_that_was_made(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path)
    run.step(60)
    goal = LAYOUTS[1]
    ends: list[tuple[str, dict[str, Any], str]] = [
        ("relayout", {"number": 0, "outcome": {"kind": "rolled_back", "reason": "a sum"}}, "a sum"),
        ("relayout", {"number": 1, "outcome": {"kind": "cancelled", "reason": "room"}}, "room"),
        ("relayout.abandoned", {"reason": "no answer"}, "no answer"),
        ("relayout.cancelled", {"number": 3, "to": str(goal), "reason": "ended"}, "ended"),
        ("relayout.begin", {}, ""),
        ("relayout", {"number": 5, "outcome": {"kind": "moved", "pause_s": 2.0}}, ""),
    ]
    for number, (kind, fields, _) in enumerate(ends):
        write_change(run.journal, number, 10 + number, to=goal)
        about = {"start": "tp1.pp1.dp4", "to": str(goal)}
        run.journal.write("relayout.requested", number=number, iteration=10 + number, **about)
        run.journal.write(kind, **fields)
    report = report_of(RunReader(tmp_path))
    assert batches_made(report) == [16]
    assert "COPUS changed the batch once and the layout once, " in report.verdict
    told = {line.iteration: line for line in report.journal if line.group == "change"}
    for number, (_, _, reason) in enumerate(ends):
        assert reason in told[10 + number].outcome
    assert "the change took 2 s" in told[15].outcome
    states = [state for _, state in changes_of(tmp_path)]
    assert states[-3:] == ["not done: ended", "under way", "being measured"]


def test_a_recorded_journal_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "docs" / "results" / "act_run.journal.jsonl"
    report = report_of(RunReader(path))
    assert batches_made(report), "changes were made"
    assert report.decision and "damaged" not in report.facts["decided"]
    assert replay.main([str(path)]) == 0
    assert re.fullmatch(
        r"[1-9]\d decisions the same, 0 different", capsys.readouterr().out.splitlines()[-1]
    )


def test_lines_that_cannot_be_read_are_told_by_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_run(tmp_path, 10)
    record_decisions(tmp_path)
    assert replay.main([str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert told.out.endswith("2 decisions the same, 0 different\n") and told.err == ""
    assert read_status(tmp_path).unread == {}
    for name, kind in ((JOURNAL, b'"decision"'), (METRICS_FILE, b'"step"')):
        lines = (tmp_path / name).read_bytes().splitlines(keepends=True)
        at = next(i for i, line in enumerate(lines) if kind in line)
        lines[at] = b"\0" * 50 + b"\n"
        # What a kill left is one, too; what is being written is not.
        lines[at:at] = [b'{"kind": "st\n', b"[1]\n", b"\n"]
        (tmp_path / name).write_bytes(b"".join(lines) + b'{"kind"')
    assert replay.main([str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert told.out.endswith("1 decisions the same, 0 different\n")
    assert told.err == "replay.py: note: unreadable: 3 lines of journal.jsonl\n"
    assert read_status(tmp_path).unread == {METRICS_FILE: 3, JOURNAL: 3}
    words = "3 lines of metrics.jsonl, 3 lines of journal.jsonl"
    assert report_of(RunReader(tmp_path)).facts["unreadable"] == words
    # The first line of the part that is read of a long file may lack its beginning.
    assert status_of(RunReader(tmp_path, max_bytes=2000)).unread == {}


@pytest.mark.parametrize("named", ["version 4", "no version"])
def test_a_journal_of_another_version_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    path = tmp_path / JOURNAL
    version = {"version 4": ', "version": 4', "no version": ""}[named]
    path.write_text(f'{{"kind": "sta\n{{"kind": "start"{version}}}\n')
    line = (
        f"error: {path} is a journal of {named}, and this copus reads version {VERSION}; "
        "read it with the commit that wrote it\n"
    )
    commands: dict[str, Any] = {"status": status, "replay": replay}
    for command, module in commands.items():
        assert module.main([str(tmp_path)]) == 5
        assert capsys.readouterr() == ("", f"{command}.py: {line}")
    assert report.main([str(path), "-o", str(tmp_path / "report.html")]) == 5
    assert capsys.readouterr() == ("", f"report.py: {line}")


def test_a_run_sets_a_journal_of_another_version_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, old = tmp_path / JOURNAL, tmp_path / "journal.version4.jsonl"
    path.write_text('{"kind": "start", "version": 4}\n')
    DecisionLog(tmp_path).write("start", iteration=3)
    assert [record["version"] for record in read_journal(path)] == [VERSION]
    assert old.read_text() == '{"kind": "start", "version": 4}\n'
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} is a journal of version 4, and this copus reads version {VERSION}; "
        "it is journal.version4.jsonl now, and a new one begins"
    ]
    caplog.clear()
    DecisionLog(tmp_path).write("end")
    assert len(list(read_journal(path))) == 2 and not caplog.records


@pytest.mark.parametrize(("version", "kind"), [(4, "version4"), ("../4", "other")])
def test_journals_set_aside_do_not_replace_each_other(
    tmp_path: Path, version: object, kind: str
) -> None:
    path = tmp_path / JOURNAL
    for number in range(3):
        path.write_text(json.dumps({"kind": "start", "version": version, "n": number}) + "\n")
        DecisionLog(tmp_path).write("start", iteration=3)
    names = [f"journal.{kind}{end}.jsonl" for end in ("", "-2", "-3")]
    assert [json.loads((tmp_path / name).read_text())["n"] for name in names] == [0, 1, 2]
