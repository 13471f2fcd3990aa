"""Files in a directory that others can write to, too."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO


def open_plain(path: Path, *, follow: bool = False) -> BinaryIO:
    """Opens what anybody may have put there: no pipe is waited for, and no device is read.

    Args:
        follow: a link to a plain file is one, too; otherwise it is refused.

    Raises:
        OSError: it cannot be read, or is not a plain file.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise OSError(errno.ELOOP, "it is a link", str(path)) from error
        raise
    return _checked(handle, path, "rb")


def append_plain(path: Path) -> BinaryIO:
    """Opens a file to append to, made if missing; a link is followed, no pipe waited for.

    Raises:
        OSError: it cannot be written, or is not a plain file.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a pipe that nobody reads
            raise _not_plain(path) from error
        raise
    return _checked(handle, path, "ab")


def _checked(handle: int, path: Path, mode: str) -> Any:
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise _not_plain(path)
        return os.fdopen(handle, mode)
    except BaseException:
        os.close(handle)
        raise


def _not_plain(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is not a plain file", str(path))
