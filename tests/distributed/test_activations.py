"""What a layer keeps for its backward pass is predicted to the byte on every rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.launch import run_ranks

WORKER = Path(__file__).with_name("worker_activations.py")


@pytest.mark.timeout(260)
def test_saved_bytes_of_a_layer(tmp_path: Path) -> None:
    run_ranks([WORKER, tmp_path], 4, timeout_s=240).check()
    rows = json.loads((tmp_path / "result.json").read_text())
    assert len(rows) == 12
    for row in rows:
        assert row["counted"] == [row["predicted"]] * 4, row["case"]
