"""The sockets of an elastic launch and strangers: who may speak, and what a wrong word ends."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from copus_ext.extras.elastic import membership, peers
from copus_ext.extras.elastic.membership import Membership
from copus_ext.extras.elastic.messages import FROM_PEER, Generation, JsonSocket, Member
from copus_ext.extras.elastic.node import Agent
from copus_ext.extras.elastic.peers import Contact, NotMet, Peers, hello
from copus_ext.extras.elastic.resize import RANKS_FILE, ranks_asked
from copus_ext.launch.listen import LOOPBACK, listen_at, loopback_interface
from copus_ext.launch.workers import Launch
from tests.helpers.processes import wait_until

NESTED = b"[" * 20_000 + b"\n"


class Node:
    """The peer port of a launcher whose loop goes round when asked to, with nodes 0 to 8."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "control" / "elastic" / "launch"
        launch = Launch(
            name="launch",
            node=0,
            nodes=list(range(9)),
            num_ranks=1,
            endpoint="127.0.0.1:1",
            folder=str(folder),
            shared=str(self.folder),
        )
        self.agent = Agent(launch=launch, command=[], folder=self.folder)
        self.select = self.agent._select = selectors.DefaultSelector()
        self.peers = self.agent._peers = Peers(launch, self.folder, self.select, LOOPBACK)
        self.peers.publish()
        self.contact = Contact.from_json(json.loads((self.folder / "node-0.json").read_text()))
        self.agent._store = "127.0.0.1:1"
        members = tuple(Member(n, 0) for n in range(9))
        self.agent._take(Generation(number=1, members=members, store="127.0.0.1:1", kind="start"))
        self.sockets: list[socket.socket] = []

    def connect(self, said: bytes = b"") -> socket.socket:
        host, _, port = self.contact.address.rpartition(":")
        one = socket.create_connection((host, int(port)), timeout=20)
        self.sockets.append(one)
        one.sendall(said)
        return one

    def look(self, rounds: int = 3) -> None:
        for _ in range(rounds):
            self.agent._look()

    def is_closed(self, one: socket.socket) -> bool:
        """Whether the launcher has closed the connection, having said nothing."""
        one.settimeout(0)
        try:
            return one.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        for key in list(self.select.get_map().values()):
            key.fileobj.close()  # pyright: ignore[reportAttributeAccessIssue]
        self.select.close()
        for one in self.sockets:
            one.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    one = Node(tmp_path)
    yield one
    one.close()


@pytest.fixture(autouse=True)
def quick_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("copus_ext.extras.elastic.node._LOOK_S", 0.02)


def test_the_right_hello_and_nothing_else_makes_a_node(node: Node) -> None:
    token = node.contact.token
    wrong = [
        NESTED,
        b"\n" * 99,
        b"\x00" * 500,
        json.dumps({"hello": 1, "token": token}).encode() + b"\n",
        hello("0" * 32, 1),
        hello(token[:-1] + "x", 1),
        hello(token, 0),  # the launcher itself
        hello(token, 999_999),
        hello(token, 1).upper(),
        hello(token, 1)[:-1] + b" ",
        b" " + hello(token, 1),
    ]
    strangers = [node.connect(said) for said in wrong]
    friend = node.connect(hello(token, 1) + b'{"beat": 1}\n')
    node.look()
    assert [node.is_closed(one) for one in strangers] == [True] * len(wrong)
    assert list(node.peers.lines) == [1] and not node.peers._strangers
    assert b'"generation"' in friend.recv(1 << 16)
    assert node.agent._alive == set(node.agent._holders), "nobody was lost"


@pytest.mark.parametrize("kind", ["ready", "died and came again"])
def test_ranks_that_are_ready_before_nodes_have_met_are_known_to_all(
    tmp_path: Path, kind: str
) -> None:
    folder, nodes = tmp_path / "control" / "elastic" / "launch", [0, 1, 2]
    agents = []
    for node in nodes:
        launch = Launch(
            name="launch",
            node=node,
            nodes=nodes,
            num_ranks=1,
            endpoint="127.0.0.1:1",
            folder=str(tmp_path),
            shared=str(folder),
        )
        agents.append(Agent(launch=launch, command=[], folder=folder))
        agents[-1]._select = selectors.DefaultSelector()
        agents[-1]._peers = Peers(launch, folder, agents[-1]._select, LOOPBACK)
    first, *others = agents
    if kind == "ready":
        first._ready.add(Member(0, 0))
    else:
        first._lose(Member(0, 0))
        first._join([Member(0, 0, 1)])
    for one in agents:
        one._peers.publish()
    threads = [threading.Thread(target=one._meet) for one in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in others:
        one._look()
        one._look()
        if kind == "ready":
            assert Member(0, 0) in one._ready
        else:
            assert one._alive >= {Member(0, 0, 1)} and Member(0, 0) not in one._alive
    for one in agents:
        for key in list(one._select.get_map().values()):
            key.fileobj.close()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_hello_in_pieces_is_a_hello(node: Node) -> None:
    one = node.connect()
    for byte in hello(node.contact.token, 3):
        one.sendall(bytes([byte]))
        node.look(1)
    node.look()
    assert list(node.peers.lines) == [3]


def test_strangers_who_say_nothing_are_bounded_and_hold_up_nobody(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent: list[socket.socket] = []
    friends: dict[int, socket.socket] = {}
    for i in range(1, 9):
        silent += [node.connect(b"copus"[: j % 5]) for j in range(30)]
        friends[i] = node.connect(hello(node.contact.token, i))
        silent += [node.connect(b"copus"[: j % 5]) for j in range(10)]
    node.look()
    assert sorted(node.peers.lines) == list(friends)
    assert len(node.peers._strangers) == peers._MAX_STRANGERS
    assert sum(node.is_closed(one) for one in silent) == len(silent) - peers._MAX_STRANGERS
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + peers._HELLO_S + 1)
    node.look(1)
    assert not node.peers._strangers and all(map(node.is_closed, silent))
    assert sorted(node.peers.lines) == list(friends), "they are not strangers any more"


def test_the_loop_waits_for_no_stranger(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(20):
        node.connect(b"cop")

    def refuse(self: socket.socket, seconds: float | None) -> None:
        raise AssertionError("a connection that is waited for")

    class Watched(socket.socket):
        settimeout = refuse

    monkeypatch.setattr(socket, "socket", Watched)
    node.look()
    assert len(node.peers._strangers) == 20
    assert all(not one.connection.getblocking() for one in node.peers._strangers.values())


@pytest.mark.parametrize(
    "said",
    [
        NESTED,
        b'{"died": 5}\n',
        b'{"died": [[1]]}\n',
        b'{"ready": 1}\n',
        b'{"asked": [1]}\n',
        b'{"asked": [1e400, 0]}\n',
        b'{"broken": []}\n',
        b'{"generation": {}}\n',
        b'{"left": [[0, 0, NaN]]}\n',
        b'{"unknown": 1}\n',
        b"\xff\xfe\n",
        b"[]\n",
        b"9" * 6000 + b"\n",
        b"x" * ((1 << 22) + (1 << 17)),
    ],
    ids=lambda said: str(said[:20]),
)
def test_what_is_no_message_ends_that_connection_alone(
    node: Node, said: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    friend = node.connect(hello(node.contact.token, 1))
    other = node.connect(hello(node.contact.token, 2))
    node.look()
    sending = threading.Thread(target=lambda: _send(friend, said))
    sending.start()
    for _ in range(600):
        node.look(1)
        if 1 not in node.peers.lines:
            break
    sending.join()
    assert list(node.peers.lines) == [2] and Member(1, 0) not in node.agent._alive
    told = capsys.readouterr().err
    assert "node 1 is lost (it has sent what is not a message: " in told and len(told) < 400
    other.sendall(b'{"broken": 1}\n')
    node.look()
    assert node.agent._is_broken, "the other is heard"


@pytest.mark.parametrize("text", ["3", "many", "9" * 150])
def test_what_a_user_asks_for_is_a_message_whatever_it_is(tmp_path: Path, text: str) -> None:
    (tmp_path / RANKS_FILE).parent.mkdir(parents=True)
    (tmp_path / RANKS_FILE).write_text(text)
    asked = ranks_asked(tmp_path)
    assert asked is not None
    ours, theirs = socket.socketpair()
    JsonSocket(ours, FROM_PEER).send(asked=list(asked))
    assert JsonSocket(theirs, FROM_PEER).read() == [{"asked": list(asked)}]


def _send(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(data)


@pytest.mark.parametrize("said", [NESTED, b'{"generation": 3}\n', b'{"ready": 1}\n', b"\x00\n"])
def test_a_rank_ends_where_its_launcher_says_what_is_no_message(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It must not train on without a launcher: the thread that reads would be dead.
    codes: list[int] = []
    monkeypatch.setattr(membership, "exit_immediately", codes.append)
    monkeypatch.setattr(membership, "_wait_in_slices", lambda membership: None)
    ours, theirs = socket.socketpair()
    Membership(theirs, Member(0, 0), "launch")
    ours.sendall(said)
    assert wait_until(lambda: codes, 20) and codes == [1]


def test_no_stranger_and_no_token_is_named_in_what_is_printed(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    token = node.contact.token
    node.connect(hello(token, 1) + b'{"token": "%s"}\n' % token.encode())
    node.connect(hello(token, 77)[:-1] + b"?")
    node.look()
    out, err = capsys.readouterr()
    assert "not a message" in err and token not in out + err and token not in repr(node.contact)


# The token's file.


@pytest.mark.parametrize("umask", [0, 0o022, 0o077, 0o777])
@pytest.mark.parametrize("before", [None, 0o666, 0o000])
def test_the_file_of_the_token_is_the_owners_alone(
    tmp_path: Path, umask: int, before: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []
    write = os.fdopen

    def note(handle: int, *more: Any, **named: Any) -> Any:
        modes.append(stat.S_IMODE(os.fstat(handle).st_mode))
        return write(handle, *more, **named)

    folder = tmp_path / "shared"
    folder.mkdir()
    path = folder / "node-0.json"
    if before is not None:
        path.write_text("{}")
        path.chmod(before)
    launch = Launch(
        name="l", node=0, nodes=[0], num_ranks=1, endpoint="", folder="", shared=str(folder)
    )
    monkeypatch.setattr(os, "fdopen", note)
    old = os.umask(umask)
    try:
        with selectors.DefaultSelector() as select:
            Peers(launch, folder, select, LOOPBACK).publish()
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert modes and not any(mode & 0o077 for mode in modes), "others could read it for a moment"


def test_a_file_that_others_can_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As on a file system that keeps no modes.
    write = peers.write_atomically

    def ignore(path: Path, text: str, *, mode: int) -> None:
        write(path, text, mode=0o644)

    monkeypatch.setattr(peers, "write_atomically", ignore)
    node = Node(tmp_path)
    node.close()
    assert "others can read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 20_000, '{"ranks": 1}', "[]", "9" * 6000, '{"address": "h:1"}', "\x00"],
    ids=lambda text: text[:12],
)
def test_a_damaged_file_of_a_node_is_no_node(node: Node, text: str) -> None:
    (node.folder / "node-1.json").write_text(text)
    assert not node.peers.connect(1)
    with pytest.raises(NotMet, match=r"node-1\.json of node 1"):
        node.peers.ranks_of(1)


# Where sockets listen.


def test_a_socket_listens_at_the_address_of_its_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"node-0": ["127.0.1.1"], "elsewhere": ["192.0.2.7"], "both": ["127.0.1.1", LOOPBACK]}

    def look_up(host: str, *args: Any, **named: Any) -> Any:
        if host == "unknown":
            raise socket.gaierror
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, 0)) for a in known.get(host, [host])
        ]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    found = {}
    for host in (LOOPBACK, "127.0.0.2", *known, "unknown"):
        with listen_at(host) as server:
            found[host] = server.getsockname()[0]
    assert found[LOOPBACK] == LOOPBACK and found["127.0.0.2"] == "127.0.0.2"
    # Other nodes do not reach what a name means here alone, nor what a name means elsewhere.
    assert {found[host] for host in (*known, "unknown")} <= {"::", "0.0.0.0"}


def test_an_address_of_this_machine_is_the_only_one_that_is_opened() -> None:
    found = [a for own in psutil.net_if_addrs().values() for a in own]
    own = [a.address for a in found if a.family == socket.AF_INET and a.address != LOOPBACK]
    if not own:
        pytest.skip("this machine has the loopback alone")
    with listen_at(own[0]) as server:
        assert server.getsockname()[0] == own[0]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((LOOPBACK, server.getsockname()[1]), timeout=20)


def test_a_port_that_is_taken_is_an_error_and_no_reason_to_listen_on_all() -> None:
    with listen_at(LOOPBACK) as one, pytest.raises(OSError):
        listen_at(LOOPBACK, one.getsockname()[1])


def test_a_system_without_the_protocol_of_an_address_listens_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def look_up(host: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 0, 0, 0))]

    def create(family: int = socket.AF_INET, *args: Any, **kwargs: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(family, *args, **kwargs)

    real = socket.socket
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "socket", create)
    with listen_at("somewhere") as server:
        assert server.getsockname()[0] == "0.0.0.0"


def test_the_loopback_has_an_interface() -> None:
    assert loopback_interface() in dict(socket.if_nameindex()).values() or os.name != "posix"


@pytest.mark.parametrize("host", [LOOPBACK, ""])
def test_the_store_listens_where_it_is_told_to(host: str) -> None:
    from torch.distributed import TCPStore

    from copus_ext.launch.store import serve
    from tests.helpers.listeners import listening

    before = listening(os.getpid())
    store = serve(host or "no-name-that-is-known")
    (own,) = listening(os.getpid()) - before
    assert own[1] == store.port and (own[0] == LOOPBACK) == bool(host)
    other = TCPStore(LOOPBACK, store.port, is_master=False)
    other.set("a", "b")
    assert store.get("a") == b"b"
