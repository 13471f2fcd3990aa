"""One run at a time in a directory.

`control/lock` names its holder, who touches it every ten seconds. Files of one directory are
compared with each other only, so that neither the clock of a node nor its changes matter.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.trainer.common.control import (
    GENERATION_VARIABLE,
    LOCK_FILE,
    SUPERVISOR_VARIABLE,
    job_of,
    restarts_of,
)
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.outside import parse_json
from megatron.trainer.common.plain_file import open_plain

logger = logging.getLogger(__name__)

STALE_S = 120.0
"""A lock that was not touched for longer may belong to a dead run."""
TOUCH_S = 10.0
"""Seconds between two touches."""

_DYING_S = 30.0
_MAX_BYTES = 4096
_POLL_S = 0.5
_JOIN_S = 5.0
_WATCHED_TOUCHES = 1.5
_TEMPORARY = "lock.new-"
_CLEARING = "lock.clearing"
_CLEARING_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Holder:
    host: str = "an unknown host"
    pid: int = 0
    launch: str = "unknown"
    machine: str = ""
    """Tells whether process numbers of there mean anything here."""
    started: str = ""
    """Tells the process from another that has got its number since."""
    token: str = ""
    """Differs for every lock ever made."""
    supervisor: str = ""
    """Differs for every supervisor; empty without one."""
    generation: str = ""
    """See `GENERATION_VARIABLE`; empty where the ranks of a launch stay the same."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, launch {self.launch}"

    def follows(self, other: Holder) -> bool:
        """Whether the starter of this process has seen the end of the other: the scheduler that
        queued the job again, or the same supervisor."""
        if job_of(other.launch) != job_of(self.launch):
            return False
        return other.supervisor == self.supervisor or restarts_of(other.launch) < restarts_of(
            self.launch
        )

    def replaces(self, other: Holder) -> bool:
        """Whether the ranks of a launch have agreed to go on with this process and without the
        other, which may be cut off and alive."""
        launch, _, number = self.generation.rpartition("/")
        of_other, _, before = other.generation.rpartition("/")
        if not (launch and launch == of_other and number.isdecimal() and before.isdecimal()):
            return False
        return int(number) > int(before)

    @property
    def is_alive(self) -> bool | None:
        """Whether the process lives; None where this process cannot know."""
        if not self.machine or self.machine != machine():
            return None
        return process_start(self.pid) == self.started


def machine() -> str:
    """The name space that process numbers of this process belong to; empty where unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process_start(pid: int) -> str | None:
    """Start of a process of this machine, in ticks since boot; None if it is dead or a zombie."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else rest[18]
    except (OSError, ValueError, IndexError):
        return None


class Lock:
    """Makes this process the only one that writes a directory, while inside `with`.

    Args:
        directory: made if missing.
        flag: that named it, for messages.
        is_supervised: whether a supervisor knows that the previous launch of this job is over.
        touch_s: seconds between two touches.
        stale_s: see `STALE_S`.
        on_lost: called with a line, from a thread, when another run has taken the lock.
    """

    def __init__(
        self,
        directory: Path,
        *,
        flag: str,
        launch: str,
        is_supervised: bool = False,
        force_unlock: bool = False,
        touch_s: float = TOUCH_S,
        stale_s: float = STALE_S,
        on_lost: Callable[[str], None] = logger.error,
    ) -> None:
        self._directory, self._flag = directory, flag
        self._path = directory / LOCK_FILE
        self._is_supervised, self._force_unlock = is_supervised, force_unlock
        self._touch_s, self._stale_s, self._on_lost = touch_s, stale_s, on_lost
        self._own = Holder(
            host=platform.node(),
            pid=os.getpid(),
            launch=launch,
            machine=machine(),
            started=process_start(os.getpid()) or "",
            token=uuid.uuid4().hex,
            supervisor=os.environ.get(SUPERVISOR_VARIABLE, "") if is_supervised else "",
            generation=os.environ.get(GENERATION_VARIABLE, "") if is_supervised else "",
        )
        self._text = json.dumps(asdict(self._own))
        self._new = self._path.with_name(_TEMPORARY + self._own.token)
        self._made: list[Path] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lock", daemon=True)

    def __enter__(self) -> Lock:
        """Takes the lock.

        Raises:
            UsageError: another run has it; names that run and the fix.
            OSError: the directory cannot be written.
        """
        folder = self._path.parent
        self._made = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            until = time.monotonic() + _DYING_S
            while not self._place():
                self._clear_the_way(may_wait=time.monotonic() < until)
        except BaseException:
            self._tidy_up()
            raise
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join(_JOIN_S)
        with contextlib.suppress(OSError):
            if _read(self._path) == self._own:
                self._path.unlink()
        self._tidy_up()

    def _tidy_up(self) -> None:
        """Leaves no empty directory behind that was not there before."""
        with contextlib.suppress(OSError):
            self._new.unlink(missing_ok=True)
            for folder in self._made:
                folder.rmdir()

    def _place(self) -> bool:
        """Puts the lock there, whole, unless there is one."""
        self._write_new()
        try:
            os.link(self._new, self._path)
        except FileExistsError:
            return False
        except OSError:
            # A file system without links: others may see the file before its text.
            try:
                handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                return False
            with os.fdopen(handle, "w") as file:
                file.write(self._text)
        self._new.unlink(missing_ok=True)
        for left in self._path.parent.glob(_TEMPORARY + "*"):
            # Of a run that was killed while it waited; others may be waiting now.
            with contextlib.suppress(FileNotFoundError):
                if self._path.stat().st_mtime - left.stat().st_mtime > self._stale_s:
                    left.unlink()
        return True

    def _write_new(self) -> None:
        # A run that ends meanwhile may take the directory with it.
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._new.write_text(self._text)

    def _clear_the_way(self, *, may_wait: bool) -> None:
        """Removes a lock whose holder is dead.

        Args:
            may_wait: for a process that its supervisor is ending.

        Raises:
            UsageError: it is held.
        """
        try:
            holder, age_s = _read(self._path), self._age_s(self._path)
        except FileNotFoundError:
            return
        if self._own.replaces(holder):
            self._remove(holder)
            return
        is_alive = holder.is_alive
        is_vouched = self._is_supervised and self._own.follows(holder)
        if is_vouched and is_alive and may_wait:
            time.sleep(_POLL_S)
            return
        if is_alive or (is_alive is None and not is_vouched):
            self._refuse_unless_stale(holder, age_s)
            logger.warning("taking over %s from %s", self._directory, holder)
        self._remove(holder)

    def _refuse_unless_stale(self, holder: Holder, age_s: float) -> None:
        who = (
            f"{self._flag} {self._directory} is being written by {holder}, who showed a sign of "
            f"life {max(age_s, 0):.0f} s ago"
        )
        if holder.is_alive or not self._force_unlock:
            fix = f"end that run first, or give another {self._flag}"
            if not holder.is_alive:
                fix += "; if it is dead give --force-unlock"
            raise UsageError(f"{who}; {fix}")
        # Longer than a holder waits between two touches: an age alone may be wrong if the clock of
        # the file system was set. One that was set back shows as an age below zero.
        watched_s = max(self._stale_s - abs(age_s), _WATCHED_TOUCHES * self._touch_s)
        logger.warning("%s; waits %.0f s for another one", who, watched_s)
        if self._is_touched(holder, watched_s):
            raise UsageError(f"{who}, and another one just now; end that run first")

    def _is_touched(self, holder: Holder, watched_s: float) -> bool:
        """Watches the lock for so long."""
        try:
            before = self._path.stat().st_mtime_ns
            until = time.monotonic() + watched_s
            while time.monotonic() < until:
                time.sleep(min(_POLL_S, self._touch_s / 4))
                if self._path.stat().st_mtime_ns != before or _read(self._path) != holder:
                    return True
        except FileNotFoundError:
            pass
        return False

    def _age_s(self, path: Path) -> float:
        """Seconds since a file was touched, by the clock that stamps files there.

        Raises:
            FileNotFoundError: it is gone.
        """
        self._write_new()
        return self._new.stat().st_mtime - path.stat().st_mtime

    def _remove(self, holder: Holder) -> None:
        """Removes the lock of a dead holder, but not one that has replaced it meanwhile.

        One run at a time removes, and reads the lock again before. Others return at once.
        """
        mark = self._path.with_name(_CLEARING)
        try:
            os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                if self._age_s(mark) > _CLEARING_S:  # of a run that was killed here
                    mark.unlink()
            time.sleep(_POLL_S / 10)
            return
        try:
            with contextlib.suppress(FileNotFoundError):
                if _read(self._path) == holder:
                    self._path.unlink()
        finally:
            mark.unlink(missing_ok=True)

    def _keep(self) -> None:
        """Touches the lock as long as it is held."""
        while not self._ended.wait(self._touch_s):
            try:
                holder = _read(self._path)
                if holder != self._own:
                    self._on_lost(f"{self._directory} was taken over by {holder}")
                    return
                os.utime(self._path)
            except FileNotFoundError:
                # Somebody has cleared the directory; nobody has taken the lock.
                with contextlib.suppress(OSError):
                    self._place()
            except OSError as error:
                logger.debug("%s cannot be touched: %s", self._path, error)


def _read(path: Path) -> Holder:
    """Who holds a lock; nobody known if the file is damaged.

    Raises:
        FileNotFoundError: there is no lock.
    """
    with open_plain(path) as file:
        text = file.read(_MAX_BYTES)
    try:
        values = asdict(holder := Holder(**parse_json(text)))
    except (ValueError, TypeError):
        return Holder()
    is_whole = type(values.pop("pid")) is int and all(
        isinstance(value, str) and value.isprintable() for value in values.values()
    )
    return holder if is_whole else Holder()
