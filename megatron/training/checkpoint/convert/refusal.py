"""The two ways an offline tool says no, told apart by exit code."""

from __future__ import annotations


class Refused(RuntimeError):
    """A checkpoint cannot be proved complete, or cannot become what was asked for (exit code 3).

    The message names the key or the file, and the way out where there is one.
    """

    exit_code = 3


class VerificationFailed(RuntimeError):
    """What was written is not what was read (exit code 4)."""

    exit_code = 4


def outcome_of(error: Exception) -> tuple[int, str]:
    """Exit code and line of any failure; 3 for what nobody foresaw, which odd contents cause."""
    text = " ".join(str(error).split())
    code = getattr(error, "exit_code", None)
    if code is not None:
        return code, text
    if isinstance(error, (OSError, MemoryError)):
        return 1, text or type(error).__name__
    return 3, f"malformed, or of a kind that is not known ({type(error).__name__}: {text[:200]})"
