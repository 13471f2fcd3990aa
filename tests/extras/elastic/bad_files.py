"""Wrong inputs of this extra for `tests.helpers.bad_inputs`: what comes over its sockets."""

from __future__ import annotations

import dataclasses
import functools
import random
import selectors
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from copus_ext.extras.elastic.messages import (
    FROM_LAUNCHER,
    FROM_PEER,
    FROM_RANK,
    Generation,
    JsonSocket,
    Member,
)
from copus_ext.extras.elastic.node import Agent
from copus_ext.extras.elastic.peers import Contact, Fenced, Peers, hello
from copus_ext.extras.elastic.rank_process import RankProcess
from copus_ext.extras.elastic.resize import RANKS_FILE, ranks_asked
from copus_ext.launch.listen import LOOPBACK
from copus_ext.launch.workers import Launch
from copus_ext.reshard.checked import read_value
from tests.helpers import spoil


def generation(*ranks: int, **fields: object) -> Generation:
    members = tuple(Member(node, local) for node, n in enumerate(ranks) for local in range(n))
    values = {"number": 1, "members": members, "store": "127.0.0.1:1", "kind": "start", **fields}
    return Generation(**values)  # pyright: ignore[reportArgumentType]


class Quiet:
    """Other nodes that are connected and say nothing."""

    def __init__(self, *nodes: int) -> None:
        self.lines = dict.fromkeys(nodes)
        self.told: list[dict[str, Any]] = []

    def tell(self, **message: Any) -> None:
        self.told.append(message)


def agent(tmp_path: Path, *ranks: int, node: int = 0) -> Agent:
    """The launcher of a node in a first generation, without processes."""
    shared = tmp_path / "control" / "elastic" / "launch"
    shared.mkdir(parents=True)
    launch = Launch(
        name="launch",
        node=node,
        nodes=list(range(len(ranks))),
        num_ranks=ranks[node],
        endpoint="",
        folder=str(tmp_path),
        shared=str(shared),
    )
    one = Agent(launch=launch, command=[], folder=shared)
    others: Any = Quiet(*(n for n in range(len(ranks)) if n != node))
    one._peers, one._store = others, "127.0.0.1:1"
    one._take(generation(*ranks))
    return one


def _said(data: bytes, takes: Any) -> list[dict[str, Any]]:
    """What is read of some bytes, up to where the connection counts as ended."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10)
        ours.sendall(data[: 1 << 16])
        ours.shutdown(socket.SHUT_WR)
        lines, found = JsonSocket(theirs, takes), []
        while (messages := lines.read()) is not None:
            found += messages
        return found


_OF_PEERS: tuple[dict[str, Any], ...] = (
    {"beat": 1},
    {"died": [[1, 0, 0]]},
    {"gone": [[2, 0, 1]], "left": []},
    {"asked": [3, 1764374400000000000]},
    {"left": [[1, 0]]},
    {"is_ready": [[1, 0, 0], [2, 0, 0]]},
    {"ready": [[1, 0, 1]]},
    {"broken": 2},
)


def peer(rng: random.Random, folder: Path) -> str | None:
    """What a launcher is told by another, whose hello was right."""
    proposed = dataclasses.replace(generation(1, 1, 1), number=rng.randrange(5)).to_json()
    message = rng.choice((*_OF_PEERS, {"generation": proposed}))
    data = spoil.spoiled_json(rng, message) + b"\n"
    one = agent(folder, 1, 1, 1)

    def hear() -> None:
        for said in _said(data, FROM_PEER):
            one._hear_peer(1, said)
            one._propose()

    return spoil.problem_of(hear, Fenced)


def launcher(rng: random.Random, folder: Path) -> str | None:
    """What a rank is told by its launcher, and a launcher by its rank."""
    whole = generation(1, 1, 1).to_json()
    told = spoil.spoiled_json(rng, {"generation": whole}) + b"\n"
    said = (
        spoil.spoiled_json(rng, rng.choice(({"ready": 1}, {"broken": 3}, {"leaving": 1}))) + b"\n"
    )

    def hear() -> None:
        for message in _said(told, FROM_LAUNCHER):
            for one in message.values():
                Generation.from_json(one)
        for message in _said(said, FROM_RANK):
            assert all(type(value) is int for value in message.values())

    return spoil.problem_of(hear)


@functools.lru_cache(maxsize=1)
def _peers() -> tuple[Any, Any]:
    """A launcher that listens, for as long as the process lives."""
    launch = Launch(name="l", node=0, nodes=[0, 1], num_ranks=1, endpoint="", folder="")
    folder = Path(tempfile.mkdtemp())
    return Peers(launch, folder, selectors.DefaultSelector(), LOOPBACK), folder


def stranger(rng: random.Random, folder: Path) -> str | None:
    """A connection with a launcher that says a wrong hello, or a right one in pieces."""
    peers, _ = _peers()
    right = hello(peers._token, 1)
    said = rng.choice(
        (spoil.spoiled_bytes(rng, right), spoil.spoiled_json(rng, {"hello": 1}), right)
    )
    host, _, port = peers._address.rpartition(":")

    def speak() -> None:
        with socket.create_connection((host, int(port)), timeout=10) as one:
            try:
                one.sendall(said[:100_000])
                one.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # closed already
            met: list[Any] = []
            while not met:
                events = peers._select.select(0 if peers._strangers else 10)
                if not events and not peers._strangers:
                    break
                for key, _ in events:
                    if key.data[0] == "server":
                        met += peers.accept()
                    elif (found := peers.greet(key.fileobj)) is not None:
                        met.append(found)
                if not peers._strangers:
                    break
            for _, connection in met:
                connection.close()
        assert bool(met) == said.startswith(right), (said[:80], met)
        assert not peers._strangers

    return spoil.problem_of(speak)


def contact(rng: random.Random, folder: Path) -> str | None:
    """What a launcher leaves for the others."""
    whole = Contact(address="127.0.0.1:4000", token="ab" * 16, ranks=8)
    path = folder / "node-1.json"
    path.write_bytes(spoil.spoiled_json(rng, whole.to_json()))

    def read() -> None:
        found = read_value(path, Contact.from_json)
        assert found is None or 0 <= int(found.address.rpartition(":")[2]) < 100_000

    return spoil.problem_of(read, ValueError)


def error_file(rng: random.Random, folder: Path) -> str | None:
    """The error that a rank leaves for its launcher, and what a user asks a run for."""
    path = folder / "error.json"
    message = {"message": "ValueError: x", "extraInfo": {"py_callstack": "a\nb", "time": 1.0}}
    path.write_bytes(spoil.spoiled_json(rng, {"message": message}))
    nothing: Any = None
    rank = RankProcess(Member(0, 0), nothing, nothing, path)
    asked = folder / RANKS_FILE
    asked.parent.mkdir(parents=True)
    asked.write_bytes(spoil.spoiled_bytes(rng, b"16\n"))

    def read() -> None:
        rank.failure(1, 0).to_json()
        ranks_asked(folder)

    return spoil.problem_of(read)


KINDS: dict[str, Callable[[random.Random, Path], str | None]] = {
    check.__name__.replace("_", " "): check
    for check in (peer, launcher, stranger, contact, error_file)
}
"""What can be wrong, and its check."""
