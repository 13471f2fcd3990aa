"""Asking a run to stop: signals that only set a flag, and reasons on which all ranks agree."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Literal

from megatron.trainer.common.control import SIGNALLED, STOP_FILE, TIME_LIMIT
from megatron.trainer.common.step_settings import Request

STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP")
FROM_TERMINAL = ("SIGINT", "SIGHUP")
"""What a terminal sends when a person types Ctrl-C or closes it."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a process that Ctrl-C ended at once."""
SAME_S = 0.5
"""Within so many seconds a signal is the first one once more, by way of a launcher."""

Kind = Literal[
    "signal", "file", "time-limit", "signalled", "duration", "interval", "callback", "relayout"
]

_CODES: dict[Kind, int] = {
    "interval": 1,
    "duration": 2,
    "file": 3,
    "time-limit": 4,
    "signalled": 5,
}
_WORDS: dict[Kind, str] = {
    "interval": "--exit-interval",
    "duration": "--exit-duration-in-mins",
    "file": str(STOP_FILE),
    "time-limit": f"{STOP_FILE}: {TIME_LIMIT}",
    "signalled": f"{STOP_FILE}: {SIGNALLED}",
}
_TEXTS: dict[str, Kind] = {TIME_LIMIT: "time-limit", SIGNALLED: "signalled"}
_FIRST_SIGNAL_CODE = 100


@dataclass(frozen=True, kw_only=True)
class StopReason:
    """Why the run leaves at this step boundary. Clocks, signals and views of a file differ between
    ranks, and one that leaves alone hangs the others: the greatest `code` of all ranks wins on all
    of them."""

    kind: Kind
    """`--exit-interval`, `--exit-duration-in-mins`, a signal, a stop file, one that was written
    before a time limit or by a supervisor that got a signal; or what all ranks come to alike: a
    wish of a callback, or of a controller to go on under another layout in new processes."""
    signal: str | None = None
    """Name such as `SIGTERM` if and only if `kind` is `signal`."""
    text: str | None = None
    """One line, if and only if `kind` is `callback` or `relayout`."""

    def __post_init__(self) -> None:
        assert (self.kind == "signal") == (self.signal is not None), self
        assert (self.kind in ("callback", "relayout")) == (self.text is not None), self

    @staticmethod
    def of(request: Request | None) -> StopReason | None:
        """The wish of a callback, if it is to stop."""
        if request is None or request.kind != "stop":
            return None
        return StopReason(kind="callback", text=request.reason)

    @property
    def is_urgent(self) -> bool:
        """Whether the processes are about to be ended: an evaluation is broken off, and the run is
        to go on elsewhere."""
        return self.kind in ("signal", "file", "time-limit", "signalled")

    @property
    def code(self) -> int:
        """Positive number for an all-reduce; see `from_code`."""
        if self.signal is not None:
            return _FIRST_SIGNAL_CODE + int(signal.Signals[self.signal])
        return _CODES[self.kind]

    @staticmethod
    def from_code(code: int) -> StopReason | None:
        """Inverse of `code`; 0 is no reason."""
        if code == 0:
            return None
        if code > _FIRST_SIGNAL_CODE:
            return StopReason(kind="signal", signal=signal.Signals(code - _FIRST_SIGNAL_CODE).name)
        return StopReason(kind=next(kind for kind, known in _CODES.items() if known == code))

    def __str__(self) -> str:
        return self.signal or self.text or _WORDS[self.kind]


class StopAsked(Exception):
    """All ranks have agreed to leave before there is anything to train."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(str(reason))
        self.reason = reason


class StopSignals:
    """Context manager: the named signals set a flag instead of ending the process.

    The first one is kept. Later ones change nothing, so that a scheduler that repeats itself during
    a save does no harm. Ctrl-C comes from a person, who ends the process at once with a second one
    after a moment. A launcher may hand that second one on as SIGTERM, as torchrun does, and the
    first one twice. What a terminal sends, and was ignored before, stays ignored: so it is below
    `nohup`, and in the background of a script.

    Forked children inherit this: a signal that a scheduler sends to every process of the job does
    not end a child that is writing a checkpoint.
    """

    def __init__(self, names: Iterable[str] = STOP_SIGNALS, *, is_told: bool = False) -> None:
        """Takes signal names; nothing is installed before `with`.

        Args:
            names: such as `SIGTERM`; repeats are allowed (`--exit-signal` joins the default ones).

        Raises:
            ValueError: this system has no signal of that name, or it cannot be caught.
        """
        self._signals = [_signal_of(name) for name in dict.fromkeys(names)]
        self._received: str | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._is_told = is_told
        self._pipe: tuple[int, int] | None = None
        self._previous_wakeup = -1
        self._defers = True

    @property
    def received(self) -> str | None:
        """Name of the first signal this rank got, or None."""
        return self._received

    @property
    def defers(self) -> bool:
        """Whether the run looks at `received` before long. Else there is nothing to save, and each
        of the signals ends the process at once with 128 and its number. That holds for one that
        came before, and inside a call that runs no handler."""
        return self._defers

    @defers.setter
    def defers(self, value: bool) -> None:
        self._defers = value
        if not value and (name := self.received) is not None:
            self._leave_early(signal.Signals[name])

    def __enter__(self) -> StopSignals:
        """Installs the handlers.

        Raises:
            RuntimeError: not in the main thread, where Python allows no handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("signal handlers can only be installed by the main thread")
        _keep_signals_of_children_apart()
        reader, writer = self._pipe = os.pipe()
        os.set_blocking(writer, False)
        self._previous_wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), daemon=True).start()
        for number in self._signals:
            if not (number.name in FROM_TERMINAL and signal.getsignal(number) == signal.SIG_IGN):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Puts the handlers back that were there before."""
        for number, handler in self._previous.items():
            # None stands for a handler that was not installed from Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()
        assert self._pipe is not None
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._pipe[1])  # its thread ends

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received = signal.Signals(number).name

    def _watch(self, reader: int) -> None:
        """Sees signals also while the main thread waits in a collective, where no handler runs."""
        first, first_s = 0, 0.0
        while numbers := os.read(reader, 64):
            now_s = time.monotonic()
            for number in (n for n in numbers if n in self._previous):
                is_typed = signal.SIGINT in (first, number)
                if not self._defers:
                    self._leave_early(number)
                elif first and is_typed and now_s - first_s > SAME_S:
                    self._leave("Ctrl-C again: leaves at once, without a checkpoint of this step")
                elif not first:
                    first, first_s = number, now_s
                    if number == signal.SIGINT:
                        self._tell(
                            "Ctrl-C: finishes the step, saves if --save is given, and leaves; "
                            "once more leaves at once"
                        )
        os.close(reader)

    def _leave_early(self, number: int) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self._leave(f"{name}: leaves before training has begun", 128 + number)

    def _leave(self, line: str, code: int = INTERRUPTED) -> None:
        self._tell(line)
        os._exit(code)

    def _tell(self, line: str) -> None:
        if self._is_told:
            with contextlib.suppress(OSError):
                os.write(2, f"{line}\n".encode())


@functools.cache
def _keep_signals_of_children_apart() -> None:
    """Has what is forked from now on leave alone the pipe on which its parent hears of signals."""
    os.register_at_fork(after_in_child=functools.partial(signal.set_wakeup_fd, -1))


def leave_on_interrupt(*, is_told: bool) -> None:
    """Has Ctrl-C end this process at once, without a traceback; see `StopSignals` for later. Does
    nothing where it is ignored.

    Args:
        is_told: print a line.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        if is_told:
            with contextlib.suppress(OSError):
                os.write(2, b"Ctrl-C: leaves\n")
        os._exit(INTERRUPTED)

    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, leave)


def stop_reason(
    *,
    iteration: int,
    elapsed_s: float,
    exit_interval: int | None,
    exit_duration_in_mins: float | None,
    received: str | None,
    stop_file: str | None = None,
) -> StopReason | None:
    """Returns why this rank would leave after this step, or None.

    Args:
        iteration: number of the step just finished, from 1.
        elapsed_s: seconds since the start of the process on a monotonic clock.
        exit_interval: leave when `iteration` is a multiple of it.
        exit_duration_in_mins: leave once `elapsed_s` exceeds it.
        received: `StopSignals.received`.
        stop_file: `Control.stop_asked`.
    """
    if received is not None:
        return StopReason(kind="signal", signal=received)
    if stop_file is not None:
        return StopReason(kind=kind_of_text(stop_file))
    if exit_duration_in_mins is not None and elapsed_s > 60.0 * exit_duration_in_mins:
        return StopReason(kind="duration")
    if exit_interval and iteration % exit_interval == 0:
        return StopReason(kind="interval")
    return None


def kind_of_text(text: str) -> Kind:
    """Why somebody wrote a stop file with this text; `file` if by hand."""
    for start, kind in _TEXTS.items():
        if text.startswith(start):
            return kind
    return "file"


def _signal_of(name: str) -> signal.Signals:
    if name not in signal.Signals.__members__:
        raise ValueError(f"unknown signal {name!r}; use a name such as SIGTERM or SIGUSR2")
    number = signal.Signals[name]
    if os.name == "posix" and number in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(f"signal {name} cannot be caught; use SIGTERM or SIGUSR2")
    return number
