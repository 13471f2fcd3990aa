"""What launchers and ranks tell each other: generations, and lines of JSON on a socket. No torch.

A generation is a set of ranks that train together. It gets a number that grows with every loss and
every join, and no two sets of one run ever have the same number.

Whatever comes over a socket is checked before anybody acts on it: each reader names the messages
that it takes, and what else comes ends that connection.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from copus_ext.launch.rendezvous import MAX_LOCAL_RANKS, MAX_NODES
from copus_ext.reshard.checked import MAX_NUMBER, check_fields, check_number, check_text, shown
from megatron.trainer.common.outside import parse_json

Kind = Literal["start", "loss", "join", "resize"]
_READ_BYTES = 1 << 16
_MAX_BYTES = 1 << 22
_MAX_MEMBERS = 1 << 20


class Member(NamedTuple):
    """A rank by where it runs; its rank in the world changes with every generation."""

    node: int
    local: int
    """Number on the node."""
    run: int = 0
    """How often the node had started that place before."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    number: int
    """Grows by one with each."""
    members: tuple[Member, ...]
    """In the order of their ranks."""
    store: str
    """`host:port` of the store where they meet."""
    kind: Kind
    """Why there is a new one. A loss ends the one before at once, the others at a step boundary."""
    lost: tuple[Member, ...] = ()
    """Members of the one before that are gone."""
    released: tuple[Member, ...] = ()
    """Members of the one before that live and leave, since the run asks for fewer ranks."""

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_json(cls, data: Any) -> Generation:
        """Inverse of `to_json`.

        Raises:
            ValueError: a field is missing, unknown, or of the wrong type.
        """
        names = ("number", "members", "store", "kind", "lost", "released")
        found = check_fields(data, names, names)
        check_number("number", found["number"], 1, MAX_NUMBER)
        check_text("store", found["store"], 300)
        host, _, port = found["store"].rpartition(":")
        is_port = port.isascii() and port.isdecimal() and len(port) < 6 and 0 < int(port) < 1 << 16
        if not (host.isascii() and host.isprintable() and host and is_port):
            raise ValueError(f"store {shown(found['store'])} must be HOST:PORT")
        if found["kind"] not in get_args(Kind):
            raise ValueError(f"kind {shown(found['kind'])} is unknown")
        members = {name: members_of(found[name]) for name in ("members", "lost", "released")}
        return cls(**{**found, **members})

    def ranks_of(self, node: int) -> list[int]:
        """Ranks in the world of the members on a node."""
        return [rank for rank, member in enumerate(self.members) if member.node == node]

    @property
    def nodes(self) -> list[int]:
        return sorted({member.node for member in self.members})


def members_of(data: Any) -> tuple[Member, ...]:
    """Ranks by where they run, from JSON.

    Raises:
        ValueError: it is not a list of them.
    """
    if not isinstance(data, (list, tuple)) or len(data) > _MAX_MEMBERS:
        raise ValueError(f"{shown(data)} is not a list of ranks")
    for one in data:
        if not isinstance(one, (list, tuple)) or len(one) not in (2, 3):
            raise ValueError(f"{shown(one)} is not a rank")
        for value, most in zip(one, (MAX_NODES, MAX_LOCAL_RANKS, MAX_NUMBER)):
            check_number("rank", value, 0, most)
    return tuple(Member(*one) for one in data)


def _check_mark(data: Any) -> None:
    check_number("mark", data, 1, 1)


def _check_generation_number(data: Any) -> None:
    check_number("generation", data, 0, MAX_NUMBER)


def _check_asked(data: Any) -> None:
    """As `RanksAsked`. A user may have asked for any number of ranks."""
    is_pair = isinstance(data, (list, tuple)) and len(data) == 2
    if not is_pair or not all(type(value) is int for value in data) or data[0] < 0:
        raise ValueError(f"{shown(data)} is not a number of ranks with a time")


Vocabulary = Mapping[str, Callable[[Any], object]]
"""The fields that messages may have, each with its check, which raises ValueError."""
FROM_RANK: Vocabulary = {
    **dict.fromkeys(("ready", "met", "leaving", "released", "failing"), _check_mark),
    "broken": _check_generation_number,
}
FROM_LAUNCHER: Vocabulary = {"generation": Generation.from_json}
FROM_PEER: Vocabulary = {
    "beat": _check_mark,
    **dict.fromkeys(("died", "gone", "left", "is_ready", "ready"), members_of),
    "asked": _check_asked,
    "broken": _check_generation_number,
    "generation": Generation.from_json,
}


class JsonSocket:
    """Messages as lines of JSON on a connected socket."""

    def __init__(self, connection: socket.socket, takes: Vocabulary) -> None:
        self.connection, self._takes = connection, takes
        self.heard_s = time.monotonic()
        """When something came last, on a monotonic clock."""
        self.end = "its connection has ended"
        """Why nothing more is read, once `read` has returned None."""
        self._rest = b""
        self._sending = threading.Lock()

    def send(self, **message: Any) -> None:
        """Sends a message, from any thread; the end of the other side shows when reading."""
        with contextlib.suppress(OSError), self._sending:
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[dict[str, Any]] | None:
        """The messages that have come; None at the end of the connection, and where something else
        has come.

        Waits for the first byte where the socket does.
        """
        try:
            data = self.connection.recv(_READ_BYTES)
        except (BlockingIOError, TimeoutError):
            return []
        except OSError:
            return None
        if not data:
            return None
        self.heard_s = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            if len(self._rest) > _MAX_BYTES:
                raise ValueError(f"a message of more than {_MAX_BYTES} bytes")
            return [self._checked(parse_json(line)) for line in lines]
        except ValueError as error:
            self.end = f"it has sent what is not a message: {error}"
            return None

    def _checked(self, message: Any) -> dict[str, Any]:
        for name, value in check_fields(message, self._takes, ()).items():
            self._takes[name](value)
        return message

    def close(self) -> None:
        with contextlib.suppress(OSError), self._sending:
            self.connection.close()
