"""Signals to the supervisor: the first asks the run to save and stop, another one ends it."""

from __future__ import annotations

import signal
import time
import types
from pathlib import Path
from typing import Protocol

from copus_ext.launch.say import say
from megatron.training.common.control import SIGNALLED, STOP_FILE, write_stop

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Stoppable(Protocol):
    """The ranks of a launch."""

    def ask_to_stop(self) -> None:
        """Lets them save and leave."""

    def end(self) -> None:
        """Kills them."""


class Stops:
    """Notes signals when they come and obeys them when asked to.

    Args:
        run_dir: directory of the run, whose stop file all ranks and nodes see.
        margin_s: seconds that saving may take; a second signal is obeyed only then, a second
            Ctrl-C at once.
    """

    def __init__(self, run_dir: Path, margin_s: float) -> None:
        self._run_dir, self._margin_s = run_dir, margin_s
        self._path = run_dir / STOP_FILE
        self._new: list[tuple[int, float]] = []
        self._since_s = 0.0
        self.first: int | None = None
        """The signal that asked to stop; None if none came."""
        self.is_final = False
        """Whether a second one ended the ranks."""

    def install(self) -> None:
        """Begins to note signals."""
        for name in _SIGNALS:
            signal.signal(name, self._note)

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        self._new.append((number, time.monotonic()))

    def clear(self) -> None:
        """Removes the stop file of an earlier job."""
        self._path.unlink(missing_ok=True)

    @property
    def asked(self) -> int | None:
        """Signal by which the run was asked to stop; 0 if by the stop file alone; None if it was
        not."""
        if self.first is not None:
            return self.first
        return 0 if self._path.exists() else None

    def obey(self, ranks: Stoppable | None) -> None:
        """Does what the signals ask that have come since the last time.

        Args:
            ranks: that are running, if any are.
        """
        while self._new:
            number, now_s = self._new.pop(0)
            if self.first is None:
                self.first, self._since_s = number, now_s
                self._write()
                if ranks is not None:
                    ranks.ask_to_stop()
            elif number == signal.SIGINT or now_s - self._since_s >= self._margin_s:
                self.is_final = True
                if ranks is not None:
                    ranks.end()
            else:
                say(
                    f"the run saves and stops; {signal.Signals(number).name} ends it "
                    f"from {self._margin_s:g} s after the first signal on, Ctrl-C at once"
                )

    def _write(self) -> None:
        try:
            write_stop(self._run_dir, SIGNALLED)
        except OSError as error:
            say(f"{self._path} cannot be written: {error.strerror or error}")
