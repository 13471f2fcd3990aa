"""What the supervisors of a job tell each other, checked where it is read. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from copus_ext.launch.cause import Failure
from copus_ext.reshard.checked import (
    MAX_NUMBER,
    check_fields,
    check_number,
    check_text,
    shown,
)
from megatron.training.common.control import LAUNCH_NAME
from megatron.training.config.layout import Layout

_MOST_NODES, _MOST_PROCESSES = 1 << 16, 1 << 12
_MOST_FLAGS, _MOST_TEXT = 1 << 14, 1 << 12


@dataclass(frozen=True, kw_only=True)
class NodeHeartbeat:
    """A supervisor that is there.

    Raises:
        ValueError: a value of the wrong type or out of bounds, naming the field.
    """

    node: int
    """Its number; the head is 0."""
    token: str
    """By which it knows that a plan is for it and not for one before."""
    processes: int
    """Ranks it can start."""
    host: str
    """Name of its machine."""

    def __post_init__(self) -> None:
        check_number("node", self.node, 0, _MOST_NODES)
        check_text("token", self.token, 64)
        check_number("processes", self.processes, 1, _MOST_PROCESSES)
        check_text("host", self.host, 500)

    @classmethod
    def from_json(cls, data: Any) -> NodeHeartbeat:
        """Reads what was written of it.

        Raises:
            ValueError: a missing or unknown field, or a value that makes no sense.
        """
        names = [f.name for f in fields(cls)]
        return cls(**check_fields(data, names, names))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the head decided: a launch, or the end.

    Raises:
        ValueError: a value of the wrong type or out of bounds, naming the field.
    """

    launch: str
    """Its name."""
    number: int
    """Of the decision; grows within a job."""
    tokens: dict[str, str] = field(default_factory=dict)
    """Of the supervisors that are asked, by node."""
    shares: dict[str, int] = field(default_factory=dict)
    """Ranks to start, by node; a node that is missing starts none."""
    flags: list[str] = field(default_factory=list)
    """Of the program."""
    barred: list[str] = field(default_factory=list)
    """Layouts that the run must not choose."""
    leave: int | None = None
    """Exit code, if no launch follows."""

    def __post_init__(self) -> None:
        if not (isinstance(self.launch, str) and LAUNCH_NAME.fullmatch(self.launch)):
            raise ValueError(f"launch {shown(self.launch)} is no name of a launch")
        check_number("number", self.number, 0, MAX_NUMBER)
        for name in ("tokens", "shares"):
            value = getattr(self, name)
            if not isinstance(value, dict) or len(value) > _MOST_NODES:
                raise ValueError(f"{name} {shown(value)} must be an object")
            if not all(isinstance(node, str) and node.isdecimal() for node in value):
                raise ValueError(f"{name} must be by numbers of nodes")
        for token in self.tokens.values():
            check_text("tokens", token, 64)
        for share in self.shares.values():
            check_number("shares", share, 1, _MOST_PROCESSES)
        for name in ("flags", "barred"):
            value = getattr(self, name)
            if not isinstance(value, list) or len(value) > _MOST_FLAGS:
                raise ValueError(f"{name} {shown(value)} must be a list")
            for word in value:
                check_text(name, word, _MOST_TEXT)
                if "\0" in word:
                    raise ValueError(f"{name} must hold no zero bytes")
        for text in self.barred:
            Layout.from_text(text)
        if self.leave is not None:
            check_number("leave", self.leave, 0, 255)
        elif not self.shares:
            raise ValueError("a launch needs shares")

    @classmethod
    def from_json(cls, data: Any) -> Plan:
        """Reads what was written of it.

        Raises:
            ValueError: a missing or unknown field, or a value that makes no sense.
        """
        return cls(**check_fields(data, [f.name for f in fields(cls)], ["launch", "number"]))

    @property
    def nodes(self) -> list[int]:
        """Nodes that take part, in the order of their ranks."""
        return sorted(int(node) for node in self.shares)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a launch ended on one node.

    Raises:
        ValueError: a value of the wrong type or out of bounds, naming the field.
    """

    launch: str
    """Its name."""
    node: int
    """Where."""
    code: int
    """Of the rank that failed first there, 128 + N after signal N; 0 if none failed."""
    told: bool = False
    """Whether its ranks were ended because it had failed elsewhere, or by a second signal."""
    failure: Failure | None = None
    """The first there."""

    def __post_init__(self) -> None:
        if not (isinstance(self.launch, str) and LAUNCH_NAME.fullmatch(self.launch)):
            raise ValueError(f"launch {shown(self.launch)} is no name of a launch")
        check_number("node", self.node, 0, _MOST_NODES)
        check_number("code", self.code, 0, 255)
        if not isinstance(self.told, bool):
            raise ValueError(f"told {shown(self.told)} must be true or false")

    @classmethod
    def from_json(cls, data: Any) -> Ended:
        """Reads what was written of it.

        Raises:
            ValueError: a missing or unknown field, or a value that makes no sense.
        """
        names = [f.name for f in fields(cls)]
        values = dict(check_fields(data, names, ["launch", "node", "code"]))
        if values.get("failure") is not None:
            values["failure"] = Failure.from_json(values["failure"])
        return cls(**values)

    @property
    def is_clean(self) -> bool:
        """Whether its ranks ended as they wanted to."""
        return self.code in (0, 85) and not self.told


def shares_of(ranks: int, places: Mapping[int, int]) -> dict[str, int]:
    """Fills the nodes in their order, so that ranks which talk most lie together.

    Args:
        ranks: to start.
        places: ranks that each node can start.

    Raises:
        ValueError: they are more than there are places.
    """
    shares = {}
    for node, processes in sorted(places.items()):
        if ranks > 0:
            shares[str(node)] = min(ranks, processes)
            ranks -= shares[str(node)]
    if ranks > 0:
        raise ValueError(f"{ranks} ranks more than the nodes can start")
    return shares
