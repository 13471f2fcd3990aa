"""The files by which the supervisors of a job on several nodes agree on what to do.

    <run>/control/nodes/<node>.json             who is there; touched every few seconds
    <run>/control/next.json                     what the head decided last; replaced atomically
    <run>/control/ended/<launch>.<node>.json    how a launch ended on a node
    <run>/control/ended/<launch>.failed         it has failed somewhere: end your part of it
    <run>/control/ended/<launch>.over           it has ended well somewhere

Ages are differences of times that the same file server gave.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from copus_ext.launch.messages import Ended, NodeHeartbeat, Plan
from copus_ext.launch.say import say
from copus_ext.reshard.checked import read_value
from megatron.training.checkpoint.files import write_atomically

_NODES, _ENDED = Path("control") / "nodes", Path("control") / "ended"
_NEXT = Path("control") / "next.json"
_MOST_BYTES = 1 << 21
_TOUCH_S, _TOUCH_AT_START_S, _LOOK_S = 5.0, 0.5, 0.5


class NodeRendezvous:
    """The files, as one supervisor sees them. With one node there are none.

    Args:
        run_dir: directory of the run.
        node: number of this node.
        num_nodes: nodes of the job.
        processes: ranks that this node can start.
        lost_s: a node that has not touched its file for so long is lost.
    """

    def __init__(
        self, run_dir: Path, *, node: int, num_nodes: int, processes: int, lost_s: float
    ) -> None:
        self._run_dir, self._is_alone, self._lost_s = run_dir, num_nodes == 1, lost_s
        self.me = NodeHeartbeat(
            node=node, token=secrets.token_hex(8), processes=processes, host=platform.node()[:500]
        )
        self.there: dict[int, NodeHeartbeat] = {node: self.me}
        """Supervisors that are known to be there."""
        self._num_nodes = num_nodes
        self._touched_s = self._looked_s = self._compared_s = float("-inf")
        self._lost: list[int] = []
        self._seen: frozenset[str] = frozenset()
        self._complaint = ""

    def clear(self) -> None:
        """Removes what an earlier job left. On the head, at its start."""
        if self._is_alone:
            return
        for folder in (_NODES, _ENDED):
            for name in _names(self._run_dir / folder):
                (self._run_dir / folder / name).unlink(missing_ok=True)
        (self._run_dir / _NEXT).unlink(missing_ok=True)

    def tick(self, *, starting: bool = False) -> None:
        """Shows that this supervisor is there; call it often.

        Args:
            starting: whether the head may still take it for one of an earlier job.
        """
        now = time.monotonic()
        pause_s = _TOUCH_AT_START_S if starting else _TOUCH_S
        if self._is_alone or now - self._touched_s < pause_s:
            return
        self._touched_s = now
        path = self._file_of(self.me.node)
        with suppress(OSError):
            try:
                os.utime(path)
            except FileNotFoundError:
                self._write(path, asdict(self.me))

    def _file_of(self, node: int) -> Path:
        return self._run_dir / _NODES / f"{node}.json"

    def missing(self) -> list[int]:
        """Nodes whose supervisors have not come yet. On the head."""
        for node in range(self._num_nodes):
            if node not in self.there:
                found = self._read(self._file_of(node), NodeHeartbeat.from_json)
                if found is not None and found.node == node:
                    self.there[node] = found
        return [node for node in range(self._num_nodes) if node not in self.there]

    def publish(self, plan: Plan) -> None:
        """Lets the others know. On the head.

        Raises:
            OSError: it cannot be written.
        """
        if self._is_alone:
            return
        for name in _names(self._run_dir / _ENDED):
            (self._run_dir / _ENDED / name).unlink(missing_ok=True)
        self._write(self._run_dir / _NEXT, asdict(plan))

    def plan_after(self, number: int) -> Plan | None:
        """What the head decided for this supervisor after a decision, or None."""
        plan = self._read(self._run_dir / _NEXT, Plan.from_json)
        is_ours = plan is not None and plan.tokens.get(str(self.me.node)) == self.me.token
        return plan if plan is not None and is_ours and plan.number > number else None

    def lost(self) -> list[int]:
        """Nodes that have not shown for long that they are there. For followers only the head
        counts. Looks every few seconds."""
        now = time.monotonic()
        if not self._is_alone and now - self._compared_s >= _TOUCH_S:
            self._compared_s, self._lost = now, self._silent()
        return self._lost

    def _silent(self) -> list[int]:
        ours = _touched(self._file_of(self.me.node))
        if ours is None:
            return []
        nodes = [n for n in self.there if n != self.me.node] if self.me.node == 0 else [0]
        touched = {node: _touched(self._file_of(node)) for node in nodes}
        return [n for n, then in touched.items() if then is not None and ours - then > self._lost_s]

    def report(self, ended: Ended) -> None:
        """Says how a launch ended here, the short way first."""
        if self._is_alone:
            return
        folder = self._run_dir / _ENDED
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{ended.launch}.{'over' if ended.is_clean else 'failed'}").touch()
            self._write(folder / f"{ended.launch}.{ended.node}.json", asdict(ended))
        except OSError as error:
            self._complain(f"{folder} cannot be written: {error.strerror or error}")

    def fail(self, launch: str) -> None:
        """Lets all nodes end what they still run of a launch."""
        if not self._is_alone:
            with suppress(OSError):
                (self._run_dir / _ENDED).mkdir(parents=True, exist_ok=True)
                (self._run_dir / _ENDED / f"{launch}.failed").touch()

    def has_failed(self, launch: str) -> bool:
        """Whether it has failed on some node. Looks twice a second."""
        return f"{launch}.failed" in self._ended()

    def is_over(self, launch: str) -> bool:
        """Whether it has ended well on some node."""
        return f"{launch}.over" in self._ended()

    def _ended(self) -> frozenset[str]:
        now = time.monotonic()
        if not self._is_alone and now - self._looked_s >= _LOOK_S:
            self._looked_s = now
            # A listing, as a network file system may remember that a name is not there.
            self._seen = frozenset(_names(self._run_dir / _ENDED))
        return self._seen

    def reports(self, plan: Plan) -> list[Ended]:
        """What the other nodes have reported of a launch so far."""
        names = [] if self._is_alone else _names(self._run_dir / _ENDED)
        others = [node for node in plan.nodes if node != self.me.node]
        wanted = {f"{plan.launch}.{node}.json": node for node in others}
        found = {
            node: self._read(self._run_dir / _ENDED / name, Ended.from_json)
            for name, node in wanted.items()
            if name in names
        }
        return [
            ended
            for node, ended in found.items()
            if ended is not None and (ended.launch, ended.node) == (plan.launch, node)
        ]

    def _write(self, path: Path, value: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(value, allow_nan=False, indent=1) + "\n")

    def _read(self, path: Path, parse: Callable[[Any], Any]) -> Any:
        """A file of another supervisor; None if it is not there or damaged, which is said once."""
        try:
            return read_value(path, parse, most_bytes=_MOST_BYTES)
        except ValueError as error:
            self._complain(str(error))
            return None

    def _complain(self, line: str) -> None:
        if line != self._complaint:
            self._complaint = line
            say(line)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _touched(path: Path) -> float | None:
    """When a file was touched, by the clock of its server; None if it is not there."""
    try:
        # Opened, since a network file system may keep an old answer of stat for a minute.
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return None
