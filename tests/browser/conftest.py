"""One browser for all tests of this folder, and runs for it to look at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.browser import Browser, browser, missing
from tests.helpers.written_runs import usual_run


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """A browser that is open, or the reason why there is none."""
    if reason := missing():
        pytest.skip(reason)
    with browser() as opened:
        yield opened


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 120 steps with changes of batch and layout."""
    return usual_run(tmp_path_factory.mktemp("runs") / "usual").path


LONG_STEPS, LONG_EVERY = 30_000, 15


@pytest.fixture(scope="session")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 30,000 steps and 2,000 decisions."""
    path = tmp_path_factory.mktemp("runs") / "long"
    return usual_run(path, steps=LONG_STEPS, every=LONG_EVERY).path
