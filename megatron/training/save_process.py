"""The processes that write a checkpoint: started, watched, and ended when they hang.

megatron-core forks a process on each rank that has something to write; it reports to a helper that
lives as long as the rank. Either may be killed, or wait for a file system that never answers. Then
the save has failed, on all ranks, and the next one starts afresh.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import psutil
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import (
    AsyncRequest,
    TemporalAsyncCaller,
)

from megatron.training.agree import first_problem
from megatron.training.signals import shielded_children

_DONE, _BUSY, _LATE = range(3)
_POLL_S = 0.05
_ANSWER_S = 60.0
_LOST = (OSError, EOFError)
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class ResultsQueue:
    """The helper's queue as megatron-core uses it, but of bytes: to take the results themselves the
    helper would have to import torch.

    Args:
        inner: of the helper.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.qsize = inner.qsize

    @property
    def helper(self) -> Any:
        """The process of the helper."""
        return self.inner._manager._process

    def put(self, results: Any) -> None:
        """Hands over what was written."""
        self.inner.put(pickle.dumps(results))

    def get_nowait(self) -> Any:
        """Takes what was written.

        Raises:
            queue.Empty: nothing has come.
        """
        return pickle.loads(self.inner.get_nowait())


class SaveProcess:
    """One save under way: this rank's process, and what all ranks know together.

    Args:
        request: what megatron-core's save returned.
        timeout_s: seconds after which a process counts as hung.
    """

    def __init__(self, request: AsyncRequest, *, timeout_s: float) -> None:
        if request.async_fn is not None:
            request = request._replace(async_fn=functools.partial(_write, request.async_fn))
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
        """Which of this rank's processes has died."""
        process = self._caller.process
        rank = dist.get_rank()
        if process is not None and process.exitcode:
            return f"the process of rank {rank} that writes it ended with {process.exitcode}"
        if not _helper_answers():
            return f"the process of rank {rank} that collects what was written is gone"
        return None

    def end(self) -> None:
        """Kills what may still run of it on this rank, and lets go of it."""
        process = self._caller.process
        if process is None:
            return
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.join(1.0)


def _write(write: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Runs in the process that writes: neither it nor those it starts outlive their parent, whose
    results nobody would take."""
    _end_with_parent()
    os.register_at_fork(after_in_child=_end_with_parent)
    write(*args, **kwargs)


def _end_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def start_helper() -> None:
    """Starts the process that collects results, unless there is one."""
    with shielded_children():
        _helper()


def _helper_answers() -> bool:
    """Whether the helper is there; if not, the next save starts another."""
    try:
        _ask(_helper().qsize)
    except _LOST:
        _drop_helper()
        return False
    return True


def forget_results() -> None:
    """Empties the helper of what a failed save has left, which the next would take for its own;
    starts another if it has died. Call before a save is planned."""
    start_helper()
    try:
        _ask(functools.partial(_empty, _helper()))
    except _LOST:
        _drop_helper()
        start_helper()


def _empty(results: ResultsQueue) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            results.get_nowait()


def _ask(question: Callable[[], Any]) -> None:
    """Asks the helper, and does not wait for one that is stopped.

    Raises:
        OSError, EOFError: it is gone, or does not answer.
    """
    answer: Future[Any] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except Exception as error:  # raised again below
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    answer.result(timeout=_ANSWER_S)


def _drop_helper() -> None:
    """Kills the helper first: letting go of one that is stopped would wait for it."""
    results: Any = filesystem_async._results_queue
    if results is not None:
        results.helper.kill()
    filesystem_async._results_queue = None


def _helper() -> ResultsQueue:
    results: Any = filesystem_async._get_write_results_queue()
    if not isinstance(results, ResultsQueue):
        results = ResultsQueue(results)
        filesystem_async._results_queue = results  # pyright: ignore[reportAttributeAccessIssue]
    return results
