"""Saves that go wrong on one rank alone, one after another in a run that saves at every step;
writes what every rank was told, what was started meanwhile, and the losses.

The faults are real where they can be: files that are full or that the kernel does not open, and
processes that are killed and stopped.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from megatron.trainer.common.core_version import since
from tests.helpers.jobs import TINY, run

COMMON = ".metadata" if since("0.19") else "common.pt"
"""From 0.19 on the common state lies among the tensors."""
SYNC = {
    2: ("data", 1),
    4: (COMMON, 0),
    6: (".metadata", 0),
    8: ("metadata.json", 0),
    10: ("held", 1),
    11: ("still held", 1),
    13: ("held", 0),
    15: ("data", 0),
    16: (COMMON, 0),
    17: ("data", 1),
}
"""Iteration -> what fails, and on which rank."""
ASYNC = {
    2: ("data", 1),
    4: ("killed", 1),
    5: ("stopped", 0),
    6: ("held", 1),
    7: ("unreachable", 0),
    8: ("held twice", 1),
    10: ("killed", 0),
    12: ("data", 0),
    13: ("held twice", 0),
    14: ("data", 1),
}
RECOVERED = ("killed", "stopped", "held", "unreachable")
"""Faults of a process, after which its rank writes the same checkpoint."""
LAST = {2: ("data", 1), 3: ("data", 1), 4: ("data", 1), 5: ("data", 1)}
STALL_S = 1.0
"""For writes that are held or stopped; for the others the machine may be as slow as it likes."""
_HELD = "a write of rank {rank} has not moved on for 1 s"
SAID = {
    "sync": {"held": _HELD, "still held": "still holds a write of an earlier save"},
    "async": {"held twice": _HELD},
}


def full() -> None:
    """Fails as a write on a full disk does."""
    raise OSError(errno.ENOSPC, "No space left on device")


class Faults:
    """Breaks the checkpoints of some iterations."""

    def __init__(self, faults: dict[int, tuple[str, int]], rank: int, folder: Path) -> None:
        self.mine = {f"iter_{i:07d}": name for i, (name, on) in faults.items() if on == rank}
        self.pipes = folder
        self.held: list[Path] = []

    def of(self, path: Any) -> str | None:
        """The fault of the checkpoint that a path lies in."""
        return next((name for folder, name in self.mine.items() if folder in str(path)), None)

    def before(self, real: Callable[..., Any], name: str, path_of: Callable[..., Any]) -> Any:
        """A function that fails first where the fault is `name`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.of(path_of(*args, **kwargs)) == name:
                full()
            return real(*args, **kwargs)

        return run

    def hold(self, path: Path) -> None:
        """Has whoever opens the file wait in the kernel, until `let_go`."""
        pipe = self.pipes / f"pipe-{len(self.held)}-{os.getpid()}"
        os.mkfifo(pipe)
        os.link(pipe, path)
        self.held.append(pipe)

    def let_go(self) -> None:
        """Opens the other end of all pipes, for threads of this rank that wait there."""
        from megatron.trainer.common.file_limits import refuse_while_stuck

        for pipe in self.held:
            reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
            with contextlib.suppress(TimeoutError):
                refuse_while_stuck(10.0)
            os.close(reader)
            pipe.unlink()
        self.held.clear()

    def prepare(self, real: Callable[..., Any]) -> Any:
        """Lets go of what an earlier save held, unless that is the fault."""

        def run(checkpointer: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
            if self.of(f"iter_{iteration:07d}") != "still held":
                self.let_go()
            return real(checkpointer, iteration, *args, **kwargs)

        return run

    def write(self, real: Callable[..., Any]) -> Any:
        """Begins the write of a save with its fault."""
        from megatron.trainer.checkpoint import save_write
        from megatron.trainer.checkpoint.file_threads import FileThreads
        from megatron.trainer.checkpoint.writer_process import writer_process

        def again(files: Any, *, anew: bool = False) -> Any:
            """The rank's own try is held, too."""
            path = Path(files[0][0])
            path.unlink()
            self.hold(path)
            return FileThreads(files)

        def run(write: Any, request: Any, *, in_background: bool) -> None:
            path = Path(request.async_fn_args[1][0][0]) if request.async_fn_args else None
            fault = self.of(path)
            if fault is None or path is None:
                return real(write, request, in_background=in_background)
            is_slow = fault in ("held", "held twice", "stopped")
            limit = {"COPUS_SAVE_STALL_S": str(STALL_S)} if is_slow else {}
            with contextlib.ExitStack() as stack:
                stack.enter_context(mock.patch.dict(os.environ, limit))
                if fault == "data":
                    path.symlink_to("/dev/full")
                if fault in ("held", "held twice"):
                    self.hold(path)
                if fault == "stopped":
                    os.kill(writer_process().pid, signal.SIGSTOP)
                if fault == "unreachable":
                    process = writer_process()
                    os.kill(process.pid, signal.SIGKILL)
                    process._process.wait()
                if fault == "killed":
                    os.kill(writer_process().pid, signal.SIGSTOP)
                real(write, request, in_background=in_background)
                if fault == "killed":
                    os.kill(writer_of(write), signal.SIGKILL)
                if fault == "held twice":
                    whole = write._state_of_process

                    def state(process: Any) -> int:
                        with mock.patch.object(save_write, "FileThreads", again):
                            return whole(process)

                    write._state_of_process = state
            return None

        return run


def writer_of(write: Any) -> int:
    return write._process.pid


@contextlib.contextmanager
def broken(faults: Faults) -> Iterator[None]:
    """Has the faults happen on this rank."""
    from torch.distributed.checkpoint import FileSystemWriter

    from megatron.trainer.checkpoint import save_errors
    from megatron.trainer.checkpoint.save import Checkpointer
    from megatron.trainer.checkpoint.save_write import SaveWrite

    finish: Any = FileSystemWriter.finish
    with contextlib.ExitStack() as stack:
        for owner, attribute, new in (
            (
                save_errors,
                "write_file",
                faults.before(save_errors.write_file, "common.pt", lambda to, *_: to),
            ),
            (
                FileSystemWriter,
                "finish",
                faults.before(finish, ".metadata", lambda writer, *_: writer.path),
            ),
            (
                save_errors,
                "save_config",
                faults.before(save_errors.save_config, "metadata.json", lambda _config, to: to),
            ),
            (Checkpointer, "_prepare", faults.prepare(Checkpointer._prepare)),
            (SaveWrite, "__init__", faults.write(SaveWrite.__init__)),
        ):
            stack.enter_context(mock.patch.object(owner, attribute, new))
        yield
    faults.let_go()


class Started:
    """Processes that this one starts while it saves; Python tells of every way to."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.is_on = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        starts = ("os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen", "os.exec")
        if self.is_on and event in starts:
            self.events.append(f"{event} {args}" if event == "subprocess.Popen" else event)

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Hears what saves start."""
        from megatron.trainer.checkpoint.save import Checkpointer

        real: Any = Checkpointer.save

        def save(*args: Any, **kwargs: Any) -> Any:
            self.is_on = True
            try:
                return real(*args, **kwargs)
            finally:
                self.is_on = False

        with mock.patch.object(Checkpointer, "save", save):
            yield


def main(output: Path) -> Any:
    """Returns by case the error of each rank, what its saves have started, and what rank 0 said."""
    import torch.distributed as dist

    from megatron.trainer.common.collectives import all_gather_object
    from megatron.trainer.common.errors import TrainingFailure
    from megatron.trainer.distributed.process_groups import destroy_groups

    rank = dist.get_rank()
    base = f"{TINY} --split 1,0,0 --use-distributed-optimizer --num-workers 0"
    told, started = {}, Started()
    for name, faults, steps, more in (
        ("plain", {}, 17, []),
        ("sync", SYNC, 30, []),
        ("async", ASYNC, 30, ["--async-save"]),
        ("gathered", {2: ("killed", 0)}, 3, ["--async-save", "--no-ckpt-fully-parallel-save"]),
        ("last", LAST, 5, ["--on-save-failure", "continue"]),
    ):
        flags = ["--save", str(output / name), "--save-interval", "1", "--train-iters", str(steps)]
        error, started.events, out = None, [], io.StringIO()
        with broken(Faults(faults, rank, output)), started.heard():
            try:
                flags += ["--lr-decay-iters", "30", *more]
                run(flags, output / name / "run", base=base, out=out)
            except TrainingFailure as failure:
                error = str(failure)
                destroy_groups()
        told[name] = {
            "errors": all_gather_object(error),
            "started": all_gather_object(started.events),
            "said": all_gather_object(out.getvalue())[0],
        }
    return told
