"""The report in a real browser: it draws everything, complains of nothing, fits the screen, and can
be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from copus_ext.commands import report as tool
from tests.browser.browser import Browser
from tests.browser.conftest import LONG_EVERY, LONG_STEPS
from tests.helpers.written_runs import WrittenRun, usual_run
from tests.unit.test_report import HOSTILE

FIGURES = ("loss", "course", "noise", "pauses", "predictions", "landscape")
LARGEST_PAGE = 8_000_000
"""Bytes of the page of a long run; 4.8 million are plotly's."""
DESKTOP, PHONE = (1200, 900), (380, 780)
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
DRAWN = (
    "document.querySelectorAll('#p-{0} .main-svg').length > 0 && "
    "document.querySelectorAll('#p-{0} .trace, #p-{0} .hm, #p-{0} .bars').length > 0"
)


def page_of(out: Path, *runs: Path) -> str:
    assert tool.main([*map(str, runs), "-o", str(out / "report.html")]) == 0
    return (out / "report.html").as_uri()


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
    assert [name for name in FIGURES if not chromium.run(DRAWN.format(name))] == []
    assert chromium.run(OVERFLOW) <= 0
    assert chromium.errors() == []
    ink, back = chromium.run(
        "(s => [s.color, s.backgroundColor].map(c => c.match(/\\d+/g).map(Number)[0]))"
        "(getComputedStyle(document.body))"
    )
    assert (ink > back) == dark
    drawn = chromium.run(
        "document.querySelector('#p-loss .xtick text').style.fill.match(/\\d+/g).map(Number)[0]"
    )
    assert (drawn > 128) == dark


def test_the_axis_can_be_chosen_with_the_keyboard(chromium: Browser, url: str) -> None:
    chromium.look(*DESKTOP)
    chromium.open(url)
    title = "document.querySelector('#p-loss .xtitle').textContent"
    assert chromium.run(title) == "steps"
    chromium.do("document.querySelector('#axis input').focus()")
    shown = []
    for _ in range(3):
        chromium.press("\ue014")  # the right arrow
        shown.append(chromium.run(title))
    assert shown[0].endswith("since the start") and shown[1:] == ["samples", "tokens"]
    last = chromium.run("document.querySelector('#p-loss').data[0].x.at(-1)")
    assert last == 128 * chromium.run(
        "document.querySelector('#p-loss').data[0].meta.x.samples.at(-1)"
    )


def test_the_journal_is_filtered(chromium: Browser, url: str) -> None:
    chromium.look(*DESKTOP)
    chromium.open(url)
    count = "document.querySelectorAll('#t-journal tbody tr').length"
    every = chromium.run(count)
    chromium.do(
        "const s = document.querySelector('#journal-group'); s.value = 'change';"
        "s.dispatchEvent(new Event('change', {bubbles: true}))"
    )
    changes = chromium.run(count)
    assert 0 < changes < every
    chromium.find("#journal-words").send_keys("layout")
    assert 0 < chromium.run(count) < changes
    assert "layout" in chromium.run("document.querySelector('#t-journal tbody').textContent")
    heads = chromium.run("document.querySelectorAll('table th:not([scope=col])').length")
    assert heads == 0 and chromium.run("document.querySelectorAll('table th').length") > 10


def test_a_decision_is_looked_up_in_the_landscape(chromium: Browser, url: str) -> None:
    chromium.look(*DESKTOP)
    chromium.open(url)
    words = "document.querySelector('#landscape-words').textContent"
    before = chromium.run(words)
    assert "goodput" in before and "It took" in before
    chromium.find("#landscape-back").click()
    assert chromium.run(words) != before
    chromium.do(
        "const s = document.querySelector('#landscape-pick'); s.selectedIndex = 0;"
        "s.dispatchEvent(new Event('change', {bubbles: true}))"
    )
    assert "After step 20 " in chromium.run(words)
    assert chromium.run("document.querySelector('#landscape-back').disabled")
    hover = "document.querySelector('#p-landscape').data[0].hovertext.flat().join()"
    assert "samples/s" in chromium.run(hover)
    chromium.do("document.querySelectorAll('#t-journal a')[2].click()")
    assert "After step 60 " in chromium.run(words)
    assert chromium.errors() == []


def test_a_point_says_what_it_is(chromium: Browser, url: str) -> None:
    chromium.look(*DESKTOP)
    chromium.open(url)
    chromium.do("Plotly.Fx.hover('p-loss', [{curveNumber: 0, pointNumber: 40}])")
    chromium.wait("document.querySelector('#p-loss .hovertext') !== null")
    assert chromium.run("document.querySelector('#p-loss .hovertext').textContent").startswith(
        "step 41: loss "
    )


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
    usual_run(tmp_path / "usual")
    chromium.look(*PHONE)
    chromium.open(page_of(tmp_path, folder, tmp_path / "usual"))
    assert chromium.errors() == []
    assert chromium.run("document.querySelectorAll('img, [onerror], [onmouseover]').length") == 0
    assert chromium.run("document.scripts.length") == 3
    assert chromium.run("document.querySelector('#p-loss .legend').textContent").count("<img") > 0
    assert chromium.run(OVERFLOW) <= 0


def test_a_long_run_is_a_page_of_a_few_megabytes(
    chromium: Browser, long_run: Path, tmp_path: Path
) -> None:
    url = page_of(tmp_path, long_run)
    assert (tmp_path / "report.html").stat().st_size < LARGEST_PAGE
    chromium.look(*DESKTOP)
    chromium.open(url)
    assert chromium.errors() == []
    points = chromium.run("document.querySelector('#p-loss').data[0].x.length")
    assert 1000 < points < 3000
    assert chromium.run("document.querySelector('#p-loss').data[0].x.at(-1)") == LONG_STEPS
    chosen = "document.querySelector('#journal-count').textContent"
    assert f"of {LONG_STEPS // LONG_EVERY + 3}" in chromium.run(chosen)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_has_hardly_begun(chromium: Browser, tmp_path: Path, steps: int) -> None:
    folder = tmp_path / "young"
    folder.mkdir()
    WrittenRun(folder).step(steps)
    chromium.look(*PHONE)
    chromium.open(page_of(tmp_path, folder))
    assert chromium.errors() == []
    assert bool(chromium.run(DRAWN.format("loss"))) == (steps == 1)
    assert not chromium.run("document.querySelector('#no-landscape').hidden")
