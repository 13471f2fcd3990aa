"""The phases of a change of layout and what comes of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

PHASES = (
    "prepare",
    "drain",
    "extract",
    "tear down",
    "groups",
    "model",
    "optimizer",
    "copy",
    "transfer",
    "weights",
    "verify",
    "commit",
    "resume",
)
"""In their order; a failure before `tear down` leaves the job untouched."""
TOGETHER = " together"
"""Behind the name of a phase: the part of it that all ranks do together."""
BACK = "back: "
"""Before the name of a phase on the way back."""


@dataclass(kw_only=True)
class Outcome:
    """What came of a change of layout; the same on every rank but for times and bytes."""

    kind: Literal["moved", "cancelled", "rolled_back"] = "cancelled"
    """On under the new layout; never begun; back under the old one."""
    reason: str = ""
    """Why it did not come about."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase, its vote included."""
    pause_s: float = 0.0
    """Seconds of the whole."""
    wire_bytes: int = 0
    """Bytes of state that ranks sent to each other."""
    minimum_bytes: int = 0
    """Bytes that they had to."""
    busiest_bytes: int = 0
    """Bytes of the rank that sent or received most."""
    num_messages: int = 0
    """Messages of this rank."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


class PhaseFailed(RuntimeError):
    """A rank said no; raised on all of them."""

    def __init__(self, phase: str, problems: list[str]) -> None:
        super().__init__(f"{phase}: {problems[0]}")
        self.phase = phase
