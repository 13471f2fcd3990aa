"""The supervisor on one and two nodes: what is killed is started again or taken along."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.trainer.checkpoint import files
from megatron.trainer.logging.metrics import read_metrics
from tests.helpers import processes
from tests.helpers.jobs import ENDLESS, TINY, losses_of, steps_of
from tests.helpers.launch import ROOT, free_port

pytestmark = [pytest.mark.waits, pytest.mark.timeout(1200)]
WORKER = Path(__file__).with_name("worker_local_cpu.py")
FLAGS = [*TINY.split(), *ENDLESS, "--log-interval", "1"]


class Job:
    """Supervisors at work, one for each node of this machine."""

    def __init__(self, folder: Path, words: list[str], nodes: int, env: dict[str, str]) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        endpoint = f"127.0.0.1:{free_port()}"
        env = {**os.environ, "PYTHONPATH": str(ROOT), processes.MARK: self.mark, **env}
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self.children = []
        for node in range(nodes):
            command = [sys.executable, "-m", "copus_ext.launch.supervisor"]
            command += ["--nnodes", str(nodes), "--node-rank", str(node)]
            command += ["--rdzv-endpoint", endpoint, "--restart-wait", "0", *words]
            with (folder / f"log{node}").open("wb") as log:
                self.children.append(
                    subprocess.Popen(
                        command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True
                    )
                )

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("log*")))

    def said(self, node: int = 0) -> list[str]:
        lines = (self.folder / f"log{node}").read_text().splitlines()
        return [line for line in lines if line.startswith("supervisor: ")]

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 200) -> None:
        assert processes.wait_until(condition, timeout_s), self.log

    def codes(self, timeout_s: float = 400) -> list[int]:
        try:
            return [child.wait(timeout=timeout_s) for child in self.children]
        except subprocess.TimeoutExpired:
            pytest.fail(f"the supervisors hang\n{self.log}")


@contextlib.contextmanager
def job(folder: Path, words: list[str], nodes: int = 1, **env: str) -> Iterator[Job]:
    """Supervisors, none of whose processes outlives the block."""
    it = Job(folder, words, nodes, env)
    try:
        yield it
    finally:
        processes.end_marked(it.mark)
        for child in it.children:
            child.wait()


def program(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_two_nodes_go_on_after_a_kill_of_a_rank(tmp_path: Path, uninterrupted: list[float]) -> None:
    flags = [*FLAGS, "--exit-interval", "7"]
    words = ["--", str(WORKER), *flags, "--save", "run", "--save-interval", "4"]
    wishes = json.dumps({5: {"kill": 1}})
    with job(tmp_path, words, nodes=2, COPUS_TEST_ASK=wishes) as it:
        assert it.codes() == [0, 0], it.log
        assert not processes.marked(it.mark), "nothing is left"
    assert len(it.said()) == 1 and "under tp1.pp1.dp2 from iteration 4: rank 1 on" in it.said()[0]
    assert "was ended by SIGKILL" in it.said()[0] and it.said(1) == []
    run = tmp_path / "run"
    assert losses_of(run) == uninterrupted[:7]
    assert [s["consumed_samples"] for s in steps_of(run)] == [8 * (i + 1) for i in range(7)]
    starts = [record["launch"] for record in read_metrics(run) if record["kind"] == "run.start"]
    assert [name.rpartition(".")[2] for name in starts] == ["0", "1"]
    assert files.read_latest(run) == 7
    plan = json.loads((run / "control/next.json").read_text())
    assert plan["exit_code"] == 0 and plan["launch"].startswith(starts[0].rpartition(".")[0])


def test_what_a_node_had_is_taken_over_when_it_is_lost(tmp_path: Path) -> None:
    """The supervisor of a node is killed: its ranks go with it, those left start alone."""
    path = program(
        tmp_path,
        """
        import os, pathlib, subprocess, sys, time
        size = os.environ["WORLD_SIZE"]
        pathlib.Path("up" + os.environ["RANK"] + "of" + size).touch()
        if size == "2":
            # As a process that writes a checkpoint, in a session of its own.
            sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
            subprocess.Popen(sleep, start_new_session=True).wait()
        """,
    )
    words = ["--node-timeout-s", "8", "--", path, *FLAGS, "--run-dir", "run"]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with job(tmp_path, words, nodes=2, TMPDIR=str(temporary)) as it:
        it.wait_for(lambda: all((tmp_path / f"up{rank}of2").exists() for rank in (0, 1)))
        it.wait_for(lambda: len(processes.marked(it.mark)) == 8)
        assert len(list(temporary.glob("copus-*"))) == 2
        it.children[1].send_signal(signal.SIGKILL)
        it.wait_for(lambda: len(processes.marked(it.mark)) <= 4, 30)
        assert it.codes()[0] == 0, it.log
        assert not processes.marked(it.mark), "nothing is left"
    assert not list(temporary.glob("copus-*")), "not even of the node that was killed"
    assert (tmp_path / "up0of1").exists()
    assert any("node 1 shows no life" in line for line in it.said())


def test_a_run_that_cannot_go_on_says_all_on_one_screen(tmp_path: Path) -> None:
    path = program(
        tmp_path,
        """
        import os, time
        from copus_ext.launch.rank_side import leave_error
        if os.environ["RANK"] == "0":
            time.sleep(600)
        try:
            raise ValueError("no such luck")
        except ValueError as error:
            leave_error(error)
            raise
        """,
    )
    flags = [*FLAGS, "--run-dir", "run dir"]
    with job(tmp_path, ["--nproc-per-node", "2", "--", path, *flags]) as it:
        assert it.codes() == [1], it.log
        assert not processes.marked(it.mark), "nothing is left"
    assert it.log.count("supervisor: rank 1 on") == 2, "at each of two crashes"
    assert "    raise ValueError" in it.log.split("supervisor: rank 1 on")[1]
    screen = it.log.split("supervisor: given up: ")[1]
    assert screen.startswith("two crashes before the first step with the same error; the last: ")
    assert "ValueError: no such luck" in screen.splitlines()[0]
    assert "crashes     2, 2 without" in screen and "none: the flags name no --save" in screen
    assert screen.rstrip().endswith("--run-dir 'run dir'") and len(screen.splitlines()) < 10
