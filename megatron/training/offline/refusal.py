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
