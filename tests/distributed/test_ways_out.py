"""Whatever way a run ends, it ends in time, and no process of it stays."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.trainer.checkpoint import files
from tests.distributed.worker_ways_out import SAID
from tests.helpers.jobs import TINY, steps_of, train
from tests.helpers.launch import RanksResult, free_port, run_ranks

pytestmark = pytest.mark.waits

WORKER = Path(__file__).with_name("worker_ways_out.py")
TIMEOUT_S = 120
STEPS = 2
SHORT_STALL = {"COPUS_SAVE_STALL_S": "8"}
"""A write that hangs is given up so soon."""
WHILE_SAVING = ["--train-iters", "9", "--save-interval", "1", "--async-save", "--num-workers", "1"]
"""From the second step on, with a process that reads data beside it."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a run that is done."""
    save = tmp_path_factory.mktemp("finished")
    flags = ["--train-iters", str(STEPS), "--save", str(save), "--load", str(save)]
    result = train(flags, 2, save / "run", timeout_s=TIMEOUT_S).check()
    assert result.orphans == 0
    return flags


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_finished_run_that_is_started_again_ends_at_once(
    tmp_path: Path, finished: list[str], ranks: int
) -> None:
    result = train(finished, ranks, tmp_path, timeout_s=TIMEOUT_S).check()
    assert f"(iteration {STEPS})" in result.stdout
    assert steps_of(tmp_path) == [] and result.orphans == 0


def leave(folder: Path, flags: list[str], ranks: int = 1, **way: Any) -> RanksResult:
    """A run that leaves as `worker_ways_out.py` can; each rank to its own end."""
    env = {"COPUS_TEST_WAY": json.dumps(way), **SHORT_STALL}
    program = [WORKER, *TINY.split(), *flags, "--save", folder]
    return run_ranks(program, ranks, timeout_s=TIMEOUT_S, env=env, ends_all=False)


@pytest.mark.parametrize(
    ("at", "ranks", "how", "code", "last"),
    [
        ("start", 1, "error", 1, f"ValueError: {SAID}"),
        ("step", 2, "error", 1, f"ValueError: {SAID}"),
        ("end", 1, "error", 1, f"ValueError: {SAID}"),
        ("step", 1, "usage", 2, f"pretrain_gpt.py: error: {SAID}"),
    ],
)
def test_an_error_ends_every_rank(
    tmp_path: Path, at: str, ranks: int, how: str, code: int, last: str
) -> None:
    result = leave(tmp_path, ["--train-iters", "2"], ranks, at=at, how=how)
    assert result.codes == (code,) * ranks and result.orphans == 0, result.tail()
    assert result.stderr.count(last) == ranks


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_ends_the_run_with_a_checkpoint(tmp_path: Path, name: str) -> None:
    result = leave(tmp_path, WHILE_SAVING, 2, at="step", how=name, rank=1).check()
    assert f"stopped after iteration 1: {name}" in result.stdout and result.orphans == 0
    assert files.complete_iterations(tmp_path) == [1]


def test_an_error_does_not_wait_for_a_checkpoint_that_is_never_written(tmp_path: Path) -> None:
    way = {"at": "step", "iteration": 2, "how": "error", "writers_hang": True}
    result = leave(tmp_path, WHILE_SAVING, 2, **way)
    assert result.codes == (1, 1) and result.orphans == 0, result.tail()
    assert files.read_latest(tmp_path) is None


def test_who_reads_what_a_killed_run_says_comes_to_its_end(tmp_path: Path) -> None:
    """While it saves, with data workers. torchrun ends the other rank."""
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    torchrun += ["--master-port", str(free_port()), str(WORKER), *TINY.split(), *WHILE_SAVING]
    command = shlex.join([sys.executable, "-m", *torchrun, "--save", str(tmp_path)])
    way = {"at": "step", "iteration": 2, "how": "SIGKILL", "rank": 0, "writers_hang": True}
    result = run_ranks(
        ["-c", "import os, sys; sys.exit(os.system(sys.argv[1]))", f"{command} 2>&1 | cat"],
        1,
        timeout_s=TIMEOUT_S,
        env={"COPUS_TEST_WAY": json.dumps(way), **SHORT_STALL},
    )
    assert result.orphans == 0 and "Signal 9 (SIGKILL)" in result.stdout, result.tail()
