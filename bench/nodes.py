"""Emulated nodes: network namespaces on this machine, one rank and one core in each.

Bandwidth is emulated, latency is not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.support import ROOT
from tests.helpers.network_namespaces import DEVICE, address, star, why_not

PORT = 29500
_SHOWN_EVERY_S, _PERIOD_US = 20.0, 5000
QUOTA = 0.46
"""Cores that a rank may use where two share one."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Namespaces that reach each other."""

    names: Sequence[str]
    groups: Sequence[Path] = ()
    """Control groups of the nodes, if there are any."""

    def on(self, node: int, command: Sequence[str]) -> list[str]:
        """A command that runs on a node, on the node's core."""
        cores = sorted(os.sched_getaffinity(0))
        words = ["ip", "netns", "exec", self.names[node], "taskset", "-c"]
        words += [str(cores[node % len(cores)]), *command]
        if not self.groups:
            return words
        # The group comes first, because a namespace has a /sys of its own.
        join = f'echo $$ > {self.groups[node]}/cgroup.procs && exec "$@"'
        return ["sh", "-c", join, "sh", *words]

    def run(
        self,
        command: Sequence[str],
        log: Path,
        *,
        order: Sequence[int] = (),
        max_s: float = 3600.0,
    ) -> float:
        """Runs a Python program to its end, rank k on node order[k].

        Args:
            command: script and flags.
            log: `<log>.<rank>.txt` take the output. Its last line is printed now and then.
            order: of nodes; empty for all of them as they are.
            max_s: seconds it may take.

        Returns:
            Seconds it took, with the start of its processes.

        Raises:
            SystemExit: it failed or took too long; with the end of the logs.
        """
        order = order or range(len(self.names))
        logs = [log.with_name(f"{log.name}.{rank}.txt") for rank in range(len(order))]
        shared = {"WORLD_SIZE": str(len(order)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        shared |= {"MASTER_ADDR": address(order[0]), "MASTER_PORT": str(PORT)}
        shared |= {"GLOO_SOCKET_IFNAME": DEVICE, "PYTHONPATH": str(ROOT)}
        began = shown = time.monotonic()
        started = []
        for rank, node in enumerate(order):
            env = {**os.environ, **shared, "RANK": str(rank)}
            words = self.on(node, [sys.executable, "-u", *command])
            with logs[rank].open("wb") as file:
                one = subprocess.Popen(words, env=env, cwd=ROOT, stdout=file, stderr=file)
            started.append(one)
        while any(one.poll() is None for one in started):
            time.sleep(0.2)
            if any(one.poll() for one in started) or time.monotonic() - began > max_s:
                break
            if time.monotonic() - shown > _SHOWN_EVERY_S:
                shown = time.monotonic()
                print("", *logs[0].read_text(errors="replace").splitlines()[-1:], flush=True)
        if any(one.poll() != 0 for one in started):
            time.sleep(2.0)
            for one in started:
                one.kill()
                one.wait()
            tails = [path.read_text(errors="replace")[-2000:] for path in logs]
            raise SystemExit("\n".join([*tails, f"{log.name} failed on the nodes"]))
        return time.monotonic() - began


@contextlib.contextmanager
def quotas(shares: Sequence[float]) -> Iterator[list[Path]]:
    """A control group for every share of a core; what is in it is the caller's to end."""
    root = Path("/sys/fs/cgroup")
    old = (root / "cpu/cpu.cfs_quota_us").exists() or (root / "cpu/tasks").exists()
    groups = [
        (root / "cpu" if old else root) / f"copus{os.getpid()}_{i}" for i in range(len(shares))
    ]
    try:
        for group, share in zip(groups, shares):
            group.mkdir()
            quota = round(share * _PERIOD_US)
            if old:
                (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        yield groups
    finally:
        for group in groups:
            with contextlib.suppress(OSError):
                group.rmdir()


@contextlib.contextmanager
def emulated(num: int, rate_mbit: float, shares: Sequence[float] = (), **links: Any) -> Any:
    """So many nodes, any two with a link of some rate; 0 is no limit.

    Args:
        num: nodes.
        rate_mbit: both ways.
        shares: of a core, by node; empty for all of it.
        links: others, see `star`.
    """
    with quotas(shares) as groups, star(num, usual_mbit=rate_mbit, **links) as names:
        yield Nodes(names=names, groups=groups)


def require() -> None:
    """Ends this program with 2 if nodes cannot be emulated; SIGTERM then unwinds as errors do."""
    if problem := why_not():
        print(problem, file=sys.stderr)
        raise SystemExit(2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
