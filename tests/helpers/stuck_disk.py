"""A disk that sticks: `stuck_disk.c`, preloaded into ranks, holds one call on a checkpoint's files
until it is let go."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

_LIBRARY = "COPUS_TEST_STUCK_DISK"


def missing() -> str:
    """Why this machine cannot have such a disk, or nothing."""
    if shutil.which("cc") is None or sys.platform != "linux":
        return "this needs Linux and a C compiler, cc, for tests/helpers/stuck_disk.c"
    return ""


def environment(folder: Path) -> dict[str, str]:
    """Of ranks that can have one; the library is made in a folder."""
    library = folder / "stuck_disk.so"
    source = Path(__file__).with_name("stuck_disk.c")
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return {"LD_PRELOAD": str(library), _LIBRARY: str(library)}


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ[_LIBRARY])
    library.stuck_seen.restype = ctypes.c_char_p
    return library


def begin(root: Path, call: str = "") -> None:
    """Holds the first such call on a file below `root` from now on, and notes all."""
    _library().stuck_begin(os.fsencode(root), call.encode())


def end() -> None:
    """Holds and notes no further one."""
    _library().stuck_end()


def let_go() -> None:
    """Has the one that is held go on."""
    _library().stuck_let_go()


def is_held() -> bool:
    """Whether one was held since `begin`."""
    return bool(_library().stuck_is_held())


def seen() -> list[str]:
    """Names of the calls since `begin`, each once."""
    return [_library().stuck_seen(i).decode() for i in range(_library().stuck_num_seen())]
