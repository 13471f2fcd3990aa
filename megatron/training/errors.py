"""The ways a run ends badly, told apart by exit code."""

from __future__ import annotations


class UsageError(ValueError):
    """The flags, the configuration or the data cannot work as given (exit code 2).

    The message says what is wrong with which value, names the flag, and gives the fix, one line
    per problem.
    """

    exit_code = 2


class TrainingFailure(RuntimeError):
    """A run that was set up correctly could not go on (exit code 1)."""

    exit_code = 1


class Relaunch(TrainingFailure):
    """The run must be started again from its last checkpoint, in new processes (exit code 85)."""

    exit_code = 85
