"""Which of many failures was the first, and how to tell it. No torch, no processes."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from copus_ext.reshard.checked import check_fields, check_number, check_text, one_line

MOST_TEXT = 8000
"""Characters of a traceback that are kept: its end."""
_MOST_LINE = 500
_SAYING = (85, 86, 2)
"""Codes by which a rank says more than that it failed, the strongest first."""
_LOST = re.compile(
    r"connection (was )?(reset|closed|refused|aborted)|broken pipe|socket (closed|timeout)"
    r"|remote process exited|connectFullMesh|DistNetworkError|unhandled system error",
    re.IGNORECASE,
)
"""What a rank says whose peer has gone."""
_NO_ANSWER_S = 25.0
"""torch's launcher waits for 30 s between SIGTERM and SIGKILL; its times are whole seconds."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one process ended.

    Raises:
        ValueError: a value of the wrong type or out of bounds, naming the field.
    """

    rank: int
    """In the world; -1 for the launcher of a node."""
    host: str
    """Name of its machine."""
    code: int
    """As Popen gives it: -N after signal N."""
    time_s: float = 0.0
    """When it noticed, by the clock of its machine, in seconds since the epoch; 0 if unknown."""
    error: str = ""
    """One line; empty if it left none."""
    traceback: str = ""
    """The end of it; empty if it left none."""

    def __post_init__(self) -> None:
        check_number("rank", self.rank, -1, 1 << 20)
        check_text("host", self.host, _MOST_LINE)
        check_number("code", self.code, -128, 255)
        if isinstance(self.time_s, bool) or not isinstance(self.time_s, (int, float)):
            raise ValueError("time_s must be a number")
        if not 0 <= self.time_s < 1e12:
            raise ValueError("time_s must be seconds since the epoch")
        check_text("error", self.error, _MOST_LINE)
        check_text("traceback", self.traceback, MOST_TEXT)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Failure:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: a missing or unknown field, or a value that makes no sense.
        """
        names = {field.name for field in fields(cls)}
        return cls(**check_fields(data, names, {"rank", "host", "code"}))

    @property
    def exit_code(self) -> int:
        """As a shell gives it: 128 + N after signal N."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def signature(self) -> str:
        """The same for errors of the same kind."""
        return re.sub(r"0x[0-9a-f]+|\d+", "#", self.error) or f"code {self.code}"

    @property
    def line(self) -> str:
        """One line for a person."""
        who = f"rank {self.rank}" if self.rank >= 0 else "the launcher"
        if self.code < 0:
            how = f"was ended by {_name_of(-self.code)}"
        else:
            how = f"left with {self.code}"
        text = f"{who} on {one_line(self.host)} {how}"
        return f"{text}: {one_line(self.error)}" if self.error else text

    @property
    def _order(self) -> tuple[int, int, bool, bool, float]:
        """Sorts causes before what follows from them."""
        # SIGTERM is how ranks are ended that are left; with SIGABRT ends who lost its peers.
        if self.code < 0 and -self.code not in (signal.SIGTERM, signal.SIGABRT):
            kind = 0
        elif self.code in _SAYING:
            kind = 1
        else:
            kind = 3 if self.code == -signal.SIGTERM else 2
        said = _SAYING.index(self.code) if kind == 1 else 0
        lost = bool(_LOST.search(f"{self.error}\n{self.traceback}"))
        return kind, said, lost, not self.error, self.time_s


def told_apart(failures: Sequence[Failure]) -> tuple[list[Failure], list[Failure]]:
    """Separates the ranks of one node that torch's launcher had to kill, as they did not answer
    when it ended them after the first failure. They hung: what ended them explains nothing.

    Returns:
        All others, and those.
    """
    first_s = min((failure.time_s for failure in failures), default=0.0)
    late = [
        failure
        for failure in failures
        if failure.code == -signal.SIGKILL and failure.time_s - first_s >= _NO_ANSWER_S
    ]
    return [failure for failure in failures if failure not in late], late


def root_of(failures: Iterable[Failure]) -> Failure | None:
    """The failure that explains the others: what was killed, else what says most, else the first
    that is not only about a peer that has gone. None without any."""
    return min(failures, key=lambda failure: failure._order, default=None)


def shortened(text: str) -> str:
    """The end of a traceback, with what no terminal should get taken out."""
    text = "".join(c for c in text if c.isprintable() or c in "\n\t")
    return text if len(text) <= MOST_TEXT else "...\n" + text[4 - MOST_TEXT :]


def first_line(text: str) -> str:
    """A message as it fits into `Failure.error`."""
    return one_line(text, _MOST_LINE)


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
