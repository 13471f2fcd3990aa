"""Errors of a save: raised on every rank together, counted, and put into words.

megatron-core writes `common.pt`, `.metadata` and `metadata.json` on rank 0 while the others go on
into a collective. They would wait there until the timeout if rank 0 alone left with an error, or
if the file system did not answer. `begin_request` does what `dist_checkpointing.save` does, and
touches no file without the limit of `file_limits`.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from megatron.trainer.checkpoint import files
from megatron.trainer.checkpoint.file_threads import GrowingFile, write_file
from megatron.trainer.common.collectives import first_problem
from megatron.trainer.common.core_version import since
from megatron.trainer.common.file_limits import answer_of

MAX_IN_A_ROW = 3
"""Failed saves one after another that end a run, unless `--on-save-failure continue`."""


@dataclass(kw_only=True)
class FailedSaves:
    """Outlives the checkpointer of a layout; the same on every rank."""

    in_a_row: int = 0
    """Saves that failed since the last that did not."""

    def ends_the_run(self, on_failure: str) -> bool:
        """Whether the run must not go on after the last failure.

        Args:
            on_failure: `--on-save-failure`.
        """
        return on_failure == "stop" and self.in_a_row >= MAX_IN_A_ROW

    def times(self) -> str:
        return f"{self.in_a_row} times in a row" if self.in_a_row > 1 else "once"


def what_is_left(root: Path) -> str:
    """Says which checkpoint a run can go on from."""
    try:
        latest = answer_of(lambda _: files.read_latest(root))
    except TimeoutError as error:
        return str(error)
    except (OSError, ValueError):
        latest = None
    if latest is None:
        return "none is saved"
    return f"the last complete checkpoint is iteration {latest}"


def way_out(problem: str) -> str:
    """What to do before the next try, where the file system is to blame."""
    is_storage = any(word in problem for word in ("Errno", " are free ", "disk full"))
    return "make room or name another --save and " if is_storage else ""


def root_cause(error: BaseException) -> str:
    """One line about the first error of a chain, which is the one worth showing."""
    while error.__cause__ is not None:
        error = error.__cause__
    nested = getattr(error, "failures", None)
    if isinstance(nested, dict) and nested:
        first = next(iter(nested.values()))
        error = first[0] if isinstance(first, tuple) else first
    text = " ".join(str(error).split())
    if "unexpected pos" in text:
        text = (
            "a file could not be written to its end; is the disk full, or a quota or limit reached?"
        )
    return f"{type(error).__name__}: {text[:300]}"


class _Writer(FileSystemWriterAsync):
    """megatron-core's writer, whose index is given up where the file system does not answer."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Touches no file: the folder is there, and is empty."""
        return plan

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Writes the index, on rank 0.

        Raises:
            OSError: the file system refuses, or does not answer.
        """
        finish = super().finish

        def act(count: Callable[[int], None]) -> None:
            self.fs = _CountedFiles(count)
            finish(metadata, results)

        answer_of(act)


class _CountedFiles(FileSystem):
    """torch's way to files, where an index that takes long to write counts its bytes."""

    def __init__(self, count: Callable[[int], None]) -> None:
        self._count = count

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Opens a file to be written."""
        assert mode == "wb"
        with io.BufferedWriter(GrowingFile(path, self._count)) as stream:
            yield stream


def use_own_writer() -> None:
    """Makes megatron-core use `_Writer`, and a queue of results in this process. Its own queue
    needs another process beside each rank, which outlives a rank that is killed."""
    where: Any = filesystem_async if since("0.17") else torch_strategy
    where.FileSystemWriterAsync = _Writer
    filesystem_async._results_queue = queue.SimpleQueue()


def begin_request(
    sharded: dict[str, Any], common: dict[str, Any], folder: Path, strategy: Any
) -> AsyncRequest:
    """Plans a save as `dist_checkpointing.save` does with `async_sharded_save`, and writes the
    common state; from megatron-core 0.19 on it is planned with the rest, as an object of one shard.
    Collective over the world.

    Args:
        sharded: state with sharded tensors; changed by it.
        common: state that is the same on every rank.

    Raises:
        OSError: on every rank, when rank 0 could not write.
    """
    parts: Any = save_preprocess({**sharded, **common})
    sharded_part, common_part = parts
    if since("0.19"):
        sharded_part[files.COMMON_STATE] = ShardedObject(
            files.COMMON_STATE, common_part, (1,), (0,), replica_id=dist.get_rank()
        )
    else:
        _write_common(common_part, folder)
    # The other way of newer releases, NVRx, writes by processes of its own.
    options = {"async_strategy": "mcore"} if since("0.17") else {}
    request = strategy.async_save(sharded_part, folder, **options)
    request.finalize_fns[0] = _agreed(request.finalize_fns[0], _join_broadcast)
    request.finalize_fns.append(lambda: _mark_written(strategy, folder))
    return request


def _write_common(state: dict[str, Any], folder: Path) -> None:
    """Writes `common.pt` on rank 0. torch would hold the interpreter while it opens a file by name,
    so that no thread could tell that the file system does not answer."""

    def act(count: Callable[[int], None]) -> None:
        data = io.BytesIO()
        torch.save(state, data)
        write_file(folder / files.COMMON, [data.getvalue()], count)

    _on_rank_0(act)


def _mark_written(strategy: Any, folder: Path) -> None:
    """Writes `metadata.json` on rank 0, which marks what megatron-core has written as whole."""
    config = CheckpointingConfig(strategy.backend, strategy.version)
    _on_rank_0(lambda _: save_config(config, str(folder)))


def _on_rank_0(act: Callable[[Callable[[int], None]], None]) -> None:
    """Does something on rank 0 within a limit. Collective over the world.

    Raises:
        OSError: on every rank, when it failed.
    """
    problem = None
    try:
        if dist.get_rank() == 0:
            answer_of(act)
    except Exception as error:  # whatever it is, the others wait
        problem = root_cause(error)
    if problem := first_problem(problem):
        raise OSError(problem)


def _join_broadcast() -> None:
    dist.broadcast(torch.ones(1, dtype=torch.int, device=torch.cuda.current_device()), src=0)


def _agreed(finalize: Callable[[], None], meet: Callable[[], object]) -> Callable[[], None]:
    """A finalization that fails on every rank when it fails on rank 0.

    Args:
        finalize: may fail on rank 0 alone.
        meet: takes part in what the others then wait in.
    """

    def run() -> None:
        problem = None
        try:
            finalize()
        except CheckpointException as error:  # raised on every rank already
            problem = root_cause(error)
        except Exception as error:
            problem = root_cause(error)
            meet()
        if problem := first_problem(problem):
            raise OSError(problem)

    return run
