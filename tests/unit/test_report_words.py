"""A report says when samples were trained, and what of it was not measured."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from copus_ext.monitor import facts
from copus_ext.monitor.chart import NARROW, Chart, Series, draw
from copus_ext.monitor.report import Report, render, report_of
from copus_ext.monitor.run_files import RunReader
from tests.helpers.written_runs import WrittenRun, usual_run


def caption_of(report: Report, title: str) -> str:
    (chart,) = [chart for chart in report.charts if chart.title == title]
    return chart.caption


def test_ticks_of_samples_say_when_they_were_trained() -> None:
    series = Series(name="loss", x=[0, 100], y=[1.0, 2.0])
    chart = Chart(title="x", caption="", unit="", series=[series])
    clock = [(20.0, 60.0), (50.0, 120.0), (100.0, 5400.0)]
    drawn = str(draw(chart, 100, clock=clock))
    texts = re.findall(r'text-anchor="middle">([^<]+)</text>', drawn)
    late = ["60", "1.5 h", "80", "1.5 h", "100", "1.5 h"]
    assert texts == ["0", "20", "1.0 min", "40", "2.0 min", *late]


def test_no_time_below_the_samples_lies_on_the_one_before() -> None:
    series = Series(name="loss", x=[10.0, 20.0], y=[3.0, 2.0])
    chart = Chart(title="x", caption="", unit="", series=[series])
    clock = [(5.0, 0.00879), (10.0, 0.0407), (15.0, 0.0408), (20.0, 0.0409)]
    drawn = str(draw(chart, 24.0, NARROW, clock))
    times = re.findall(r'<text x="([0-9.]+)"[^>]*>(0[.]0[0-9]* s)<', drawn)
    assert times and times[0][1] == "0.00879 s"
    for (left, before), (right, after) in itertools.pairwise(times):
        assert float(right) - float(left) >= 4 * (len(before) + len(after))


def test_what_was_not_measured_is_told(tmp_path: Path) -> None:
    usual = report_of(RunReader(usual_run(tmp_path / "usual").path))
    text = render(usual)
    assert "by its own estimate" in usual.verdict and "compare_runs.py PLAIN_RUN" in text
    assert [samples for samples, _ in usual.clock[:20]] == [8 * i for i in range(1, 21)]
    assert "before a noise scale" not in caption_of(usual, "Batch")
    early = WrittenRun(tmp_path / "early")
    early.step(2)
    early.decide(reason="batch 8 -> 16; predicted to gain 410.6 %; by the published law alone")
    assert "before a noise scale" in caption_of(report_of(RunReader(early.path)), "Batch")


def test_a_time_is_not_called_a_profile() -> None:
    rows = [{"row": {"source": source}} for source in ("profiled", "corrected", "measured")]
    shown = facts.candidates({"decision": {"candidates": rows}})
    column = facts.CANDIDATE.index("known by")
    assert [row[column] for row in shown] == ["timed before", "corrected", "measured"]
