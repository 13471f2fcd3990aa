"""Temporary folders of launches: each goes with its supervisor, or with the next one that starts.

A supervisor that is killed removes nothing. Its launcher then does; where that was killed as well,
the next supervisor of the same user on the machine finds the folder by its name, which says whose
it is.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from megatron.trainer.resilience.lock import machine, process_start

_PREFIX = "copus-"
_NAME = re.compile(rf"{_PREFIX}(?P<machine>[0-9a-f]{{8}})-(?P<pid>\d+)-(?P<started>\d+)-\w+")


@contextlib.contextmanager
def launch_folder() -> Iterator[str]:
    """An empty folder that lasts as long as the block; removes those of dead processes first."""
    remove_abandoned()
    start = process_start(os.getpid())
    # Without /proc nobody can tell whether its owner lives.
    owner = f"{_machine()}-{os.getpid()}-{start}-" if machine() and start else ""
    with tempfile.TemporaryDirectory(prefix=_PREFIX + owner, ignore_cleanup_errors=True) as folder:
        yield folder


def remove_abandoned() -> None:
    """Removes the folders of this user whose process is dead. A process number counts only on the
    machine, since its last boot and in the container that the name tells, with its start."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        found = _NAME.fullmatch(path.name)
        if found is None or not machine() or found["machine"] != _machine():
            continue
        with contextlib.suppress(OSError):
            is_ours = path.lstat().st_uid == os.getuid() and not path.is_symlink()
            if is_ours and process_start(int(found["pid"])) != found["started"]:
                shutil.rmtree(path, ignore_errors=True)


def _machine() -> str:
    return f"{zlib.crc32(machine().encode()):08x}"
