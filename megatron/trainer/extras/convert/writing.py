"""Writes a `torch_dist` checkpoint rectangle by rectangle, with torch's own writer, whole or not at
all."""

from __future__ import annotations

import fcntl
import glob
import io
import itertools
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megatron.trainer.checkpoint.files import COMMON, COMMON_FILE
from megatron.trainer.checkpoint.safe_index import COMMON_KEY, METADATA, read_index
from megatron.trainer.common.core_version import since
from megatron.trainer.common.errors import UsageError
from megatron.trainer.extras.inspect_checkpoint.archive import Chunk

FILE_BYTES = 1 << 26
"""Tensors that share a file are all in memory until it is written: no more than this, or than the
largest one."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A rectangle to be written, made when its turn comes."""

    key: str
    """Tensor it belongs to."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Global shape of that tensor."""
    part: Chunk
    """Which rectangle."""
    make: Callable[[], torch.Tensor]
    """Gives the data, of the shape of the part."""

    @classmethod
    def whole(
        cls, key: str, dtype: torch.dtype, shape: tuple[int, ...], make: Callable[[], torch.Tensor]
    ) -> Piece:
        return cls(key=key, dtype=dtype, shape=shape, part=Chunk.whole(shape), make=make)

    @property
    def num_bytes(self) -> int:
        return self.part.volume * self.dtype.itemsize


class _Planner(DefaultSavePlanner):
    """Makes each piece when the writer comes to it."""

    def __init__(self, pieces: Sequence[Piece], blobs: Mapping[str, Callable[[], bytes]]) -> None:
        super().__init__()
        self.pieces = {(p.key, p.part.offset): p for p in pieces}
        self.blobs = blobs

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        index = write_item.index
        if index.offset is None:
            return io.BytesIO(self.blobs[index.fqn]())
        piece = self.pieces[index.fqn, tuple(index.offset)]
        data = piece.make()
        assert tuple(data.shape) == piece.part.size and data.dtype == piece.dtype, piece.key
        return data.contiguous()


class _Writer(FileSystemWriter):
    def storage_meta(self) -> None:
        """None: a path of Python 3.13 in the index would stop earlier releases from reading it."""


def write_tensors(
    folder: Path,
    pieces: Sequence[Piece],
    blobs: Mapping[str, Callable[[], bytes]],
    *,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes tensors and opaque objects, several to a file.

    Needs memory for the pieces of one file, which are `file_bytes` or one piece, and for making the
    next piece: about twice the largest piece.

    Args:
        folder: exists and is empty.
        file_bytes: see `FILE_BYTES`.
    """
    # Copying ahead would ask for, and start, an accelerator.
    writer = _Writer(folder, single_file_per_rank=True, thread_count=1, per_thread_copy_ahead=0)
    planner = _Planner(pieces, blobs)
    writer.set_up_storage_writer(True)
    plans = [SavePlan([_item_of(p) for p in group]) for group in grouped(pieces, file_bytes)]
    if blobs:
        objects = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in sorted(blobs)]
        plans.append(SavePlan(objects))
    # The writer names files after the ranks whose plans they are.
    plans = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in plans])
    results = [writer.write_data(plan, planner).wait() for plan in plans]
    writer.finish(Metadata(_index(pieces, blobs)), results)


def _item_of(piece: Piece) -> WriteItem:
    return WriteItem(
        MetadataIndex(piece.key, piece.part.offset),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=piece.part.stored,
            properties=TensorProperties(dtype=piece.dtype),
            size=torch.Size(piece.shape),
        ),
    )


def grouped(pieces: Sequence[Piece], limit: int) -> Iterator[list[Piece]]:
    """Pieces for one file after another: at most `limit` bytes, or one piece."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        if group and size + piece.num_bytes > limit:
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.num_bytes
    if group:
        yield group


def _index(pieces: Sequence[Piece], blobs: Mapping[str, Any]) -> dict[str, Any]:
    index: dict[str, Any] = {key: BytesStorageMetadata() for key in blobs}
    for piece in pieces:
        if piece.key not in index:
            properties = TensorProperties(dtype=piece.dtype)
            index[piece.key] = TensorStorageMetadata(properties, torch.Size(piece.shape), [])
        index[piece.key].chunks.append(piece.part.stored)
    return index


def write_common(folder: Path, common: Mapping[str, Any]) -> None:
    """Writes the common state where the megatron-core in use has it, and the mark that says which
    format this is. The tensors are there already, and may be copies of those of another release."""
    index = read_index(folder / METADATA)
    assert index.storage_data is not None
    was_there = index.storage_data.pop(COMMON_KEY, None)
    index.state_dict_metadata.pop(COMMON_KEY.fqn, None)
    if since("0.19"):
        data = io.BytesIO()
        torch.save([dict(common)], data)
        (folder / COMMON_FILE).write_bytes(data.getbuffer())
        index.state_dict_metadata[COMMON_KEY.fqn] = BytesStorageMetadata()
        index.storage_data[COMMON_KEY] = _StorageInfo(COMMON_FILE, 0, data.getbuffer().nbytes)
    else:
        torch.save(dict(common), folder / COMMON)
    if since("0.19") or was_there is not None:
        (folder / METADATA).write_bytes(pickle.dumps(index))
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


@contextmanager
def staged(source: Path, destination: Path) -> Iterator[Path]:
    """Gives an empty folder that becomes `destination` if the block succeeds, else is deleted.

    Every file is on the disk before the folder gets its name. A kill leaves `.NAME.unfinished-PID`
    beside it, never a part of `destination`; the next conversion to `destination` removes that.

    Args:
        source: folder that is read; must not hold the destination, nor lie in it.
        destination: must not exist, or be an empty folder.

    Raises:
        UsageError: the destination is taken, or entangled with the source.
        OSError: the file system refuses.
    """
    target, origin = destination.resolve(), source.resolve()
    if target == origin or origin in target.parents or target in origin.parents:
        raise UsageError(f"DST {destination} and SRC {source} overlap; name another DST")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError(f"DST {destination} exists; name another or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _temporary(target) as temporary:
        yield temporary
        for folder, _, names in os.walk(temporary):
            for path in (*(Path(folder, name) for name in names), Path(folder)):
                _sync(path)
        os.rename(temporary, target)
        _sync(target.parent)


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """An empty folder beside `target`, gone at the end. Removes what was left by conversions that
    were killed: they hold no lock any more."""
    name = f".{target.name}.unfinished-"
    for left in target.parent.glob(f"{glob.escape(name)}*"):
        if (held := _locked(left)) is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(held)
    for number in itertools.count(os.getpid()):  # a container gives the same one each time
        temporary = target.with_name(f"{name}{number}")
        with suppress(FileExistsError):
            temporary.mkdir()
            break
    held = _locked(temporary)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if held is not None:
            os.close(held)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the lock of a folder; None where another process holds it or has just
    removed the folder, or where the file system has no locks."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
