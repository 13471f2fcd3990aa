"""The order of nodes that a file asks for, in place of SLURM's own.

`tools/plan.py --hostfile` writes the file; ranks are numbered along it before any process group
exists.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.training.common.errors import UsageError

if TYPE_CHECKING:
    from copus_ext.launch.slurm import Step

VARIABLE = "COPUS_HOSTFILE"
"""Environment variable that names the file: a host a line."""
_OWN_NAME = "SLURMD_NODENAME"
_MOST = 1 << 20


def expanded(nodes: str) -> list[str]:
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
            if not (first.isdecimal() and last.isdecimal() and int(last) - int(first) < _MOST):
                raise UsageError(f"{nodes[:60]} is no list of nodes such as n[1-4]")
            width = len(first)
            numbers = range(int(first), int(last) + 1)
            firsts = [f"{before}{number:0{width}d}" for number in numbers]
            names += [f"{one}{rest}" for one in firsts for rest in expanded(behind)]
    return names


def read_hosts(path: Path) -> list[str]:
    """The hosts of a file, a line each; empty lines and what follows # mean nothing.

    Raises:
        UsageError: no such file, or a host twice.
    """
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{VARIABLE}={path}: {error}") from error
    hosts = [line for line in lines if line]
    twice = next((host for host, times in Counter(hosts).items() if times > 1), None)
    if twice is not None:
        raise UsageError(f"{VARIABLE}={path} names {twice} twice; name every node once")
    return hosts


def in_order(step: Step, env: Mapping[str, str]) -> tuple[Step, str]:
    """The step with its nodes numbered along the file, if the environment names one.

    Nodes that the file does not name come behind those that it does, in SLURM's order.

    Args:
        step: as SLURM numbers it.
        env: environment of the process.

    Returns:
        The step, and a line to say where the file does not fit the nodes; else no text.

    Raises:
        UsageError: a file that cannot be read, or nodes with different numbers of tasks.
    """
    path = env.get(VARIABLE)
    if not path or step.num_nodes == 1:
        return step, ""
    given = expanded(step.nodes)
    own = env.get(_OWN_NAME, "")
    if own not in given and step.node_rank < len(given):
        own = given[step.node_rank]
    hosts = read_hosts(Path(path))
    order = _ordered(given, hosts)
    if step.num_tasks != step.num_local_tasks * step.num_nodes:
        raise UsageError(
            f"{VARIABLE}: nodes with different numbers of tasks keep SLURM's order; start as many "
            "on each, or unset it"
        )
    if own not in order:
        raise UsageError(f"{VARIABLE}: {_OWN_NAME}={own} is none of the step's nodes {step.nodes}")
    node_rank = order.index(own)
    moved = replace(
        step,
        nodes=",".join(order),
        node_rank=node_rank,
        rank=node_rank * step.num_local_tasks + step.local_rank,
    )
    missing = [node for node in given if node not in hosts]
    gone = [host for host in hosts if host not in given]
    if not missing and not gone:
        return moved, ""
    told = [f"{', '.join(missing)} not in the file"] if missing else []
    told += [f"{', '.join(gone)} not in this job"] if gone else []
    return moved, (
        f"{VARIABLE}={path} was made for other nodes ({'; '.join(told)}); measure the links and "
        "plan again for a better order"
    )


def _ordered(given: Sequence[str], hosts: Sequence[str]) -> list[str]:
    here, named = set(given), set(hosts)
    return [*(host for host in hosts if host in here), *(n for n in given if n not in named)]
