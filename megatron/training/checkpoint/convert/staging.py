"""A result appears whole or not at all: written beside its place, then renamed into it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.training.common.errors import UsageError


@contextmanager
def staged(source: Path, destination: Path) -> Iterator[Path]:
    """Gives an empty folder that becomes `destination` if the block ends well, and is removed if
    not. Every file in it is on the disk before it gets its name.

    A kill leaves `.NAME.unfinished-PID` beside it, never a part of `destination`.

    Args:
        source: folder that is read; must not hold the destination, nor lie in it.
        destination: must not exist, or be an empty folder.

    Raises:
        UsageError: the destination is taken, or entangled with the source.
        OSError: the file system refuses.
    """
    target, origin = destination.resolve(), source.resolve()
    if target == origin or origin in target.parents or target in origin.parents:
        raise UsageError(f"DST {destination} and SRC {source} overlap; name another DST")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError(f"DST {destination} exists; name another or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.unfinished-{os.getpid()}")
    temporary.mkdir()
    try:
        yield temporary
        for folder, _, names in os.walk(temporary):
            for path in (*(Path(folder, name) for name in names), Path(folder)):
                _sync(path)
        os.rename(temporary, target)
        _sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_file(source: Path, destination: Path) -> None:
    """Copies the contents of a file."""
    shutil.copyfile(source, destination)
