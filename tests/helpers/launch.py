"""Starts the ranks of a distributed test, and leaves no process behind whatever happens."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, TypeVar

from tests.helpers import processes
from tests.helpers.fork_server import ForkedProcess, ForkServer

ROOT = Path(__file__).resolve().parents[2]
Launcher = Literal["torchrun", "direct", "fresh"]
_T = TypeVar("_T")

CHILD_PATH = Path(__file__).resolve().parent / "child"
_TAIL_CHARS = 6000
_STACK_WAIT_S = 3.0
_GRACE_S = 20.0
_ORPHAN_WAIT_S = 1.0
_POLL_S = 0.05
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_OTHER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID")


class RanksHung(AssertionError):
    """The ranks did not finish in time; the message holds their stacks."""


_Child = subprocess.Popen[Any] | ForkedProcess


@dataclass(frozen=True, kw_only=True)
class RanksResult:
    args: list[str]
    """Program and flags of every rank."""
    returncode: int
    """torchrun's own, or with `direct` the code of the rank that failed first."""
    stdout: str
    """Of all ranks, as it came."""
    stderr: str
    """Of all ranks, as it came."""
    wall_s: float
    """Seconds from start to end."""
    codes: tuple[int, ...] = ()
    """Of every process started: with `direct` of every rank."""
    orphans: int = 0
    """Processes that outlived all ranks; they are ended."""

    def check(self) -> RanksResult:
        """Returns itself.

        Raises:
            AssertionError: the code is not 0; the message ends with the output.
        """
        assert self.returncode == 0, (
            f"{self.args} left with {self.returncode} after {self.wall_s:.1f} s\n{self.tail()}"
        )
        return self

    def tail(self) -> str:
        return f"--- stdout\n{self.stdout[-_TAIL_CHARS:]}\n--- stderr\n{self.stderr[-_TAIL_CHARS:]}"


def run_ranks(
    args: str | Path | Sequence[str | Path],
    nproc: int,
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    launcher: Launcher = "direct",
    ends_all: bool = True,
) -> RanksResult:
    """Runs a Python program on `nproc` ranks of this machine and waits for its end.

    Args:
        args: program, or program and flags.
        nproc: ranks.
        timeout_s: seconds after which the ranks are hung.
        env: added to this process's environment.
        cwd: working directory, the repository by default.
        launcher: `direct`: one process per rank, forked from a server that has done the imports,
            with the true code of the first failure. `fresh`: the same with new interpreters; so
            is `direct` where the environment changes how Python starts. `torchrun`: as users do.
        ends_all: end all ranks when one has failed, as torchrun does; else each must end by itself.

    Raises:
        RanksHung: not done in time. All stacks are in the message, all processes are gone.
    """
    program = [str(args)] if isinstance(args, (str, Path)) else [str(arg) for arg in args]
    mark = uuid.uuid4().hex
    processes.guard_session()
    is_forked = launcher == "direct" and _can_fork(program, env or {})
    if is_forked:
        _fork_server()  # its imports do not count as time of the ranks
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="copus-ranks-") as folder:
        work = Path(folder)
        base = _environment(env or {}, mark, work)
        children: list[_Child] = []
        with (work / "stdout").open("wb") as out, (work / "stderr").open("wb") as err:
            for command, extra in _commands(program, nproc, launcher):
                where: dict[str, Any] = {"env": {**base, **extra}, "cwd": cwd or ROOT}
                where |= {"stdout": out, "stderr": err}
                if is_forked:
                    children.append(_fork_server().start(program, **where))
                    continue
                children.append(
                    subprocess.Popen(
                        command, **where, stdin=subprocess.DEVNULL, start_new_session=True
                    )
                )
        code = _wait(children, begin + timeout_s, ends_all=ends_all)
        stacks = stacks_of(mark, work) if code is None else ""
        orphans = 0 if code is None else _count_after(mark, _ORPHAN_WAIT_S)
        left = processes.end_marked(mark)
        result = RanksResult(
            args=program,
            returncode=-signal.SIGKILL if code is None else code,
            stdout=(work / "stdout").read_text(errors="replace"),
            stderr=(work / "stderr").read_text(errors="replace"),
            wall_s=time.monotonic() - begin,
            codes=tuple(child.wait() for child in children),
            orphans=orphans,
        )
    assert not left, f"processes {left} cannot be ended"
    if code is None:
        raise RanksHung(f"{program} hung after {timeout_s:g} s\n{result.tail()}\n{stacks}")
    return result


def run_in_fork(function: Callable[..., _T], *args: Any, timeout_s: float = 60.0) -> _T:
    """Returns what a function returns in a process of its own.

    The process is forked from this one, so that it imports nothing again. It may spoil what belongs
    to a process: groups, handlers of signals, globals of megatron-core.

    Raises:
        AssertionError: the function raised, or did not return in time.
    """
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def answer() -> None:
        try:
            theirs.send((function(*args), ""))
        except BaseException:
            theirs.send((None, traceback.format_exc()))

    child = context.Process(target=answer)
    child.start()
    theirs.close()
    try:
        assert ours.poll(timeout_s), f"{function.__name__} hung for {timeout_s:g} s"
        result, problem = ours.recv()
    finally:
        child.kill()
        child.join()
    assert not problem, problem
    return result


def free_port() -> int:
    """Returns a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _commands(
    program: list[str], nproc: int, launcher: Launcher
) -> Iterator[tuple[list[str], dict[str, str]]]:
    if launcher == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc)]
        local = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        yield [*torchrun, *local, *program], {}
        return
    port = str(free_port())
    for rank in range(nproc):
        ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        world = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(nproc))
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": "0"}
        yield [sys.executable, *program], {**ranks, **world, **master}


@functools.cache
def _fork_server() -> ForkServer:
    """The server of this test process, ready; it ends when this process does."""
    return ForkServer(_interpreter_environment())


def _can_fork(program: list[str], extra: Mapping[str, str]) -> bool:
    """Whether a forked rank is what a fresh one with these variables would be."""
    read_at_start = ("PYTHON", "LD_", "OMP_", "MKL_", "MALLOC_", "TZ")
    return program[0].endswith(".py") and not any(n.startswith(read_at_start) for n in extra)


def _interpreter_environment() -> dict[str, str]:
    """What every rank has before a test adds to it."""
    dropped = (*_RANK_VARIABLES, *_OTHER_VARIABLES)
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    env.setdefault("OMP_NUM_THREADS", "1")
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    env["PYTHONFAULTHANDLER"] = "1"
    paths = (str(CHILD_PATH), str(ROOT), env.get("PYTHONPATH"))
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return env


def _environment(extra: Mapping[str, str], mark: str, work: Path) -> dict[str, str]:
    stacks = work / "stacks"
    stacks.mkdir()
    env = {**_interpreter_environment(), "COPUS_TEST_STACKS": str(stacks)}
    if "PYTHONPATH" in extra:
        paths = (env["PYTHONPATH"], extra["PYTHONPATH"])
        extra = {**extra, "PYTHONPATH": os.pathsep.join(paths)}
    env.update(extra)
    env[processes.MARK] = mark
    return env


def _count_after(mark: str, seconds: float) -> int:
    """Marked processes that are still there after some seconds."""
    deadline = time.monotonic() + seconds
    while (left := len(processes.marked(mark))) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return left


def _wait(children: list[_Child], deadline: float, *, ends_all: bool) -> int | None:
    """Returns the first code that is not 0, or 0, or None if the deadline passes before."""
    failed: int | None = None
    while True:
        codes = [child.poll() for child in children]
        if failed is None:
            failed = next((code for code in codes if code), None)
            if failed is not None and ends_all:
                # Ranks that wait for the dead one never finish; torchrun ends them like this.
                deadline = min(deadline, time.monotonic() + _GRACE_S)
                for child in children:
                    child.terminate()
        if None not in codes:
            return failed or 0
        if time.monotonic() > deadline:
            return failed if ends_all else None
        time.sleep(_POLL_S)


def stacks_of(mark: str, work: Path) -> str:
    """Asks every marked process for its stacks; returns them under one heading each."""
    alive = set(processes.marked(mark))
    files = {file: int(file.stem.split(".")[1]) for file in sorted((work / "stacks").iterdir())}
    asked = {file: pid for file, pid in files.items() if pid in alive}
    for pid in asked.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
    deadline = time.monotonic() + _STACK_WAIT_S
    while time.monotonic() < deadline and not all(file.stat().st_size for file in asked):
        time.sleep(_POLL_S)
    # Let the slowest writer finish its last thread.
    time.sleep(4 * _POLL_S)
    return "\n".join(
        f"--- stacks of {file.stem}\n{file.read_text(errors='replace') or 'no answer'}"
        for file in asked
    )
