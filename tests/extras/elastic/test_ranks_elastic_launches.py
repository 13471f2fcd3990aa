"""Strangers that connect with launchers, and processes of a save that is lost with its rank."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
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
from tests.helpers.jobs import TINY, losses_of
from tests.helpers.launch import ROOT

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


@pytest.mark.parametrize("flags", ["--optimizer muon", "--fp8-format e4m3"])
def test_state_that_cannot_be_copied_is_refused_before_anything_is_built(
    tmp_path: Path, flags: str
) -> None:
    own = ["--restart-wait", "0", "--nproc-per-node", "2", "--elastic", "--"]
    words = f"{TINY} --device cpu --train-iters 2 --save run {flags}".split()
    command = [sys.executable, "-m", "copus_ext.launch.supervisor", *own, ROOT / "pretrain_gpt.py"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, *words],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    lines = [line for line in said.splitlines() if "--elastic copies the weights" in line]
    assert lines and all(line.endswith(f"drop {flags.removesuffix(' e4m3')}") for line in lines)
    assert "Traceback" not in said and not (tmp_path / "run/metrics.jsonl").exists()


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
