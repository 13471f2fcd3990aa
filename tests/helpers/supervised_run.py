"""A supervised run that can be hurt from outside, and what must be true of it when it is done.

The run is the one people start: the supervisor, `pretrain_gpt.py` and its helper processes. What
hurts it looks at the run directory only, as an operator could.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from megatron.trainer.checkpoint import files
from megatron.trainer.logging.metrics import METRICS_FILE, decode, read_metrics
from tests.helpers import processes
from tests.helpers.jobs import TINY, steps_of
from tests.helpers.launch import ROOT

STEPS, INTERVAL = 90, 15
"""Steps of a run, and between saves and evaluations."""
FLAGS = [*TINY.split(), "--train-iters", str(STEPS), "--eval-interval", str(INTERVAL)]
FLAGS += ["--eval-iters", "8", "--use-distributed-optimizer"]
MOMENTS = ("any", "start", "save", "commit", "evaluation")
MAX_S = 300.0
"""Nothing takes longer."""
POLL_S, _GONE_S = 0.005, 30.0


class Run:
    """A run under a supervisor, and its processes.

    Args:
        folder: new or of an earlier start.
        flags: more flags of the trainer.
        ranks: of the run.
        env: more of the environment.
        log: name of the file in the folder that takes what is said.
    """

    def __init__(
        self,
        folder: Path,
        flags: Sequence[str] = (),
        *,
        ranks: int = 2,
        env: Mapping[str, str] | None = None,
        log: str = "log",
    ) -> None:
        self.folder, self.ranks = folder, ranks
        self._env, self._log = dict(env or {}), folder / log
        folder.mkdir(parents=True, exist_ok=True)
        self.save, self.mark = folder / "save", uuid.uuid4().hex
        words = [*FLAGS, *flags, "--save", "save", "--load", "save"]
        self._words = [*words, "--save-interval", str(INTERVAL)]
        self._child: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def start(self) -> None:
        """The command, as a person would give it again."""
        self.starts += 1
        self._child = self.spawn(["--nproc-per-node", str(self.ranks)])

    def spawn(self, own: Sequence[str], inside: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Starts a supervisor.

        Args:
            own: flags of it.
            inside: what to start it with.
        """
        env = {**os.environ, "PYTHONPATH": str(ROOT), processes.MARK: self.mark}
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **self._env}
        command = [*inside, sys.executable, "-m", "copus_ext.launch.supervisor", *own]
        command += ["--restart-wait", "0"]
        command += ["--max-crashes", "1000", "--max-crashes-per-hour", "1000"]
        command += ["--", str(ROOT / "pretrain_gpt.py"), *self._words]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command, cwd=self.folder, env=env, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def code(self) -> int | None:
        """How the supervisor ended; None while it runs."""
        return None if self._child is None else self._child.poll()

    @property
    def log(self) -> str:
        """What was said."""
        return self._log.read_text(errors="replace")

    def finish(self, timeout_s: float = MAX_S) -> int | None:
        """Waits for the end; None if it does not come."""
        assert self._child is not None
        try:
            return self._child.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def gone(self, timeout_s: float = _GONE_S) -> bool:
        """Waits until no process of it is left."""
        return processes.wait_until(lambda: not processes.marked(self.mark), timeout_s)

    def end(self) -> None:
        processes.end_marked(self.mark)
        if self._child is not None:
            self._child.wait()

    def find(self, victim: str) -> list[int]:
        """Ids of the processes that a name stands for, as far as they are there."""
        assert self._child is not None
        if victim == "supervisor":
            return [self._child.pid]
        if victim == "all":
            return processes.marked(self.mark)
        launchers = _children(self._child.pid)
        if victim == "launcher":
            return [p.pid for p in launchers]
        ranks = [rank for launcher in launchers for rank in _children(launcher.pid)]
        number = {_local_rank(p): p.pid for p in ranks}
        if victim == "writer":
            return [p.pid for pid in number.values() for p in _children(pid)][:1]
        found = number.get(victim.rpartition(" ")[2])
        return [] if found is None else [found]

    def records(self) -> list[dict[str, Any]]:
        try:
            lines = (self.save / METRICS_FILE).read_text(errors="replace").splitlines()
        except OSError:
            return []
        return [record for record in map(decode, lines) if record is not None]


def _children(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children()
    return []


def _local_rank(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        return process.environ().get("LOCAL_RANK", "")
    return ""


def _saves(run: Run) -> set[tuple[str, int]]:
    """Saves that are under way or were broken off."""
    found = set()
    for path in run.save.glob("*.unfinished"):
        with contextlib.suppress(OSError):
            found.add((path.name, path.stat().st_ino))
    return found


def _is_evaluating(records: list[dict[str, Any]]) -> bool:
    last = next((r for r in reversed(records) if r.get("kind") in ("step", "eval")), {})
    return last.get("kind") == "step" and last.get("iteration", 1) % INTERVAL == 0


def wait_for_moment(run: Run, moment: str, after_s: float) -> bool:
    """Waits for a moment of a run.

    Args:
        run: under way.
        moment: of `MOMENTS`, or `steps`: from the first step on.
        after_s: see `Kill`.

    Returns:
        Whether it came before the run was done.
    """
    begun, latest = time.monotonic(), latest_of(run)
    saves, known = _saves(run), len(run.records())
    moments: dict[str, Callable[[], bool]] = {
        "any": lambda: time.monotonic() - begun >= after_s,
        "start": lambda: time.monotonic() - begun >= after_s,
        "save": lambda: bool(_saves(run) - saves),
        "commit": lambda: latest_of(run) != latest,
        "evaluation": lambda: _is_evaluating(run.records()[known:]),
        "steps": lambda: any(r.get("kind") == "step" for r in run.records()[known:]),
    }
    is_moment = moments[moment]
    processes.wait_until(lambda: run.code is not None or is_moment(), MAX_S, poll_s=POLL_S)
    if moment not in ("any", "start"):
        time.sleep(after_s)
    return run.code is None


def send(pid: int, number: int) -> None:
    """Sends a signal to a process that may have gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def step_of(run: Run) -> int:
    return next((r["iteration"] for r in run.records()[::-1] if r.get("kind") == "step"), 0)


def num_launches(run: Run) -> int:
    """How often its ranks were started and came as far as to say so."""
    return sum(record.get("kind") == "run.start" for record in run.records())


def latest_of(run: Run) -> int | None:
    """The latest checkpoint, if there is one."""
    with contextlib.suppress(OSError, ValueError):
        return files.read_latest(run.save)
    return None


def process_names(run: Run) -> list[str]:
    """The processes of it that are there."""
    found = []
    for pid in processes.marked(run.mark):
        with contextlib.suppress(psutil.Error):
            found.append(" ".join(psutil.Process(pid).cmdline())[:120])
    return found


def problems_at_end(run: Run, reference: list[Any]) -> list[str]:
    """Waits for the end and checks everything that must be true then."""
    code = run.finish()
    if code != 0:
        return [f"the run ended with {code}: {run.log[-600:]}"]
    problems = [] if run.gone() else [f"left behind: {process_names(run)}"]
    return problems + state_problems(run.save, reference)


def history(save: Path) -> list[Any]:
    """What the steps of a run's committed history must have in common with another's."""
    fields = ("iteration", "losses", "grad_norm", "learning_rate", "consumed_samples")
    return [[step[field] for field in fields] for step in steps_of(save)]


def state_problems(save: Path, reference: list[Any]) -> list[str]:
    """What is wrong with a run that is done."""
    problems = []
    if (own := history(save)) != reference:
        at = next((i for i, (a, b) in enumerate(zip(own, reference)) if a != b), len(own))
        steps = f"{len(own)} steps of {len(reference)}"
        problems.append(f"{steps}, other than uninterrupted from {at} on")
    if files.read_latest(save) != STEPS:
        problems.append(f"the latest checkpoint is {files.read_latest(save)}")
    for iteration in files.complete_iterations(save):
        problems += files.damage(files.folder_of(save, iteration))
    odd = re.compile(r".*(\.unfinished|\.tmp\d*|/lock)$")
    left = [str(path.relative_to(save)) for path in save.rglob("*") if odd.match(str(path))]
    if left:
        problems.append(f"files are left: {left}")
    folders = {files.folder_of(save, i).name for i in files.complete_iterations(save)}
    stray = sorted(p.name for p in save.glob("iter_*") if p.name not in folders)
    if stray:
        problems.append(f"half-written checkpoints are left: {stray}")
    for name in ("journal.jsonl", METRICS_FILE):
        if (save / name).exists():
            lines = (save / name).read_text().splitlines()
            torn = sum(decode(line) is None for line in lines if line)
            starts = [r for r in read_metrics(save, superseded=True) if r["kind"] == "run.start"]
            if torn > len(starts):
                problems.append(f"{torn} torn lines in {name}")
    return problems


def uninterrupted(folder: Path) -> list[Any]:
    """Steps of the run that nobody hurts."""
    run = Run(folder)
    try:
        run.start()
        assert run.finish() == 0, run.log
    finally:
        run.end()
    return history(run.save)
