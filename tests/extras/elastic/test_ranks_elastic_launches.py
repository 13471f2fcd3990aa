"""Strangers that connect with launchers, and processes of a save that is lost with its rank."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.trainer.logging.metrics import read_metrics
from tests.distributed.test_save_processes import (
    HARM,
    check,
    check_long_step,
    plain,
    train,
)
from tests.distributed.test_sockets import Launch, begin
from tests.helpers.jobs import losses_of

__all__ = ["begin", "plain"]  # fixtures
pytestmark = [pytest.mark.waits, pytest.mark.timeout(900)]
NESTED = b"[" * 20_000 + b"\n"
LOST_RANK = {"15:0": "stop", "15:1": "rank"}
"""A rank dies while neither has written, and another process stands still."""


def test_strangers_end_nothing_of_an_elastic_launch(begin: Callable[..., Launch]) -> None:
    launch = begin("--elastic")
    launch.wait_for_step(2)
    (path,) = launch.run.glob("control/elastic/*/node-0.json")
    contact = json.loads(path.read_text())
    host, _, port = contact["address"].rpartition(":")
    assert int(port) in launch.check_listeners()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    strangers = [socket.create_connection((host, int(port)), timeout=20) for _ in range(100)]
    for i, one in enumerate(strangers):
        said = (b"", NESTED, b'{"hello": 0, "token": ""}\n', os.urandom(500))[i % 4]
        try:
            one.sendall(said)
        except OSError:
            assert said  # closed after the first bytes
    launch.wait_for_step(launch.last_step() + 3)
    for one in strangers:
        one.close()
    assert launch.stop() == 85, launch.log[-4000:]
    starts = [r for r in read_metrics(launch.run, superseded=True) if r["kind"] == "run.start"]
    assert [r["generation"] for r in starts] == [1], "no rank and no node was lost"
    assert "Traceback" not in launch.log and contact["token"] not in launch.log


def test_elastic_ranks_go_on_and_leave_nothing_of_a_save_that_was_under_way(
    tmp_path: Path, plain: list[float]
) -> None:
    said = train(tmp_path, {**HARM, **LOST_RANK}, "--elastic", "--copy-interval", "5")
    notes = check(tmp_path, ranks=1)  # the run may end before the lost one has come again
    assert 5 in notes and "ended with -9" in notes[5][0]
    starts = [
        r for r in read_metrics(tmp_path / "run", superseded=True) if r["kind"] == "run.start"
    ]
    assert len(starts) > 1, said[-6000:]
    assert losses_of(tmp_path / "run") == pytest.approx(plain, rel=1e-6)


def test_a_long_step_hides_no_process_that_is_lost(tmp_path: Path, plain: list[float]) -> None:
    check_long_step(tmp_path, plain, "--elastic", "--copy-interval", "5")
