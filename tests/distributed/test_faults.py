"""Drawn faults of a supervised run, one of each kind; `bench.faults` kills many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.drawn_faults import KINDS, drawn, run_case
from tests.helpers.supervised_run import uninterrupted

pytestmark = [pytest.mark.waits, pytest.mark.timeout(1200)]
CASES = {"clock": 2, "stop": 1}
"""Numbers of faults, by kind. `test_disk_full.py` fills disks."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Steps of the run that nobody hurts."""
    return uninterrupted(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("kind", CASES)
def test_a_run_gets_over_a_drawn_fault(kind: str, tmp_path: Path, reference: list[Any]) -> None:
    if why := KINDS[kind].why_not():
        pytest.skip(why)
    row = run_case(drawn(kind, 0, CASES[kind]), tmp_path / "run", reference)
    assert row["problems"] == [], "\n".join([str(row["what"]), *row["problems"]])
    assert row["what"] != "nobody was there"
