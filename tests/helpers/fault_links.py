"""A supervised run on two nodes whose link can be cut."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.helpers.fault_runs import Run
from tests.helpers.launch import free_port
from tests.helpers.two_nodes import DEVICE, HEAD, set_link, two_nodes, why_not

__all__ = ["TwoNodes", "on_two_nodes", "why_not"]
_MBIT = 1000.0


class TwoNodes(Run):
    """One rank and a supervisor on each.

    Args:
        names: of the nodes.
        folder: see `Run`.
        flags: see `Run`.
    """

    def __init__(self, names: tuple[str, str], folder: Path, flags: Sequence[str]) -> None:
        super().__init__(folder, flags, env={"GLOO_SOCKET_IFNAME": DEVICE})
        self._names = names
        self._second: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """The command on both."""
        self.starts += 1
        shared = ["--nnodes", "2", "--nproc-per-node", "1"]
        shared += ["--rdzv-endpoint", f"{HEAD}:{free_port()}"]
        self._child, self._second = (
            self.spawn([*shared, "--node-rank", str(node)], ["ip", "netns", "exec", name])
            for node, name in enumerate(self._names)
        )

    def end(self) -> None:
        """Kills what is left on both."""
        super().end()
        if self._second is not None:
            self._second.wait()

    def set_link(self, state: str) -> None:
        """Takes the link `down` or `up`."""
        set_link(self._names[0], state)


@contextlib.contextmanager
def on_two_nodes(case: Any, folder: Path, flags: list[str]) -> Iterator[Run]:
    """A run on two nodes that wait for a minute only."""
    with two_nodes(_MBIT) as names:
        yield TwoNodes(names, folder, [*flags, "--distributed-timeout-minutes", "1"])
