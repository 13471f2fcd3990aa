"""The report of a run: its numbers are those of the files, whatever these hold."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from copus_ext.commands import report as tool
from copus_ext.controller.decision_log import DecisionLog
from copus_ext.goodput.headroom import Headroom
from copus_ext.monitor.downsample import changes, downsample, running_mean
from copus_ext.monitor.explain import gain
from copus_ext.monitor.figures import max_points
from copus_ext.monitor.landscape import chosen_decisions
from copus_ext.monitor.report import ReportData, names_of, render
from copus_ext.monitor.run_files import RunReader
from megatron.training.common.control import LOCK_FILE, PAUSE_FILE
from megatron.training.logging.metrics import read_metrics
from megatron.training.logging.tail_reader import Tail
from tests.helpers.recorded import record_decisions, record_run
from tests.helpers.written_runs import WrittenRun, usual_run

HOSTILE = "</script><script>alert(1)</script><!-- <b onmouseover=x> & \u2028 %{y} \ud800"


def payload_of(*runs: Path) -> dict[str, Any]:
    book = ReportData(runs)
    book.refresh()
    return book.payload()


def embedded(page: str) -> dict[str, Any]:
    """What a browser would find in the page."""
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(data)


def traces(payload: dict[str, Any], figure: str) -> dict[str, dict[str, Any]]:
    (found,) = [f for f in payload["figures"] if f["id"] == figure]
    return {trace["name"]: trace for trace in found["data"]}


def facts_of(about: dict[str, Any]) -> dict[str, str]:
    return dict(about["facts"])


def lines_of(path: Path, kind: str) -> list[dict[str, Any]]:
    records = map(json.loads, path.read_text().splitlines())
    return [record for record in records if record["kind"] == kind]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 120 steps with changes of batch and layout."""
    return usual_run(tmp_path_factory.mktemp("runs") / "usual").path


@pytest.fixture(scope="module")
def shown(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What its page holds."""
    out = tmp_path_factory.mktemp("out") / "report.html"
    assert tool.main([str(run), "-o", str(out)]) == 0
    return embedded(out.read_text())


def test_steps_are_those_of_the_record(run: Path, shown: dict[str, Any]) -> None:
    steps = lines_of(run / "metrics.jsonl", "step")
    loss = traces(shown, "loss")["loss"]
    assert loss["y"] == [s["losses"]["lm loss"] for s in steps]
    assert loss["meta"]["x"]["steps"] == [s["iteration"] for s in steps]
    assert loss["meta"]["x"]["samples"] == [s["consumed_samples"] for s in steps]
    assert loss["meta"]["tokens"] == 128
    begin = lines_of(run / "metrics.jsonl", "run.start")[0]["t"]
    hours = [(s["t"] - begin) / 3600 for s in steps]
    assert loss["meta"]["x"]["hours"] == pytest.approx(hours, abs=1e-6)
    phi = traces(shown, "noise")["noise scale phi"]
    assert phi["y"] == [s["noise"]["phi_samples"] for s in steps]
    assert [c[1:3] for c in phi["customdata"]] == [
        [s["noise"]["low_samples"], s["noise"]["high_samples"]] for s in steps
    ]
    course = traces(shown, "course")
    assert course["learning rate"]["y"] == [s["learning_rate"] for s in steps]
    (evaluated,) = lines_of(run / "metrics.jsonl", "eval")
    assert traces(shown, "loss")["evaluation"]["y"] == [evaluated["losses"]["lm loss"]]


def test_an_interval_without_an_upper_end_is_a_band_that_is_open_above(
    run: Path, shown: dict[str, Any]
) -> None:
    (figure,) = [f for f in shown["figures"] if f["id"] == "noise"]
    top = figure["layout"]["yaxis"]["autorangeoptions"]["clipmax"]
    named = traces(shown, "noise")
    band = named["95 % interval"]
    ends: dict[int, list[float]] = {}
    for iteration, y in zip(band["meta"]["x"]["steps"], band["y"], strict=True):
        if iteration is not None:
            ends.setdefault(iteration, []).append(y)
    noise = {s["iteration"]: s["noise"] for s in lines_of(run / "metrics.jsonl", "step")}
    known = [v for n in noise.values() for v in (n["phi_samples"], n["high_samples"]) if v]
    assert top > max(known)
    for iteration, about in noise.items():
        low, high = about["low_samples"], about["high_samples"]
        if not low and high is None:  # nothing is known
            assert iteration not in ends
            continue
        assert min(ends[iteration]) == low
        assert max(ends[iteration]) == high if high is not None else max(ends[iteration]) > top
    words = {c[0]: c[3] for c in named["noise scale phi"]["customdata"]}
    assert words[8].endswith("to unbounded") and words[20].endswith(" to 13")


def test_changes_are_those_of_the_record(run: Path, shown: dict[str, Any]) -> None:
    steps = lines_of(run / "metrics.jsonl", "step")
    course = traces(shown, "course")
    batch = course["batch"]
    by_step = dict(zip(batch["meta"]["x"]["steps"], batch["y"]))
    sizes = [s["global_batch_size"] for s in steps]
    assert len(set(sizes)) > 1
    assert all(by_step[steps[i]["iteration"]] == sizes[i] for i in changes(sizes))
    relayout = lines_of(run / "journal.jsonl", "relayout")
    assert course["layout"]["y"][0] == "tp1.pp1.dp4"
    assert course["layout"]["y"][-1] == relayout[-1]["to"]
    pauses = traces(shown, "pauses")
    phases = relayout[0]["outcome"]["phases"]
    # What all ranks do together is a part of its phase and counts once.
    assert {n: t["x"][0] for n, t in pauses.items()} == {
        n: s for n, s in phases.items() if not n.endswith("together")
    }
    outcomes = lines_of(run / "journal.jsonl", "outcome")
    compared = traces(shown, "predictions")["changes"]
    assert compared["x"] == [o["predicted_samples_per_s"] for o in outcomes]
    assert compared["y"] == [o["samples_per_s"] for o in outcomes]


def test_the_journal_has_every_decision_with_its_numbers(run: Path, shown: dict[str, Any]) -> None:
    decisions = lines_of(run / "journal.jsonl", "decision")
    told = [line for line in shown["journal"] if line[4] in ("change", "stay")]
    assert [line[2] for line in told] == [d["iteration"] for d in decisions]
    assert [line[6] for line in told] == [d["decision"]["reason"] for d in decisions]
    changed = [(d, line) for d, line in zip(decisions, told) if d["decision"]["kind"] != "stay"]
    assert changed
    for decision, line in changed:
        chosen = next(
            c for c in decision["decision"]["candidates"] if c["row"] == decision["decision"]["to"]
        )
        about = decision["decision"]
        assert (line[7], line[8]) == (gain(about["gain"], about["gain_sd"]), chosen["needed"])
        assert "+-" in line[7], "a prediction has its doubt"
        assert "samples/s" in line[9]


def test_a_landscape_agrees_with_what_the_decision_saw(shown: dict[str, Any]) -> None:
    (lands,) = shown["landscapes"]
    assert len(lands["items"]) == 6 and lands["path"][0][1:] == ["tp1.pp1.dp4", 8]
    num_compared = 0
    for item in lands["items"]:
        assert item["by_goodput"] and item["words"]
        for layout, batch, micro, speed, words, *_ in item["candidates"]:
            i, j = item["layouts"].index(layout), item["batches"].index(batch)
            if item["micros"][i][j] == micro:
                share, doubt = (100 * item[name][i][j] for name in ("gains", "doubts"))
                assert words in (f"{share:+.1f} +- {doubt:.1f} %", "+0.0 %")
                assert item["speeds"][i][j] == speed
                num_compared += 1
    assert num_compared > 20


@pytest.mark.parametrize(("every", "num_runs"), [(1, 1), (3, 16), (7, 1), (1000, 16)])
def test_a_page_has_so_many_landscapes_and_changes_come_first(
    run: Path, every: int, num_runs: int
) -> None:
    reader = RunReader(run, name="x")
    reader.refresh()
    one = reader.history().decisions.decided[0]
    kinds = ["batch" if i % every == 0 else "stay" for i in range(1000)]
    decided = [dataclasses.replace(one, number=i, kind=kind) for i, kind in enumerate(kinds)]
    most = 200 if num_runs == 1 else 20
    assert chosen_decisions(decided[:most], num_runs) == decided[:most]
    chosen = chosen_decisions(decided, num_runs)
    assert len(chosen) == most and chosen[-1] is decided[-1]
    changes = [d for d in decided if d.is_change]
    assert [d for d in chosen if d.is_change][1 - most :] == changes[1 - most :]


def test_of_what_a_crash_had_done_again_the_newer_counts(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, launch="job.0.0")
    run.step(20)
    run.decide()
    run.step(10, loss=9.0)
    run.decide()
    run.relaunch("job.0.1", iteration=20, samples=160)
    run.step(15, loss=3.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"v":1,"kind":"step","launch":"job.0.1","iter')
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('{"kind": "decision", "version": 1, "ti')
    shown = payload_of(tmp_path)
    loss = traces(shown, "loss")["loss"]
    kept_steps = [r for r in read_metrics(tmp_path) if r["kind"] == "step"]
    assert loss["y"] == [r["losses"]["lm loss"] for r in kept_steps]
    assert loss["y"][20:] == [3.0] * 15 and loss["meta"]["x"]["steps"] == list(range(1, 36))
    undone = [line[9] for line in shown["journal"] if line[2] == 30 and line[4] != "run"]
    assert len(undone) == 1 and "undone" in undone[0]
    assert [item["iteration"] for item in shown["landscapes"][0]["items"]] == [20]
    facts = dict(shown["runs"][0]["facts"])
    assert facts["Launches"] == "2"


def test_ranks_of_an_elastic_run_are_told_over_time(tmp_path: Path) -> None:
    def start(launch: str, iteration: int, ranks: int, why: str) -> dict[str, Any]:
        members = [[0, local, 0] for local in range(ranks)]
        fields = {
            "iteration": iteration,
            "consumed_samples": 8 * iteration,
            "layout": "tp1.pp1.dp1",
        }
        return {"kind": "run.start", "launch": launch, **fields, "members": members, "why": why}

    def step(launch: str, iteration: int) -> dict[str, Any]:
        fields = {"iteration": iteration, "consumed_samples": 8 * iteration}
        return {
            "kind": "step",
            "launch": launch,
            **fields,
            "losses": {"lm loss": 1.0},
            "elapsed_per_iteration_ms": 1000.0,
            "global_batch_size": 8,
            "micro_batch_size": 1,
        }

    records = [start("a", 0, 4, "start"), step("a", 1), step("a", 2)]
    records += [start("b", 1, 3, "loss"), step("b", 2), start("c", 2, 4, "join"), step("c", 3)]
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for i, record in enumerate(records):
            file.write(json.dumps({"v": 1, "t": 1000.0 + i, "m": float(i), **record}) + "\n")
    facts = facts_of(payload_of(tmp_path)["runs"][0])
    assert facts["Ranks"] == "4 then 3 after a loss then 4 after a join"
    assert facts["Launches"] == "1"
    # Three of six seconds were steps that count; one step was done again.
    assert "3 s steps (50.0 %)" in facts["Of this"]
    assert "1 s steps that a restart did again" in facts["Of this"]
    assert "2 s recoveries and joins" in facts["Of this"]


def test_time_that_a_crash_has_wasted_is_told_from_time_between_launches(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, launch="job.0.0", train_iters=900)
    run.step(90)
    run.relaunch("job.0.1", iteration=50, samples=400)
    run.step(10)
    run.end()
    path = tmp_path / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for i, record in enumerate(records):  # a second each, and ten minutes between the launches
        record["t"] = 1e9 + i + (600 if record["launch"] == "job.0.1" else 0)
    path.write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records))
    about = payload_of(tmp_path)["runs"][0]
    names = ["job.0.0", "job.0.1"]
    assert [(x[0], x[2], x[3]) for x in about["launches"]] == list(
        zip(names, ["0", "50"], ["90", "60"])
    )
    steps = facts_of(about)["Steps"]
    assert steps == "60 of 1,000 (6.0 %)", "of what the last step expects, not of the flags"
    parts = [part.partition(" s ") for part in facts_of(about)["Of this"].split("; ")]
    spent = {what: time for time, _, what in parts}
    seconds = {r["iteration"]: r["elapsed_per_iteration_ms"] / 1000 for r in lines_of(path, "step")}
    assert float(spent["steps that a restart did again"]) == pytest.approx(
        sum(seconds[i] for i in range(51, 91)), rel=0.01
    )
    assert "10.0 min between launches" in facts_of(about)["Of this"]


def test_what_a_run_says_cannot_leave_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "<script>alert(1)<" / "script>&"
    run = WrittenRun(folder, copus_policy=HOSTILE, tokenizer_model=HOSTILE, data_path=[HOSTILE])
    run.step(20)
    run.decide(reason=HOSTILE)
    run.tracker.event("alert", 20, 160, alert="x", line=HOSTILE)
    run.journal.append("failure", iteration=20, error=HOSTILE)
    run.end(HOSTILE)
    payload = payload_of(folder)
    payload["runs"][0]["name"] = HOSTILE.encode(errors="replace").decode()
    page = render(payload)
    ours = page[: page.index('<script type="application/json"')]
    assert "alert(1)" in ours and "<script>alert" not in ours
    (data,) = re.findall(r'id="data">(.*?)</script>', page, re.S)
    assert "<" not in data and "alert(1)" in data
    assert json.loads(data) == payload
    said = HOSTILE.encode(errors="replace").decode().replace("\u2028", " ")
    assert " ".join(said.split()) in [line[6] for line in payload["journal"]]


@pytest.mark.parametrize("steps", [None, 0, 1])
def test_a_run_that_has_hardly_begun_has_a_page(tmp_path: Path, steps: int | None) -> None:
    if steps is not None:
        WrittenRun(tmp_path).step(steps)
    page = render(payload_of(tmp_path))
    assert len(traces(embedded(page), "loss")["loss"]["y"]) == (steps or 0)


def test_of_a_run_its_journal_alone_makes_a_page(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "journal.jsonl", tmp_path / "kept.journal.jsonl")
    payload = payload_of(tmp_path / "kept.journal.jsonl")
    assert len(payload["landscapes"][0]["items"]) == 6
    assert any(traces(payload, "pauses").values())


def test_the_page_says_what_there_was_to_gain(run: Path, tmp_path: Path) -> None:
    assert "To gain" not in facts_of(payload_of(run)["runs"][0])
    record_run(tmp_path)
    record_decisions(tmp_path)
    headroom = Headroom.from_json(lines_of(tmp_path / "journal.jsonl", "decision")[-1]["headroom"])
    assert facts_of(payload_of(tmp_path)["runs"][0])["To gain"] == str(headroom)
    # A later launch that knows nothing does not repeat it.
    DecisionLog(tmp_path).append("start", mode="act", flags={}, headroom=None)
    assert "To gain" not in facts_of(payload_of(tmp_path)["runs"][0])


def test_runs_are_compared_at_the_loss_that_all_reached(tmp_path: Path) -> None:
    for name, level in (("a", 2.0), ("b", 3.0)):
        run = WrittenRun(tmp_path / name, seed=level)
        run.step(60, loss=5.0)
        run.step(60, loss=level)
        run.end()
    payload = payload_of(tmp_path / "a", tmp_path / "b")
    assert payload["common"] == 3.0
    assert payload["differing"] == [["--seed", "2.0", "3.0"]]
    tokens = [
        dict(zip(payload["compared"], line))["tokens to common loss"] for line in payload["compare"]
    ]
    # The mean of 50 steps is down to 3 after the 34th step at 2, and the 50th at 3.
    assert tokens == ["96.3 k", "113 k"]
    assert {t.split(":")[0] for t in traces(payload, "loss")} == {"a", "b"}


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    assert names_of([tmp_path / "x" / "run", tmp_path / "y" / "run"]) == ["x/run", "y/run"]
    assert len(set(names_of([tmp_path, tmp_path]))) == 2


COLUMN = st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=400)


@given(COLUMN, st.integers(1, 60))
def test_fewer_points_keep_both_ends_extremes_and_gaps(
    column: list[float | None], most: int
) -> None:
    chosen = downsample([column], most)
    assert len(chosen) <= max(most, len(column) if len(column) <= most else 5 + 4 * most // 3)
    assert {0, len(column) - 1} <= set(chosen) and chosen == sorted(set(chosen))
    values = [v for v in column if v is not None]
    picked = [v for v in (column[i] for i in chosen) if v is not None]
    if values:
        assert max(picked) == max(values) and min(picked) == min(values)
    assert (None in column) == (None in [column[i] for i in chosen])


def test_a_hundred_thousand_steps_become_few_and_keep_every_spike_and_turn() -> None:
    spikes = {777: 50.0, 50_001: -3.0, 99_998: 40.0}
    loss = [spikes.get(i, 2.0 + math.sin(i)) for i in range(100_000)]
    chosen = downsample([loss], max_points(1))
    assert spikes.keys() <= set(chosen) and len(chosen) <= max_points(1) + 1
    batch = [8 << (i // 9_999) for i in range(100_000)]
    assert [batch[i] for i in changes(batch)][:-1] == sorted(set(batch))


@given(st.lists(st.none() | st.floats(-100, 100), max_size=60), st.integers(1, 70))
def test_a_running_mean_is_that_of_the_last_values(values: list[float | None], window: int) -> None:
    for i, mean in enumerate(running_mean(values, window)):
        known = [v for v in values[max(i + 1 - window, 0) : i + 1] if v is not None]
        assert mean == (pytest.approx(math.fsum(known) / len(known)) if known else None)


def test_lines_come_once_and_start_over_with_another_file(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    tail = Tail(path, max_bytes=None)
    assert list(tail.lines()) == []
    path.write_text('{"a": 1}\nnot json\n{"a": 3}\n{"a": 4')
    found = list(tail.lines())
    assert [line for _, line in found] == [b'{"a": 1}\n', b"not json\n", b'{"a": 3}\n']
    assert [tail.line_at(place) for place, _ in found] == [line for _, line in found]
    with path.open("a") as file:
        file.write('2}\n{"a": 5}\n')
    assert [line for _, line in tail.lines()] == [b'{"a": 42}\n', b'{"a": 5}\n']
    assert not tail.is_replaced() and list(tail.lines()) == []
    path.write_text('{"b": 1}\n')
    assert tail.is_replaced() and list(tail.records()) == [{"b": 1}]


def test_a_page_that_follows_is_written_until_the_run_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, page, seen = WrittenRun(tmp_path / "run"), tmp_path / "report.html", []
    run.step(12)

    def while_it_waits(seconds: float) -> None:
        payload = embedded(page.read_text())
        seen.append((seconds, payload["reload_s"], facts_of(payload["runs"][0])["Steps"]))
        run.step(3) if len(seen) < 3 else run.end()

    monkeypatch.setattr(tool.time, "sleep", while_it_waits)
    assert tool.main([str(run.path), "-o", str(page), "--follow", "5"]) == 0
    assert [(s, r, steps.split()[0]) for s, r, steps in seen] == [
        (5.0, 5.0, "12"),
        (5.0, 5.0, "15"),
        (5.0, 5.0, "18"),
    ]
    last = embedded(page.read_text())
    assert last["reload_s"] is None and facts_of(last["runs"][0])["State"] == "done"
    assert list(tmp_path.glob("*.unfinished")) == []


def test_a_page_says_when_its_run_falls_silent_or_is_asked_for_something(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path)
    run.step(3)
    path = tmp_path / "metrics.jsonl"
    path.write_text(re.sub(r'"t":[0-9.]+', '"t":1.0', path.read_text()))
    (tmp_path / LOCK_FILE).parent.mkdir()
    (tmp_path / LOCK_FILE).touch()
    data = ReportData([tmp_path])

    def facts() -> dict[str, str]:
        data.refresh()
        return facts_of(data.payload()["runs"][0])

    assert facts()["State"].startswith("training") and "Asked" not in facts()
    (tmp_path / PAUSE_FILE).touch()
    assert "pause the controller" in facts()["Asked"]
    os.utime(tmp_path / LOCK_FILE, (1.0, 1.0))
    assert facts()["State"].startswith("lost: no sign of life")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nowhere", "-o", "x.html"], 5, "--run-dir"),
        (["RUN", "-o", "no/such/folder/x.html"], 5, "-o"),
        (["RUN", "-o", "x.html", "--follow", "0"], 2, "--follow 0"),
        (["RUN"] * 17 + ["-o", "x.html"], 2, "at most 16"),
    ],
)
def test_the_command_says_what_is_wrong(
    arguments: list[str],
    code: int,
    said: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert tool.main([str(run) if word == "RUN" else word for word in arguments]) == code
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_every_figure_has_its_place_on_the_page() -> None:
    import copus_ext.monitor as package

    (folder,) = package.__path__
    ids = [
        line for line in Path(folder, "figures.py").read_text().splitlines() if '"id": "' in line
    ]
    page = Path(folder, "templates", "report.html").read_text()
    assert len(ids) >= 6
    for line in ids:
        assert f'<figure id="f-{line.split(chr(34))[3]}"' in page, line
