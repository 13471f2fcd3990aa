"""The files for Kubernetes, SkyPilot and Ray: their commands train on two nodes of this machine.
One is killed and started again, as the engine would, and the run goes on from its checkpoint."""

from __future__ import annotations

import os
import subprocess
import uuid
from pathlib import Path

import pytest

from megatron.trainer.checkpoint import files
from megatron.trainer.logging.metrics import read_metrics
from tests.helpers import processes
from tests.helpers.jobs import ENDLESS, TINY, losses_of, steps_of
from tests.helpers.launch import ROOT, free_port
from tests.helpers.manifests import NODES, Engine, Use, indexed_job, kubeflow, ray, skypilot
from tests.helpers.nightly import case

pytestmark = [pytest.mark.waits, pytest.mark.timeout(600)]
STEPS, EVERY = 100, 10
FLAGS = [*TINY.split(), *ENDLESS, "--exit-interval", str(STEPS)]


class Nodes:
    """Nodes of a cluster: here each is what one command has started."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.folder, self.save, self._engine = folder, folder / "run", engine
        self._mark = [f"{uuid.uuid4().hex}-{node}" for node in range(NODES)]
        self._child: dict[int, subprocess.Popen[bytes]] = {}
        self._use = Use(flags=FLAGS, run_dir=self.save, save_interval=EVERY, port=free_port())

    def start(self, node: int) -> None:
        command, more = self._engine(node, self._use)
        env = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", **more}
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        env[processes.MARK] = self._mark[node]
        with (self.folder / f"log{node}").open("ab") as log:
            self._child[node] = subprocess.Popen(
                command, cwd=self.folder, env=env, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self, node: int) -> None:
        """The process that the engine has started; what that has started must end with it."""
        self._child[node].kill()
        self._child[node].wait()
        assert processes.wait_until(lambda: not processes.marked(self._mark[node]), 60)

    def end(self) -> None:
        for node, child in self._child.items():
            processes.end_marked(self._mark[node])
            child.wait()

    def latest(self) -> int:
        try:
            return files.read_latest(self.save) or 0
        except OSError:
            return 0

    @property
    def log(self) -> str:
        return "".join(path.read_text()[-4000:] for path in sorted(self.folder.glob("log*")))

    def codes(self, timeout_s: float = 240) -> list[int]:
        try:
            return [self._child[node].wait(timeout_s) for node in range(NODES)]
        except subprocess.TimeoutExpired:
            pytest.fail(f"the nodes hang\n{self.log}")


@pytest.mark.parametrize(
    ("engine", "lost", "again"),
    [
        pytest.param(indexed_job, 1, [1], id="job"),
        case(kubeflow, 0, [0], daily=False, id="kubeflow"),
        # These end all nodes when one fails.
        case(skypilot, 1, [0, 1], daily=False, id="skypilot"),
        case(ray, 0, [0, 1], daily=False, id="ray"),
    ],
)
def test_a_run_goes_on_when_a_node_is_started_again(
    tmp_path: Path, uninterrupted: list[float], engine: Engine, lost: int, again: list[int]
) -> None:
    nodes = Nodes(tmp_path, engine)
    try:
        for node in range(NODES):
            nodes.start(node)
        assert processes.wait_until(lambda: nodes.latest() >= EVERY, 240), nodes.log
        nodes.kill(lost)
        for node in again:
            if node != lost:
                nodes.kill(node)
        for node in again:
            nodes.start(node)
        assert nodes.codes() == [0] * NODES, nodes.log
    finally:
        nodes.end()
    assert [step["iteration"] for step in steps_of(nodes.save)] == [*range(1, STEPS + 1)]
    assert losses_of(nodes.save)[: len(uninterrupted)] == uninterrupted
    first, *more = (r for r in read_metrics(nodes.save) if r["kind"] == "run.start")
    assert first["iteration"] == 0 and len(more) == 1, nodes.log
    assert EVERY <= more[0]["iteration"] < STEPS, "from the checkpoint"
    assert first["layout"] == more[0]["layout"] == "tp1.pp1.dp2", "on both nodes"
