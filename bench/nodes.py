"""Programs on two emulated nodes (`tests.helpers.two_nodes`): one rank and one core in each.

Bandwidth is emulated, latency is not. Also a program of its own, which times the link:
`nodes.py receive` in one namespace, `nodes.py send ADDRESS SECONDS` in the other.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support import ROOT

PORT = 29500
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
MOST_S = 3600.0
"""Seconds after which a program on the nodes counts as hung, if nothing else is said."""
_TEST_PORT = 29400
_SAY_EVERY_S = 20.0
_TAIL_BYTES = 1 << 16

Names = tuple[str, str]


def unwind_on_signals() -> None:
    """An end by a signal unwinds as an error does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@contextlib.contextmanager
def two_nodes(rate_mbit: float) -> Iterator[Names]:
    """Names of two namespaces with a link of some rate between them, both ways; 0 is no limit."""
    from tests.helpers.two_nodes import DEVICE
    from tests.helpers.two_nodes import two_nodes as emulated

    with emulated(rate_mbit or 1000.0) as names:
        for name in names if not rate_mbit else ():
            words = ["tc", "-n", name, "qdisc", "del", "dev", DEVICE, "root"]
            subprocess.run(words, check=True)
        yield names


def end_all(names: Names) -> None:
    """Ends every process on the nodes."""
    for name in names:
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        for pid in found.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def on_node(names: Names, node: int) -> list[str]:
    """What to put before a command that is to run on a node, on the node's core."""
    core = sorted(os.sched_getaffinity(0))[node]
    return ["ip", "netns", "exec", names[node], "taskset", "-c", str(core)]


def start(names: Names, command: list[str], log: Path) -> list[subprocess.Popen[bytes]]:
    """Starts a Python program on every node with torchrun, one rank on each.

    Args:
        names: of the nodes.
        command: script and flags.
        log: `<log>.<node>.txt` take what the nodes print.
    """
    from tests.helpers.two_nodes import DEVICE, HEAD

    env = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": DEVICE,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    launcher += ["--nproc-per-node", "1", "--master-addr", HEAD]
    launcher += ["--master-port", str(PORT)]
    started = []
    for node in range(len(names)):
        words = [*on_node(names, node), *launcher, "--node-rank", str(node), *command]
        with _log_of(log, node).open("wb") as file:
            started.append(
                subprocess.Popen(words, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT)
            )
    return started


def _log_of(log: Path, node: int) -> Path:
    return log.with_name(f"{log.name}.{node}.txt")


def run(
    names: Names,
    command: list[str],
    log: Path,
    *,
    most_s: float = MOST_S,
    say: Callable[[], str] = lambda: "",
) -> float:
    """Runs a program on the nodes to its end.

    Args:
        names: of the nodes.
        command: script and flags.
        log: see `start`.
        most_s: seconds it may take.
        say: asked now and then for a line on how far it is; empty says nothing.

    Returns:
        Seconds it took, with the start of its processes.

    Raises:
        SystemExit: it failed or took too long; with the end of both logs.
    """
    began = said = time.monotonic()
    launchers = start(names, command, log)
    while any(one.poll() is None for one in launchers):
        time.sleep(0.5)
        took = time.monotonic() - began
        if any(one.poll() for one in launchers) or took > most_s:
            break
        if time.monotonic() - said >= _SAY_EVERY_S:
            said = time.monotonic()
            if line := say():
                print(line, flush=True)
    if any(one.poll() != 0 for one in launchers):
        # A worker does not go with its launcher.
        end_all(names)
        codes = [one.wait() for one in launchers]
        tails = [_log_of(log, node).read_text(errors="replace")[-3000:] for node in (0, 1)]
        raise SystemExit("\n".join([*tails, f"{log.name} failed on the nodes: {codes}"]))
    return time.monotonic() - began


def progress(folder: Path, samples: int, name: str) -> str:
    """How far a run of the trainer is, from the end of its record; empty before its sixth step."""
    from megatron.training.logging.metrics import METRICS_FILE, decode

    path = folder / METRICS_FILE
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
        lines = file.read().decode(errors="replace").splitlines()
    steps = [r for r in map(decode, lines) if r is not None and r.get("kind") == "step"]
    if len(steps) < 6:
        return ""
    first, last = steps[-6], steps[-1]
    speed = (last["consumed_samples"] - first["consumed_samples"]) / (last["m"] - first["m"])
    left = (samples - last["consumed_samples"]) / speed
    return (
        f"{name}: {last['consumed_samples']} of {samples} samples, batch "
        f"{last['global_batch_size']}, {speed:.1f} samples/s, about {left:.0f} s left of this run"
    )


def measure_link(names: Names, seconds: float = 2.0) -> dict[str, float]:
    """Mbit/s of one TCP stream each way."""
    found = {}
    for sender, receiver in ((0, 1), (1, 0)):
        script = str(Path(__file__).resolve())
        to = [*on_node(names, receiver), sys.executable, script, "receive"]
        listener = subprocess.Popen(to, stdout=subprocess.PIPE, text=True)
        assert listener.stdout is not None
        listener.stdout.readline()  # it listens
        words = [sys.executable, script, "send", _ADDRESSES[receiver], f"{seconds:g}"]
        subprocess.run([*on_node(names, sender), *words], check=True)
        out, _ = listener.communicate(timeout=60)
        found[f"{sender} to {receiver}"] = round(float(out), 1)
    return found


def _receive() -> None:
    """Prints the Mbit/s of one stream that comes in."""
    with socket.create_server(("", _TEST_PORT)) as server:
        print("listening", flush=True)
        stream, _ = server.accept()
        buffer, total = bytearray(1 << 20), 0
        with stream:
            began = time.perf_counter()
            while count := stream.recv_into(buffer):
                total += count
        print(total * 8e-6 / (time.perf_counter() - began))


def _send(address: str, seconds: float) -> None:
    data, until = bytes(1 << 20), time.perf_counter() + seconds
    with socket.create_connection((address, _TEST_PORT)) as stream:
        while time.perf_counter() < until:
            stream.sendall(data)


def main(argv: list[str]) -> Any:
    """One side of a measurement."""
    return _receive() if argv[0] == "receive" else _send(argv[1], float(argv[2]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
