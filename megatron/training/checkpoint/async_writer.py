"""Starts and watches the processes that write a checkpoint, and ends them when they hang.

megatron-core forks a process on each rank that has something to write. Such a process may be
killed, or wait for a file system that never answers. Then the save fails on all ranks, and the next
save starts afresh.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import queue
import tempfile
import time
from collections.abc import Callable
from typing import IO, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import (
    AsyncRequest,
    TemporalAsyncCaller,
)

from megatron.training.common.child_processes import end_with_parent, kill_children
from megatron.training.common.collectives import first_problem

_DONE, _BUSY, _LATE = range(3)
_POLL_S = 0.05


class WriteResults:
    """Carries the results of one save from the forked process to its parent, once.

    It stands in for megatron-core's queue. As a file without a name it holds any number of bytes
    and blocks nobody. A killed process leaves nothing in it that a later save could read.
    """

    def __init__(self) -> None:
        self._file = _unnamed_file()

    def put(self, results: Any) -> None:
        """Hands over what was written; in the forked process."""
        pickle.dump(results, self._file)
        self._file.flush()

    def get_nowait(self) -> Any:
        """Takes what was written.

        Raises:
            queue.Empty: nothing has come, or not all of it.
        """
        self._file.seek(0)
        try:
            return pickle.load(self._file)
        except (EOFError, pickle.UnpicklingError) as error:
            raise queue.Empty from error


def _unnamed_file() -> IO[bytes]:
    """In memory where the system can: the disk of temporary files may be full."""
    with contextlib.suppress(AttributeError, OSError):
        return open(os.memfd_create("written"), "w+b")
    return tempfile.TemporaryFile()


class SaveProcess:
    """One save under way: this rank's process, and the state that all ranks agree on.

    Args:
        request: what megatron-core's save returned.
        timeout_s: seconds after which a process counts as hung.
    """

    def __init__(self, request: AsyncRequest, *, timeout_s: float) -> None:
        if request.async_fn is not None:
            write = functools.partial(_write, os.getpid(), request.async_fn)
            request = request._replace(async_fn=write)
        self._request = request
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._caller = TemporalAsyncCaller()

    def start(self) -> None:
        """Starts the process, if this rank has something to write.

        Raises:
            OSError: on this rank alone, when it cannot be started.
        """
        self._caller.schedule_async_call(self._request.freeze())
        # Before multiprocessing's own, which would wait for it where the run has failed.
        atexit.register(self.end)

    def is_written(self, *, blocking: bool) -> bool:
        """Whether the processes of all ranks have ended. Collective over the world.

        Raises:
            TimeoutError: on every rank, when any process has taken too long.
        """
        while True:
            state = torch.tensor(
                [self._state()], dtype=torch.int, device=torch.cuda.current_device()
            )
            dist.all_reduce(state, op=dist.ReduceOp.MAX)
            worst = int(state.item())
            if worst == _LATE:
                raise TimeoutError(
                    f"a process that writes it has not ended after {self._timeout_s:g} s "
                    "(--distributed-timeout-minutes)"
                )
            if worst == _DONE or not blocking:
                return worst == _DONE
            process = self._caller.process
            if process is None or not process.is_alive():
                time.sleep(_POLL_S)
            else:
                process.join(_POLL_S)

    def _state(self) -> int:
        process = self._caller.process
        if process is None or not process.is_alive():
            return _DONE
        return _BUSY if time.monotonic() < self._deadline else _LATE

    def finish(self) -> None:
        """Puts the index together from what all ranks have written. Collective over the world;
        call when `is_written`.

        Raises:
            ChildProcessError: on every rank, when a process was killed.
            OSError, CheckpointException: on every rank, when something could not be written.
        """
        if problem := first_problem(self._loss()):
            raise ChildProcessError(problem)
        for finalize in self._request.finalize_fns:
            finalize()

    def _loss(self) -> str | None:
        """What is lost on this rank, if its process has died."""
        process, rank = self._caller.process, dist.get_rank()
        if process is None or not process.exitcode:
            return None
        return f"the process of rank {rank} that writes it ended with {process.exitcode}"

    def end(self) -> None:
        """Kills the process on this rank if it still runs. Call it after every save."""
        atexit.unregister(self.end)
        process = self._caller.process
        if process is not None and process.pid is not None and process.is_alive():
            kill_children(process.pid)
            process.kill()
            process.join(1.0)


def _write(rank: int, write: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Runs in the process that writes. Neither it nor its children outlive the rank.

    Args:
        rank: process id of the rank.
        write: of megatron-core, with its arguments.
    """
    end_with_parent(rank)
    os.register_at_fork(after_in_child=functools.partial(end_with_parent, os.getpid()))
    write(*args, **kwargs)
