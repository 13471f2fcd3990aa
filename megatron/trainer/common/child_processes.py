"""Processes that this one has started: they end with it, or before."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent(parent: int) -> None:
    """Has Linux kill this process when its parent ends, however that goes; elsewhere nothing.

    To be exact, when the thread that started it ends: start it from the main thread.

    Args:
        parent: process id; where it has gone already, this process ends here.
    """
    if _LIBC is None:
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


@functools.cache
def never_collect_inherited() -> None:
    """Keeps processes that are forked from now on from collecting garbage of this one.

    To collect a process group joins its threads, which no forked process has: it would hang for
    ever. Such groups are garbage after a change of layout, or of the world.
    """
    was_enabled = True

    def before() -> None:
        nonlocal was_enabled
        was_enabled = gc.isenabled()
        gc.disable()

    def after() -> None:
        if was_enabled:
            gc.enable()

    def after_in_child() -> None:
        gc.freeze()
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after_in_child)


def kill_children(pid: int) -> None:
    """Kills all that a process has started, and what that has started."""
    # A rank needs this module before it can say that a package is missing.
    import psutil

    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
