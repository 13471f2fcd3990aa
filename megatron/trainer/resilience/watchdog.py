"""Notices that a rank makes no progress: writes its stacks, and in the end stops the process.

Every rank watches itself. A rank that waits in a collective for a hanging one makes no progress
either, so the stacks of all running ranks appear.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import platform
import queue
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.trainer.common.child_processes import kill_children
from megatron.trainer.common.control import HEARTBEATS, STACKS
from megatron.trainer.common.errors import UsageError

logger = logging.getLogger(__name__)

EXIT_CODE = 86
"""Exit code of a process that makes no progress any more."""
VARIABLE = "COPUS_WATCHDOG_S"
"""Environment variable: seconds without progress before stacks are written, and behind a colon
seconds before the process leaves; 0 watches nothing."""

_STALL_S = 60.0
_STALL_STEPS = 10
_EXIT_SHARE = 0.95
"""Of the time-out of a collective: a process that waits in one should leave with our code."""
_STEPS_KEPT = 50
_LAST_WORDS_S = 10.0
_CLOSE_S = 2.0
_RANKS_PER_HEARTBEAT_S = 200
_HEARTBEAT_BYTES = 400


@dataclass(frozen=True, kw_only=True)
class WatchdogLimits:
    """How long a rank may make no progress."""

    stall_s: float
    """Seconds, or ten times a step if that is more, before the stacks are written; 0 never."""
    exit_s: float
    """The same before the process leaves."""

    @classmethod
    def of(cls, env: Mapping[str, str], *, timeout_minutes: float) -> WatchdogLimits:
        """As the environment says, else a minute, and just less than a collective waits.

        Raises:
            UsageError: `VARIABLE` holds something else than numbers.
        """
        text = env.get(VARIABLE) or f"{_STALL_S:g}"
        exit_s = _EXIT_SHARE * 60.0 * timeout_minutes
        try:
            numbers = [float(part) for part in text.split(":")]
        except ValueError:
            numbers = []
        if not 1 <= len(numbers) <= 2 or not all(0 <= number < 1e9 for number in numbers):
            raise UsageError(f"{VARIABLE}={text} must be seconds, such as 60 or 60:600, or 0")
        return cls(stall_s=numbers[0], exit_s=numbers[1] if len(numbers) == 2 else exit_s)


NEVER = WatchdogLimits(stall_s=0.0, exit_s=0.0)


class Watchdog:
    """Watches one rank while inside `with`; outside it only counts.

    Only time in which this process runs counts: a process that was stopped and goes on has not
    hung. Before the first step and in patient phases, stacks come late and the process never
    exits. There the time-outs of collectives end a hang.

    Args:
        run_dir: of the run; None writes no files.
        launch: names the stacks.
        world_size: heartbeats get rarer with it.
        limits: how long to wait.
        note: called from a thread with (kind, fields) of each event.
    """

    def __init__(
        self,
        run_dir: Path | None = None,
        *,
        launch: str = "",
        rank: int = 0,
        world_size: int = 1,
        limits: WatchdogLimits = NEVER,
        note: Callable[..., None] = lambda kind, **fields: None,
    ) -> None:
        self._run_dir, self._launch, self._rank = run_dir, launch, rank
        self._limits, self._note = limits, note
        self._period_s = min(1.0, limits.stall_s / 10)
        self._heartbeat_s = max(2 * self._period_s, world_size / _RANKS_PER_HEARTBEAT_S)
        self.iteration = 0
        """Steps done."""
        self._beats = 0
        self._steps_s: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._doing, self._is_patient = "start", False
        self._ended = threading.Event()
        self._to_write: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        # Writing apart from watching: a file system that hangs must not keep us from noticing.
        self._threads = [
            threading.Thread(target=target, name=f"watchdog-{name}", daemon=True)
            for name, target in (("watch", self._watch), ("write", self._write))
        ]

    def beat(self) -> None:
        self._beats += 1

    def step(self, iteration: int, seconds: float) -> None:
        self.iteration = iteration
        self._steps_s.append(seconds)
        self._doing = "training"
        self._beats += 1

    def reset_step_times(self) -> None:
        """Forgets the durations of past steps, as the next ones differ."""
        self._steps_s.clear()

    @contextlib.contextmanager
    def phase(self, doing: str, *, patient: bool = False) -> Iterator[None]:
        """A phase other than training.

        Args:
            patient: it may take long without progress.
        """
        before = self._doing, self._is_patient
        self._doing, self._is_patient = doing, patient or self._is_patient
        self._beats += 1
        try:
            yield
        finally:
            self._doing, self._is_patient = before
            self._beats += 1

    def __enter__(self) -> Watchdog:
        if self._limits.stall_s > 0:
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._to_write.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_CLOSE_S)
        if self._run_dir is not None:
            folder = self._run_dir / HEARTBEATS
            with contextlib.suppress(OSError):
                (folder / str(self._rank)).unlink(missing_ok=True)
                folder.rmdir()

    def limits_now(self) -> tuple[float, float | None]:
        """Seconds before stacks are written and before the process leaves, None for never."""
        steps = list(self._steps_s)
        if self._is_patient or not steps:
            return max(self._limits.exit_s, self._limits.stall_s), None
        slow_s = _STALL_STEPS * statistics.median(steps)
        return max(self._limits.stall_s, slow_s), max(self._limits.exit_s, slow_s)

    def _watch(self) -> None:
        beats, waited_s, is_reported = -1, 0.0, False
        before = time.monotonic()
        while not self._ended.wait(self._period_s):
            now = time.monotonic()
            waited_s += min(now - before, 2 * self._period_s)
            before = now
            if beats != self._beats:
                if is_reported:
                    self._report(f"goes on after {waited_s:.0f} s")
                beats, waited_s, is_reported = self._beats, 0.0, False
            stall_s, exit_s = self.limits_now()
            if waited_s > stall_s and not is_reported:
                is_reported = True
                self._report_stall(waited_s)
            if exit_s is not None and waited_s > exit_s:
                self._exit_process(waited_s)

    def _report_stall(self, waited_s: float) -> None:
        what = f"has made no progress for {waited_s:.0f} s"
        self._to_write.put(lambda: self._dump_stacks(what))
        line = self._report(f"{what}; its stacks are in {self._stacks_path()}")
        self._to_write.put(lambda: self._note("alert", alert="no progress", line=line))

    def _exit_process(self, waited_s: float) -> None:
        what = f"has made no progress for {waited_s:.0f} s and exits with {EXIT_CODE}"
        written = threading.Event()
        self._to_write.put(lambda: self._dump_stacks(what))
        line = self._report(what)
        self._to_write.put(lambda: self._note("fault", fault="no progress", line=line))
        self._to_write.put(written.set)
        written.wait(_LAST_WORDS_S)
        exit_immediately(EXIT_CODE)

    def _report(self, what: str) -> str:
        line = f"rank {self._rank}, after step {self.iteration} ({self._doing}), {what}"
        # Not through sys.stderr, whose lock the thread that hangs may hold.
        self._to_write.put(lambda: os.write(2, f"copus: {line}\n".encode()))
        return line

    def _write(self) -> None:
        beats = -1
        while True:
            try:
                act = self._to_write.get(timeout=self._heartbeat_s)
            except queue.Empty:
                if beats != self._beats:
                    beats = self._beats
                    self._write_heartbeat()
                continue
            if act is None:
                return
            try:
                act()
            except Exception as error:  # no message is worth the thread
                logger.debug("the watchdog cannot write: %r", error)

    def _write_heartbeat(self) -> None:
        if self._run_dir is None:
            return
        known: dict[str, Any] = {"launch": self._launch, "iteration": self.iteration}
        known |= {"doing": self._doing, "host": platform.node(), "pid": os.getpid()}
        text = json.dumps(known)[: _HEARTBEAT_BYTES - 1].ljust(_HEARTBEAT_BYTES - 1) + "\n"
        path = self._run_dir / HEARTBEATS / str(self._rank)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Always as long, so that a reader finds no end of an older one.
            handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.write(handle, text.encode())
            finally:
                os.close(handle)

    def _stacks_path(self) -> Path:
        return (self._run_dir or Path()) / STACKS / f"{self._launch}.{self._rank}.txt"

    def _dump_stacks(self, what: str) -> None:
        if self._run_dir is None:
            return
        path = self._stacks_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            print(f"rank {self._rank} {what}, step {self.iteration}", file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)


def exit_immediately(code: int) -> None:
    """Ends this process and its children at once. Handlers of a normal exit do not run."""
    try:
        kill_children(os.getpid())
    finally:
        os._exit(code)
