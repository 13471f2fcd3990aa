"""One sentence on a run, for page and screen: what COPUS did, and whether the run was sooner."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from copus_ext.monitor.report import report_of
from copus_ext.monitor.run_files import RunReader
from copus_ext.monitor.run_status import read_status
from copus_ext.monitor.terminal import screen
from copus_ext.monitor.verdict import _changes
from megatron.trainer.logging.tracker import Tracker
from tests.helpers.recorded import hold
from tests.helpers.written_runs import WrittenRun, usual_run
from tests.unit.test_time_saved import FIRST, Run, grown, never_timed, observed, unchanged

GREW = "COPUS changed the batch once (from 4 to 16)"
OWN = "by its own estimate, held against no other run, the run"


def done(run: Run) -> Run:
    run.tracker.event("run.end", run.iteration, run.samples, why="done")
    return run


def slower(path: Path) -> Run:
    return second_batch(path, 6.0)


def second_batch(path: Path, seconds: float) -> Run:
    """A run whose steps took so long after its batch grew."""
    run = Run(path)
    run.step(10, 1.0)
    run.speeds[4] = 4.0, "measured"
    run.decide(16)
    run.step(20, seconds)
    return run


def unsure(path: Path) -> Run:
    return second_batch(path, 1.7)


def failed(path: Path) -> Run:
    run = unchanged(path)
    run.log.write("failure", iteration=10, error="no room")
    return run


def back_again(path: Path) -> Run:
    """A batch that grew and shrank, and nothing else."""
    run = grown(path)
    run.decide(4)
    run.step(10, 1.0)
    return run


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            grown,
            f"{GREW}, and {OWN} finished sooner: the same progress took "
            f"20 % less time than staying at {FIRST} (",
        ),
        (
            slower,
            f"{GREW}, and {OWN} finished later: the same progress took "
            f"160 % more time than staying at {FIRST} (",
        ),
        (unsure, f"{GREW}; whether the run finished sooner is not sure: by its own estimate, "),
        (
            never_timed,
            f"{GREW}; whether the run finished sooner is not known: {FIRST} was not timed",
        ),
        (unchanged, "COPUS changed nothing in 1 decision, so nothing was gained or lost."),
        (observed, "COPUS only observed, so nothing was gained or lost."),
        (
            failed,
            "COPUS changed nothing in 1 decision, until an error disabled it, so nothing was "
            "gained or lost.",
        ),
        (back_again, f"COPUS changed the batch twice, and {OWN} finished "),
    ],
)
def test_a_finished_run_is_judged_in_one_sentence(
    make: Callable[[Path], Run], said: str, tmp_path: Path
) -> None:
    run = done(make(tmp_path))
    told = read_status(tmp_path).verdict
    assert told.startswith(f"Done after {run.iteration} steps; {said}")
    assert told.endswith(".") and not told.endswith("..")
    report = report_of(RunReader(tmp_path))
    assert report.verdict == told and told not in report.facts.values()
    out = io.StringIO()
    Console(file=out, width=2000, highlight=False).print(screen(read_status(tmp_path)))
    (line,) = [x for x in out.getvalue().splitlines() if x.startswith("verdict ")]
    assert line.split(maxsplit=1)[1].rstrip() == told


def test_a_run_that_goes_on_or_broke_off_has_not_finished(tmp_path: Path) -> None:
    grown(tmp_path)
    hold(tmp_path)
    alive = read_status(tmp_path)
    assert alive.verdict.startswith(f"Training after 30 steps; {GREW}, and {OWN} is ahead: ")
    lost = read_status(tmp_path, t=alive.t + 1000)
    assert lost.verdict.startswith(f"Lost after 30 steps; {GREW}, and {OWN} was ahead: ")


def test_all_kinds_of_changes_are_counted(tmp_path: Path) -> None:
    usual_run(tmp_path)
    made = RunReader(tmp_path)
    made.refresh()
    changes = made.history().decisions.made
    told = read_status(tmp_path).verdict
    assert [d.kind for d in changes].count("relayout") == 1 and " and the layout once" in told
    # A change of the layout may be one of the batch, too.
    (moved,) = [d for d in changes if d.kind == "relayout"]
    moved.now, moved.to = replace(moved.now, batch=64), replace(moved.to, batch=16)
    assert _changes([moved]) == "the batch once (from 64 to 16) and the layout once"


def test_a_move_of_the_schedule_counts_in_sentence_and_table(tmp_path: Path) -> None:
    run = grown(tmp_path)
    outcome = {"kind": "moved", "reason": "", "phases": {}, "pause_s": 0.2}
    where = {"number": None, "start": "tp1.pp2.dp1", "to": "tp1.pp1.dp2"}
    run.tracker.event("relayout", run.iteration, run.samples, **where, outcome=outcome)
    done(run)
    told = read_status(tmp_path).verdict
    assert GREW in told
    assert told.endswith(". The layout moved once, to tp1.pp1.dp2, as --layout-schedule says.")
    rows = report_of(RunReader(tmp_path)).changes
    assert [row[1] for row in rows] == [
        "batch 16 in 2",
        "tp1.pp1.dp2, as --layout-schedule says",
    ], rows
    assert rows[-1][5] == "scheduled"


def test_without_a_controller_nothing_is_judged(tmp_path: Path) -> None:
    with Tracker(tmp_path, launch="a") as tracker:
        tracker.event("run.start", 0, 0, layout="tp1.pp1.dp1")
        tracker.event("run.end", 0, 0, why="done")
    assert read_status(tmp_path).verdict == "Done; it had no controller."


def test_of_a_run_that_is_over_everything_is_said_in_the_past_tense(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path)
    for _ in range(3):
        run.step(20)
        run.decide()
    alive = report_of(RunReader(tmp_path))
    assert "now" in alive.facts and "at the end" not in alive.facts
    run.end()
    over = report_of(RunReader(tmp_path))
    assert over.facts["at the end"] == alive.facts["now"] and "now" not in over.facts
    words = [line.what for line in over.journal]
    assert any(word.startswith("Changed ") for word in words)
    assert re.match(r"Decision 3 after step 60\. (Changed|Stayed at) ", over.decision)
    for word in words:
        assert not re.search(r"^(Stay|Change|Would change) | (starts|ends|is|goes) ", word)


def test_a_change_that_nothing_measured_before_the_end_is_not_being_measured(
    tmp_path: Path,
) -> None:
    grown(tmp_path)
    hold(tmp_path)
    states = [line[5] for line in report_of(RunReader(tmp_path)).changes]
    assert states == ["being measured"]
    with Tracker(tmp_path, launch="job.0.0") as tracker:
        tracker.event("run.end", 30, 360, why="done")
    assert [line[5] for line in report_of(RunReader(tmp_path)).changes] == ["not measured"]
