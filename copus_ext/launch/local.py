"""Runs a training program on CPU ranks of this machine, and again when it asks for it.

python -m copus_ext.launch.local RANKS program.py FLAGS
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import types
from datetime import datetime, timezone
from pathlib import Path

import psutil

from copus_ext.launch.verdict import Judge, Next
from copus_ext.reconfigure.relaunch import LAUNCH_VARIABLE, read_request, value_of

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_END_WAIT_S = 10.0
_RUN_DIR_FLAGS = ("--run-dir", "--save", "--tensorboard-dir")
"""Where the trainer keeps the run, the first that is given."""


class Supervisor:
    """Starts launches one after the other and ends with the last, or with a signal."""

    def __init__(self, program: Path, flags: list[str], ranks: int) -> None:
        """Finds the run's directory, giving it one if the flags name none."""
        now = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}"
        found = [value for value in (value_of(flags, f) for f in _RUN_DIR_FLAGS) if value]
        if not found:
            found = [f"runs/{now}-{os.getpid()}"]
            flags = [*flags, "--run-dir", found[0]]
        self._run_dir = Path(found[0])
        self._program = program
        self._judge = Judge(flags, ranks)
        self._names = f"{now}-{os.getpid()}.0"
        self._child: subprocess.Popen[bytes] | None = None
        self._launch = ""
        self._stopped_by: int | None = None

    def run(self) -> int:
        """Runs launches until one ends the run.

        Returns:
            The exit code: of the last launch, or 128 + N after signal N.
        """
        for name in _STOP_SIGNALS:
            signal.signal(name, self._on_signal)
        following = self._judge.first()
        number = 0
        while following.leave is None and self._stopped_by is None:
            self._launch = f"{self._names}.{number}"
            following = self._after(self._start(following))
            number += 1
        if self._stopped_by is not None:
            return 128 + self._stopped_by
        assert following.leave is not None
        return following.leave

    def _start(self, launch: Next) -> int:
        """Runs one launch to its end; 128 + N if signal N ended it."""
        env = {**os.environ, LAUNCH_VARIABLE: self._launch, "CUDA_VISIBLE_DEVICES": ""}
        env.setdefault("OMP_NUM_THREADS", "1")
        env.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        if sys.platform == "linux":
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        command = [sys.executable, "-m", "copus_ext.launch.ranks", "--standalone"]
        command += ["--nproc-per-node", str(launch.ranks), str(self._program), *launch.flags]
        # A group of its own: Ctrl-C reaches this process alone, which passes it on as SIGTERM.
        self._child = subprocess.Popen(command, env=env, start_new_session=True)
        if self._stopped_by is not None:
            self._child.terminate()
        code = self._child.wait()
        self._child = None
        end_launch(self._launch)
        return code if code >= 0 else 128 - code

    def _after(self, code: int) -> Next:
        if self._stopped_by is not None:
            return Next(flags=[], ranks=0, leave=128 + self._stopped_by)
        try:
            request = read_request(self._run_dir, launch=self._launch)
        except ValueError as error:
            following = Next(flags=[], ranks=0, leave=code or 1, line=str(error))
        else:
            following = self._judge.after(code, request)
        if following.line:
            print(f"local_cpu: {following.line}", file=sys.stderr, flush=True)
        return following

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        """Asks the ranks to save and stop; the second time ends them."""
        again = self._stopped_by is not None
        self._stopped_by = self._stopped_by or number
        if self._child is not None:
            if again:
                self._child.kill()
            else:
                self._ask_to_stop(self._child)

    def _ask_to_stop(self, child: subprocess.Popen[bytes]) -> None:
        """Signals the ranks themselves: torchrun would end their helpers too, which they need to
        save. It follows them, and ends at once while there are none."""
        ranks = _ranks_of(child.pid)
        for rank in ranks:
            with contextlib.suppress(psutil.Error):
                rank.terminate()
        if not ranks:
            child.terminate()


def _ranks_of(torchrun: int) -> list[psutil.Process]:
    """The children of torchrun that are ranks, as far as they can be seen."""
    ranks = []
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(torchrun).children():
            with contextlib.suppress(psutil.Error, OSError):
                if "LOCAL_RANK" in process.environ():
                    ranks.append(process)
    return ranks


def end_launch(name: str) -> None:
    """Kills what is left of a launch: the processes that bear its name, which no other has."""
    for _ in range(2):  # a dying parent may have started one more between two looks
        left = [process for process in psutil.process_iter() if _bears(process, name)]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=_END_WAIT_S)


def _bears(process: psutil.Process, name: str) -> bool:
    if process.pid == os.getpid():
        return False
    try:
        return process.environ().get(LAUNCH_VARIABLE) == name
    except (psutil.Error, OSError):
        return False


def main(argv: list[str]) -> int:
    """Reads the command line of this module."""
    ranks, program, *flags = argv
    if not Path(program).is_file():
        print(f"local_cpu: there is no program {program}", file=sys.stderr)
        return 2
    return Supervisor(Path(program), flags, int(ranks)).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
