"""A disk that sticks at any call of a save holds no run up: the save fails, or the record does
without it, one line says so, and the next save commits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.trainer.checkpoint import files
from megatron.trainer.common.core_version import since
from megatron.trainer.logging.metrics import read_metrics
from tests.distributed.worker_stuck_disk import STALL_S
from tests.helpers import stuck_disk
from tests.helpers.jobs import losses_of
from tests.helpers.launch import run_ranks
from tests.helpers.nightly import case
from tests.helpers.on_ranks import program
from tests.helpers.text import text_prefix

pytestmark = [
    pytest.mark.waits,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(stuck_disk.missing()), reason=stuck_disk.missing()),
]
TIMEOUT_S = 900
HELD = (f"has not answered for {STALL_S:g} s", f"has not moved on for {STALL_S:g} s")
WITHOUT_FAILURE = ("statvfs", "unlink", "list save", "metrics.jsonl")
"""Calls that a checkpoint does without: free room, removal of an older one, and the record."""


def train(folder: Path, mode: str) -> Any:
    text_prefix()
    own = program("worker_stuck_disk", folder, mode)
    run_ranks(own, 2, timeout_s=TIMEOUT_S, env=stuck_disk.environment(folder)).check()
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("mode", [case("sync", daily=False), "async"])
def test_no_call_that_a_disk_holds_holds_the_run_up(tmp_path: Path, mode: str) -> None:
    result = train(tmp_path, mode)
    calls = {int(iteration): call for iteration, (_, call) in result["calls"].items()}
    for wanted in ("open .metadata.tmp", "write metadata.json", "statvfs save"):
        assert wanted in calls.values()
    # From 0.19 on the common state lies among the tensors.
    assert ("open common.pt" in calls.values()) is not since("0.19")
    assert any("latest_checkpointed_iteration" in call for call in calls.values())
    assert sorted(i for held in result["held"] for i in held) == sorted(calls)
    root = tmp_path / "stuck" / "save"
    records = read_metrics(root / "run")
    failed = {r["iteration"]: r["reason"] for r in records if r["kind"] == "checkpoint.failed"}
    committed = {r["iteration"] for r in records if r["kind"] == "checkpoint.commit"}
    assert committed | set(failed) == set(range(1, 2 * len(calls) + 1))
    assert set(failed) <= set(calls), "whatever is held, the next save commits"
    assert all(any(held in reason for held in HELD) for reason in failed.values())
    for iteration, call in calls.items():
        assert iteration in failed or any(part in call for part in WITHOUT_FAILURE), call
    assert all(not files.damage(files.folder_of(root, i)) for i in files.complete_iterations(root))
    assert losses_of(root / "run") == losses_of(tmp_path / "plain" / "save" / "run")
