"""The report of a run: its numbers are those of the files, whatever these hold."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from copus_ext.commands import report as tool
from copus_ext.controller.decision_log import DecisionLog
from copus_ext.goodput.headroom import Headroom
from copus_ext.goodput.inputs import DecisionInputs
from copus_ext.monitor.chart import (
    LEFT,
    MAX_POINTS,
    NARROW,
    RIGHT,
    TOP,
    WIDE,
    Chart,
    Series,
    draw,
    running_mean,
    thinned,
    turns,
)
from copus_ext.monitor.explain import gain, percent
from copus_ext.monitor.report import Report, render, report_of
from copus_ext.monitor.run_files import RunReader
from megatron.trainer.common.control import LOCK_FILE, PAUSE_FILE
from megatron.trainer.logging.metrics import read_metrics
from megatron.trainer.logging.tail_reader import Tail
from tests.helpers.recorded import hold, record_decisions, record_run
from tests.helpers.written_runs import WrittenRun, rewrite, usual_run

HOSTILE = "</title></script><script>alert(1)</script><!-- <b onmouseover=x> & \u2028 {{ x }} \ud800"


def series_of(report: Report, title: str) -> dict[str, Series]:
    (chart,) = [chart for chart in report.charts if chart.title == title]
    return {series.name: series for series in chart.series}


def lines_of(path: Path, kind: str) -> list[dict[str, Any]]:
    records = map(json.loads, path.read_text().splitlines())
    return [record for record in records if record["kind"] == kind]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 120 steps with changes of batch and layout."""
    return usual_run(tmp_path_factory.mktemp("runs") / "usual").path


@pytest.fixture(scope="module")
def shown(run: Path) -> Report:
    return report_of(RunReader(run))


def test_steps_are_those_of_the_record(run: Path, shown: Report) -> None:
    steps = lines_of(run / "metrics.jsonl", "step")
    loss = series_of(shown, "Loss")
    assert loss["step"].y == [s["losses"]["lm loss"] for s in steps]
    assert loss["step"].x == [s["consumed_samples"] for s in steps]
    (evaluated,) = lines_of(run / "metrics.jsonl", "eval")
    assert loss["valid"].y == [evaluated["losses"]["lm loss"]]
    noise = series_of(shown, "Gradient noise scale")
    assert noise["noise scale"].y == [s["noise"]["phi_samples"] for s in steps]
    band, is_open = noise["95 % interval"], noise["no upper end"]
    highs, lows = ([s["noise"][f"{end}_samples"] for s in steps] for end in ("high", "low"))
    assert band.high == highs
    assert band.y == [low if high else None for low, high in zip(lows, highs)]
    assert is_open.y == [None if high else low for low, high in zip(lows, highs)]
    decisions = lines_of(run / "journal.jsonl", "decision")
    used = noise["critical batch size"]
    assert used.y == [d["decision"]["critical_batch_size"] for d in decisions]
    ends = ("critical_batch_size_low", "critical_batch_size_high")
    for tip, decided in zip(used.tips, decisions, strict=True):
        assert "({:.4g} to {:.4g})".format(*(decided["decision"][end] for end in ends)) in tip


def test_where_no_interval_is_known_the_picture_and_its_caption_say_so(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path)
    run.step(12)
    run.decide()

    def blind(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for record in records:
            if record["kind"] == "step" and record["iteration"] <= 3:
                ends = ("phi_samples", "low_samples", "high_samples")
                record["noise"] |= {"status": "none", **dict.fromkeys(ends)}
        return records

    rewrite(tmp_path / "metrics.jsonl", blind)
    report = report_of(RunReader(tmp_path))
    assert series_of(report, "Gradient noise scale")["no upper end"].y[:3] == [0.0] * 3
    (chart,) = [chart for chart in report.charts if chart.title == "Gradient noise scale"]
    assert (
        "Grey: in 7 of 12 steps the interval had no upper end, in 3 of 12 steps nothing was "
        "known of it."
    ) in chart.caption


def test_the_caption_says_what_decisions_used(run: Path, shown: Report) -> None:
    (chart,) = [chart for chart in shown.charts if chart.title == "Gradient noise scale"]
    for part in ("believed in", "published law", "followed the noise scale, taken 8 times"):
        assert part in chart.caption
    assert chart.caption.endswith("no upper end.")
    words = shown.facts["went by"]
    assert words.startswith("critical batch size") and words in chart.caption
    decisions = lines_of(run / "journal.jsonl", "decision")
    series = series_of(shown, "Gradient noise scale")
    believed, law = series["believed range"], series["law alone"]
    for end, column in (("low", believed.y), ("high", believed.high)):
        assert column == [d["decision"][f"critical_batch_size_{end}"] for d in decisions]
    for d, value in zip(decisions, law.y, strict=True):
        before = DecisionInputs.from_json({**d["situation"], "looks": []})
        assert value == before.critical_batch_size
    known = [value for value in law.y if value is not None]
    assert known == sorted(known), "the law grows"


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([4.0, 16.0], ["4", "8", "16"]),
        ([1.0, 1000.0], ["1", "4", "16", "64", "256", "1,024"]),
        ([41.0, 47.0], ["41", "42", "43", "44", "45", "46", "47"]),
        ([4.0, 4.0], ["4"]),
        ([8.0, 8.0], ["6", "7", "8", "9", "10", "11"]),
        ([3.0, 2.0**30], ["1", "64", "4,096", "262 k", "16.8 M", "1.07 G"]),
    ],
)
def test_ticks_of_batches_are_round_and_enough(
    values: list[float], ticks: list[str], width: int
) -> None:
    series = Series(name="batch", x=[0, 1], y=values)
    chart = Chart(title="x", caption="", unit="", series=[series], is_log=True)
    drawn = str(draw(chart, 1, width))
    assert re.findall(r'text-anchor="end">([^<]+)</text>', drawn) == [*ticks, "samples"]


def test_a_run_that_measured_nothing_does_not_claim_to_have_followed_it(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path)
    run.step(12)
    run.decide()

    def forget(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for line in lines:
            if line["kind"] == "decision":
                line["situation"]["looks"] = []
        return lines

    rewrite(tmp_path / "journal.jsonl", forget)
    charts = {chart.title: chart for chart in report_of(RunReader(tmp_path)).charts}
    caption = charts["Gradient noise scale"].caption
    assert "by the published law alone" in caption and "No noise scale was good enough" in caption
    assert "It followed" not in caption


def test_one_step_without_an_upper_end_is_seen() -> None:
    lone = Series(name="x", x=[0, 1, 2], y=[None, 2.0, None], high=[None] * 3, kind="band")
    drawn = str(draw(Chart(title="x", caption="", unit="", series=[lone], is_log=True), 2))
    (way,) = re.findall(r'class="band first" d="(M[^"]+)"/><path', drawn)
    corners = [float(c.split()[0]) for c in way.strip("MZ").split("L")]
    assert max(corners) - min(corners) == pytest.approx((WIDE - LEFT - RIGHT) / 2, abs=0.1)


def test_an_interval_without_an_upper_end_is_a_band_that_is_open_above() -> None:
    band = Series(
        name="band",
        x=[0, 1, 2, 3, 4],
        y=[0.0, 0.0, 4.0, 4.0, None],
        high=[None, 8.0, None, 16.0, None],
        kind="band",
    )
    drawn = str(draw(Chart(title="x", caption="", unit="", series=[band], is_log=True), 4))
    way, _ = re.findall(r'class="band first" d="([^"]+)"', drawn)  # the second is its mark
    corners = [tuple(map(float, c.split())) for c in way.strip("MZ").split("L")]
    x = [LEFT + (WIDE - LEFT - RIGHT) * i / 4 for i in (0, 0, 1, 2, 3)]
    assert [a for a, _ in corners] == pytest.approx([*x, *reversed(x)], abs=0.1)
    tops, lows = [b for _, b in corners[1:5]], [b for _, b in corners[:4:-1]][1:]
    assert tops[0] == tops[2] == TOP and TOP < tops[3] < tops[1]
    assert tops[1] < lows[3] == lows[2] < lows[1] == lows[0]


def test_changes_are_those_of_the_record(run: Path, shown: Report) -> None:
    steps = lines_of(run / "metrics.jsonl", "step")
    batch = series_of(shown, "Batch")
    stairs = list(zip(batch["batch"].x, batch["batch"].y))
    for before, now in zip([None, *steps], steps):
        begin = 0 if before is None else before["consumed_samples"]
        assert [y for x, y in stairs if x <= begin][-1] == now["global_batch_size"]
    decisions = [d for d in lines_of(run / "journal.jsonl", "decision") if d["applied"]]
    assert batch["change"].x == [d["consumed_samples"] for d in decisions]
    assert batch["change"].y == [d["decision"]["to"]["global_batch_size"] for d in decisions]
    for tip, decided in zip(batch["change"].tips, decisions, strict=True):
        sizes, _, why = decided["decision"]["reason"].partition("; ")
        assert why in tip and sizes not in tip  # the headline has the sizes
    (moved,) = lines_of(run / "journal.jsonl", "relayout")
    (chart,) = [chart for chart in shown.charts if chart.title == "Layout"]
    named = [chart.names[int(y or 0)] for y in chart.series[0].y]
    assert named[0] == "tp1.pp1.dp4" and named[-1] == moved["to"]
    outcomes = lines_of(run / "journal.jsonl", "outcome")
    names = ("samples_per_s_before", "predicted_samples_per_s", "samples_per_s")
    speeds = [[f"{o[name]:.3g}" for name in names] for o in outcomes]
    assert [[cell.split()[0] for cell in line[3:6]] for line in shown.changes] == speeds


def test_the_journal_has_every_decision_with_its_numbers(run: Path, shown: Report) -> None:
    decisions = lines_of(run / "journal.jsonl", "decision")
    told = [line for line in shown.journal if line.group in ("change", "stay")]
    assert [line.iteration for line in told] == [d["iteration"] for d in decisions]
    for line, d in zip(told, decisions, strict=True):
        assert d["decision"]["reason"].endswith(line.why) and len(line.why) > 20
    changed = [(d, line) for d, line in zip(decisions, told) if d["decision"]["kind"] != "stay"]
    assert changed
    for decision, line in changed:
        about = decision["decision"]
        chosen = next(c for c in about["candidates"] if c["row"] == about["to"])
        assert line.gain == gain(about["gain"], about["gain_sd"])
        assert line.needed == chosen["needed"]
        assert "+-" in line.gain, "a prediction has its doubt"
        assert "samples/s" in line.outcome


def test_candidates_are_those_that_the_last_decision_compared(run: Path, shown: Report) -> None:
    last = lines_of(run / "journal.jsonl", "decision")[-1]
    compared = last["decision"]["candidates"]
    assert len(compared) == len(shown.candidates) > 2
    for candidate, line in zip(compared, shown.candidates):
        row = candidate["row"]
        assert line[0] == f"tp{row['tp']}.pp{row['pp']}.dp{row['dp']}"
        assert line[1:3] == [str(row["global_batch_size"]), str(row["micro_batch_size"])]
        assert line[3:5] == [f"{row['samples_per_s']:.4g}", row["source"]]
        assert line[5] == gain(candidate["gain"], candidate["gain_sd"])
        assert line[6] == percent(candidate["needed"]).replace("-", "")
        assert line[7] == candidate["blocked_reason"] or "allowed"
    assert shown.decision.startswith(f"Decision 6 after step {last['iteration']}. ")
    assert last["decision"]["reason"] in shown.decision


def test_a_move_of_a_schedule_is_one_row_in_plain_words(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path)
    run.step(12)
    sizes: dict[str, Any] = {"seq_length": 128, "global_batch_size": 8, "micro_batch_size": 2}
    where, to = (run.iteration, run.samples), "tp1.pp2.dp2"
    run.tracker.event("phase", *where, phase=1, rotary_base=10000, **sizes)
    run.journal.write("segment", iteration=12, consumed_samples=96, **sizes)
    run.tracker.event("relayout.begin", *where, to=to)
    run.tracker.event("relayout.commit", *where, to=to)
    run.tracker.event("layout", *where, layout=to)
    outcome = {"kind": "moved", "reason": "", "phases": {"copy": 0.25}, "pause_s": 0.25}
    about: dict[str, Any] = {"number": None, "start": "tp1.pp1.dp4", "to": to, "outcome": outcome}
    run.tracker.event("relayout", *where, **about)
    run.step(3)
    report = report_of(RunReader(tmp_path))
    begins = "of the schedule begins: batch 8 in micro-batches of 2, samples of 128 tokens"
    rows = [(x.what, x.why, x.outcome) for x in report.journal if x.iteration == 12]
    assert rows == [
        (f"Phase 1 {begins}", "", ""),
        (
            "Change of layout tp1.pp1.dp4 to tp1.pp2.dp2",
            "as --layout-schedule says",
            "the change took 0.25 s",
        ),
    ]
    assert "0.25 s changes of layout" in report.facts["of this"]
    alone = report_of(RunReader(tmp_path / "journal.jsonl"))
    assert f"The next phase {begins}" in [x.what for x in alone.journal]


def test_the_time_of_a_launch_is_told_to_its_last_second(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path)
    run.step(4)
    run.evaluate(2.5)
    run.step(1)
    run.end()
    # The record begins at 1000 s, steps are of 2 s, the evaluation of 3 s, and 10 s are of nothing.
    times = iter([1000.0, 1007.0, 1009.0, 1011.0, 1013.0, 1016.0, 1018.0, 1028.0])

    def timed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for record, t in zip(records, times, strict=True):
            record |= {"t": t, **({"launched_t": 990.0} if t == 1000.0 else {})}
            if record["kind"] == "step":
                record["elapsed_per_iteration_ms"] = 2000.0
        return records

    rewrite(tmp_path / "metrics.jsonl", timed)
    facts = report_of(RunReader(tmp_path)).facts
    assert facts["start"] == (
        "17 s to the end of the first step: 10 s for processes and imports, 5 s for data and "
        "model, 2 s for the step"
    )
    parts = facts["of this"].split("; ")
    assert parts == [
        "10 s steps (35.7 %)",
        "3 s evaluations",
        "5 s building data and model",
        "10 s other (deciding, measuring, records)",
    ]


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
    shown = report_of(RunReader(tmp_path))
    loss = series_of(shown, "Loss")["step"]
    assert loss.y == [r["losses"]["lm loss"] for r in read_metrics(tmp_path) if r["kind"] == "step"]
    assert loss.y[20:] == [3.0] * 15 and len(loss.x) == 35
    (undone,) = [x for x in shown.journal if x.iteration == 30 and x.group != "run"]
    assert "undone" in undone.outcome
    assert series_of(shown, "Batch")["change"].x == [160]
    assert shown.decision.startswith("Decision 1 after step 20.")
    assert shown.facts["launch"] == "job.0.1, 1 restart, 1 crash"


def test_ranks_of_an_elastic_run_are_told_over_time(tmp_path: Path) -> None:
    def start(launch: str, iteration: int, ranks: int, why: str) -> dict[str, Any]:
        members = [[0, local, 0] for local in range(ranks)]
        about = {"kind": "run.start", "launch": launch, "layout": "tp1.pp1.dp1"}
        return {**about, **where(iteration), "members": members, "why": why}

    def step(launch: str, iteration: int) -> dict[str, Any]:
        about = {"kind": "step", "launch": launch, "losses": {"lm loss": 1.0}}
        sizes = {"global_batch_size": 8, "micro_batch_size": 1}
        return {**about, **where(iteration), **sizes, "elapsed_per_iteration_ms": 1000.0}

    def where(iteration: int) -> dict[str, int]:
        return {"iteration": iteration, "consumed_samples": 8 * iteration}

    records = [start("a", 0, 4, "start"), step("a", 1), step("a", 2)]
    records += [start("b", 1, 3, "loss"), step("b", 2), start("c", 2, 4, "join"), step("c", 3)]
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for i, record in enumerate(records):
            file.write(json.dumps({"v": 1, "t": 1000.0 + i, "m": float(i), **record}) + "\n")
    facts = report_of(RunReader(tmp_path)).facts
    assert facts["ranks"] == "4 then 3 after a loss then 4 after a join"
    assert facts["launch"] == "c, 0 restarts, 0 crashes, ranks were lost 1 time"
    # Three of six seconds were steps that count; one step was done again.
    assert "3 s steps (50.0 %)" in facts["of this"]
    assert "1 s steps that a restart did again" in facts["of this"]
    assert "2 s recoveries and joins" in facts["of this"]


def test_time_that_a_crash_has_wasted_is_told_from_time_between_launches(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, launch="job.0.0", train_iters=900)
    run.step(90)
    run.relaunch("job.0.1", iteration=50, samples=400)
    run.step(10)
    run.end()

    def timed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for i, record in enumerate(records):  # a second each, and ten minutes between the launches
            record["t"] = 1e9 + i + (600 if record["launch"] == "job.0.1" else 0)
        return records

    rewrite(tmp_path / "metrics.jsonl", timed)
    reader = RunReader(tmp_path)
    facts = report_of(reader).facts
    launches = [(x.name, x.iteration) for x in reader.history().launches]
    assert launches == [("job.0.0", 0), ("job.0.1", 50)]
    assert facts["step"].startswith("60 of 1,000,"), "of what the last step expects"
    parts = [part.partition(" s ") for part in facts["of this"].split("; ")]
    spent = {what: time for time, _, what in parts}
    seconds = {
        r["iteration"]: r["elapsed_per_iteration_ms"] / 1000
        for r in lines_of(tmp_path / "metrics.jsonl", "step")
    }
    assert float(spent["steps that a restart did again"]) == pytest.approx(
        sum(seconds[i] for i in range(51, 91)), rel=0.01
    )
    assert "10.0 min between launches" in facts["of this"]


def test_what_a_run_says_cannot_leave_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "<script>alert(1)<" / "script>&"
    run = WrittenRun(folder, copus_policy=HOSTILE)
    run.step(20)
    run.decide(reason=HOSTILE)
    run.tracker.event("alert", 20, 160, alert="x", line=HOSTILE)
    run.tracker.event("layout", 20, 160, layout=HOSTILE)
    run.step(5)
    run.journal.write("failure", iteration=20, error=HOSTILE)
    run.end(HOSTILE)
    shown = report_of(RunReader(folder))
    page = render(shown)
    assert page.count("alert(1)") > 5 and "<script" not in page and "<b " not in page
    assert not re.search(r"<(link|img|iframe)[^>]*(src|href)=.(?!data:,)", page)
    assert "script-src" not in page and "default-src 'none'" in page
    said = " ".join(HOSTILE.encode(errors="replace").decode().replace("\u2028", " ").split())
    assert said in [line.why for line in shown.journal] and said in unescape(page)


@pytest.mark.parametrize("steps", [None, 0, 1])
def test_a_run_that_has_hardly_begun_has_a_page(tmp_path: Path, steps: int | None) -> None:
    if steps is not None:
        WrittenRun(tmp_path).step(steps)
    shown = report_of(RunReader(tmp_path))
    assert len(series_of(shown, "Loss")["step"].y) == (steps or 0)
    assert render(shown).count("<svg") == (6 if steps else 0), "each for a desk and a phone"


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            {},
            "the last 20 % of the run (tau = B / (lr x weight decay x D)) at batch 8",
        ),
        (
            {"copus_reference_batch_size": 16},
            "the last 40 % of the run (tau = B / (lr x weight decay x D)) at batch 16",
        ),
        ({"optimizer": "sgd"}, None),
        ({"weight_decay": 0.0}, None),
        ({"lr": "fast"}, None),
    ],
)
def test_the_timescale_of_the_weight_decay_is_told(
    tmp_path: Path, more: dict[str, Any], told: str | None
) -> None:
    rates = {"optimizer": "adam", "lr": 0.1, "weight_decay": 0.1, "initial_global_batch_size": 8}
    WrittenRun(tmp_path, **{**rates, **more}).step(2)
    said = report_of(RunReader(tmp_path)).facts.get("weight decay")
    assert said == (told and f"the weights average the updates of {told}")


def test_of_a_run_its_journal_alone_makes_a_page(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "journal.jsonl", tmp_path / "kept.journal.jsonl")
    shown = report_of(RunReader(tmp_path / "kept.journal.jsonl"))
    assert len([x for x in shown.journal if x.group in ("change", "stay")]) == 6
    assert shown.candidates and "the change took 1.88 s (2 s predicted)" in render(shown)


def test_the_page_says_what_there_was_to_gain(run: Path, shown: Report, tmp_path: Path) -> None:
    assert "to gain" not in shown.facts  # its decisions record none
    record_run(tmp_path)
    record_decisions(tmp_path)
    headroom = Headroom.from_json(lines_of(tmp_path / "journal.jsonl", "decision")[-1]["headroom"])
    was = headroom.words(is_over=True)
    assert "could have saved" in was and report_of(RunReader(tmp_path)).facts["to gain"] == was
    hold(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:-1]))
    assert report_of(RunReader(tmp_path)).facts["to gain"] == str(headroom)
    # A later launch that knows nothing does not repeat it.
    DecisionLog(tmp_path).write("start", mode="act", flags={}, headroom=None)
    assert "to gain" not in report_of(RunReader(tmp_path)).facts


COLUMN = st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=400)


@given(COLUMN, st.integers(1, 60))
def test_fewer_points_keep_both_ends_extremes_and_gaps(
    column: list[float | None], most: int
) -> None:
    chosen = thinned(column, most)
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
    chosen = thinned(loss)
    assert spikes.keys() <= set(chosen) and len(chosen) <= MAX_POINTS + 1
    batch = [8 << (i // 9_999) for i in range(100_000)]
    assert [batch[i] for i in turns(batch)][:-1] == sorted(set(batch))


@given(st.lists(st.none() | st.floats(-100, 100), max_size=60), st.integers(1, 70))
def test_a_running_mean_is_that_of_the_last_values(values: list[float | None], window: int) -> None:
    for i, mean in enumerate(running_mean(values, window)):
        known = [v for v in values[max(i + 1 - window, 0) : i + 1] if v is not None]
        assert mean == (pytest.approx(math.fsum(known) / len(known)) if known else None)


NUMBERS = st.lists(st.none() | st.floats(-1e300, 1e300), min_size=1, max_size=30)


@given(NUMBERS, st.booleans(), st.sampled_from([WIDE, NARROW]))
def test_any_numbers_are_drawn_within_the_picture(
    values: list[float | None], is_log: bool, width: int
) -> None:
    series = [
        Series(name="a", x=range(len(values)), y=values, kind=kind)
        for kind in ("line", "stairs", "points")
    ]
    chart = Chart(title="x", caption="", unit="", series=series, is_log=is_log)
    drawn = str(draw(chart, len(values) - 1, width))
    assert "nan" not in drawn and "inf" not in drawn
    for x, y in re.findall(r'cx="([^"]+)" cy="([^"]+)"', drawn):
        assert LEFT <= float(x) <= width and 0 <= float(y) <= chart.height + 40


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


def test_a_page_that_follows_is_written_until_the_run_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, page, seen = WrittenRun(tmp_path / "run"), tmp_path / "report.html", []
    run.step(12)

    def while_it_waits(seconds: float) -> None:
        text = page.read_text()
        reload_s = re.findall(r'http-equiv="refresh" content="([0-9.]+)"', text)
        (steps,) = re.findall(r"<dt>step</dt><dd>(\d+) of", text)
        seen.append((seconds, *reload_s, steps))
        run.step(3) if len(seen) < 3 else run.end()

    monkeypatch.setattr(tool.time, "sleep", while_it_waits)
    assert tool.main([str(run.path), "-o", str(page), "--follow", "5"]) == 0
    assert seen == [(5.0, "5.0", "12"), (5.0, "5.0", "15"), (5.0, "5.0", "18")]
    last = page.read_text()
    assert "refresh" not in last and "<dt>state</dt><dd>done</dd>" in last
    assert list(tmp_path.glob("*.unfinished")) == []


def test_a_page_says_when_its_run_falls_silent_or_is_asked_for_something(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path)
    run.step(3)
    path = tmp_path / "metrics.jsonl"
    path.write_text(re.sub(r'"t":[0-9.]+', '"t":1.0', path.read_text()))
    reader = RunReader(tmp_path)
    facts = report_of(reader).facts
    assert facts["state"].startswith("training") and "asked" not in facts
    (tmp_path / PAUSE_FILE).touch()
    assert "pause the controller" in report_of(reader).facts["asked"]
    os.utime(tmp_path / LOCK_FILE, (1.0, 1.0))
    assert report_of(reader).facts["state"].startswith("lost: no sign of life")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nowhere", "-o", "x.html"], 5, "--run-dir"),
        (["RUN", "-o", "no/such/folder/x.html"], 5, "-o"),
        (["RUN", "-o", "x.html", "--follow", "0"], 2, "--follow 0"),
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


def test_a_change_is_not_told_twice(shown: Report) -> None:
    changes = [line for line in shown.journal if line.what.startswith("Changed ")]
    assert changes and not any(" -> " in line.why.split(";")[0] for line in changes)
