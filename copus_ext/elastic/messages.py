"""What launchers and ranks tell each other: generations, and lines of JSON on a socket. No torch.

A generation is a set of ranks that train together. It gets a number that grows with every loss and
every join, and no two sets of one run ever have the same number.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

PIPE_VARIABLE = "COPUS_ELASTIC_PIPE"
"""Environment variable of a rank: file number of its connection with the launcher, and its place,
as FD:NODE:LOCAL:RUN."""
Kind = Literal["start", "loss", "join", "resize"]
_READ_BYTES = 1 << 16
_MOST_BYTES = 1 << 22


class Member(NamedTuple):
    """A rank by where it runs; its rank in the world changes with every generation."""

    node: int
    """Number of its node."""
    local: int
    """Number on the node."""
    run: int = 0
    """How often the node had started that place before."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Who trains together."""

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
        """Plain JSON types."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Generation:
        """Inverse of `to_json`."""
        names = ("members", "lost", "released")
        members = {name: tuple(Member(*m) for m in data[name]) for name in names}
        return cls(**{**data, **members})

    def ranks_of(self, node: int) -> list[int]:
        """Ranks in the world of the members on a node."""
        return [rank for rank, member in enumerate(self.members) if member.node == node]

    @property
    def nodes(self) -> list[int]:
        """Nodes with a member."""
        return sorted({member.node for member in self.members})


class Lines:
    """Messages as lines of JSON on a connected socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.heard_s = time.monotonic()
        """When something came last, on a monotonic clock."""
        self._rest = b""
        self._sending = threading.Lock()

    def send(self, **message: Any) -> None:
        """Sends a message, from any thread; the end of the other side shows when reading."""
        with contextlib.suppress(OSError), self._sending:
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[dict[str, Any]] | None:
        """The messages that have come; None at the end of the connection.

        Waits for the first byte where the socket does.
        """
        try:
            data = self.connection.recv(_READ_BYTES)
        except (BlockingIOError, TimeoutError):
            return []
        except OSError:
            return None
        if not data or len(self._rest) > _MOST_BYTES:
            return None
        self.heard_s = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            found = [json.loads(line) for line in lines]
        except ValueError:  # no launcher speaks like this
            return None
        return found if all(isinstance(message, dict) for message in found) else None

    def close(self) -> None:
        """Closes the connection."""
        with contextlib.suppress(OSError), self._sending:
            self.connection.close()
