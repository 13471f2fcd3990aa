"""The process that writes a rank's asynchronous saves: one, beside the rank, for all of them.

It is a new interpreter and not a copy of the rank: it has none of its threads, locks, groups and
open files, and can be started at any time, also after another was killed. It gets tensors in
memory that both have mapped, writes them by threads, and ends with the rank.

Nothing here has a name in a file system: memory and messages are gone with the last process that
has them open, however that ends.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import mmap
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, Any

import psutil

from megatron.trainer.common.child_processes import end_with_parent

_COUNT = struct.Struct("<Q")
_HEADER_BYTES = 4096
_ALIGN = 64
_DONE = b"d"
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from megatron.trainer.checkpoint.writer_process import main; "
    "main(int(sys.argv[2]), int(sys.argv[3]))"
)
_own: list[WriterProcess] = []


class SharedMemory:
    """Memory that two processes map: counts of bytes, one for each file, and then tensors.

    Args:
        handle: of a file without a name, which is not closed.
    """

    def __init__(self, handle: int) -> None:
        self.size = os.fstat(handle).st_size
        self._map = mmap.mmap(handle, self.size)

    def add(self, number: int, written: int) -> None:
        """Adds to a count; one process, and one thread of it, does that for each."""
        place = number * _COUNT.size
        _COUNT.pack_into(self._map, place, _COUNT.unpack_from(self._map, place)[0] + written)

    def clear(self) -> None:
        self._map[:_HEADER_BYTES] = bytes(_HEADER_BYTES)

    def total(self) -> int:
        return sum(number for (number,) in _COUNT.iter_unpack(self._map[:_HEADER_BYTES]))

    def tensor(self, like: Any, start: int) -> Any:
        """A tensor that lies here.

        Args:
            like: without data, of its format, shape and strides.
            start: where it begins.
        """
        import torch

        size = like.numel() * like.element_size()
        if size == 0:
            return torch.empty_like(like, device="cpu")
        flat = torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=start)
        return flat.view(like.dtype).as_strided(like.size(), like.stride())


def unnamed_file(size: int = 0) -> IO[bytes]:
    """A file that goes with its last user: in memory where the system can, whatever `/dev/shm` has
    room for, and else on the disk of temporary files.

    Raises:
        OSError: there is no room. To find out on writing to mapped memory would end the process.
    """
    file = _memory_file() or tempfile.TemporaryFile()  # noqa: SIM115
    if size:
        os.posix_fallocate(file.fileno(), 0, size)
    return file


def _memory_file() -> IO[bytes] | None:
    with contextlib.suppress(AttributeError, OSError):
        return open(os.memfd_create("save"), "w+b")
    return None


def _stored(tensor: Any) -> Any:
    """What `tensor` is like on the CPU, without its data."""
    import torch

    return torch.empty_like(tensor, device="meta", requires_grad=False)


class WriterProcess:
    """The process as its rank sees it. A save is `send`, then `is_done` until it is, then
    `outcome`.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            # Python itself passes over entries that are no strings.
            paths = [entry for entry in sys.path if isinstance(entry, str)]
            arguments = [json.dumps(paths), str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # It must not make a context on a GPU, nor any torch threads.
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            )
        ours.setblocking(False)
        self._socket = ours
        self._rank = os.getpid()
        self._file: IO[bytes] | None = None
        self._memory: SharedMemory | None = None
        self._message: IO[bytes] | None = None
        self._is_idle = True

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_free(self) -> bool:
        """Whether it runs, and has written what was sent before."""
        return self._is_idle and self._process.poll() is None

    def send(self, files: Sequence[tuple[Any, Sequence[Any]]]) -> list[tuple[Any, list[Any]]]:
        """Has files written. Copies their tensors, which may then change; does not wait.

        Args:
            files: path and items of each: bytes, or tensors on any device.

        Returns:
            The same with the copies, which stay as they are until the next call.

        Raises:
            MemoryError: there is not enough for the copies.
            OSError: nor on the disk in its place, or the process cannot be reached.
        """
        plan, where = [], _HEADER_BYTES
        for path, items in files:
            places: list[Any] = []
            for item in items:
                if isinstance(item, bytes):
                    places.append(item)
                    continue
                like = _stored(item)
                places.append((like, where))
                where += -(-like.numel() * like.element_size() // _ALIGN) * _ALIGN
            plan.append((path, places))
        file, memory = self._room(where)
        copies = _resolve(plan, memory)
        for (_, sources), (_, targets) in zip(files, copies, strict=True):
            for source, target in zip(sources, targets, strict=True):
                if not isinstance(source, bytes):
                    target.copy_(source)
        memory.clear()
        self._message = unnamed_file()
        pickle.dump(plan, self._message)
        self._message.flush()
        self._is_idle = False
        socket.send_fds(self._socket, [b"w"], [file.fileno(), self._message.fileno()])
        return copies

    def _room(self, size: int) -> tuple[IO[bytes], SharedMemory]:
        """Memory of at least this size: that of the save before, since new pages take long."""
        if self._file is None or self._memory is None or self._memory.size < size:
            self._file = self._memory = None
            if size > (free := psutil.virtual_memory().available):
                raise MemoryError(
                    f"{free / 1e6:.0f} MB of memory are free, {size / 1e6:.0f} needed"
                )
            self._file = unnamed_file(size)
            self._memory = SharedMemory(self._file.fileno())
        return self._file, self._memory

    @property
    def written(self) -> int:
        """A number that grows as long as the process writes."""
        assert self._memory is not None
        return self._memory.total()

    def wait(self, seconds: float) -> None:
        """Returns when it answers or ends, or after so many seconds."""
        if self._socket.fileno() >= 0:
            poll = select.poll()  # `select` refuses file numbers from 1024 on
            poll.register(self._socket, select.POLLIN)
            poll.poll(1000 * seconds)

    def is_done(self) -> bool:
        """Whether it has written what was sent.

        Raises:
            ChildProcessError: it has ended instead.
        """
        try:
            answer = self._socket.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            answer = b""
        if answer == _DONE:
            self._is_idle = True
            return True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self.kill()
        raise ChildProcessError(f"ended with {self._process.returncode}")

    def outcome(self) -> Any:
        """What `FileThreads.outcome` returned there; when done."""
        assert self._message is not None
        self._message.seek(0)
        return pickle.load(self._message)

    def kill(self) -> None:
        """Ends it, whatever it does. One that a file system keeps goes when it is free."""
        if os.getpid() != self._rank:  # in a process that was forked from the rank
            return
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._socket.close()
        self._file = self._memory = self._message = None


def _resolve(plan: Sequence[Any], memory: SharedMemory) -> list[tuple[Any, list[Any]]]:
    return [
        (path, [p if isinstance(p, bytes) else memory.tensor(*p) for p in places])
        for path, places in plan
    ]


def writer_process() -> WriterProcess:
    """The process of this rank; starts it where there is none that is free.

    Raises:
        OSError: it cannot be started.
    """
    if _own and not _own[0].is_free():
        end_writer_process()
    if not _own:
        _own.append(WriterProcess())
    return _own[0]


@atexit.register
def end_writer_process() -> None:
    """Ends the process of this rank, if there is one."""
    while _own:
        _own.pop().kill()


def main(handle: int, rank: int) -> None:
    """Runs in the process until its rank has gone.

    Args:
        handle: of the socket to the rank.
        rank: its process id.
    """
    end_with_parent(rank)
    # The rank says when it is to end: a save goes on while a run is told to stop.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=handle) as rank_socket:
        # Takes seconds, and the first save need not wait for it.
        import megatron.trainer.checkpoint.file_threads  # noqa: F401

        while True:
            message, handles, _, _ = socket.recv_fds(rank_socket, 1, 2)
            if not message:
                return
            _serve(*handles)
            rank_socket.sendall(_DONE)


def _serve(memory_handle: int, message_handle: int) -> None:
    """Writes one save, and leaves the outcome in the message."""
    from megatron.trainer.checkpoint.file_threads import FileThreads

    with open(memory_handle, "r+b"), open(message_handle, "r+b") as message:
        message.seek(0)  # the place in it is shared, too
        plan = pickle.load(message)
        memory = SharedMemory(memory_handle)
        outcome = FileThreads(_resolve(plan, memory), count=memory.add).outcome()
        message.seek(0)
        message.truncate()
        try:
            pickle.dump(outcome, message)
        except Exception as error:  # the rank must learn of the first error all the same
            message.seek(0)
            message.truncate()
            pickle.dump(OSError(f"{outcome!r} ({error!r})"), message)
