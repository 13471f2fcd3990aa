"""A run writes the file that its flag names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.jobs import train

pytest.importorskip("prometheus_client")


@pytest.mark.timeout(300)
def test_a_run_writes_its_numbers(tmp_path: Path) -> None:
    path = tmp_path / "copus.prom"
    flags = ["--train-iters", "2", "--log-interval", "1", "--prometheus-textfile", str(path)]
    train(flags, 1, tmp_path / "run").check()
    text = path.read_text()
    assert re.search(r'^copus_iteration\{run="[^"]*run"\} 2\.0$', text, re.M), text
    assert re.search(r'^copus_running\{run="[^"]*run"\} 0\.0$', text, re.M), text
