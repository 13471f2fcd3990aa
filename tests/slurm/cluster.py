"""A throw-away SLURM of four pretend nodes, and jobs on it."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.trainer.logging.metrics import read_metrics
from tests.helpers import processes
from tests.helpers.launch import CHILD_PATH, ROOT, stacks_of

SCRIPT = Path(__file__).with_name("slurm_dev.sh")
SCRIPTS = ROOT / "scripts" / "slurm"
NODES = 4
EXTRA = """
# Two minutes more than the limit, so that a slow machine fails no test.
OverTimeLimit=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=120 MaxTime=INFINITE
"""
_ANSWER_S = 30
_TAIL = 6000


def missing() -> str | None:
    """Why there can be no cluster here, or None."""
    if os.geteuid() != 0:
        return "slurmd needs root"
    lacking = [name for name in ("slurmctld", "slurmd", "sbatch") if not shutil.which(name)]
    if lacking:
        return f"no {lacking[0]}: apt-get install slurmctld slurmd slurm-client"
    return None


class JobHung(AssertionError):
    """What was waited for did not come; the message says how things stand."""


class Cluster:
    def __init__(self, env: dict[str, str], work: Path) -> None:
        self.env, self.work = env, work

    def run(self, *command: str | Path, timeout_s: float = _ANSWER_S) -> str:
        """What a command prints; it must end well and in time."""
        done = subprocess.run(
            [str(word) for word in command],
            env=self.env,
            cwd=self.work,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, f"{command} left with {done.returncode}: {done.stderr}"
        return done.stdout.strip()

    def submit(
        self, script: str | Path, flags: list[Any], *options: str, **variables: str | Path
    ) -> str:
        """Submits a shipped batch script from the folder of the test; returns the job's number."""
        named = [f"{name}={value}" for name, value in variables.items()]
        command = ["env", *named, "sbatch", "--parsable", *options, SCRIPTS / script, *flags]
        return self.run(*command)

    def fields(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        text = self.run("scontrol", "show", "job", "--oneliner", job)
        return dict(re.findall(r"(\w+)=(\S*)", text.split("\n")[0]))

    def state(self, job: str) -> str:
        return self.fields(job)["JobState"]

    def log(self, job: str) -> str:
        found = [p.read_text(errors="replace") for p in sorted(self.work.glob(f"*-{job}.out"))]
        return "\n".join(found)

    def wait(self, what: str, until: Callable[[], Any], job: str, timeout_s: float) -> Any:
        """Waits for something about a job; returns the first answer that is true.

        Raises:
            JobHung: it did not come in time.
        """
        deadline = time.monotonic() + timeout_s
        while not (found := until()):
            if time.monotonic() > deadline:
                raise JobHung(f"{what}: not within {timeout_s:g} s\n{self.report(job)}")
            time.sleep(0.2)
        return found

    def wait_for_end(self, job: str, timeout_s: float = 200) -> None:
        ended = ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"]
        state = self.wait("the end", lambda: self.state(job) in ended, job, timeout_s)
        assert state and self.state(job) == "COMPLETED", self.report(job)

    def wait_for_steps(self, run: Path, job: str, restarts: int, timeout_s: float = 150) -> None:
        """Waits until a run has done some steps since a restart of its job."""

        def is_done() -> bool:
            with contextlib.suppress(FileNotFoundError):
                steps = [r for r in read_metrics(run, superseded=True) if r["kind"] == "step"]
                return sum(r["launch"].startswith(f"{job}.{restarts}.") for r in steps) >= 5
            return False

        self.wait(f"steps after restart {restarts}", is_done, job, timeout_s)

    def wait_for_restart(self, job: str, restarts: int, timeout_s: float = 150) -> None:
        """Waits until a job was put back into the queue."""

        def is_back() -> bool:
            fields = self.fields(job)
            return fields["Restarts"] == str(restarts) and fields["JobState"] == "PENDING"

        self.wait(f"restart {restarts}", is_back, job, timeout_s)

    def start_now(self, job: str) -> None:
        """Spares a job in the queue the two minutes that SLURM holds it."""

        def has_begun() -> bool:
            if self.state(job) == "PENDING":
                with contextlib.suppress(AssertionError):  # It may begin by itself meanwhile.
                    self.run("scontrol", "update", f"JobId={job}", "StartTime=now")
            return self.state(job) == "RUNNING"

        self.wait("the start", has_begun, job, 60)

    def lose_node(self, node: str) -> None:
        """Kills all of a node, and tells SLURM, which would notice after its SlurmdTimeout."""
        self.run("bash", SCRIPT, "kill-node", node)
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def return_node(self, node: str) -> None:
        """Brings a lost node back, which SLURM then uses again."""
        self.run("bash", SCRIPT, "start-node", node)

    def report(self, job: str) -> str:
        """How things stand."""
        parts = []
        for command in (["squeue", "-o", "%i %T %r %L %N %k"], ["scontrol", "show", "job", job]):
            with contextlib.suppress(AssertionError, subprocess.SubprocessError):
                parts.append(self.run(*command))
        controller = Path(self.env["SLURM_DEV_ROOT"]) / "log" / "slurmctld.log"
        parts += [self.log(job)[-_TAIL:], controller.read_text()[-_TAIL:]]
        parts.append(stacks_of(self.env[processes.MARK], self.work))
        return "\n---\n".join(parts)


@contextlib.contextmanager
def cluster_up(work: Path) -> Iterator[Cluster]:
    """Brings the cluster up; nothing of it is left behind, even if this process is killed."""
    mark = uuid.uuid4().hex
    # The sockets of slurmd want a short path.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        extra = Path(folder) / "extra.conf"
        extra.write_text(EXTRA)
        root = Path(folder) / "c"
        port = free_ports(NODES + 1)
        env = {n: v for n, v in os.environ.items() if not n.startswith(("SLURM", "SBATCH"))}
        env |= {
            processes.MARK: mark,
            "SLURM_DEV_ROOT": str(root),
            "SLURM_DEV_PORT": str(port),
            "SLURM_DEV_EXTRA": str(extra),
            "SLURM_CONF": str(root / "etc" / "slurm.conf"),
            "COPUS_ROOT": str(ROOT),
            "COPUS_USE_PYTHON": sys.executable,
            "PYTHONPATH": f"{CHILD_PATH}:{ROOT}",
            "COPUS_TEST_STACKS": str(work / "stacks"),
            "OMP_NUM_THREADS": "1",
        }
        (work / "stacks").mkdir()
        up = Cluster(env, work)
        try:
            with _ending_with_us(env):
                up.run("bash", SCRIPT, "up", str(NODES), "8", timeout_s=60)
                yield up
        finally:
            left = processes.end_marked(mark)
    assert not left, f"processes {left} cannot be ended"


@contextlib.contextmanager
def _ending_with_us(env: dict[str, str]) -> Iterator[None]:
    """Holds a process that takes the cluster down afterwards, or when this process is killed."""
    command = ["bash", "-c", 'cat >/dev/null; exec bash "$0" down', str(SCRIPT)]
    guard = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            guard.wait(60)


def free_ports(num: int) -> int:
    """The first of some ports in a row that nobody listens on, below those of the kernel and of
    jobs."""
    for _ in range(100):
        first = random.randrange(11000, 19000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as probes:
            for port in range(first, first + num):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise OSError("no free ports")
