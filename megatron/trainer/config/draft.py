"""A configuration while it is being derived from flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron.trainer.common.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What this machine offers."""

    world_size: int
    """Number of ranks."""
    cuda: bool
    """Whether there is a GPU."""
    transformer_engine: bool
    """Whether Transformer Engine imports."""
    apex: bool
    """Whether NVIDIA's apex imports."""


@dataclass(kw_only=True)
class Draft:
    """A configuration in the making."""

    values: dict[str, Any]
    """Field name -> value, filled in step by step."""
    explicit: frozenset[str]
    """Names given on the command line."""
    notes: list[str] = field(default_factory=list)
    """What was derived against the flags, one line each."""
    problems: list[str] = field(default_factory=list)
    """What cannot work, one line each."""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.values[name] = value

    def default(self, name: str, value: Any) -> None:
        """Fills in a value that was left open."""
        if self.values[name] is None:
            self.values[name] = value

    def problem(self, text: str) -> None:
        """Notes one thing that cannot work."""
        self.problems.append(text)

    def require(self, holds: bool, text: str) -> None:
        """Notes a problem unless the rule holds."""
        if not holds:
            self.problems.append(text)

    def stop_if_problems(self) -> None:
        """Raises UsageError with all problems so far, one line each."""
        if self.problems:
            raise UsageError("\n".join(self.problems))


def flag_of(name: str) -> str:
    """Returns the option string of a field that is spelled like its flag."""
    return "--" + name.replace("_", "-")
