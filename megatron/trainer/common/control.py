"""The control directory of a run: how an operator or a supervisor talks to it, and it to them.

Paths are relative to the run directory.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

STOP_FILE = Path("control") / "stop"
"""Save and leave at the next step boundary. Its text may say why: `TIME_LIMIT` or `SIGNALLED`, else
it is taken for an operator's."""
SAVE_FILE = Path("control") / "save"
"""Save at the next step boundary, and go on."""
PAUSE_FILE = Path("control") / "pause"
"""While it is there a controller decides nothing."""
LOCK_FILE = Path("control") / "lock"
"""Who is writing this directory."""
HEARTBEATS = Path("control") / "heartbeat"
"""A file for each rank, written while it makes progress."""
STACKS = Path("stacks")
"""Where a rank that makes no progress writes its stacks: `<launch>.<rank>.txt`."""
TRACES = Path("traces")
"""Where `--profile` writes: `<launch>.rank<r>.steps<first>-<last>.json.gz`."""
TIME_LIMIT = "time limit"
"""Text of a stop file that was written because the allocation is about to end."""
SIGNALLED = "signal"
"""Text of a stop file that a supervisor wrote when it was asked to stop by a signal."""

LAUNCH_VARIABLE = "COPUS_LAUNCH"
"""Environment variable: the name of this launch, set by whoever supervises it."""
SUPERVISOR_VARIABLE = "COPUS_SUPERVISOR"
"""Environment variable: differs for every supervisor, whatever its launches are called."""
GENERATION_VARIABLE = "COPUS_GENERATION"
"""Environment variable: `<launch>/<n>` in a launch that goes on without ranks it has lost; the n-th
set of ranks. Whoever has a higher number has seen the end of those before."""
LAUNCH_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
"""What a launch may be called: `<job>.<restart count>.<n>`."""

_LOOK_S = 1.0
_MAX_TEXT_BYTES = 200


def supervised_launch(env: Mapping[str, str]) -> str | None:
    """The name that a supervisor has given this launch, or None without one."""
    name = env.get(LAUNCH_VARIABLE, "")
    return name if LAUNCH_NAME.fullmatch(name) else None


def job_of(launch: str) -> str:
    """The job that a launch belongs to: what its name begins with."""
    return launch.rsplit(".", 2)[0]


def restarts_of(launch: str) -> int:
    """How often that job was queued again before, as the name says; 0 if it does not."""
    parts = launch.rsplit(".", 2)
    return int(parts[1]) if len(parts) == 3 and parts[1].isdecimal() else 0


class Control:
    """Sees what is asked of a run by files, at most once a second.

    Each rank has one. What it sees it tells the others, so that all do the same at one boundary.
    """

    def __init__(
        self, run_dir: Path | None = None, *, sees_save: bool = False, look_s: float = _LOOK_S
    ) -> None:
        """Looks at nothing yet.

        Args:
            run_dir: whose control directory to look into; None sees nothing.
            sees_save: whether this rank looks for `SAVE_FILE` too; one is enough.
        """
        self._run_dir, self._sees_save, self._look_s = run_dir, sees_save, look_s
        self._looked_at = -math.inf
        self._stop: str | None = None
        self._save = False

    def stop_asked(self) -> str | None:
        """The text of the stop file; None as long as none was seen."""
        self._look()
        return self._stop

    def save_asked(self) -> bool:
        """Whether a save is asked for that was not yet done."""
        self._look()
        return self._save

    def _look(self) -> None:
        now = time.monotonic()
        if self._run_dir is None or now - self._looked_at < self._look_s:
            return
        self._looked_at = now
        try:
            # A network file system may remember for a minute that a name is not there; a listing
            # it asks for anew.
            names = os.listdir(self._run_dir / STOP_FILE.parent)
        except OSError:
            return
        if self._stop is None and STOP_FILE.name in names:
            self._stop = text_of(self._run_dir / STOP_FILE)
        self._save = self._sees_save and SAVE_FILE.name in names

    def stop_obeyed(self) -> None:
        if self._run_dir is not None:
            _remove(self._run_dir / STOP_FILE)

    def save_obeyed(self) -> None:
        """Takes the save file away. What cannot be taken away asks no second time."""
        self._save = False
        if self._run_dir is not None and self._sees_save:
            self._sees_save = _remove(self._run_dir / SAVE_FILE)


def write_stop(run_dir: Path, text: str) -> None:
    """Asks a run to stop, unless somebody has already. The file is there with its text or not at
    all, as without a text it is an operator's.

    Raises:
        OSError: it cannot be written.
    """
    path = run_dir / STOP_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new-{uuid.uuid4().hex}")
    try:
        new.write_text(text + "\n")
        try:
            os.link(new, path)
        except FileExistsError:
            return
        except OSError:
            # A file system without links.
            if not os.path.lexists(path):
                os.replace(new, path)
    finally:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)


def remove_stale(run_dir: Path) -> list[str]:
    """Takes away what was asked of an earlier run. Where a supervisor does not.

    Returns:
        The names of the files that were there.
    """
    there = [name for name in (STOP_FILE, SAVE_FILE) if (run_dir / name).exists()]
    return [str(name) for name in there if _remove(run_dir / name)]


def _remove(path: Path) -> bool:
    """Whether the file is gone."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        return True
    return False


def text_of(path: Path) -> str:
    """The start of a file that anybody may have written; waits for no pipe, follows no link."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            return os.read(handle, _MAX_TEXT_BYTES).decode(errors="replace").strip()
        finally:
            os.close(handle)
    return ""
