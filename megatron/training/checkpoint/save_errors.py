"""What a run does about a checkpoint that could not be written: how often that was, what to say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron.training.checkpoint import files

MAX_IN_A_ROW = 3
"""Failed saves one after another that end a run, unless `--on-save-failure continue`."""


@dataclass(kw_only=True)
class FailedSaves:
    """Outlives the checkpointer of a layout; the same on every rank."""

    in_a_row: int = 0
    """Saves that failed since the last that did not."""

    def ends_the_run(self, on_failure: str) -> bool:
        """Whether the run must not go on after the last failure.

        Args:
            on_failure: `--on-save-failure`.
        """
        return on_failure == "stop" and self.in_a_row >= MAX_IN_A_ROW

    def times(self) -> str:
        """How often, for messages."""
        return f"{self.in_a_row} times in a row" if self.in_a_row > 1 else "once"


def what_is_left(root: Path) -> str:
    """Says which checkpoint a run can go on from."""
    try:
        latest = files.read_latest(root)
    except (OSError, ValueError):
        latest = None
    if latest is None:
        return "none is saved"
    return f"the last complete checkpoint is iteration {latest}"


def way_out(problem: str) -> str:
    """What to do before the next try, where the file system is to blame."""
    is_storage = any(word in problem for word in ("Errno", " are free ", "disk full"))
    return "make room or name another --save and " if is_storage else ""


def root_cause(error: BaseException) -> str:
    """One line about the first error of a chain, which is the one worth showing."""
    while error.__cause__ is not None:
        error = error.__cause__
    nested = getattr(error, "failures", None)
    if isinstance(nested, dict) and nested:
        first = next(iter(nested.values()))
        error = first[0] if isinstance(first, tuple) else first
    text = " ".join(str(error).split())
    if "unexpected pos" in text:
        text = (
            "a file could not be written to its end; is the disk full, or a quota or limit reached?"
        )
    return f"{type(error).__name__}: {text[:300]}"
