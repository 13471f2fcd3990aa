"""What a rank does for its launcher: it finds its place under srun, ends with the launcher, and
leaves its error where torch's launcher looks. Needs no torch and no supervisor."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import MutableMapping
from typing import Any

from copus_ext.launch.slurm import address_of, read_step
from copus_ext.reshard.relaunch import is_supervised
from megatron.trainer.common.child_processes import end_with_parent

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def adopt_srun(env: MutableMapping[str, str] | None = None) -> bool:
    """Sets RANK, WORLD_SIZE and the like from the variables of srun, as torchrun would set them.

    Does nothing if another launcher has set RANK, outside of a step of srun, and in a step of one
    process. MASTER_ADDR and MASTER_PORT of the user win. A process that sees one GPU takes it,
    whatever its number on the node.

    Returns:
        Whether it set anything.

    Raises:
        UsageError: one line, if SLURM's variables make no sense.
    """
    env = os.environ if env is None else env
    step = None if "RANK" in env else read_step(env)
    if step is None or step.num_tasks == 1:
        return False
    gpus = [name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    env.update(
        RANK=str(step.rank),
        WORLD_SIZE=str(step.num_tasks),
        LOCAL_RANK="0" if len(gpus) == 1 else str(step.local_rank),
        LOCAL_WORLD_SIZE=str(step.num_local_tasks),
        GROUP_RANK=str(step.node_rank),
    )
    if "MASTER_ADDR" not in env:
        env["MASTER_ADDR"] = address_of(step.head)
    env.setdefault("MASTER_PORT", str(step.port))
    return True


def end_with_launcher() -> None:
    """Ends this process when its launcher has gone. Only under a supervisor, which starts the run
    again."""
    if is_supervised():
        end_with_parent(os.getppid())


def leave_error(error: BaseException, *, message_only: bool = False) -> None:
    """Writes an error as torch's `record` does.

    Args:
        message_only: leave out type and traceback, since the message says all.
    """
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return
    now = time.time()
    name = "" if message_only else f"{type(error).__name__}: "
    more: dict[str, Any] = {"timestamp": str(int(now)), "time": now}
    if not message_only:  # else torch's launcher shows the message in its place
        more["py_callstack"] = "".join(traceback.format_exception(error))
    unfinished = f"{path}.{os.getpid()}"
    try:
        # The launcher may read at any moment, and half a file would crash it.
        with open(unfinished, "w") as file:
            json.dump({"message": {"message": f"{name}{error}", "extraInfo": more}}, file)
        os.replace(unfinished, path)
    except OSError:  # the error itself matters more
        print(f"{path} cannot be written", file=sys.stderr)
