"""Several nodes on one machine: namespaces on a bridge, with slow links planted. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

DEVICE = "net0"
"""The network, on every node."""


def address(node: int) -> str:
    """Of a node."""
    return f"10.78.0.{node + 1}"


def why_not() -> str:
    """Why two nodes cannot be emulated here; empty if they can."""
    missing = [name for name in ("ip", "tc", "taskset") if shutil.which(name) is None]
    if missing:
        return f"this needs {', '.join(missing)} (iproute2, util-linux)"
    if os.geteuid():
        return "this needs root, for network namespaces: run it with sudo"
    if len(os.sched_getaffinity(0)) < 2:
        return "this needs two cores, one for each node"
    name = f"copus{os.getpid()}t"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"this needs network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


def _command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def use_usual_tcp(name: str) -> None:
    """Gives the connections of a namespace Linux's usual congestion control.

    With BBR, which some machines have instead, messages of some 100 KB over an emulated link wait
    for delayed acknowledgements: 40 or 80 ms, in some runs and not in others.
    """
    setting = "/proc/sys/net/ipv4/tcp_congestion_control"
    script = f"echo cubic >{setting} || echo reno >{setting}"
    _command("ip", "netns", "exec", name, "sh", "-c", script)


def limit_link(name: str, device: str, rate_mbit: float, *, offload: bool = False) -> None:
    """Limits what a namespace sends by a device. A link that was idle passes half a millisecond's
    bytes at once, and at least 32 KB: with more, messages that are few and short would cost
    nothing.

    Args:
        name: the namespace.
        device: of the namespace.
        rate_mbit: of the device.
        offload: whether packets are no larger than half of what passes at once, so that they pass
            whole, as where a network card cuts them. Else, below about 1 Gbit/s, a core cuts those
            of 64 KB into 1.5 KB, and computes less meanwhile.
    """
    burst_kb = max(32, round(rate_mbit / 16))
    limit = ["rate", f"{rate_mbit:g}mbit", "burst", f"{burst_kb}kb", "latency", "100ms"]
    _command("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *limit)
    if offload:
        largest = str(min(burst_kb * 512, 65_536))
        _command("ip", "-n", name, "link", "set", device, "gso_max_size", largest)


@contextlib.contextmanager
def star(
    num_nodes: int,
    *,
    slow_senders: Sequence[int] = (),
    slow_pairs: Sequence[tuple[int, int]] = (),
    rate_mbit: float = 100.0,
    usual_mbit: float = 800.0,
    offload: bool = False,
) -> Iterator[list[str]]:
    """Names of namespaces that reach each other.

    A guard waits for the end of this process, however it ends, and then ends what runs in them and
    takes them away.

    Args:
        num_nodes: namespaces.
        slow_senders: nodes whose sending is limited.
        slow_pairs: pairs with a limited link of their own, both ways.
        rate_mbit: of what is slow.
        usual_mbit: of what every other node sends, so that the processor decides nothing; 0 is no
            limit.
        offload: see `limit_link`.
    """
    names = [f"copus{os.getpid()}n{i}" for i in range(num_nodes)]
    hub = f"copus{os.getpid()}hub"
    script = 'cat >/dev/null; for n in "$@"; do ip netns pids $n | xargs -r kill -9; done; '
    script += 'for n in "$@"; do ip netns del $n; done'
    guard = subprocess.Popen(
        ["sh", "-c", script, "guard", *names, hub],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _command("ip", "netns", "add", hub)
        _command("ip", "-n", hub, "link", "add", "bridge0", "type", "bridge")
        _command("ip", "-n", hub, "link", "set", "bridge0", "up")
        for i, name in enumerate(names):
            _command("ip", "netns", "add", name)
            use_usual_tcp(name)
            peer = ("peer", "name", f"port{i}", "netns", hub)
            _command("ip", "link", "add", DEVICE, "netns", name, "type", "veth", *peer)
            _command("ip", "-n", hub, "link", "set", f"port{i}", "master", "bridge0", "up")
            _command("ip", "-n", name, "addr", "add", f"{address(i)}/24", "dev", DEVICE)
            _command("ip", "-n", name, "link", "set", "lo", "up")
            _command("ip", "-n", name, "link", "set", DEVICE, "up")
            rate = rate_mbit if i in slow_senders else usual_mbit
            if rate:
                limit_link(name, DEVICE, rate, offload=offload)
        for number, pair in enumerate(slow_pairs):
            _own_link(names, pair, f"own{number}", rate_mbit, offload=offload)
        yield names
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait()


def _own_link(
    names: Sequence[str], pair: tuple[int, int], device: str, rate_mbit: float, *, offload: bool
) -> None:
    """A cable between two nodes beside the bridge, which what they send each other takes."""
    a, b = pair
    peer = ("peer", "name", device, "netns", names[b])
    _command("ip", "link", "add", device, "netns", names[a], "type", "veth", *peer)
    for node in pair:
        _command("ip", "-n", names[node], "link", "set", device, "up")
    for node, other in (pair, pair[::-1]):
        route = (f"{address(other)}/32", "dev", device, "src", address(node))
        _command("ip", "-n", names[node], "route", "add", *route)
        limit_link(names[node], device, rate_mbit, offload=offload)
