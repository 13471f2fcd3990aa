"""Processes and memory of asynchronous saves, for tests that harm them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil


def stop_writer(pid: int) -> None:
    """Stops a process that writes checkpoints, once it is bound to its rank: then it also ignores
    SIGTERM."""
    bit = 1 << (signal.SIGTERM - 1)
    status = Path(f"/proc/{pid}/status")
    while not int(status.read_text().split("SigIgn:")[1].split()[0], 16) & bit:
        time.sleep(0.02)
    os.kill(pid, signal.SIGSTOP)


def left_of_saves() -> dict[str, Any]:
    """What this process still has of saves: processes that write, dead ones that nobody has waited
    for, shared memory, threads."""
    children = psutil.Process().children(recursive=True)
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them has gone
            names.append(os.readlink(entry))
    return {
        "writers": sum("writer_process" in " ".join(child.cmdline()) for child in children),
        "zombies": sum(child.status() == psutil.STATUS_ZOMBIE for child in children),
        "handles": sum("memfd:save" in name for name in names),
        "maps": Path("/proc/self/maps").read_text().count("memfd:save"),
        "threads": [thread.name for thread in threading.enumerate() if "save" in thread.name],
    }
