"""A page of `report --follow` in a real browser: it follows the run and keeps what is chosen."""

from __future__ import annotations

from pathlib import Path

from copus_ext.commands.report import write
from copus_ext.monitor.report import ReportData
from tests.browser.browser import Browser
from tests.helpers.written_runs import WrittenRun

LAST_STEP = "document.querySelector('#p-loss').data[0].meta.x.steps.at(-1)"


def test_it_follows_the_file_and_keeps_zoom_and_choice(chromium: Browser, tmp_path: Path) -> None:
    run, page = WrittenRun(tmp_path / "run"), tmp_path / "report.html"
    run.step(30)
    data = ReportData([run.path])
    data.refresh()
    assert write(data, page, reload_s=0.5)
    chromium.look(1200, 900)
    chromium.open(page.as_uri())
    chromium.find("#axis input[value=samples]").click()
    chromium.do("Plotly.relayout('p-loss', {'xaxis.range': [50, 150]})")
    run.step(10)
    run.decide()
    run.step(10)
    data.refresh()
    assert write(data, page, reload_s=0.5)
    chromium.wait(f"window.Plotly && document.querySelector('#p-loss') && {LAST_STEP} === 50")
    chromium.wait("document.documentElement.dataset.ready === 'yes'")
    assert chromium.run("document.querySelector('#p-loss').layout.xaxis.range") == [50, 150]
    assert chromium.run("document.querySelector('#p-loss .xtitle').textContent") == "samples"
    assert chromium.run("document.querySelector('#axis input[value=samples]').checked")
    chromium.wait("document.querySelector('#t-journal tbody')?.textContent.includes('Change')")
    chromium.wait("document.querySelector('#live')?.textContent.includes('Updates itself')")
    run.end()
    data.refresh()
    assert not write(data, page, reload_s=0.5), "a run that is done is followed no more"
    chromium.wait("document.querySelector('#live') && !document.querySelector('#live').textContent")
    assert chromium.errors() == []


def test_it_says_when_it_is_written_no_more(chromium: Browser, tmp_path: Path) -> None:
    run, page = WrittenRun(tmp_path / "run"), tmp_path / "report.html"
    run.step(30)
    data = ReportData([run.path])
    data.refresh()
    write(data, page, reload_s=0.5)
    old = page.read_text()
    made = old.index('"made_t":') + len('"made_t":')
    page.write_text(old[:made] + "1" + old[old.index(",", made) :])
    chromium.look(380, 780, dark=True)
    chromium.open(page.as_uri())
    chromium.wait("document.querySelector('#live')?.textContent.includes('has ended')")
