"""How the supervisors of a job on several nodes agree: by files in the run directory.
docs/decisions/026 says why not by a network service.

    <run>/control/nodes/<node>.json             who is there; touched every few seconds
    <run>/control/next.json                     what the leader decided last; replaced atomically
    <run>/control/ended/<launch>.<node>.json    how a launch ended on a node
    <run>/control/ended/<launch>.failed         it failed on some node: end your part of it
    <run>/control/ended/<launch>.over           it ended well on some node

An age is the difference of two times that the same file server gave. Nothing here needs torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from copus_ext.launch.failure import Failure
from copus_ext.reshard.checked import (
    MAX_NUMBER,
    JsonRecord,
    check_number,
    check_text,
    read_value,
    shown,
)
from megatron.trainer.checkpoint.files import write_atomically
from megatron.trainer.common.control import LAUNCH_NAME
from megatron.trainer.common.program import tell
from megatron.trainer.config.layout import Layout

MAX_NODES, MAX_LOCAL_RANKS = 1 << 16, 1 << 12
_MAX_FLAGS, _MAX_TEXT, _MAX_BYTES = 1 << 14, 1 << 12, 1 << 21
_NODES, _ENDED = Path("control") / "nodes", Path("control") / "ended"
_NEXT = Path("control") / "next.json"
_BEAT_S, _FIRST_BEATS_S, _LOOK_S = 5.0, 0.5, 0.5


def _check_launch(name: Any) -> None:
    if not (isinstance(name, str) and LAUNCH_NAME.fullmatch(name)):
        raise ValueError(f"launch {shown(name)} is not a name of a launch")


@dataclass(frozen=True, kw_only=True)
class NodeHeartbeat(JsonRecord):
    """A supervisor that is there.

    Raises:
        ValueError: a value of the wrong type or out of bounds, naming the field.
    """

    node: int
    """Its number; the leader is 0."""
    token: str
    """Marks a plan as meant for this process and not for an earlier one."""
    num_ranks: int
    """Ranks that it can start."""
    host: str

    def __post_init__(self) -> None:
        check_number("node", self.node, 0, MAX_NODES)
        check_text("token", self.token, 64)
        check_number("num_ranks", self.num_ranks, 1, MAX_LOCAL_RANKS)
        check_text("host", self.host, 500)


@dataclass(frozen=True, kw_only=True)
class LaunchPlan(JsonRecord):
    """What the leader decided: a launch, or the end.

    Raises:
        ValueError: a value of the wrong type or out of bounds, naming the field.
    """

    launch: str
    number: int
    """Of the decision; grows within a job."""
    tokens: dict[str, str] = field(default_factory=dict)
    """By node, the token of the supervisor that is asked."""
    num_ranks: dict[str, int] = field(default_factory=dict)
    """By node, ranks to start; a node that is missing starts none."""
    flags: list[str] = field(default_factory=list)
    blocked_layouts: list[str] = field(default_factory=list)
    """Layouts that the run must not choose."""
    exit_code: int | None = None
    """What supervisors leave with, if no launch follows."""

    def __post_init__(self) -> None:
        _check_launch(self.launch)
        check_number("number", self.number, 0, MAX_NUMBER)
        for name in ("tokens", "num_ranks"):
            value = getattr(self, name)
            if not isinstance(value, dict) or len(value) > MAX_NODES:
                raise ValueError(f"{name} {shown(value)} must be an object")
            if not all(isinstance(node, str) and node.isdecimal() for node in value):
                raise ValueError(f"{name} must be by numbers of nodes")
        for token in self.tokens.values():
            check_text("tokens", token, 64)
        for number in self.num_ranks.values():
            check_number("num_ranks", number, 1, MAX_LOCAL_RANKS)
        for name in ("flags", "blocked_layouts"):
            value = getattr(self, name)
            if not isinstance(value, list) or len(value) > _MAX_FLAGS:
                raise ValueError(f"{name} {shown(value)} must be a list")
            for word in value:
                check_text(name, word, _MAX_TEXT)
                if "\0" in word:
                    raise ValueError(f"{name} must hold no zero bytes")
        for text in self.blocked_layouts:
            Layout.from_text(text)
        if self.exit_code is not None:
            check_number("exit_code", self.exit_code, 0, 255)
        elif not self.num_ranks:
            raise ValueError("a launch needs num_ranks")

    @property
    def nodes(self) -> list[int]:
        """Nodes that take part, in the order of their ranks."""
        return sorted(int(node) for node in self.num_ranks)


@dataclass(frozen=True, kw_only=True)
class LaunchResult(JsonRecord):
    """How a launch ended on one node.

    Raises:
        ValueError: a value of the wrong type or out of bounds, naming the field.
    """

    launch: str
    node: int
    code: int
    """Exit code of the rank that failed first there, 128 + N after signal N; 0 if none failed."""
    was_killed: bool = False
    """The supervisor killed the ranks: the launch had failed elsewhere, or a second signal came."""
    failure: Failure | None = None
    """The first there."""

    def __post_init__(self) -> None:
        _check_launch(self.launch)
        check_number("node", self.node, 0, MAX_NODES)
        check_number("code", self.code, 0, 255)
        if not isinstance(self.was_killed, bool):
            raise ValueError(f"was_killed {shown(self.was_killed)} must be true or false")

    @classmethod
    def from_json(cls, data: Any) -> LaunchResult:
        """Reads what `to_json` wrote; see `JsonRecord.from_json`."""
        if isinstance(data, dict) and data.get("failure") is not None:
            data = {**data, "failure": Failure.from_json(data["failure"])}
        return super().from_json(data)

    @classmethod
    def of(cls, launch: str, node: int, failure: Failure | None) -> LaunchResult:
        """The result that follows from the first failure on a node, or from none."""
        code = 0 if failure is None else failure.exit_code or 1
        return cls(launch=launch, node=node, code=code, failure=failure)

    @property
    def is_clean(self) -> bool:
        """The ranks ended by themselves, as done or to be started again."""
        return self.code in (0, 85) and not self.was_killed


def assign_ranks(num_ranks: int, available: Mapping[int, int]) -> dict[str, int]:
    """Fills the nodes in their order, so that ranks which communicate most share a node.

    Args:
        available: by node, ranks that it can start.

    Raises:
        ValueError: the nodes can start fewer.
    """
    assigned = {}
    for node, most in sorted(available.items()):
        if num_ranks > 0:
            assigned[str(node)] = min(num_ranks, most)
            num_ranks -= assigned[str(node)]
    if num_ranks > 0:
        raise ValueError(f"{num_ranks} ranks more than the nodes can start")
    return assigned


class NodeRendezvous:
    """The files, as one supervisor sees them. A job on one node writes none.

    Args:
        num_ranks: ranks that this node can start.
        lost_s: a node that has not touched its file for so many seconds is lost.
    """

    def __init__(
        self, run_dir: Path, *, node: int, num_nodes: int, num_ranks: int, lost_s: float
    ) -> None:
        self._run_dir, self._num_nodes, self._lost_s = run_dir, num_nodes, lost_s
        self._is_alone = num_nodes == 1
        self.me = NodeHeartbeat(
            node=node, token=secrets.token_hex(8), num_ranks=num_ranks, host=platform.node()[:500]
        )
        self.there: dict[int, NodeHeartbeat] = {node: self.me}
        """Supervisors that have come, by node."""
        self._beat_at = self._looked_at = self._compared_at = float("-inf")
        self._newcomers_at, self._is_there = float("-inf"), False
        self._lost: list[int] = []
        self._restarted: list[int] = []
        self._leader = ""
        self._ended_names: frozenset[str] = frozenset()
        self._complaint = ""

    def clear(self) -> None:
        """Removes the files of an earlier job. On the leader, at its start."""
        if self._is_alone:
            return
        for folder in (_NODES, _ENDED):
            self._remove_all(folder)
        (self._run_dir / _NEXT).unlink(missing_ok=True)

    def tick(self, *, starting: bool = False) -> None:
        """Touches this node's file; call it often.

        Args:
            starting: touch it more often, since the leader may still be removing the files of an
                earlier job and take this one along.
        """
        now = time.monotonic()
        pause_s = _FIRST_BEATS_S if starting else _BEAT_S
        if self._is_alone or now - self._beat_at < pause_s:
            return
        self._beat_at = now
        path = self._file_of(self.me.node)
        with suppress(OSError):
            try:
                if not self._is_there:  # the file may be of a supervisor that was here before
                    raise FileNotFoundError(path)
                os.utime(path)
            except FileNotFoundError:
                self._write(path, self.me)
                self._is_there = True

    def missing(self) -> list[int]:
        """Nodes whose supervisors have not come yet. On the leader."""
        for node in range(self._num_nodes):
            if node not in self.there:
                found = self._read(self._file_of(node), NodeHeartbeat.from_json)
                if found is not None and found.node == node:
                    self.there[node] = found
        return [node for node in range(self._num_nodes) if node not in self.there]

    def newcomers(self, *, now: bool = False) -> list[int]:
        """Nodes that have come, or come again, since the launch began. On the leader.

        Args:
            now: look at once, and not every few seconds only.
        """
        found: list[int] = []
        now_s = time.monotonic()
        if self._is_alone or (now_s - self._newcomers_at < _BEAT_S and not now):
            return found
        self._newcomers_at = now_s
        for node in range(self._num_nodes):
            one = self._read(self._file_of(node), NodeHeartbeat.from_json)
            known = self.there.get(node)
            if one is not None and one.node == node and (known is None or known.token != one.token):
                self.there[node] = one
                found.append(node)
                self._compared_at = float("-inf")
        return found

    def publish(self, plan: LaunchPlan) -> None:
        """Sends a plan to the nodes that are there. On the leader.

        Raises:
            OSError: it cannot be written.
        """
        if not self._is_alone:
            self._remove_all(_ENDED)
            tokens = {str(node): one.token for node, one in self.there.items()}
            self._write(self._run_dir / _NEXT, dataclasses.replace(plan, tokens=tokens))

    def plan_after(self, number: int) -> LaunchPlan | None:
        """A plan for this supervisor that is newer than a decision, or None. Where another leader
        has come since, whose numbers begin again, its plan is newer."""
        plan: LaunchPlan | None = self._read(self._run_dir / _NEXT, LaunchPlan.from_json)
        if plan is None or plan.tokens.get(str(self.me.node)) != self.me.token:
            return None
        leader = plan.tokens.get("0", "")
        if leader == self._leader and plan.number <= number:
            return None
        self._leader, self._compared_at = leader, float("-inf")
        return plan

    def lost(self) -> list[int]:
        """Nodes whose file has not been touched for too long. A worker node looks at the leader
        alone. Reads files every few seconds only."""
        self._compare()
        return self._lost

    def restarted(self) -> list[int]:
        """Of the same nodes those where another supervisor has come since; the ranks of the one
        before are gone."""
        self._compare()
        return self._restarted

    def _compare(self) -> None:
        now = time.monotonic()
        if self._is_alone or now - self._compared_at < _BEAT_S:
            return
        self._compared_at = now
        known = {0: self._leader}
        if self.me.node == 0:
            known = {node: one.token for node, one in self.there.items() if node != 0}
        self._lost, self._restarted = [], []
        ours = _touched_at(self._file_of(self.me.node))
        for node, token in known.items():
            then = _touched_at(self._file_of(node))
            if ours is None or then is None:
                continue
            if ours - then > self._lost_s:
                self._lost.append(node)
                continue
            one = self._read(self._file_of(node), NodeHeartbeat.from_json)
            if one is not None and token not in ("", one.token):
                self._restarted.append(node)

    def report(self, result: LaunchResult) -> None:
        """Tells the other nodes how a launch ended here; the file without content comes first."""
        if self._is_alone:
            return
        folder = self._run_dir / _ENDED
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{result.launch}.{'over' if result.is_clean else 'failed'}").touch()
            self._write(folder / f"{result.launch}.{result.node}.json", result)
        except OSError as error:
            self._complain(f"{folder} cannot be written: {error.strerror or error}")

    def fail(self, launch: str) -> None:
        """Makes all nodes end their ranks of a launch."""
        if not self._is_alone:
            with suppress(OSError):
                (self._run_dir / _ENDED).mkdir(parents=True, exist_ok=True)
                (self._run_dir / _ENDED / f"{launch}.failed").touch()

    def has_failed(self, launch: str) -> bool:
        """Whether a launch has failed on some node. Looks twice a second."""
        return f"{launch}.failed" in self._names_of_ended()

    def is_over(self, launch: str) -> bool:
        """Whether a launch has ended well on some node. Looks twice a second."""
        return f"{launch}.over" in self._names_of_ended()

    def _names_of_ended(self) -> frozenset[str]:
        now = time.monotonic()
        if not self._is_alone and now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            # A listing: a network file system may remember for a while that a name is not there.
            self._ended_names = frozenset(_names(self._run_dir / _ENDED))
        return self._ended_names

    def results(self, plan: LaunchPlan) -> list[LaunchResult]:
        """What the other nodes have reported of a launch so far."""
        names = [] if self._is_alone else _names(self._run_dir / _ENDED)
        found = []
        for node in plan.nodes:
            name = f"{plan.launch}.{node}.json"
            if node != self.me.node and name in names:
                result = self._read(self._run_dir / _ENDED / name, LaunchResult.from_json)
                if result is not None and (result.launch, result.node) == (plan.launch, node):
                    found.append(result)
        return found

    def _file_of(self, node: int) -> Path:
        return self._run_dir / _NODES / f"{node}.json"

    def _remove_all(self, folder: Path) -> None:
        for name in _names(self._run_dir / folder):
            (self._run_dir / folder / name).unlink(missing_ok=True)

    def _write(self, path: Path, value: JsonRecord) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(value.to_json(), allow_nan=False, indent=1) + "\n")

    def _read(self, path: Path, parse: Callable[[Any], Any]) -> Any:
        """A file of another supervisor; None if it is missing or damaged. Says the latter once."""
        try:
            return read_value(path, parse, max_bytes=_MAX_BYTES)
        except ValueError as error:
            self._complain(str(error))
            return None

    def _complain(self, line: str) -> None:
        if line != self._complaint:
            self._complaint = line
            tell("supervisor", line)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _touched_at(path: Path) -> float | None:
    """When a file was touched, by the clock of its server; None if it is not there."""
    try:
        # Opened, since a network file system may keep an old answer of stat for a minute.
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return None
