"""A checkpoint written with padding between buckets resumes as if it had never been written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.worker_padding import AFTER, BEFORE
from tests.helpers.launch import run_ranks
from tests.helpers.on_ranks import program


def test_padding_between_buckets_is_not_stored(tmp_path: Path) -> None:
    result = run_ranks(program("worker_padding", tmp_path), 3, timeout_s=480).check()
    losses = json.loads((tmp_path / "result.json").read_text())
    assert len(losses["same"]) == len(losses["pipeline"]) == AFTER
    assert losses["first"] == losses["whole"][:BEFORE]
    assert losses["same"] == losses["whole"][BEFORE:]
    assert losses["pipeline"] == pytest.approx(losses["whole"][BEFORE:], rel=1e-6)
    assert "data corruption" not in result.stderr
