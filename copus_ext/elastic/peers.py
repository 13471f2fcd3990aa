"""The connections of a node's launcher with those of the other nodes.

Every launcher listens, and leaves its address and a token in a file that all nodes see. Who comes
connects with those that are there.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
import threading
import time
from pathlib import Path
from typing import Any

from copus_ext.elastic.messages import Lines
from copus_ext.launch.workers import Launch
from megatron.training.checkpoint.files import write_atomically

BEAT_S = 0.5
"""Seconds between two signs of life."""
_STUCK_S = 6.0
"""A launcher whose loop has not gone round for so long falls silent. With the silence that the
others wait for, it is less than ranks wait for a new generation."""
_CONNECT_S = 1.0


class Fenced(Exception):
    """The others have gone on without this node."""


class NotMet(Exception):
    """A node did not come at the start."""


class Peers:
    """The other nodes, as one launcher sees them.

    Args:
        launch: of this node.
        folder: shared by all nodes and empty at the start of the launch.
        select: told of every connection: ("server", None) and ("peer", node).
    """

    def __init__(self, launch: Launch, folder: Path, select: selectors.BaseSelector) -> None:
        self._launch, self._folder, self._select = launch, folder, select
        self._token = secrets.token_hex(8)
        self._server = socket.create_server(("", 0))
        select.register(self._server, selectors.EVENT_READ, ("server", None))
        self._turned_s = time.monotonic()
        self.lines: dict[int, Lines] = {}
        """By node, of those that are connected."""

    def publish(self, host: str) -> None:
        """Tells where this launcher listens, and how many ranks it starts.

        Args:
            host: its address.
        """
        own = {
            "address": f"{host}:{self._server.getsockname()[1]}",
            "token": self._token,
            "ranks": self._launch.num_ranks,
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file_of(self._launch.node), json.dumps(own))

    def _file_of(self, node: int) -> Path:
        return self._folder / f"node-{node}.json"

    def ranks_of(self, node: int) -> int:
        """The ranks that another node starts."""
        return int(json.loads(self._file_of(node).read_text())["ranks"])

    def connect(self, node: int) -> bool:
        """Connects with a node that listens. Returns whether it does."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            found = json.loads(self._file_of(node).read_text())
            host, _, port = found["address"].rpartition(":")
            connection = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
            lines = Lines(connection)
            lines.send(hello=self._launch.node, token=found["token"])
            self.add(node, lines)
            return True
        return False

    def accept(self) -> tuple[int, Lines, list[dict[str, Any]]] | None:
        """Takes a connection that has come: the node, and what it has said already. `add` makes it
        one of the others. None for a stranger."""
        connection, _ = self._server.accept()
        connection.settimeout(1.0)
        lines = Lines(connection)
        hello, *rest = lines.read() or [{}]
        node = hello.get("hello")
        if hello.get("token") != self._token or not isinstance(node, int):
            lines.close()
            return None
        return node, lines, rest

    def add(self, node: int, lines: Lines) -> None:
        """Makes a connection that of a node, which has none."""
        lines.connection.setblocking(False)
        lines.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.lines[node] = lines
        self._select.register(lines.connection, selectors.EVENT_READ, ("peer", node))

    def drop(self, node: int) -> None:
        """Closes the connection with a node."""
        lines = self.lines.pop(node)
        self._select.unregister(lines.connection)
        lines.close()

    def tell(self, **message: Any) -> None:
        """Sends all of them a message."""
        for lines in self.lines.values():
            lines.send(**message)

    def turn(self) -> None:
        """Notes that the launcher's loop goes round."""
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


def own_address(launch: Launch) -> str:
    """The address at which other nodes reach this one: that from which it reaches the first."""
    if not launch.endpoint:
        return "127.0.0.1"
    host, _, port = launch.endpoint.rpartition(":")
    if launch.node == 0:  # its own name may be that of the loopback here
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        return probe.getsockname()[0]
