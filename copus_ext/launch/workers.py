"""The processes of one launch on this node: started, asked to stop, ended. No torch."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from copus_ext.launch.cause import Failure
from copus_ext.launch.messages import Ended
from copus_ext.reshard.checked import check_fields, check_number, read_value
from copus_ext.reshard.relaunch import BARRED_VARIABLE, LAUNCH_VARIABLE
from megatron.training.common.control import SUPERVISOR_VARIABLE

_OWN = f"{platform.node()}-{os.getpid()}-{secrets.token_hex(8)}"
REPORT = "report.json"
"""How the ranks ended, written by the launcher."""
_END_WAIT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What to start on this node."""

    name: str
    """Of the launch."""
    node: int
    """Number of this node."""
    nodes: list[int]
    """That take part, in the order of their ranks."""
    processes: int
    """Ranks on this node."""
    endpoint: str
    """`host:port` of the first node."""
    command: list[str]
    """Program and flags."""
    barred: list[str]
    """Layouts that the run must not choose."""


class Workers:
    """torch's launcher and the ranks below it.

    Args:
        launch: what to start.
        folder: empty, for what the launcher writes; gone with the launch.
    """

    def __init__(self, launch: Launch, folder: Path) -> None:
        self._launch, self._folder = launch, folder
        self.told = False
        """Whether this ended them."""
        env = {
            **os.environ,
            LAUNCH_VARIABLE: launch.name,
            SUPERVISOR_VARIABLE: _OWN,
            BARRED_VARIABLE: ",".join(launch.barred),
        }
        if launch.processes > 1:  # as torchrun does
            env.setdefault("OMP_NUM_THREADS", "1")
        options: dict[str, Any] = {
            "launch": launch.name,
            "node": launch.node,
            "nodes": len(launch.nodes),
            "position": launch.nodes.index(launch.node),
            "processes": launch.processes,
            "endpoint": launch.endpoint,
            "folder": folder,
            "parent": os.getpid(),
        }
        command = [sys.executable, "-m", "copus_ext.launch.ranks"]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        # A group of its own: Ctrl-C reaches the supervisor alone, which passes it on as SIGTERM.
        self._child = subprocess.Popen(
            [*command, "--", *launch.command],
            env=env,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
        )

    def is_running(self) -> bool:
        """Whether the launcher is there."""
        return self._child.poll() is None

    def ask_to_stop(self) -> None:
        """Signals the ranks themselves, which save and leave; while there are none, all is ended.

        The processes that read data and write checkpoints get none: they are needed to save.
        """
        ranks = _ranks_of(self._child.pid)
        for rank in ranks:
            with contextlib.suppress(psutil.Error):
                rank.terminate()
        if not ranks:
            self.end()

    def end(self) -> None:
        """Kills what is left, at once."""
        self.told |= self.is_running()
        if self.told:
            self._child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=_END_WAIT_S)  # longer only in the hands of a broken driver
        end_launch(self._launch.name, _OWN)

    def ended(self) -> Ended:
        """How they ended; they have."""
        name, node = self._launch.name, self._launch.node
        code = self._child.poll()
        code = -signal.SIGKILL if code is None else code
        try:
            known = read_value(self._folder / REPORT, _parse_report)
        except ValueError:
            known = None
        if known is None and code != 0:
            said = "" if self.told else "it left no report"
            known = 1, Failure(rank=-1, host=platform.node()[:500], code=code, error=said)
        failure = known[1] if known is not None else None
        if failure is None:
            return Ended(launch=name, node=node, code=0, told=self.told)
        return Ended(
            launch=name, node=node, code=failure.exit_code or 1, told=self.told, failure=failure
        )


def _parse_report(data: Any) -> tuple[int, Failure | None]:
    check_fields(data, ["code", "failure"], ["code", "failure"])
    check_number("code", data["code"], 0, 255)
    failure = data["failure"]
    return data["code"], None if failure is None else Failure.from_json(failure)


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
    """Kills what is left of a launch on a node: the processes that bear its name and that of their
    supervisor, which no others do; some may have left the process group of their rank."""
    for _ in range(2):  # a dying parent may have started one more between two looks
        left = [process for process in psutil.process_iter() if _bears(process, name, supervisor)]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=_END_WAIT_S)


def _bears(process: psutil.Process, name: str, supervisor: str) -> bool:
    if process.pid == os.getpid():
        return False
    try:
        env = process.environ()
    except (psutil.Error, OSError):
        return False
    return env.get(LAUNCH_VARIABLE) == name and env.get(SUPERVISOR_VARIABLE) == supervisor
