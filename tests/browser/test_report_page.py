"""The report in a real browser: it draws everything, complains of nothing and fits the screen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from copus_ext.commands import report as tool
from copus_ext.commands.report import write
from copus_ext.monitor.run_files import RunReader
from tests.browser.browser import Browser
from tests.browser.conftest import LONG_EVERY, LONG_STEPS
from tests.helpers.written_runs import WrittenRun
from tests.unit.test_report import HOSTILE

LARGEST_PAGE = 2_000_000
"""Bytes of the page of a long run."""
DESKTOP, PHONE = (1400, 900), (400, 780)
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
SHADES = "(s => [{}].map(c => s[c].match(/\\d+/g).map(Number)[0]))(getComputedStyle({}))"
DRAWN = (
    "[...document.querySelectorAll('svg')].filter(s => s.getClientRects().length"
    " && s.getBBox().width > 0.7 * s.viewBox.baseVal.width).length"
)
"""Pictures that the screen shows."""
TEXTS = (
    "[...document.querySelectorAll('svg')].filter(s => s.getClientRects().length).map(s =>"
    " [[s, s.parentElement], ...[...s.querySelectorAll('text')].map(t => [t, t])].map("
    "([e, t]) => (r => [t.textContent, r.left, r.top, r.right, r.bottom])"
    "(e.getBoundingClientRect())))"
)
"""Of every picture its own box and those of its texts: words, left, top, right, bottom."""
SMALLEST = 13.0
"""Pixels of a line of text that can still be read."""


def page_of(out: Path, run: Path) -> str:
    assert tool.main([str(run), "-o", str(out / "report.html")]) == 0
    return (out / "report.html").as_uri()


def goes_on(reader: RunReader, page: Path) -> bool:
    """Writes the page; whether the run goes on, so that the page asks for itself again."""
    _, more = write(reader, page, reload_s=1.0)
    return more


@pytest.fixture(scope="module")
def url(run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(tmp_path_factory.mktemp("out"), run)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("screen", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_draws_everything_and_fits(
    chromium: Browser, url: str, screen: tuple[int, int], dark: bool
) -> None:
    chromium.look(*screen, dark=dark)
    chromium.open(url)
    assert chromium.run(DRAWN) == 4
    assert chromium.run(OVERFLOW) <= 0
    assert chromium.errors() == []
    texts_can_be_read(chromium)
    ink, back = chromium.run(SHADES.format("'color', 'backgroundColor'", "document.body"))
    (label,) = chromium.run(SHADES.format("'fill'", "document.querySelector('svg text')"))
    assert (ink > back) == (label > 128) == dark
    heads = "document.querySelectorAll('th:not([scope=col])').length"
    assert chromium.run(heads) == 0 and chromium.run("document.querySelectorAll('th').length") > 10
    tip = "document.querySelector('circle.points title').textContent"
    assert "test after" in chromium.run(tip) or "valid after" in chromium.run(tip)


def texts_can_be_read(chromium: Browser) -> None:
    """No text of a picture lies on another, is cut, or is too small."""
    for (_, *picture), *texts in chromium.run(TEXTS):
        assert len(texts) > 4
        for (words, left, top, right, bottom), *others in (texts[i:] for i in range(len(texts))):
            assert bottom - top >= SMALLEST, words
            assert picture[0] <= left and right <= picture[2], f"{words} is cut"
            assert picture[1] <= top and bottom <= picture[3], f"{words} is cut"
            for other, *box in others:
                is_apart = right <= box[0] or box[2] <= left or bottom <= box[1] or box[3] <= top
                assert is_apart, f"{words} lies on {other}"


@pytest.mark.parametrize("screen", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("steps", [1, 3, 20, 1000])
def test_pictures_of_any_length_can_be_read(
    chromium: Browser, tmp_path: Path, screen: tuple[int, int], steps: int
) -> None:
    run = WrittenRun(tmp_path / "run")
    run.step(steps)
    run.decide()
    run.step(steps)
    run.end()
    chromium.look(*screen)
    chromium.open(page_of(tmp_path, run.path))
    texts_can_be_read(chromium)


def test_star_and_ring_lie_on_their_cells(chromium: Browser, url: str, run: Path) -> None:
    chromium.look(*PHONE)
    chromium.open(url)
    lines = (json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines())
    last = [line for line in lines if line["kind"] == "decision"][-1]
    for mark, filled in (("★", 100), ("○", None)):
        layout, batch, share = chromium.run(
            "(c => [c.parentElement.cells[0].textContent,"
            " c.closest('table').rows[0].cells[c.cellIndex].textContent,"
            " c.textContent.match(/\\d+/)[0]])([...document.querySelectorAll('.cells td')]"
            f".find(c => c.textContent.includes('{mark}')))"
        )
        assert filled in (None, int(share))
        if mark == "○":
            to = last["decision"]["to"]
            assert layout == f"tp{to['tp']}.pp{to['pp']}.dp{to['dp']}"
            assert batch == str(to["global_batch_size"])


def test_it_prints(chromium: Browser, url: str) -> None:
    chromium.look(*DESKTOP, dark=True)
    chromium.open(url)
    assert chromium.printed().startswith(b"%PDF")
    assert chromium.errors() == []


def test_what_a_run_says_stays_text(chromium: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    run = WrittenRun(folder, copus_policy=HOSTILE)
    run.step(20)
    run.decide(reason=HOSTILE)
    run.step(60)
    run.end(HOSTILE)
    chromium.look(*PHONE)
    chromium.open(page_of(tmp_path, folder))
    assert chromium.errors() == []
    assert chromium.run("document.querySelectorAll('img, [onerror], [onmouseover]').length") == 0
    assert chromium.run("document.scripts.length") == 0
    assert chromium.run("document.querySelector('h1').textContent") == folder.name
    assert chromium.run(OVERFLOW) <= 0


def test_a_long_run_is_a_small_page(chromium: Browser, long_run: Path, tmp_path: Path) -> None:
    url = page_of(tmp_path, long_run)
    assert (tmp_path / "report.html").stat().st_size < LARGEST_PAGE
    chromium.look(*DESKTOP)
    chromium.open(url)
    assert chromium.errors() == [] and chromium.run(DRAWN) == 4
    told = chromium.run("document.querySelector('#journal .quiet').textContent")
    assert f"of {LONG_STEPS // LONG_EVERY + 3} " in told


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_has_hardly_begun(chromium: Browser, tmp_path: Path, steps: int) -> None:
    folder = tmp_path / "young"
    folder.mkdir()
    WrittenRun(folder).step(steps)
    chromium.look(*PHONE)
    chromium.open(page_of(tmp_path, folder))
    assert chromium.errors() == []
    assert bool(chromium.run(DRAWN)) == (steps == 1)


def test_a_page_follows_the_file_until_the_run_is_done(chromium: Browser, tmp_path: Path) -> None:
    run, page = WrittenRun(tmp_path / "run"), tmp_path / "report.html"
    run.step(30)
    reader = RunReader(run.path)
    assert goes_on(reader, page)
    chromium.look(*DESKTOP)
    chromium.open(page.as_uri())
    told = "document.body?.textContent.includes('{}')"
    chromium.wait(told.format("Updates itself every 1.0 s"))
    run.step(10)
    run.decide()
    run.step(10)
    assert goes_on(reader, page)
    chromium.wait(told.format("50 of 1,000"))
    run.end()
    assert not goes_on(reader, page), "a run that is done is followed no more"
    chromium.wait(told.format("Done after 50 steps"))
    assert chromium.errors() == []
