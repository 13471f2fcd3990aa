"""Two nodes on one machine: network namespaces with a link between them. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

from tests.helpers.network_namespaces import limit_link, use_usual_tcp

DEVICE = "slow0"
"""The link, on both nodes."""
HEAD = "10.77.0.1"
"""Address of the first node."""


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


@contextlib.contextmanager
def two_nodes(rate_mbit: float) -> Iterator[tuple[str, str]]:
    """Names of two namespaces with a link of some rate between them.

    A guard waits for the end of this process, however it ends, and then ends what runs in them and
    takes them away.
    """
    names = f"copus{os.getpid()}a", f"copus{os.getpid()}b"
    script = 'cat >/dev/null; for n in "$@"; do ip netns pids $n | xargs -r kill -9; done; '
    script += 'for n in "$@"; do ip netns del $n; done'
    guard = subprocess.Popen(
        ["sh", "-c", script, "guard", *names],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        for name in names:
            _command("ip", "netns", "add", name)
            use_usual_tcp(name)
        peer = ("peer", "name", DEVICE, "netns", names[1])
        _command("ip", "link", "add", DEVICE, "netns", names[0], "type", "veth", *peer)
        for i, name in enumerate(names):
            _command("ip", "-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", DEVICE)
            _command("ip", "-n", name, "link", "set", "lo", "up")
            _command("ip", "-n", name, "link", "set", DEVICE, "up")
            limit_link(name, DEVICE, rate_mbit)
        yield names
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait()
