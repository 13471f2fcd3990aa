"""The name that usage and error lines give to the running command."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

_given: str | None = None


def program_name(script: str) -> str:
    """Returns the name by which the user called the running command.

    Args:
        script: name of the file that starts the command from a checkout, such as `plan.py`. It is
            the answer unless `running_as` says otherwise.
    """
    return script if _given is None else _given


@contextlib.contextmanager
def running_as(name: str) -> Iterator[None]:
    """Gives the command that runs inside this context another name, such as `copus plan`."""
    global _given
    before, _given = _given, name
    try:
        yield
    finally:
        _given = before


def tell(script: str, text: str) -> None:
    """Prints one line on standard error, after the name of the command.

    Args:
        script: as in `program_name`.
        text: such as `error: ...` or `note: ...`.
    """
    print(f"{program_name(script)}: {text}", file=sys.stderr, flush=True)


def close_output() -> None:
    """Closes standard output after its reader has gone, so that Python does not complain of what is
    left in its buffer."""
    with contextlib.suppress(OSError):
        os.close(sys.stdout.fileno())
