"""What SLURM says about the job step of this process, and the order of its nodes.

COPUS_HOSTFILE names a file with a host a line, which replaces SLURM's order of nodes.
Ranks are numbered along it before any process group exists.

Nothing here needs torch or `sacct`, which answers nothing on a cluster without a database. What a
command does not answer counts as unknown.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.trainer.common.errors import UsageError

HOSTFILE_VARIABLE = "COPUS_HOSTFILE"
"""Environment variable that names a file with one host a line."""
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""From here on step numbers mean the shells of sbatch and salloc."""
_FIRST_PORT, _NUM_PORTS = 20000, 12000
"""Below those that Linux gives to outgoing connections."""
_PORTS_PER_JOB = 8
_ANSWER_S = 10.0
_NODE_NAME = "SLURMD_NODENAME"
_UNITS_S = (1, 60, 3600, 86400)
_asked: set[subprocess.Popen[str]] = set()
"""Commands of SLURM that run now."""
_starting = threading.Lock()
"""Held while one starts: whoever ends them all must not miss it."""
_MAX_NODES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Step:
    """The place of this process in a step that srun started."""

    job: str
    """Number of the job; of an array's task its own."""
    handle: str
    """Name of the job in SLURM's commands; see `handle_of`."""
    restarts: int
    """How often the job was put back into the queue."""
    number: int
    nodes: str
    """Its nodes as SLURM writes them, such as n[1-4]."""
    num_nodes: int
    node_rank: int
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
        return expand_nodes(self.nodes)[0]

    @property
    def port(self) -> int:
        """A port of the head node that other jobs there do not take."""
        within = self.number % _PORTS_PER_JOB
        return _FIRST_PORT + (int(self.job) * _PORTS_PER_JOB + within) % _NUM_PORTS


def read_step(env: Mapping[str, str] | None = None) -> Step | None:
    """The step of this process, with its nodes in the order of COPUS_HOSTFILE.

    Returns:
        None outside of a step, as in the shells of sbatch and salloc.

    Raises:
        UsageError: one line, if the variables or the file make no sense.
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
    step, note = order_by_hostfile(step, env)
    if note and step.rank == 0:
        print(note, file=sys.stderr, flush=True)
    return step


def handle_of(env: Mapping[str, str]) -> str:
    """The name of this job in SLURM's commands, such as 77. A task of an array has a name such as
    70_3, since its own number may stand for the whole array."""
    array, task = (env.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else env.get("SLURM_JOB_ID", "")


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise UsageError(f"{name}={text} is not a number; start under srun, torchrun or alone")
    return int(text)


def _tasks_of_node(text: str, node_rank: int) -> int:
    """The entry of a node in a list such as 4(x2),1."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not found:
            raise UsageError(f"SLURM_TASKS_PER_NODE={text} is not a list such as 4(x2),1")
        # Only as many as are looked for, whatever the list says.
        counts += [int(found[1])] * min(int(found[2] or 1), node_rank + 1)
    return counts[min(node_rank, len(counts) - 1)]


def expand_nodes(nodes: str) -> list[str]:
    """The names in a list such as gpu-[07-09,12],login.

    Raises:
        UsageError: more names than any cluster has.
    """
    names: list[str] = []
    for part in re.split(r",(?![^\[]*\])", nodes):
        found = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
        if not found:
            names.append(part)
            continue
        before, ranges, behind = found.groups()
        for one in ranges.split(","):
            first, dash, last = one.partition("-")
            last = last if dash else first
            if not (first.isdecimal() and last.isdecimal() and int(last) - int(first) < _MAX_NODES):
                raise UsageError(f"{nodes[:60]} is not a list of nodes such as n[1-4]")
            width = len(first)
            numbers = range(int(first), int(last) + 1)
            firsts = [f"{before}{number:0{width}d}" for number in numbers]
            names += [f"{one}{rest}" for one in firsts for rest in expand_nodes(behind)]
    return names


def read_hosts(path: Path) -> list[str]:
    """The hosts of a file, a line each; empty lines and what follows # mean nothing.

    Raises:
        UsageError: no such file, or a host twice.
    """
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{HOSTFILE_VARIABLE}={path}: {error}") from error
    hosts = [line for line in lines if line]
    twice = next((host for host, times in Counter(hosts).items() if times > 1), None)
    if twice is not None:
        raise UsageError(f"{HOSTFILE_VARIABLE}={path} names {twice} twice; name every node once")
    return hosts


def order_by_hostfile(step: Step, env: Mapping[str, str]) -> tuple[Step, str]:
    """The step with its nodes numbered along COPUS_HOSTFILE, if the environment names one. Nodes
    that are not in the file come last, in SLURM's order.

    Args:
        step: as SLURM numbers it.

    Returns:
        The step, and a line for the user if the file is of other nodes, else an empty text.

    Raises:
        UsageError: a file that cannot be read, or nodes with different numbers of tasks.
    """
    path = env.get(HOSTFILE_VARIABLE)
    if not path or step.num_nodes == 1:
        return step, ""
    given = expand_nodes(step.nodes)
    own = env.get(_NODE_NAME, "")
    if own not in given and step.node_rank < len(given):
        own = given[step.node_rank]
    hosts = read_hosts(Path(path))
    missing, gone = sorted(set(given) - set(hosts)), sorted(set(hosts) - set(given))
    order = [*(host for host in hosts if host not in gone), *(n for n in given if n in missing)]
    if step.num_tasks != step.num_local_tasks * step.num_nodes:
        raise UsageError(
            f"{HOSTFILE_VARIABLE}: nodes with different numbers of tasks keep SLURM's order; start "
            "as many on each, or unset it"
        )
    if own not in order:
        raise UsageError(
            f"{HOSTFILE_VARIABLE}: {_NODE_NAME}={own} is none of the step's nodes {step.nodes}"
        )
    node_rank = order.index(own)
    moved = replace(
        step,
        nodes=",".join(order),
        node_rank=node_rank,
        rank=node_rank * step.num_local_tasks + step.local_rank,
    )
    notes = [f"{', '.join(missing)} not in the file"] if missing else []
    notes += [f"{', '.join(gone)} not in this job"] if gone else []
    note = (
        f"{HOSTFILE_VARIABLE}={path} was made for other nodes ({'; '.join(notes)}); measure the "
        "links and plan again for a better order"
    )
    return moved, note if notes else ""


def address_of(node: str) -> str:
    """Where a node is reached: its NodeAddr, as names need not resolve; else its name."""
    text = answer(["scontrol", "show", "node", "--oneliner", node])
    found = re.search(r"\bNodeAddr=(\S+)", text or "")
    return found[1] if found else node


def answer(command: Sequence[str]) -> str | None:
    """What a command prints, or None if it is missing, fails or takes too long."""
    try:
        with _starting:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                errors="replace",
            )
            _asked.add(process)
    except OSError:
        return None
    try:
        text, _ = process.communicate(timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None
    finally:
        _asked.discard(process)
    return text if process.returncode == 0 else None


def stop_asking() -> None:
    """Ends the commands that still run: nobody waits for their answers any more."""
    with _starting:
        running = list(_asked)
    for process in running:
        process.kill()


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
