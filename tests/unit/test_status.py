"""What tools/status.py shows of a run, whatever state its directory is in."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from copus_ext.commands import status
from copus_ext.controller.decision_log import NAME, DecisionLog, read_journal
from copus_ext.megatron_lm.record import RunRecord
from copus_ext.monitor import run_status
from copus_ext.monitor.explain import time_left
from copus_ext.monitor.report import render, report_of
from copus_ext.monitor.run_files import RunReader
from copus_ext.monitor.run_status import RunStatus, read_status
from copus_ext.monitor.terminal import screen
from megatron.trainer.common.control import HEARTBEATS, LOCK_FILE, PAUSE_FILE
from megatron.trainer.common.errors import TrainingFailure
from megatron.trainer.logging.metrics import METRICS_FILE, encode, read_metrics
from megatron.trainer.logging.tracker import Tracker
from megatron.trainer.resilience.lock import Lock
from tests.helpers.recorded import (
    BATCH,
    CONFIG,
    LAYOUT,
    TOTAL,
    hold,
    let_go,
    record_decisions,
    record_run,
    step,
)
from tests.helpers.steps import step_info
from tests.helpers.written_runs import LAYOUTS, write_change


def shown(now: RunStatus, width: int = 200) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(screen(now))
    return out.getvalue()


def test_the_numbers_are_those_of_record_and_journal(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    record_run(tmp_path)
    record_decisions(tmp_path)
    before = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))
    assert status.main([str(tmp_path), "--json"]) == 0
    now = json.loads(capsys.readouterr().out)
    records = read_metrics(tmp_path)
    last = [r for r in records if r["kind"] == "step"][-1]
    names = ("iteration", "train_iterations", "consumed_samples")
    for name in (*names, "global_batch_size", "micro_batch_size"):
        assert now[name] == last[name], name
    assert now["loss"] == last["losses"]["lm loss"]
    assert now["layout"] == LAYOUT and now["state"] == "done"
    measured = [r["iteration"] for r in records if r.get("noise", {}).get("measured")]
    known = {**last["noise"], "measured_at": measured[-1]}
    assert now["noise"] == {name: known[name] for name in now["noise"]}
    assert now["share_done"] == 20 * BATCH / TOTAL
    assert now["step_s"] == 0.5105 and now["tokens_per_s"] == 128 * BATCH / 0.5105
    commit = [r for r in records if r["kind"] == "checkpoint.commit"][-1]
    assert now["saved"]["iteration"] == commit["iteration"] and now["saved"]["steps_ago"] == 0
    written = list(read_journal(tmp_path / NAME))
    outcome = next(r for r in written if r["kind"] == "outcome")
    (change,) = now["controller"]["changes"]
    for name in ("gain", "predicted_samples_per_s", "samples_per_s", "speed_over_predicted"):
        assert change[name] == outcome[name], name
    controller, decision = now["controller"], written[-1]["decision"]
    assert controller["reason"] == decision["reason"]
    assert controller["critical_batch_size"] == decision["critical_batch_size"]
    assert controller["headroom"] == {
        name: value
        for name, value in written[-1]["headroom"].items()
        if name != "batch_is_worth_it"
    }
    status_now = read_status(tmp_path)
    for part in (
        "to gain      adapting the batch could have saved about",
        "20 of 1,000, 2.0 %",
        "0.3000",
        "84.0 samples [42.0, 168.0]",
        f"last measured at step {measured[-1]}",
        f"batch 16 in 4 on {LAYOUT}",
        "of step 20",
        "9.5",
        "0.51 s a step",
    ):
        assert part in shown(status_now)
    assert max(map(len, shown(status_now, 60).splitlines())) <= 60
    assert sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*")) == before
    assert "decided      at step 15: to stay; " in shown(status_now)
    DecisionLog(tmp_path).write("failure", error="no room")
    assert "decided      at step 15: controller disabled: no room" in shown(read_status(tmp_path))


def test_a_run_killed_in_the_middle_of_a_line_opens(tmp_path: Path) -> None:
    record_run(tmp_path, ended=False)
    record_decisions(tmp_path)
    whole = {name: (tmp_path / name).read_bytes() for name in (METRICS_FILE, NAME)}
    for name, data in whole.items():
        for cut in range(0, len(data), len(data) // 12):
            (tmp_path / name).write_bytes(data[:cut])
            now = read_status(tmp_path)
            shown(now)
            lines = data[:cut].count(b"\n") if name == METRICS_FILE else whole[METRICS_FILE]
            assert lines or now.iteration is None
        (tmp_path / name).write_bytes(data)
    (tmp_path / METRICS_FILE).write_bytes(whole[METRICS_FILE][:-700])
    os.utime(tmp_path / LOCK_FILE, (1.0, 1.0))
    now = read_status(tmp_path, t=time.time() + 1000)
    assert now.state == "lost" and now.iteration == 19 and "killed" in now.why
    with (tmp_path / METRICS_FILE).open("ab") as file:
        file.write(b"\n\xff\xfe{]\n")
    record_run(tmp_path, 3, launch="job.1.0", start=10)
    now = read_status(tmp_path)
    assert (now.iteration, now.launches, now.crashes, now.state) == (13, 2, 1, "done")


def test_what_is_no_run_yet_or_hardly_one(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert status.main([str(tmp_path / "none")]) == 5
    assert status.main([str(tmp_path)]) == 5
    assert "--run-dir" in capsys.readouterr().err
    (tmp_path / METRICS_FILE).touch()
    assert status.main([str(tmp_path)]) == 0
    assert "nothing is recorded yet" in capsys.readouterr().out
    record_run(tmp_path, 1)
    assert status.main([str(tmp_path)]) == 0
    assert "1 of 1,000" in capsys.readouterr().out
    alone = tmp_path / "journal"
    alone.mkdir()
    record_decisions(alone)
    deciding = read_status(alone).controller
    assert deciding is not None and len(deciding.changes) == 1


def test_texts_of_a_run_are_no_markup_and_no_escapes(tmp_path: Path) -> None:
    bad = "[red]x[/red][/] [link=http://a]\x1b[31m\r\n\x07{}"
    run = tmp_path / "[bold]run[-"
    record_run(run, launch=bad, ended=False, copus_cluster=bad)
    journal = record_decisions(run, reason=bad)
    write_change(journal, 3, 7, to=LAYOUTS[1])
    journal.note("relayout", number=3, iteration=7, start=bad, to=bad, outcome={"reason": bad})
    journal.note("failure", error=bad)
    with Tracker(run, launch=bad) as tracker:
        tracker.event("alert", 20, 320, alert=bad, line=bad)
        tracker.event("layout", 20, 320, layout=bad)
    text = shown(read_status(run, t=time.time() + 1000))
    assert "\x1b" not in text and "\x07" not in text and "\r" not in text
    assert "[red]x[/red][/] [link=http://a][31m {}" in text and "[bold]run[-" in text


def beat(run: Path, doing: str) -> None:
    path = run / HEARTBEATS / "0"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"launch": "job.0.0", "iteration": 20, "doing": doing}))


def event(kind: str, launch: str = "job.0.0", **fields: Any) -> Callable[[Path], None]:
    def write(run: Path) -> None:
        hold(run)
        with Tracker(run, launch=launch) as tracker:
            tracker.event(kind, 20, 320, **fields)

    return write


def gone(run: Path) -> None:
    event("fault", fault="bad steps", line="ten bad steps")(run)
    let_go(run)


def gone_and_controlled(run: Path) -> None:
    gone(run)
    (run / "control").mkdir()


def silent(run: Path) -> None:
    hold(run)
    for path in (run / LOCK_FILE, run / METRICS_FILE):
        os.utime(path, (0, 0))
    lines = [json.loads(line) for line in (run / METRICS_FILE).read_text().splitlines()]
    text = "".join(encode({**record, "t": 1.0}) + "\n" for record in lines)
    (run / METRICS_FILE).write_text(text)


@pytest.mark.parametrize(
    ("make", "state", "why"),
    [
        (hold, "training", ""),
        (event("run.start", "job.0.1", config=CONFIG), "starting", ""),
        (event("run.end", why="SIGTERM"), "stopped", "SIGTERM"),
        (event("run.end", why="done"), "done", ""),
        (lambda run: (hold(run), beat(run, "evaluating")), "evaluating", ""),
        (lambda run: (hold(run), beat(run, "saving")), "saving", ""),
        (lambda run: (hold(run), beat(run, "changing the layout")), "changing layout", ""),
        (lambda run: (hold(run), beat(run, "[odd]")), "training", ""),
        (lambda run: (hold(run), (run / "control" / "stop").touch()), "training", "asked to stop"),
        (gone, "failed", "ten bad steps"),
        (gone_and_controlled, "failed", "ten bad steps"),
        (let_go, "failed", "without a last record"),
        (lambda run: (event("run.end", why="SIGTERM")(run), let_go(run)), "stopped", "SIGTERM"),
        (lambda run: (event("run.end", why="done")(run), let_go(run)), "done", ""),
        (silent, "lost", "no sign of life"),
    ],
)
def test_states(make: Callable[[Path], Any], state: str, why: str, tmp_path: Path) -> None:
    record_run(tmp_path, ended=False)
    make(tmp_path)
    now = read_status(tmp_path)
    assert now.state == state and why in now.why
    told = report_of(RunReader(tmp_path)).facts["state"]
    assert told.startswith(state) and why in told, "the report says the same"
    assert (now.left_s is not None) == (state not in ("done", "stopped", "failed", "lost"))


@pytest.mark.parametrize("why", ["done", "SIGINT", None])
def test_a_run_is_over_as_soon_as_it_lets_go_of_its_directory(
    why: str | None, tmp_path: Path
) -> None:
    """With the lock that a run takes: it leaves no directory behind that it has made."""
    error = contextlib.nullcontext() if why else pytest.raises(TrainingFailure)
    lock = Lock(tmp_path, flag="--run-dir", launch="job.0.0")
    with error, lock, Tracker(tmp_path, launch="job.0.0") as tracker:
        tracker.event("run.start", 0, 0, config=CONFIG, layout=LAYOUT)
        step(tracker, 1)
        assert read_status(tmp_path).state == "training"
        if not why:
            raise TrainingFailure("nothing that is recorded")
        tracker.event("run.end", 1, BATCH, why=why)
    assert not (tmp_path / "control").exists()
    now = read_status(tmp_path)
    assert now.state == {"done": "done", "SIGINT": "stopped", None: "failed"}[why]
    told = report_of(RunReader(tmp_path)).facts["state"]
    assert now.left_s is None and told.startswith(now.state)


@pytest.mark.parametrize(
    ("end", "state", "why"),
    [
        (lambda record: record.end("done"), "done", ""),
        (lambda record: record.end("", fault="RuntimeError: no memory"), "failed", "no memory"),
    ],
)
def test_a_run_of_a_megatron_lm_checkout_lives_without_a_lock(
    end: Callable[[RunRecord], None], state: str, why: str, tmp_path: Path
) -> None:
    args = SimpleNamespace(iteration=0, consumed_train_samples=0, load=None)
    record = RunRecord(tmp_path, args, layout=LAYOUT, train_samples=320, flags={})
    record.step(step_info(), iterations=20, scalars={}, fields={})
    record.saved()
    alive, later = read_status(tmp_path), read_status(tmp_path, t=time.time() + 200)
    assert (alive.state, later.state) == ("training", "lost")
    assert alive.iteration == 1 and alive.saved is not None and alive.saved.iteration == 1
    end(record)
    now = read_status(tmp_path)
    assert now.state == state and why in now.why


@pytest.mark.parametrize(
    ("make", "state"), [(gone, "failed"), (event("run.end", why="SIGTERM"), "stopped")]
)
def test_a_view_follows_a_run_that_failed_for_two_more_minutes(
    make: Callable[[Path], Any], state: str, tmp_path: Path
) -> None:
    """Its supervisor may start it again."""
    record_run(tmp_path, ended=False)
    make(tmp_path)
    let_go(tmp_path)
    now, later = read_status(tmp_path), read_status(tmp_path, t=time.time() + 200)
    assert (now.state, now.is_over, later.state, later.is_over) == (state, False, state, True)


def test_what_to_look_at(tmp_path: Path) -> None:
    record_run(tmp_path, ended=False)
    journal = record_decisions(tmp_path)
    (tmp_path / PAUSE_FILE).touch()
    with Tracker(tmp_path, launch="job.0.0") as tracker:
        tracker.event("alert", 20, 320, alert="save failed")
    for number in range(3, 7):
        outcome = {"kind": "moved", "pause_s": 1.5}
        write_change(journal, number, 20, to=LAYOUTS[1])
        journal.note("relayout", number=number, iteration=20, to=LAYOUT, outcome=outcome)
    now = read_status(tmp_path, t=time.time() + 60)
    assert [a.name for a in now.alarms] == ["save failed", "no step"]
    assert now.paused and "paused" in shown(now)
    assert now.controller is not None
    assert [c.state for c in now.controller.changes[-4:]] == ["being measured"] * 4
    assert "changes; copus report" not in shown(now), "few are all shown"
    for number in range(7, 15):
        write_change(journal, number, 20, to=LAYOUTS[1])
    now = read_status(tmp_path)
    assert now.controller is not None
    total = now.controller.num_changes
    assert len(now.controller.changes) == 8 < total
    assert f"the last 8 of {total} changes; copus report" in " ".join(shown(now).split())


def test_a_run_that_only_observes_has_proposals_and_equal_ones_count_once(tmp_path: Path) -> None:
    record_run(tmp_path)
    journal = DecisionLog(tmp_path)
    journal.write("start", mode="observe", flags={}, layout=LAYOUT)
    for number in range(1, 15):
        batch = 16 if number % 2 else 32
        write_change(journal, number, number, batch=batch, to=LAYOUTS[1], applied=False)
    now = read_status(tmp_path)
    assert now.controller is not None
    assert [c.iteration for c in now.controller.changes] == [13, 14]
    assert (now.controller.num_changes, now.controller.num_proposals) == (0, 2)
    assert "would change to" in shown(now) and "changed to" not in shown(now)
    page = render(report_of(RunReader(tmp_path)))
    assert "What it proposed" in page and "would change to" in page
    assert "What changes brought" not in page and "changed to" not in page
    for number in range(15, 24):
        write_change(journal, number, number, batch=number, to=LAYOUTS[1], applied=False)
    told = " ".join(shown(read_status(tmp_path)).split())
    assert "the last 8 of 10 proposals; copus report" in told
    # A run that went on and acts has both.
    journal.write("start", mode="act", flags={}, layout=LAYOUT)
    write_change(journal, 24, 24)
    told = " ".join(shown(read_status(tmp_path)).split())
    assert "changed to" in told and "the last 8 of 1 change and 10 proposals; copus report" in told


def test_a_page_says_when_and_a_screen_how_long_ago(tmp_path: Path) -> None:
    record_run(tmp_path)
    with Tracker(tmp_path, launch="job.0.0") as tracker:
        tracker.event("alert", 20, 320, alert="save failed")
        tracker.event("run.end", 20, 320, why="done")
    now = shown(read_status(tmp_path, t=time.time() + 60))
    assert re.search(r"^ended +1\.\d min ago", now, re.MULTILINE)
    assert re.search(r"^checkpoint +of step 20, 1\.\d min ago", now, re.MULTILINE)
    assert re.search(r"^! save failed \(1\.\d min ago\)", now, re.MULTILINE)
    facts = report_of(RunReader(tmp_path)).facts
    moment = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
    assert re.fullmatch(moment, facts["ended"])
    assert re.fullmatch(f"of step 20, {moment}", facts["checkpoint"])
    assert re.fullmatch(rf"save failed \({moment}\)", facts["alarms"])
    assert not [value for value in facts.values() if " ago" in value]


def test_crashes_count_and_later_launches_win(tmp_path: Path) -> None:
    record_run(tmp_path, 5, ended=False)
    record_run(tmp_path, 5, ended=False, launch="job.0.1", start=2)
    record_run(tmp_path, 2, ended=False, launch="job.0.2", start=2)
    now = read_status(tmp_path)
    assert (now.iteration, now.launches, now.crashes) == (4, 3, 2)
    assert "2 restarts, 2 crashes" in shown(now)


def test_the_time_left_says_what_another_schedule_could_save(tmp_path: Path) -> None:
    t = 1e9
    record_run(tmp_path, ended=False)
    plain = read_status(tmp_path)
    assert plain.left_s is not None
    (line,) = [line for line in shown(plain).splitlines() if line.startswith("time left")]
    assert "if nothing changes, until 20" in line and line.rstrip().endswith(" UTC")
    record_decisions(tmp_path)
    now = read_status(tmp_path)
    found = now.controller and now.controller.headroom
    assert found
    most = dataclasses.replace(found.together, high=0.125)
    some = dataclasses.replace(found, together=most)
    assert time_left(80.0, some, t=t) == (
        "1.3 min if nothing changes, until 2001-09-09 01:48:00 UTC; the best schedule could save "
        "at most 12.5 % of it (10 s)"
    )
    none = dataclasses.replace(found, together=dataclasses.replace(most, high=0.004))
    assert time_left(80.0, none, t=t).endswith("; no other schedule could save 0.5 % of it")
    assert f"at most {100 * found.together.high:.1f} % of it" in shown(now)
    told = report_of(RunReader(tmp_path)).facts["time left"]
    assert f"at most {100 * found.together.high:.1f} % of it" in told


def pushed_back(path: Path, kind: str) -> None:
    """Puts more between the first lines of a kind and what follows them than is read."""
    lines = path.read_bytes().splitlines(keepends=True)
    at = max(i for i, line in enumerate(lines) if f'"{kind}"'.encode() in line[:40]) + 1
    path.write_bytes(b"".join([*lines[:at], b"x" * (1 << 21), b"\n", *lines[at:]]))


def test_of_large_files_only_the_end_is_read_and_layout_speed_and_mode_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_status, "END_BYTES", 1 << 20)
    record_run(tmp_path, 3, ended=False)
    journal = record_decisions(tmp_path)
    before = read_status(tmp_path)
    assert not before.launches_at_least
    flags = {**CONFIG, "copus_mode": "observe", "copus_policy": "static", "data_parallel_size": 2}
    flags |= {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    (tmp_path / "config.json").write_text(json.dumps(flags))
    pushed_back(tmp_path / METRICS_FILE, "run.start")
    pushed_back(tmp_path / NAME, "start")
    now = read_status(tmp_path)
    assert (now.iteration, now.launches, now.launches_at_least) == (3, 0, True)
    assert now.layout == LAYOUT
    assert before.controller is not None and now.controller is not None
    assert now.controller.reason == before.controller.reason
    assert now.controller.changes == before.controller.changes != ()
    assert now.controller.policy == "static"
    assert "observes only" in shown(now) and "restarts unknown" in shown(now)
    (tmp_path / NAME).unlink()
    assert read_status(tmp_path).layout == LAYOUT
    journal.note("relayout", number=3, to="tp2.pp1.dp1", outcome={"kind": "moved"})
    assert read_status(tmp_path).layout == "tp2.pp1.dp1"
    record_run(tmp_path, 1, launch="job.0.1", start=3)
    assert "at least 0 restarts" in shown(read_status(tmp_path))


def test_speed_and_time_left_of_a_phase_count_its_longer_samples(tmp_path: Path) -> None:
    record_run(tmp_path, 3, ended=False)
    plain = read_status(tmp_path)
    with Tracker(tmp_path, launch="job.0.0") as tracker:
        for i in range(4, 7):
            step(tracker, i, elapsed_per_iteration_ms=100.0, seq_length=4 * CONFIG["seq_length"])
    now = read_status(tmp_path)
    assert now.samples_per_s == 160.0 and plain.samples_per_s is not None
    assert now.tokens_per_s == 160.0 * 4 * CONFIG["seq_length"]


def test_steps_before_a_change_of_layout_say_nothing_of_those_after_it(tmp_path: Path) -> None:
    record_run(tmp_path, 40, ended=False)
    with Tracker(tmp_path, launch="job.0.0") as tracker:
        tracker.event("layout", 40, 640, layout="tp2.pp1.dp1")
        for i in range(41, 44):
            step(tracker, i, elapsed_per_iteration_ms=100.0)
    now = read_status(tmp_path)
    assert now.step_s == 0.1 and now.samples_per_s == 160.0 and now.layout == "tp2.pp1.dp1"


def test_a_loss_that_is_no_number_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with Tracker(tmp_path, launch="a.0.0") as tracker:
        step(tracker, 1, loss=math.nan)
    assert "nan" in shown(read_status(tmp_path))
    assert status.main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == "NaN"


def test_following_ends_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    record_run(tmp_path)
    assert status.main([str(tmp_path), "--follow", "0.1"]) == 0
    assert capsys.readouterr().out.count("done") == 1
    for flags in (["--follow", "0"], ["--follow", "nan"]):
        with pytest.raises(SystemExit) as error:
            status.main([str(tmp_path), *flags])
        assert error.value.code == 2


def test_a_last_step_of_what_is_left_is_not_where_the_run_stood(tmp_path: Path) -> None:
    record_run(tmp_path, 5, ended=False)
    config = {**CONFIG, "train_samples": 5 * BATCH + 4}
    with Tracker(tmp_path, launch="job.0.0") as tracker:
        tracker.event("run.start", 5, 5 * BATCH, config=config, layout=LAYOUT)
        for i in (6, 7):
            sizes = {"global_batch_size": 4, "consumed_samples": 5 * BATCH + 4} if i == 7 else {}
            step(tracker, i, **sizes)
    now = read_status(tmp_path)
    assert (now.global_batch_size, now.iteration, now.step_s) == (BATCH, 7, 0.506)
