"""Files that a user names for the answer of a command."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_output(path: Path, content: str | bytes) -> int:
    """Writes an answer where the user wants it, as `sort -o` does.

    A pipe or a device is opened and written to. A regular file, or none, is replaced, whole or not
    at all; a link to one stays.

    Args:
        content: characters of it that are no UTF-8 become `?`.

    Returns:
        Number of bytes.

    Raises:
        OSError: it cannot be written; its `filename` is always the path.
    """
    data = content.encode(errors="replace") if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                file.write(data)
        else:
            replace_file(Path(os.path.realpath(path)), data)
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise
    return len(data)


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file, whole or not at all. A link or a pipe in its place is replaced, and nothing is
    written through one.

    Raises:
        OSError: it cannot be written.
    """
    # A name that nobody can have laid something under; the mode is the user's umask.
    unfinished = path.with_name(f"unfinished.{secrets.token_hex(8)}.{path.name}")
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
