"""One save under way: how this rank writes its part, and what all ranks agree on.

A synchronous save writes by threads of the rank. An asynchronous one has a process write from a
copy. If that process ends or stands still, threads of the rank write once more from the same copy.
A thread looks after it while the rank trains: a step may last for minutes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.storage import WriteResult

from megatron.trainer.checkpoint.file_threads import FileThreads
from megatron.trainer.checkpoint.writer_process import (
    WriterProcess,
    end_writer_process,
    writer_process,
)
from megatron.trainer.common.collectives import first_problem
from megatron.trainer.common.file_limits import Stall, stall_s

logger = logging.getLogger(__name__)

_DONE, _BUSY, _STUCK = range(3)
_POLL_S = 0.05
_WATCH_S = 1.0


_Bucket = tuple[Any, str, tuple[list[Any], list[Any]]]
"""Of megatron-core: path and name of a file, and its items, each with what it holds: bytes, and
tensors."""


def _files_of(buckets: Sequence[_Bucket]) -> list[tuple[Any, list[Any]]]:
    return [
        (path, [*(data.getvalue() for _, data in data_items), *(t for _, t in tensor_items)])
        for path, _, (data_items, tensor_items) in buckets
    ]


def _results_of(bucket: _Bucket, places: Sequence[tuple[int, int]]) -> list[WriteResult]:
    """What torch's index needs to know of the items of a file that has been written."""
    _, name, (data_items, tensor_items) = bucket
    return [
        WriteResult(item.index, length, filesystem._StorageInfo(name, start, length))
        for (item, _), (start, length) in zip([*data_items, *tensor_items], places, strict=True)
    ]


class SaveWrite:
    """A save that is being written.

    Args:
        in_background: write by a process, so that training may go on.
    """

    def __init__(self, request: AsyncRequest, *, in_background: bool) -> None:
        self.note: str | None = None
        """What went wrong with the process of this rank, where threads have written instead."""
        self._request = request
        self._process: WriterProcess | None = None
        self._threads: FileThreads | None = None
        self._buckets: Sequence[_Bucket] = ()
        self._copies: Sequence[tuple[Any, list[Any]]] = ()
        self._outcome: Any = None
        self._limit_s = stall_s()
        self._is_stuck = False
        self._rank = dist.get_rank()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._has_lost_process = False
        self._watch: threading.Thread | None = None
        self.holds_training_up = False
        """Whether threads of a rank write what training would change, though a process should."""
        if request.async_fn is None:  # this rank has nothing to write
            return
        self._buckets = request.async_fn_args[1]
        self._stall = Stall(self._limit_s)
        if not (in_background and self._hand_over()):
            self._threads = FileThreads(_files_of(request.preload_fn()))
            self.holds_training_up = in_background
        if self._process is not None:
            watch = threading.Thread(target=self._look_after, daemon=True, name="save watch")
            with contextlib.suppress(RuntimeError):  # then a death is seen at the step's end
                watch.start()
                self._watch = watch

    def _look_after(self) -> None:
        """Sees what becomes of the process during a step, and has the rank write where it is lost.
        What all ranks do together waits for `is_written`."""
        while not self._is_over.wait(_WATCH_S):
            state = self._state()
            if state == _STUCK:
                logger.warning("%s; this save fails at the end of the step", self._held())
            if state != _BUSY:
                return

    def _hand_over(self) -> bool:
        """Has the process write; returns whether it could."""
        try:
            process = writer_process()
            self._copies = process.send(_files_of(self._buckets))
        except (OSError, MemoryError, ValueError) as error:
            end_writer_process()
            self._tell(f"could not take it over ({error}); this save holds training up")
            return False
        self._process = process
        return True

    def _tell(self, what: str) -> None:
        self.note = f"the process of rank {self._rank} that writes checkpoints {what}"
        logger.warning("%s", self.note)

    def is_written(self, *, blocking: bool) -> bool:
        """Whether all ranks have written, or failed to. Collective over the world.

        Raises:
            TimeoutError: on every rank, when the file system holds a write of any.
        """
        while True:
            mine = self._state()
            if self._has_lost_process:
                # Not by the thread that looks after it: Linux ends a process with the thread that
                # has started it.
                self._has_lost_process = False
                with contextlib.suppress(OSError):  # the next save tries again
                    writer_process()
            state = torch.tensor([mine], dtype=torch.int, device=torch.cuda.current_device())
            dist.all_reduce(state, op=dist.ReduceOp.MAX)
            worst = int(state.item())
            if worst == _STUCK:
                raise TimeoutError(first_problem(self._held() if mine == _STUCK else None))
            if worst == _DONE or not blocking:
                return worst == _DONE
            process, threads = self._process, self._threads
            if process is not None:
                process.wait(_POLL_S)
            elif threads is None or threads.is_done(_POLL_S):
                time.sleep(_POLL_S)

    def _held(self) -> str:
        return f"a write of rank {self._rank} has not moved on for {self._limit_s:g} s"

    def _state(self) -> int:
        with self._lock:
            return self._state_alone()

    def _state_alone(self) -> int:
        try:
            return self._look()
        except Exception as error:  # all ranks wait for an answer, and learn of it in `finish`
            self._outcome, self._process, self._threads = error, None, None
            return _DONE

    def _look(self) -> int:
        if self._process is not None:
            return self._state_of_process(self._process)
        if self._threads is None:
            return _DONE
        if not self._is_stuck and self._threads.is_done():
            self._outcome = self._threads.outcome()
            return _DONE
        self._is_stuck = self._is_stuck or self._stall.is_over(self._threads.written)
        return _STUCK if self._is_stuck else _BUSY

    def _state_of_process(self, process: WriterProcess) -> int:
        """Of the process; where it is lost, the rank writes by threads from now on."""
        try:
            if process.is_done():
                self._outcome, self._process = process.outcome(), None
                return _DONE
            if not self._stall.is_over(process.written):
                return _BUSY
            lost = f"has not moved on for {self._limit_s:g} s"
        except ChildProcessError as error:
            lost = str(error)
        except Exception as error:  # not every pickled error can be read again
            lost = f"gave no readable answer ({error!r})"
        self._process = None
        process.kill()
        self._tell(f"{lost}; the rank writes itself")
        self._threads = FileThreads(self._copies, anew=True)
        self._stall = Stall(self._limit_s)
        self._has_lost_process = True
        return _BUSY

    def finish(self) -> None:
        """Puts the index together from what all ranks have written. Collective over the world;
        call when `is_written`.

        Raises:
            OSError, CheckpointException: on every rank, when something could not be written.
        """
        if self._request.async_fn is not None:
            # Where its writer looks for them.
            outcome = self._outcome
            if not isinstance(outcome, Exception):
                outcome = {i: _results_of(self._buckets[i], outcome[i]) for i in outcome}
            self._request.async_fn_args[2].put(outcome)
        for finalize in self._request.finalize_fns:
            finalize()

    def end(self) -> None:
        """Ends what still writes on this rank, and lets go of the copies. Call it after every
        save."""
        self._is_over.set()
        if self._watch is not None:
            self._watch.join()
            self._watch = None
        if self._process is not None:
            self._process.kill()
            self._process = None
        if self._threads is not None:
            self._threads.end()
            self._threads = None
        self._copies = ()
