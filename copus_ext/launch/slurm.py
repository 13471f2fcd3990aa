"""What SLURM says about the job step that this process is part of.

Needs no torch, and never asks `sacct`, which answers nothing on a cluster without a database.
Whatever a command does not answer counts as unknown.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from copus_ext.launch.hostfile import in_order
from megatron.training.common.errors import UsageError

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Numbers from here on are the shells of sbatch and salloc, not steps of srun."""
_FIRST_PORT, _NUM_PORTS = 20000, 12000
"""Below those that Linux gives to outgoing connections."""
_PORTS_PER_JOB = 8
_ANSWER_S = 10.0
_UNITS_S = (1, 60, 3600, 86400)


@dataclass(frozen=True, kw_only=True)
class Step:
    """The place of this process in a step that srun started."""

    job: str
    """Number of the job; of an array's task its own."""
    handle: str
    """What commands know the job by; see `handle_of`."""
    restarts: int
    """How often the job was put back into the queue."""
    number: int
    """Of the step."""
    nodes: str
    """Its nodes as SLURM writes them, such as n[1-4]."""
    num_nodes: int
    """Nodes of the step."""
    node_rank: int
    """Of this node."""
    num_tasks: int
    """Processes that srun started on all nodes."""
    rank: int
    """Of this process among them."""
    num_local_tasks: int
    """Processes that srun started on this node."""
    local_rank: int
    """Of this process among those."""

    @property
    def head(self) -> str:
        """Name of the first node."""
        return first_node(self.nodes)

    @property
    def port(self) -> int:
        """A port of the head node that other jobs there do not take."""
        within = self.number % _PORTS_PER_JOB
        return _FIRST_PORT + (int(self.job) * _PORTS_PER_JOB + within) % _NUM_PORTS


def read_step(env: Mapping[str, str] | None = None) -> Step | None:
    """The step of this process; None outside of one, as in the shells of sbatch and salloc.

    Its nodes are numbered along the file that COPUS_HOSTFILE names, if there is one.

    Args:
        env: environment; None takes that of the process.

    Raises:
        UsageError: one line, if the variables make no sense, or that file does not.
    """
    env = os.environ if env is None else env
    if not {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"} <= set(env):
        return None
    if _number(env, "SLURM_STEP_ID") >= _FIRST_SPECIAL_STEP:
        return None
    node_rank = _number(env, "SLURM_NODEID")
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "1")
    step = Step(
        job=str(_number(env, "SLURM_JOB_ID")),
        handle=handle_of(env),
        restarts=_number(env, "SLURM_RESTART_COUNT", 0),
        number=_number(env, "SLURM_STEP_ID"),
        nodes=env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "localhost"),
        num_nodes=_number(env, "SLURM_STEP_NUM_NODES", _number(env, "SLURM_JOB_NUM_NODES", 1)),
        node_rank=node_rank,
        num_tasks=_number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1)),
        rank=_number(env, "SLURM_PROCID"),
        num_local_tasks=_tasks_of_node(per_node, node_rank),
        local_rank=_number(env, "SLURM_LOCALID", 0),
    )
    step, note = in_order(step, env)
    if note and step.rank == 0:
        print(note, file=sys.stderr, flush=True)
    return step


def handle_of(env: Mapping[str, str]) -> str:
    """What commands know this job by, such as 77, or 70_3 for a task of an array: the number of one
    of the tasks stands for the whole array."""
    array, task = (env.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else env.get("SLURM_JOB_ID", "")


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise UsageError(f"{name}={text} is no number; start under srun, torchrun or alone")
    return int(text)


def _tasks_of_node(text: str, node_rank: int) -> int:
    """The entry of a node in a list such as 4(x2),1."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not found:
            raise UsageError(f"SLURM_TASKS_PER_NODE={text} is no list such as 4(x2),1")
        # Only as many as are looked for, whatever the list says.
        counts += [int(found[1])] * min(int(found[2] or 1), node_rank + 1)
    return counts[min(node_rank, len(counts) - 1)]


def first_node(nodes: str) -> str:
    """The first name of a list such as gpu-[07-09,12],login."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)


def address_of(node: str) -> str:
    """Where a node is reached: its NodeAddr, as names need not resolve; else its name."""
    text = answer(["scontrol", "show", "node", "--oneliner", node])
    found = re.search(r"\bNodeAddr=(\S+)", text or "")
    return found[1] if found else node


def answer(command: Sequence[str]) -> str | None:
    """What a command prints, or None if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def time_left_command(handle: str) -> list[str]:
    """Asks for the time left of a job; see `seconds_of`."""
    return ["squeue", "-h", "-j", handle, "-o", "%L"]


def comment_command(handle: str, text: str) -> list[str]:
    """Publishes a text as the job's comment, which `squeue -o %k` shows."""
    return ["scontrol", "update", f"JobId={handle}", f"Comment={text}"]


def state_of(handle: str) -> str | None:
    """State of a job, such as RUNNING; COMPLETING once it was cancelled. None if unknown."""
    return (answer(["squeue", "-h", "-j", handle, "-o", "%T"]) or "").strip() or None


def seconds_of(text: str | None) -> float | None:
    """Reads a time as squeue prints it.

    Args:
        text: such as 1-02:03:04, 2:03:04, 3:04 or UNLIMITED; None for no answer.

    Returns:
        Seconds, infinity without a limit, None if it says nothing.
    """
    text = (text or "").strip()
    if text == "UNLIMITED":
        return math.inf
    found = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text)
    if not found:
        return None
    return float(sum(int(n or 0) * unit for n, unit in zip(reversed(found.groups()), _UNITS_S)))
