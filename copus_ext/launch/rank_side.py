"""What a rank does for its launcher: goes when it goes, and leaves its error where torch's launcher
looks. Nothing here needs torch, or a supervisor."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback

from copus_ext.reshard.relaunch import is_supervised
from megatron.training.common.child_processes import end_with_parent

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def end_with_launcher() -> None:
    """Ends this process when its launcher has gone; only under a supervisor, which starts the run
    again."""
    if is_supervised():
        end_with_parent(os.getppid())


def leave_error(error: BaseException, *, is_told: bool = False) -> None:
    """Writes what torch's `record` would.

    Args:
        error: that ends this rank.
        is_told: whether its message says all, so that no one needs to know where it was raised.
    """
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return
    now = time.time()
    name = "" if is_told else f"{type(error).__name__}: "
    lines = [] if is_told else traceback.format_exception(error)
    more = {"py_callstack": "".join(lines), "timestamp": str(int(now)), "time": now}
    unfinished = f"{path}.{os.getpid()}"
    try:
        # The launcher may look at any moment, and does not survive half a file.
        with open(unfinished, "w") as file:
            json.dump({"message": {"message": f"{name}{error}", "extraInfo": more}}, file)
        os.replace(unfinished, path)
    except OSError:  # the error itself matters more
        print(f"{path} cannot be written", file=sys.stderr)
