"""Copies of tensors in memory of the host, made beside the computation where that is on a GPU."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch

logger = logging.getLogger(__name__)


class HostMemory:
    """Room for copies of this process, and the copying.

    On a GPU the room is page-locked, so that copies run on a stream of their own. To lock pages
    takes seconds, so room that is given back is used again. torch's own page-locked memory would be
    up to twice as large: it comes in powers of two. Without a GPU all of this is plain memory and
    plain copies.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None

    def empty(self, *shape: int) -> torch.Tensor:
        """Room for fp32 numbers, such as was given back or new. Room of other shapes is let go."""
        self._free = [one for one in self._free if one.shape == shape]
        if self._free:
            return self._free.pop()
        room = torch.empty(shape, dtype=torch.float32)
        if torch.cuda.is_initialized():  # a CPU run beside GPUs does not touch them
            _lock(room)
        return room

    def give_back(self, room: torch.Tensor) -> None:
        """Lets `empty` hand it out again."""
        if torch.cuda.is_initialized():
            self._free.append(room)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Copies that are begun inside, `non_blocking`, come after what this thread has asked of
        the GPU before, and run beside what it asks later."""
        if not torch.cuda.is_initialized():
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
            self._done = torch.cuda.Event()
            self._done.record()

    def before_write(self) -> None:
        """Lets what this thread asks of the GPU from now on wait for the copies: it may write to
        what they read."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)

    def wait(self) -> None:
        """Waits until the copies are there."""
        if self._done is not None:
            self._done.synchronize()


def _lock(room: torch.Tensor) -> None:
    """Locks the pages of a tensor for as long as it lives, if the system lets it."""
    runtime: Any = torch.cuda.cudart()
    place = room.data_ptr()
    if int(runtime.cudaHostRegister(place, room.nbytes, 0)) != 0:
        logger.warning("%.1f GB of copies are not page-locked: they take longer", room.nbytes / 1e9)
        _forget_error()
        return
    weakref.finalize(room, runtime.cudaHostUnregister, place).atexit = False


def _forget_error() -> None:
    """Takes the error that CUDA keeps for this thread, or the next kernel would raise it. torch has
    no call for that, but looks for one behind each kernel that it launches."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=torch.cuda.current_device())
