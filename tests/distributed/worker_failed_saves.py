"""Saves that go wrong on one rank alone, one after another in a run that saves at every step;
writes what every rank was told."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers.jobs import run

FAULTS = {
    2: ("data", 1),
    4: ("common.pt", 0),
    6: (".metadata", 0),
    8: ("metadata.json", 0),
    10: ("killed", 1),
    12: ("hung", 1),
    14: ("results", 1),
    16: ("data", 0),
    17: ("common.pt", 0),
    18: ("data", 1),
}
"""Iteration -> what fails, and on which rank."""
LAST_FAULTS = {2: ("data", 1), 3: ("data", 1), 4: ("data", 1), 5: ("data", 1)}
HANGS_S = 300


def full() -> None:
    """Fails as a write on a full disk does."""
    raise OSError(errno.ENOSPC, "No space left on device")


def die() -> None:
    """Kills the process that waits for this one, which is to end with it."""
    os.kill(os.getppid(), signal.SIGKILL)
    hang()


def hang() -> None:
    """Waits as on a file system that does not answer."""
    time.sleep(HANGS_S)


class Faults:
    """Breaks functions of megatron-core and torch for the checkpoints of some iterations."""

    def __init__(self, faults: dict[int, tuple[str, int]], rank: int) -> None:
        self.mine = {f"iter_{i:07d}": name for i, (name, on) in faults.items() if on == rank}

    def meets(self, path: Any, *names: str) -> str | None:
        """The fault of the checkpoint that a path lies in, if it is one of these."""
        found = next((name for folder, name in self.mine.items() if folder in str(path)), None)
        return found if found in names else None

    def before(self, real: Callable[..., Any], name: str, path_of: Callable[..., Any]) -> Any:
        """A function that fails first where the fault is `name`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.meets(path_of(*args, **kwargs), name):
                full()
            return real(*args, **kwargs)

        return run

    def write_item(self, real: Callable[..., Any]) -> Any:
        """Writes, in the process of one file, what the fault lets through."""
        harm = {"data": full, "killed": die, "hung": hang}

        @functools.wraps(real)
        def run(transforms: Any, stream: Any, *args: Any, **kwargs: Any) -> Any:
            result = real(transforms, stream, *args, **kwargs)
            if name := self.meets(stream.name, *harm):
                harm[name]()
            return result

        return run

    def start(self, real: Callable[..., Any]) -> Any:
        """Waits for a second only where the fault is to hang; hands nothing over where that is
        what fails."""

        def run(process: Any, request: Any, *, timeout_s: float) -> None:
            buckets = request.async_fn_args[1] if request.async_fn_args else []
            found = {self.meets(bucket[0], "hung", "results") for bucket in buckets}
            if "results" in found:
                request.async_fn_args[2].put = lambda results: full()
            real(process, request, timeout_s=1.0 if "hung" in found else timeout_s)

        return run


@contextlib.contextmanager
def broken(faults: dict[int, tuple[str, int]], rank: int) -> Any:
    """Has the faults happen on this rank."""
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
    from torch.distributed.checkpoint import FileSystemWriter

    from megatron.training.checkpoint.async_writer import SaveProcess

    all_faults = Faults(faults, rank)
    save_common: Any = TorchCommonSaveStrategy.save_common
    finish: Any = FileSystemWriter.finish
    with contextlib.ExitStack() as stack:
        for owner, attribute, new in (
            (
                TorchCommonSaveStrategy,
                "save_common",
                all_faults.before(save_common, "common.pt", lambda _self, _state, to: to),
            ),
            (
                FileSystemWriter,
                "finish",
                all_faults.before(finish, ".metadata", lambda writer, *_: writer.path),
            ),
            (
                serialization,
                "save_config",
                all_faults.before(
                    serialization.save_config, "metadata.json", lambda _config, to: to
                ),
            ),
            (filesystem_async, "_write_item", all_faults.write_item(filesystem_async._write_item)),
            (SaveProcess, "__init__", all_faults.start(SaveProcess.__init__)),
        ):
            stack.enter_context(mock.patch.object(owner, attribute, new))
        yield


def main(output: Path) -> Any:
    """Returns by case the error of each rank."""
    import torch.distributed as dist

    from megatron.training.common.collectives import all_gather_object
    from megatron.training.common.errors import TrainingFailure
    from megatron.training.distributed.process_groups import destroy_groups

    told = {}
    for name, faults, steps, more in (
        ("sync", FAULTS, 30, []),
        ("async", FAULTS, 30, ["--async-save"]),
        ("last", LAST_FAULTS, 5, ["--on-save-failure", "continue"]),
    ):
        flags = ["--save", str(output / name), "--save-interval", "1", "--train-iters", str(steps)]
        error = None
        with broken(faults, dist.get_rank()):
            try:
                run([*flags, "--use-distributed-optimizer", *more], output / name / "run")
            except TrainingFailure as failure:
                error = str(failure)
                destroy_groups()
        told[name] = all_gather_object(error)
    return told
