"""The live page in a real browser: it follows what is written and keeps what its reader has set."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from copus_ext.monitor import serve, source
from tests.browser.browser import Browser
from tests.helpers.written_runs import WrittenRun

TOKEN = "a-token-of-some-length"
STEPS = "document.querySelector('#p-loss').data[0].x.at(-1)"


@pytest.fixture
def followed(tmp_path: Path) -> WrittenRun:
    run = WrittenRun(tmp_path / "run")
    run.step(30)
    return run


@pytest.fixture
def server(followed: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> Iterator[serve.ReportServer]:
    monkeypatch.setattr(source, "POLL_S", 0.2)
    made = serve.make_server(followed.path, address="127.0.0.1", port=0, token=TOKEN)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def test_it_follows_the_files_and_keeps_zoom_and_choice(
    chromium: Browser, server: serve.ReportServer, followed: WrittenRun
) -> None:
    chromium.look(1200, 900)
    home = f"http://localhost:{server.server_address[1]}/"
    # Through the page that sets the cookie.
    chromium.open(f"{home}?token={TOKEN}")
    assert chromium.run("location.href") == home
    assert chromium.run(STEPS) == 30
    chromium.find("#axis input[value=samples]").click()
    chromium.do("Plotly.relayout('p-loss', {'xaxis.range': [50, 150]})")
    followed.step(10)
    followed.decide()
    followed.step(10)
    chromium.wait("document.querySelector('#p-loss').data[0].meta.x.steps.at(-1) === 50")
    assert chromium.run("document.querySelector('#p-loss').layout.xaxis.range") == [50, 150]
    assert chromium.run("document.querySelector('#p-loss .xtitle').textContent") == "samples"
    assert chromium.run("document.querySelector('#axis input[value=samples]').checked")
    chromium.wait("document.querySelector('#t-journal tbody').textContent.includes('Change')")
    chromium.wait("document.querySelector('#live').textContent.includes('Updates itself')")
    assert chromium.errors() == []


def test_it_says_when_nobody_answers_any_more(
    chromium: Browser, server: serve.ReportServer
) -> None:
    chromium.look(380, 780, dark=True)
    chromium.open(f"http://localhost:{server.server_address[1]}/?token={TOKEN}")
    server.session = "of another server"
    chromium.wait("document.querySelector('#live').textContent.includes('403')")
    server.shutdown()
    server.server_close()
    chromium.wait("document.querySelector('#live').textContent.includes('does not answer')")
