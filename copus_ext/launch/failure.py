"""How ranks failed, and which of many failures came first. No torch, no processes."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from copus_ext.reshard.checked import JsonRecord, check_number, check_text, one_line

MAX_TRACEBACK = 8000
"""Characters of a traceback that are kept: its end."""
_MAX_LINE = 500
_SIGNALLED = 128
_TELLING_CODES = (85, 86, 2)
"""Exit codes by which a rank says more than that it failed, the strongest first."""
_OWN_FAULTS = tuple(
    getattr(signal, name)
    for name in ("SIGSEGV", "SIGABRT", "SIGFPE", "SIGILL", "SIGBUS", "SIGSYS", "SIGTRAP")
    if hasattr(signal, name)
)
"""Signals that a process brings on itself by what it computes."""
_OWN_FAULT_WORDS = [(signal.strsignal(number) or "").partition(" ")[0] for number in _OWN_FAULTS]
_LOST_PEER = re.compile(
    r"connection (was )?(reset|closed|refused|aborted)|broken pipe|socket (closed|timeout)"
    r"|remote process exited|connectFullMesh|DistNetworkError|unhandled system error",
    re.IGNORECASE,
)
"""What a rank says after one of its peers has gone."""
_LOST_READER = re.compile(r"DataLoader worker \(pid\S* \d+\) is killed by signal: ([^\s.]+)")
"""What torch says of a process that reads data, and the first word for its signal."""
_NO_ANSWER_S = 25.0
"""torch's launcher waits 30 s between SIGTERM and SIGKILL, and records times in whole seconds."""


@dataclass(frozen=True, kw_only=True)
class Failure(JsonRecord):
    """How one process failed.

    Raises:
        ValueError: a value of the wrong type or out of bounds, naming the field.
    """

    rank: int
    """In the world; -1 for the launcher of a node."""
    host: str
    code: int
    """Return code as of Popen: -N after signal N."""
    time_s: float = 0.0
    """When it was noticed, by the clock of its machine, in seconds since the epoch; 0: unknown."""
    error: str = ""
    """One line; empty if the process left none."""
    traceback: str = ""
    """The end of the traceback; empty if the process left none."""

    def __post_init__(self) -> None:
        check_number("rank", self.rank, -1, 1 << 20)
        check_text("host", self.host, _MAX_LINE)
        check_number("code", self.code, -128, 255)
        if isinstance(self.time_s, bool) or not isinstance(self.time_s, (int, float)):
            raise ValueError("time_s must be a number")
        if not 0 <= self.time_s < 1e12:
            raise ValueError("time_s must be seconds since the epoch")
        check_text("error", self.error, _MAX_LINE)
        check_text("traceback", self.traceback, MAX_TRACEBACK)

    @property
    def exit_code(self) -> int:
        """Exit code as of a shell: 128 + N after signal N."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def signature(self) -> str:
        """Equal for errors that differ only in numbers."""
        return re.sub(r"0x[0-9a-f]+|\d+", "#", self.error) or f"code {self.code}"

    @property
    def is_from_outside(self) -> bool:
        """Whether a signal ended it, or a process that reads its data, that somebody else sent: a
        person, a scheduler, or the kernel for lack of memory. It may come at any step, so that
        twice at one step is no evidence."""
        if (reader := _LOST_READER.search(self.error)) is not None:
            return reader[1] not in _OWN_FAULT_WORDS
        number = -self.code
        if self.code > _SIGNALLED and not self.error:  # a shell or container around the rank
            number = self.code - _SIGNALLED
        # A program that leaves with 255 had no signal: there is none of that number.
        return number in signal.valid_signals() and number not in _OWN_FAULTS

    @property
    def line(self) -> str:
        who = f"rank {self.rank}" if self.rank >= 0 else "the launcher"
        how = f"left with {self.code}"
        if self.code < 0:
            try:
                name = signal.Signals(-self.code).name
            except ValueError:
                name = f"signal {-self.code}"
            how = f"was ended by {name}"
        text = f"{who} on {one_line(self.host)} {how}"
        return f"{text}: {one_line(self.error)}" if self.error else text

    @property
    def _order(self) -> tuple[int, int, bool, bool, float]:
        """Sorts causes before their consequences."""
        # The launcher ends surviving ranks with SIGTERM; SIGABRT ends a rank that lost its peers.
        if self.code < 0 and -self.code not in (signal.SIGTERM, signal.SIGABRT):
            kind = 0
        elif self.code in _TELLING_CODES:
            kind = 1
        else:
            kind = 3 if self.code == -signal.SIGTERM else 2
        strength = _TELLING_CODES.index(self.code) if kind == 1 else 0
        lost_peer = bool(_LOST_PEER.search(f"{self.error}\n{self.traceback}"))
        return kind, strength, lost_peer, not self.error, self.time_s


def first_failure(failures: Iterable[Failure]) -> Failure | None:
    """The failure that explains the others; None without any.

    A kill comes first, then the most telling exit code, then the earliest error that does not only
    report a lost peer.
    """
    return min(failures, key=lambda failure: failure._order, default=None)


def split_hung(failures: Sequence[Failure]) -> tuple[list[Failure], list[Failure]]:
    """Separates ranks of one node that hung: torch's launcher had to kill them, since they did not
    answer SIGTERM after the first failure. That kill explains nothing.

    Returns:
        All other failures, and those of hung ranks.
    """
    first_s = min((failure.time_s for failure in failures), default=0.0)
    hung = [
        failure
        for failure in failures
        if failure.code == -signal.SIGKILL and failure.time_s - first_s >= _NO_ANSWER_S
    ]
    return [failure for failure in failures if failure not in hung], hung


def traceback_end(text: str) -> str:
    """The end of a traceback, without characters that would disturb a terminal."""
    text = "".join(c for c in text if c.isprintable() or c in "\n\t")
    return text if len(text) <= MAX_TRACEBACK else "...\n" + text[4 - MAX_TRACEBACK :]


def error_line(text: str) -> str:
    """A message cut to what `Failure.error` takes."""
    return one_line(text, _MAX_LINE)
