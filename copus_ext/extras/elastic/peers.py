"""The connections of a node's launcher with those of the other nodes.

Every launcher listens, and leaves its address and a token in a file that all nodes see. Who comes
connects with those that are there, and says a hello of fixed length with the token of the other.
Nothing else that a connection sends is looked at before that.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import stat
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from copus_ext.extras.elastic.messages import FROM_PEER, JsonSocket
from copus_ext.launch.listen import LOOPBACK, listen_at
from copus_ext.launch.rendezvous import MAX_LOCAL_RANKS, MAX_NODES
from copus_ext.launch.workers import Launch
from copus_ext.reshard.checked import JsonRecord, check_number, check_text, read_value
from megatron.trainer.checkpoint.files import write_atomically
from megatron.trainer.common.program import tell

BEAT_S = 0.5
"""Seconds between two signs of life."""
_STUCK_S = 6.0
"""A launcher whose loop has not gone round for so long falls silent. With the silence that the
others wait for, it is less than ranks wait for a new generation."""
_CONNECT_S = 1.0
_TOKEN_BYTES = 16
_HELLO_S = 5.0
"""A connection without a whole hello is closed after so long."""
_MAX_STRANGERS = 64
"""Connections that may owe their hello at the same time. One more closes the oldest: the hello of
a launcher follows its connection at once, so the oldest is the least likely to be one."""
_MAX_ACCEPTED = 256
"""Connections that are taken at once, so that a flood of them does not keep the loop."""


class Fenced(Exception):
    """The others have gone on without this node."""


class NotMet(Exception):
    """A node did not come at the start."""


@dataclass(frozen=True, kw_only=True)
class Contact(JsonRecord):
    """What a launcher leaves in the shared folder, for the owner of the run alone.

    Raises:
        ValueError: a value of the wrong type or out of bounds, naming the field.
    """

    address: str
    """`host:port` where it listens."""
    token: str = field(repr=False)
    """What a hello to it must hold."""
    ranks: int
    """Ranks that it starts."""

    def __post_init__(self) -> None:
        check_text("address", self.address, 300)
        _, _, port = self.address.rpartition(":")
        if not (port.isascii() and port.isdecimal() and len(port) < 6):
            raise ValueError("address must be HOST:PORT")
        if not isinstance(self.token, str) or len(self.token) != 2 * _TOKEN_BYTES:
            raise ValueError("token is none")  # it is shown to nobody
        if not self.token.isascii():
            raise ValueError("token is none")
        check_number("ranks", self.ranks, 1, MAX_LOCAL_RANKS)


def hello(token: str, node: int) -> bytes:
    """What a launcher says first: of the same length for every node."""
    return f"copus-elastic-1 {token} {node:06d}\n".encode()


@dataclass
class _Stranger:
    """A connection that has not said its hello yet."""

    connection: socket.socket
    until_s: float
    said: bytes = b""


class Peers:
    """The other nodes, as one launcher sees them.

    Args:
        folder: shared by all nodes and empty at the start of the launch.
        select: told of every connection: ("server", None), ("stranger", None) and ("peer", node).
        host: address of this node; nothing listens elsewhere if that can be (see `listen_at`).
    """

    def __init__(
        self, launch: Launch, folder: Path, select: selectors.BaseSelector, host: str
    ) -> None:
        self._launch, self._folder, self._select = launch, folder, select
        self._token = secrets.token_hex(_TOKEN_BYTES)
        self._server = listen_at(host)
        self._server.setblocking(False)
        self._address = f"{host}:{self._server.getsockname()[1]}"
        self._strangers: dict[int, _Stranger] = {}
        """By file number, the oldest first."""
        select.register(self._server, selectors.EVENT_READ, ("server", None))
        self._turned_s = time.monotonic()
        self.lines: dict[int, JsonSocket] = {}
        """By node, of those that are connected."""

    def publish(self) -> None:
        """Tells where this launcher listens, with which token, and how many ranks it starts. Only
        the owner may read it, where the file system keeps modes."""
        own = Contact(address=self._address, token=self._token, ranks=self._launch.num_ranks)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._file_of(self._launch.node)
        write_atomically(path, json.dumps(own.to_json()), mode=0o600)
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            tell("launcher", f"others can read {path}: they can act as a node of this run")

    def _file_of(self, node: int) -> Path:
        return self._folder / f"node-{node}.json"

    def ranks_of(self, node: int) -> int:
        """The ranks that another node starts.

        Raises:
            NotMet: it does not say so.
        """
        with contextlib.suppress(ValueError):
            if (found := self._contact(node)) is not None:
                return found.ranks
        raise NotMet(f"{self._file_of(node)} of node {node} is missing or damaged")

    def _contact(self, node: int) -> Contact | None:
        return read_value(self._file_of(node), Contact.from_json)

    def connect(self, node: int) -> bool:
        """Connects with a node that listens. Returns whether it does."""
        with contextlib.suppress(OSError, ValueError):
            if (found := self._contact(node)) is None:
                return False
            host, _, port = found.address.rpartition(":")
            connection = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
            connection.sendall(hello(found.token, self._launch.node))
            self.add(node, connection)
            return True
        return False

    def accept(self) -> list[tuple[int, socket.socket]]:
        """Takes the connections that have come. None of them is waited for.

        Returns:
            Those whose hello has come already, as `greet` returns them.
        """
        found = []
        for _ in range(_MAX_ACCEPTED):
            try:
                connection, _ = self._server.accept()
            except OSError:  # no more, or one that has gone again
                break
            connection.setblocking(False)
            if len(self._strangers) >= _MAX_STRANGERS:
                self._dismiss(next(iter(self._strangers)))
            until_s = time.monotonic() + _HELLO_S
            self._strangers[connection.fileno()] = _Stranger(connection, until_s)
            self._select.register(connection, selectors.EVENT_READ, ("stranger", None))
            if (one := self.greet(connection)) is not None:
                found.append(one)
        return found

    def greet(self, connection: Any) -> tuple[int, socket.socket] | None:
        """Reads what a connection says first.

        Args:
            connection: of which something has come.

        Returns:
            The node and its connection, which `add` makes one of the others. None while the hello
            is not whole, and for one that is wrong, whose connection is closed.
        """
        number = connection.fileno()
        one = self._strangers.get(number)
        if one is None or one.connection is not connection:
            return None
        length = len(hello(self._token, 0))
        try:
            came = connection.recv(length - len(one.said))
        except BlockingIOError:
            return None
        except OSError:
            came = b""
        one.said += came
        if came and len(one.said) < length:
            return None
        digits = one.said[-7:-1]
        node = int(digits) if digits.isdigit() else MAX_NODES
        # All of it is compared, in a time that does not tell where it differs.
        is_right = hmac.compare_digest(one.said, hello(self._token, node))
        if not is_right or node >= MAX_NODES or node == self._launch.node:
            self._dismiss(number)
            return None
        self._forget(number)
        return node, connection

    def dismiss_late(self) -> None:
        """Closes connections that have not said their hello in time."""
        now_s = time.monotonic()
        for number in [n for n, one in self._strangers.items() if now_s > one.until_s]:
            self._dismiss(number)

    def _forget(self, number: int) -> socket.socket:
        connection = self._strangers.pop(number).connection
        self._select.unregister(connection)
        return connection

    def _dismiss(self, number: int) -> None:
        self._forget(number).close()

    def add(self, node: int, connection: socket.socket) -> None:
        """Makes a connection that of a node, which has none."""
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # it may have gone again, which reading will show
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.lines[node] = JsonSocket(connection, FROM_PEER)
        self._select.register(connection, selectors.EVENT_READ, ("peer", node))

    def drop(self, node: int) -> None:
        lines = self.lines.pop(node)
        self._select.unregister(lines.connection)
        lines.close()

    def tell(self, **message: Any) -> None:
        for lines in self.lines.values():
            lines.send(**message)

    def turn(self) -> None:
        self._turned_s = time.monotonic()

    def start_to_beat(self) -> None:
        """Shows the others that this launcher lives, from now on, also while it waits a little for
        a file system. Counts their silence from now on: nobody sends before all have met."""
        for lines in self.lines.values():
            lines.heard_s = time.monotonic()
        threading.Thread(target=self._beat, name="beats", daemon=True).start()

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            if time.monotonic() - self._turned_s > _STUCK_S:
                continue  # another node may lead
            for lines in list(self.lines.values()):
                lines.send(beat=1)

    def silent(self, limit_s: float) -> list[int]:
        """Nodes that have said nothing for so long."""
        now_s = time.monotonic()
        return [node for node, lines in self.lines.items() if now_s - lines.heard_s > limit_s]


def local_address(launch: Launch) -> str:
    """The address at which other nodes reach this one: that from which it reaches the first."""
    if not launch.endpoint:
        return LOOPBACK
    host, _, port = launch.endpoint.rpartition(":")
    if launch.node == 0:  # its own name may be that of the loopback here
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        return probe.getsockname()[0]
