"""The phases of a change of layout, and its result. Needs no torch."""

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
"""In their order; a failure before `tear down` leaves the job as it was."""
TOGETHER = " together"
"""After the name of a phase: the part that all ranks do together."""
BACK = "back: "
"""Before the name of a phase on the way back."""


@dataclass(kw_only=True)
class ReshardResult:
    """The result of a change of layout; the same on every rank but for times and bytes."""

    kind: Literal["moved", "cancelled", "rolled_back"] = "cancelled"
    """Under the new layout; never begun; back under the old one."""
    reason: str = ""
    """Why it failed."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase with its votes."""
    pause_s: float = 0.0
    """Seconds of the whole."""
    wire_bytes: int = 0
    """Bytes of state that ranks sent."""
    minimum_bytes: int = 0
    """Bytes that they had to send."""
    busiest_bytes: int = 0
    """Bytes of the rank that sent or received most."""
    num_messages: int = 0
    """Messages of this rank."""
    peak_bytes: float = 0.0
    """Most memory in use on its GPU meanwhile, with context and libraries; 0 on CPU ranks."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class PhaseFailed(RuntimeError):
    """A rank failed in a phase; raised on all of them."""

    def __init__(self, phase: str, problems: list[str]) -> None:
        super().__init__(f"{phase}: {problems[0]}")
        self.phase = phase
