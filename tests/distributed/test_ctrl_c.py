"""Ctrl-C below a real torchrun: a checkpoint that goes on exactly, and no traceback of ours."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.trainer.checkpoint import files
from tests.helpers import processes
from tests.helpers.jobs import ENDLESS, TINY, losses_of, train
from tests.helpers.launch import ROOT
from tests.helpers.nightly import case

pytestmark = [pytest.mark.waits, pytest.mark.timeout(900)]
WORKER = Path(__file__).with_name("worker_ways_out.py")
BASE = " ".join([TINY, *ENDLESS])


class Torchrun:
    """torchrun with two ranks, in a session of its own, as the only job of a terminal."""

    def __init__(self, program: Path, flags: list[str], log: Path, env: dict[str, str]) -> None:
        self.mark, self.log = uuid.uuid4().hex, log
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", str(program), *flags]
        env = {**os.environ, "PYTHONPATH": str(ROOT), processes.MARK: self.mark, **env}
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with log.open("wb") as out:
            self.child = subprocess.Popen(
                command, env=env, stdout=out, stderr=out, start_new_session=True
            )

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 300
        while not condition():
            assert self.child.poll() is None and time.monotonic() < deadline, self.said
            time.sleep(0.05)

    def all_import_torch(self) -> bool:
        """Whether torchrun and its ranks have begun to."""
        maps = [Path(f"/proc/{pid}/maps") for pid in processes.marked(self.mark)]
        with contextlib.suppress(OSError):
            return sum("libtorch" in path.read_text() for path in maps) == 3
        return False

    def type_ctrl_c(self) -> None:
        os.killpg(self.child.pid, signal.SIGINT)

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self) -> str:
        """What was printed in all; nothing is left of it, and no rank had to be killed."""
        self.child.wait(timeout=300)
        said = self.said
        assert not processes.marked(self.mark), said
        assert "SIGKILL" not in said and "KeyboardInterrupt" not in said, said
        # torchrun itself has a traceback.
        ours = [x for x in said.splitlines() if f'File "{ROOT}/' in x and ".venv" not in x]
        assert ours == [], said
        return said


@contextlib.contextmanager
def torchrun(
    flags: list[str], folder: Path, program: Path = ROOT / "pretrain_gpt.py", **env: str
) -> Iterator[Torchrun]:
    it = Torchrun(program, flags, folder / "log", env)
    try:
        yield it
    finally:
        processes.end_marked(it.mark)
        it.child.wait()


def kinds(run: Path) -> list[str]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["kind"] for line in lines if line.endswith("}")]


def test_ctrl_c_saves_and_the_run_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, uninterrupted: list[float]
) -> None:
    save = tmp_path / "save"
    own = ["--save", str(save), "--load", str(save)]
    with torchrun([*BASE.split(), *own, "--run-dir", str(save)], tmp_path) as job:
        job.wait_for(lambda: kinds(save).count("step") >= 3)
        job.type_ctrl_c()
        said = job.end()
    latest = files.read_latest(save)
    assert latest is not None and f"stopped after iteration {latest}: SIGINT" in said
    steps = len(uninterrupted)
    assert files.complete_iterations(save) == [latest] and 3 <= latest < steps
    assert said.count("Ctrl-C: finishes the step") == 1, "rank 0 says it"
    assert kinds(save)[-1] == "run.end"
    train([*own, "--exit-interval", str(steps)], 2, save, base=BASE).check()
    assert losses_of(save) == uninterrupted


def test_a_second_ctrl_c_leaves_at_once(tmp_path: Path) -> None:
    """During a save that does not come to its end."""
    way = json.dumps({"at": "never", "writers_hang": True})
    flags = [*BASE.split(), "--save", str(tmp_path / "save")]
    with torchrun(flags, tmp_path, WORKER, COPUS_TEST_WAY=way) as job:
        job.wait_for(lambda: "step" in kinds(tmp_path / "save"))
        job.type_ctrl_c()
        job.wait_for(lambda: "checkpoint.begin" in kinds(tmp_path / "save"))
        time.sleep(1.0)  # a person's second one
        job.type_ctrl_c()
        assert "Ctrl-C again: leaves at once" in job.end()
    assert files.read_latest(tmp_path / "save") is None


@pytest.mark.parametrize("after", [case("start", daily=False), "lock"])
def test_ctrl_c_before_training_leaves_quietly(tmp_path: Path, after: str) -> None:
    """During the imports, and while the run is put together."""
    save = tmp_path / "save"
    with torchrun([*BASE.split(), "--save", str(save)], tmp_path) as job:
        locked = save / "control" / "lock"
        job.wait_for(locked.exists if after == "lock" else job.all_import_torch)
        job.type_ctrl_c()
        job.end()
    assert "step" not in kinds(save) or files.complete_iterations(save)
