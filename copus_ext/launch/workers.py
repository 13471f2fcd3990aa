"""The ranks of one launch on this node, below a launcher process of their own.

    supervisor -> python -m copus_ext.launch.workers -> ranks

The launcher is torch's, or one of `launchers`. It dies with the supervisor, takes the
ranks along, and leaves in a file how they ended. docs/decisions/017 says why each launch has its
own. Only it imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import platform
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from copus_ext.launch.failure import Failure, error_line, first_failure, split_hung, traceback_end
from copus_ext.launch.listen import LOOPBACK, loopback_interface
from copus_ext.launch.rendezvous import LaunchResult
from copus_ext.reshard.checked import read_value
from copus_ext.reshard.relaunch import BLOCKED_VARIABLE, LAUNCH_VARIABLE
from megatron.trainer.checkpoint.files import write_atomically
from megatron.trainer.common.control import SUPERVISOR_VARIABLE
from megatron.trainer.common.program import tell
from megatron.trainer.resilience.env_checks import no_collection

_OWN = f"{platform.node()}-{os.getpid()}-{secrets.token_hex(8)}"
_REPORT = "report.json"
FENCED, RELEASED = 87, 88
"""Exit codes of a launcher whose node the others have gone on without: it was taken for lost, or
the run asks for fewer ranks."""
_END_WAIT_S, _PARENT_LOOK_S = 10.0, 0.2
_LEFT_TO_OTHERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Schedulers send these to every process of a job; ranks and supervisor answer them."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    name: str
    node: int
    nodes: list[int]
    """Nodes that take part, in the order of their ranks."""
    num_ranks: int
    """Ranks on this node."""
    endpoint: str
    """`host:port` of the first node."""
    folder: str
    """Empty, for the report and the errors of ranks."""
    module: str = "copus_ext.launch.workers"
    shared: str | None = None
    """A folder that all nodes see, where launchers agree that go on without lost ranks; else
    None."""

    @property
    def is_alone(self) -> bool:
        """Whether no other node takes part, or can come later."""
        return len(self.nodes) == 1 if self.shared is None else not self.endpoint


class Workers:
    """Torch's launcher and the ranks below it.

    Args:
        blocked_layouts: layouts that the run must not choose.
    """

    def __init__(self, launch: Launch, command: list[str], blocked_layouts: list[str]) -> None:
        self._launch = launch
        self.were_killed = False
        """Whether `end` had to kill them."""
        env = {
            **os.environ,
            LAUNCH_VARIABLE: launch.name,
            SUPERVISOR_VARIABLE: _OWN,
            BLOCKED_VARIABLE: ",".join(blocked_layouts),
        }
        if launch.num_ranks > 1:  # as torchrun does
            env.setdefault("OMP_NUM_THREADS", "1")
        if launch.is_alone:  # else they choose an interface by the name of the machine
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                env.setdefault(name, loopback_interface())
        options = json.dumps({**dataclasses.asdict(launch), "parent": os.getpid()})
        # A session of its own: Ctrl-C reaches the supervisor alone, which passes it on as SIGTERM.
        self._child = subprocess.Popen(
            [sys.executable, "-m", launch.module, options, *command],
            env=env,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
        )

    def is_running(self) -> bool:
        """Whether the launcher is there."""
        return self._child.poll() is None

    def ask_to_stop(self) -> None:
        """Sends SIGTERM to the ranks, which save and leave. Ends the launch if there are none yet.

        Processes that read data and write checkpoints get no signal: ranks need them to save.
        """
        ranks = _ranks_of(self._child.pid)
        for rank in ranks:
            with contextlib.suppress(psutil.Error):
                rank.terminate()
        if not ranks:
            self.end()

    def end(self) -> None:
        """Kills what is left, at once."""
        self.were_killed |= self.is_running()
        if self.were_killed:
            self._child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=_END_WAIT_S)  # longer only inside a broken driver
        end_launch(self._launch.name, _OWN)

    def result(self) -> LaunchResult:
        """How they ended; to be called after `end`."""
        name, node, code = self._launch.name, self._launch.node, self._child.poll()
        try:
            found = read_value(Path(self._launch.folder) / _REPORT, LaunchResult.from_json)
        except ValueError:
            found = None
        if found is None and code == 0:
            found = LaunchResult.of(name, node, None)
        elif found is None:
            error = "" if self.were_killed else "it left no report"
            code = -signal.SIGKILL if code is None else code
            found = LaunchResult.of(name, node, _launcher_failure(code, error))
        return dataclasses.replace(found, was_killed=self.were_killed)


def _ranks_of(launcher: int) -> list[psutil.Process]:
    """The children of a launcher that are ranks, as far as they can be seen."""
    ranks = []
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(launcher).children():
            with contextlib.suppress(psutil.Error, OSError):
                if "LOCAL_RANK" in process.environ():
                    ranks.append(process)
    return ranks


def end_launch(name: str, supervisor: str) -> None:
    """Kills every process on this node whose environment names this launch of this supervisor; some
    may have left the process group of their rank."""
    for _ in range(2):  # a dying parent may have started one more between two looks
        left = [process for process in psutil.process_iter() if _is_of(process, name, supervisor)]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=_END_WAIT_S)


def _is_of(process: psutil.Process, name: str, supervisor: str) -> bool:
    if process.pid == os.getpid():
        return False
    try:
        env = process.environ()
    except (psutil.Error, OSError):
        return False
    return env.get(LAUNCH_VARIABLE) == name and env.get(SUPERVISOR_VARIABLE) == supervisor


def main(argv: list[str], run: Callable[[Launch, list[str]], list[Failure]]) -> int:
    """The launcher: runs the ranks of this node to their end and writes the report.

    Args:
        argv: a `Launch` and the id of the parent as JSON, then program and flags.
        run: starts the ranks and returns their failures once they have ended.

    Returns:
        0, or the exit code of the rank that failed first.
    """
    options = json.loads(argv[0])
    parent = options.pop("parent")
    launch = Launch(**options)
    _end_with(parent, launch)
    for number in _LEFT_TO_OTHERS:
        # A function: ranks would inherit a signal that is ignored as ignored.
        signal.signal(number, lambda number, frame: None)
    result = LaunchResult.of(launch.name, launch.node, first_failure(run(launch, argv[1:])))
    write_atomically(Path(launch.folder) / _REPORT, json.dumps(result.to_json()))
    return result.code


def _end_with(parent: int, launch: Launch) -> None:
    """Ends the launch when the supervisor has gone, however it went, and removes its folder."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_LOOK_S)
        end_launch(launch.name, os.environ.get(SUPERVISOR_VARIABLE, ""))
        shutil.rmtree(launch.folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run(launch: Launch, command: list[str]) -> list[Failure]:
    with no_collection():
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        from copus_ext.launch import store

    # Torch logs every end as an error, also one that is none; the supervisor says it instead.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    store.register()
    config = LaunchConfig(
        min_nodes=len(launch.nodes),
        max_nodes=len(launch.nodes),
        nproc_per_node=launch.num_ranks,
        run_id=launch.name,
        rdzv_backend=store.BACKEND,
        # One node needs no fixed port.
        rdzv_endpoint=f"{LOOPBACK}:0" if launch.is_alone else launch.endpoint,
        rdzv_configs={"rank": launch.nodes.index(launch.node)},
        local_addr=LOOPBACK if launch.is_alone else None,
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGINT",
        logs_specs=DefaultLogsSpecs(log_dir=launch.folder),
    )
    try:
        elastic_launch(config, sys.executable)("-u", *command)
    except ChildFailedError as error:
        failures, hung = split_hung([_failure(rank, one) for rank, one in error.failures.items()])
        for one in hung:
            tell(
                "supervisor",
                f"rank {one.rank} hung: it did not answer SIGTERM after another rank had failed",
            )
        return failures
    except SignalException as error:
        return [_launcher_failure(-int(error.sigval), "")]
    except Exception as error:  # no rendezvous, no port, no program: torch raises many kinds
        return [_launcher_failure(1, f"{type(error).__name__}: {error}")]
    return []


def _failure(rank: int, failure: Any) -> Failure:
    """Of a rank, with the error that it left in torch's form."""
    error, text, seconds = "", "", float(failure.timestamp)
    if isinstance(failure.message, dict):
        more = failure.message.get("extraInfo") or {}
        error, text = str(failure.message.get("message", "")), str(more.get("py_callstack", ""))
        if isinstance(more.get("time"), float):
            seconds = more["time"]
    return Failure(
        rank=rank,
        host=platform.node()[:500],
        code=failure.exitcode,
        time_s=seconds,
        error=error_line(error),
        traceback=traceback_end(text),
    )


def _launcher_failure(code: int, error: str) -> Failure:
    host, now = platform.node()[:500], time.time()
    return Failure(rank=-1, host=host, code=code, time_s=now, error=error_line(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], _run))
