"""Starts the ranks of distributed tests from a process that has imported torch and megatron-core.

A fresh interpreter spends over 4 CPU seconds on these imports. The server spends them once for each
test process and then forks every rank of every launch. Each rank is a real process with an exit
code, signals and a kill of its own. Our own packages are not imported before the fork.

Three things differ from a fresh interpreter. All ranks share one hash seed, so that a test of the
order of a set needs `launcher="torchrun"`. `/proc/PID/cmdline` shows the server's. And a rank that
is done leaves without taking down what it has imported: to free half a million objects, which it
shares with the server, takes over a CPU second, more than most ranks train for. Ranks under a
launcher of their own end as programs do.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

if __name__ == "__main__":
    # The folder of this file would hide modules of the same names as those beside it.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.helpers import processes

ROOT = Path(__file__).resolve().parents[2]
PLACE = "0" * 32
"""What the mark of a launch is written over; as long as `uuid4().hex`."""
_PRELOADED = ("torch", "megatron.core", "numpy", "psutil")
_MAX_MESSAGE = 1 << 20


class ForkedProcess:
    """A rank that the server has forked, with the part of Popen that tests use."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code, negative for a signal, or None while the process runs."""
        if self.returncode is None:
            self.returncode = self._server.exit_code(self.pid)
        return self.returncode

    def wait(self) -> int:
        """Returns the exit code as soon as there is one."""
        while self.poll() is None:
            self._server.receive(timeout_s=None)
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)


class ForkServer:
    """The client's end of a server process, which is ready when this is made.

    Args:
        env: the environment of the server. Variables that only count when an interpreter starts
            (`PYTHON*`, `LD_PRELOAD`, `OMP_NUM_THREADS`) hold for all its ranks.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self.env = {**env, processes.MARK: PLACE}
        self._socket = ours
        self._codes: dict[int, int] = {}
        self._buffer = b""
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env=self.env,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.receive(timeout_s=None)

    def start(
        self,
        program: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        stdout: BinaryIO,
        stderr: BinaryIO,
    ) -> ForkedProcess:
        """Forks a process that runs a Python file.

        Args:
            program: the file and its arguments.
            env: its whole environment.
            cwd: its working directory.
            stdout: open file that it writes to.
            stderr: the same for errors.

        Raises:
            EOFError: the server has died.
        """
        job = json.dumps({"argv": list(program), "env": dict(env), "cwd": str(cwd)}).encode()
        socket.send_fds(self._socket, [b"%d\n" % len(job)], [stdout.fileno(), stderr.fileno()])
        self._socket.sendall(job)
        while True:
            message = self.receive(timeout_s=None)
            if message is not None and "pid" in message:
                return ForkedProcess(self, message["pid"])

    def exit_code(self, pid: int) -> int | None:
        """Returns the exit code of a rank, or None while it runs."""
        while pid not in self._codes:
            if self.receive(timeout_s=0.0) is None:
                return None
        return self._codes.pop(pid)

    def receive(self, *, timeout_s: float | None) -> dict[str, Any] | None:
        """Returns the next message of the server, or None if there is none in time.

        Raises:
            EOFError: the server has died.
        """
        while b"\n" not in self._buffer:
            self._socket.settimeout(timeout_s)
            try:
                received = self._socket.recv(_MAX_MESSAGE)
            except (BlockingIOError, TimeoutError):
                return None
            if not received:
                raise EOFError(f"the fork server ended with {self._process.wait()}")
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        message = json.loads(line)
        if "code" in message:
            self._codes[message["ended"]] = message["code"]
        self._socket.settimeout(None)
        return message

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def preload() -> None:
    """Imports what our packages import of torch, megatron-core and numpy, and none of our own."""
    names = set()
    for package in (ROOT / "megatron" / "trainer", ROOT / "copus_ext"):
        for path in package.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    names |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names.add(node.module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not Path("/dev/nvidiactl").exists():
            _import_without_compiler()
        for name in sorted(n for n in names if n.startswith(_PRELOADED)):
            # Transformer Engine's and other optional parts.
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def _import_without_compiler() -> None:
    """Does what `import_core` of our own packages does on ranks without a GPU."""
    torch: Any = importlib.import_module("torch")
    compiler, torch.compile = torch.compile, lambda function: function
    try:
        importlib.import_module("megatron.core.jit")
    finally:
        torch.compile = compiler


class _Jobs:
    """The server: one thread that waits for jobs and for the ends of ranks."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.selector = selectors.DefaultSelector()
        self.selector.register(connection, selectors.EVENT_READ)
        self.mark_address = _address_of_mark()

    def next_in_child(self) -> dict[str, Any] | None:
        """Returns the job, in each forked rank; or None in the server, when its client is gone."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is not self.connection:
                    self._report_end(key.fd, key.data)
                    continue
                job = self._receive()
                if job is None:
                    return None
                pid = os.fork()
                if pid == 0:
                    self._become(job)
                    return job
                for fd in job["fds"]:
                    os.close(fd)
                self.selector.register(os.pidfd_open(pid), selectors.EVENT_READ, data=pid)
                self.send({"pid": pid})

    def _receive(self) -> dict[str, Any] | None:
        header, fds, _, _ = socket.recv_fds(self.connection, 1, 2)
        if not header:
            return None
        while not header.endswith(b"\n"):
            header += self.connection.recv(1)
        length, text = int(header), b""
        while len(text) < length:
            text += self.connection.recv(length - len(text))
        return {**json.loads(text), "fds": fds}

    def _report_end(self, pidfd: int, pid: int) -> None:
        _, status = os.waitpid(pid, 0)
        self.selector.unregister(pidfd)
        os.close(pidfd)
        self.send({"ended": pid, "code": os.waitstatus_to_exitcode(status)})

    def send(self, message: dict[str, int]) -> None:
        """Tells the client, if it is still there."""
        with contextlib.suppress(BrokenPipeError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def _become(self, job: dict[str, Any]) -> None:
        """Makes the forked process what a fresh one would be."""
        for key in list(self.selector.get_map().values()):
            if key.fileobj is not self.connection:
                os.close(key.fd)
        self.selector.close()
        self.connection.close()
        os.setsid()
        for target, fd in zip((1, 2), job["fds"]):
            os.dup2(fd, target)
            os.close(fd)
        os.environ.clear()
        os.environ.update(job["env"])
        # /proc/PID/environ shows the memory that the process began with.
        mark = job["env"][processes.MARK].encode()
        assert len(mark) == len(PLACE), f"a mark has {len(PLACE)} characters, not {len(mark)}"
        ctypes.memmove(self.mark_address, mark, len(mark))
        os.chdir(job["cwd"])
        sys.argv = job["argv"]
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)


def _address_of_mark() -> int:
    """Where the value of the mark stands in this process's first environment."""
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47])
    entry = f"{processes.MARK}={PLACE}".encode()
    found = Path("/proc/self/environ").read_bytes().index(entry)
    return start + found + len(entry) - len(PLACE)


def _run(program: str) -> NoReturn:
    """Runs a program to its end, with its threads and what it has registered for its exit."""
    code: Any = 0
    interrupted = False
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        code = 1
        sys.excepthook(type(error), error, error.__traceback__)
        interrupted = isinstance(error, KeyboardInterrupt)
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    shutdown: Any = threading
    shutdown._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


def main() -> None:
    """Serves until the client closes its end. A forked rank runs its program and ends here too."""
    preload()
    gc.collect()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a fork would lose them"
    jobs = _Jobs(socket.socket(fileno=int(sys.argv[1])))
    jobs.send({"ready": os.getpid()})
    job = jobs.next_in_child()
    if job is None:
        return
    importlib.import_module("copus_test_child").prepare()
    _run(sys.argv[0])


if __name__ == "__main__":
    main()
