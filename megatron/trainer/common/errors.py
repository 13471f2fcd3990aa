"""The ways a command fails, told apart by exit code, and a number of things in a message."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """A number of things in words: `1 step`, `2 steps`.

    Args:
        noun: for one of them; its plural ends in s.
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class UsageError(ValueError):
    """The flags, the configuration or the data cannot work as given (exit code 2).

    The message says what is wrong with which value, names the flag, and gives the fix, one line
    per problem.
    """

    exit_code = 2


class TrainingFailure(RuntimeError):
    """A run that was set up correctly could not go on (exit code 1).

    Args:
        message: one line: what happened, where, and what to do.
        restart_helps: whether the run, started again as it was, may get further; then a supervisor
            does that. The same on every rank that raises it.
    """

    exit_code = 1

    def __init__(self, message: str, *, restart_helps: bool = False) -> None:
        super().__init__(message)
        self.restart_helps = restart_helps


class Relaunch(TrainingFailure):
    """The run must be started again from its last checkpoint, in new processes (exit code 85)."""

    exit_code = 85

    def __init__(self, message: str) -> None:
        super().__init__(message, restart_helps=True)


class Refused(ValueError):
    """A checkpoint is malformed or incomplete, or cannot become what was asked for (exit code 3).

    The message names the key or the file, and the way out where there is one.
    """

    exit_code = 3


class VerificationFailed(RuntimeError):
    """The file that was written differs from the one that was read (exit code 4)."""

    exit_code = 4
