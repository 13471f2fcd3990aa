"""Reads a `torch_dist` checkpoint rectangle by rectangle, with torch's own reader.

A checkpoint from elsewhere cannot run code. `safe_index` reads the index and the common state,
torch's weights-only loader reads the tensors, and other stored objects are copied as bytes.
"""

from __future__ import annotations

import io
import math
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron.trainer.checkpoint import files
from megatron.trainer.checkpoint.safe_index import (
    COMMON_KEY,
    METADATA,
    file_names,
    read_common,
    read_index,
)
from megatron.trainer.common.errors import Refused, UsageError
from megatron.trainer.common.outside import parse_json
from megatron.trainer.extras.inspect_checkpoint import contents
from megatron.trainer.logging.metrics import METRICS_FILE
from megatron.trainer.model.norm_names import other_names

_MARK_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Chunk:
    offset: tuple[int, ...]
    """First index along each axis."""
    size: tuple[int, ...]
    """Length along each axis."""

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Chunk:
        return cls(offset=(0,) * len(shape), size=shape)

    @classmethod
    def at(cls, shape: tuple[int, ...], index: tuple[int, ...]) -> Chunk:
        """What lies at an index of the first axes of a tensor: a layer, or one expert of it."""
        lead = len(index)
        return cls(offset=index + (0,) * (len(shape) - lead), size=(1,) * lead + shape[lead:])

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last index along each axis."""
        return tuple(o + s for o, s in zip(self.offset, self.size))

    @property
    def stored(self) -> ChunkStorageMetadata:
        """The rectangle as an index of torch names it."""
        return ChunkStorageMetadata(torch.Size(self.offset), torch.Size(self.size))

    @property
    def volume(self) -> int:
        return math.prod(self.size)


class _Into(DefaultLoadPlanner):
    """Lets torch's reader fill one tensor, or hand over one object's bytes."""

    def __init__(self, target: torch.Tensor | None = None) -> None:
        super().__init__()
        self.target = target
        self.data = b""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Takes an object's bytes."""
        self.data = value.getvalue()

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The part of the target that one stored chunk fills."""
        assert self.target is not None
        where = zip(read_item.dest_offsets, read_item.lengths)
        return self.target[tuple(slice(o, o + n) for o, n in where)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """It is in its place already."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    """The rectangles it is stored in."""

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Archive:
    """One iteration's checkpoint, opened for reading.

    Args:
        trust_unverified: whether one of COPUS counts as whole though its manifest is gone or lists
            only a part.

    Raises:
        Refused: it is no `torch_dist` checkpoint, or its index or common state cannot be read.
        OSError: a file cannot be read.
    """

    def __init__(self, folder: Path, *, trust_unverified: bool = False) -> None:
        self.folder, self.trust_unverified = folder, trust_unverified
        _check_format(folder)
        self.common = read_common(folder)
        self.metadata = read_index(folder / METADATA)
        self.is_renamed = _rename(self.metadata)
        """Whether it has other names than ours; in `metadata` and `tensors` they are ours."""
        self.tensors: dict[str, StoredTensor] = {}
        self.blobs: list[str] = []
        for key, value in sorted(self.metadata.state_dict_metadata.items()):
            if isinstance(value, TensorStorageMetadata):
                chunks = tuple(
                    Chunk(offset=tuple(c.offsets), size=tuple(c.sizes)) for c in value.chunks
                )
                self.tensors[key] = StoredTensor(
                    key=key, dtype=value.properties.dtype, shape=tuple(value.size), chunks=chunks
                )
            elif key != COMMON_KEY.fqn:
                self.blobs.append(key)
        self._leads: dict[str, dict[tuple[int, ...], list[ChunkStorageMetadata]] | None] = {}
        self._reader = FileSystemReader(folder)
        self._reader.set_up_storage_reader(self.metadata, True)

    @property
    def arguments(self) -> dict[str, Any]:
        """The flags it was saved with; empty if it holds none."""
        return vars(self.common.get("args") or Namespace())

    @property
    def iteration(self) -> int:
        return self.common.get("iteration") or 0

    def storage(self) -> Mapping[MetadataIndex, Any]:
        """Where each chunk lies: file, first byte, number of bytes."""
        return self.metadata.storage_data or {}

    def file_names(self) -> list[str]:
        return file_names(self.metadata)

    def read(
        self, key: str, part: Chunk | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """One tensor or a rectangle of it. Holds the result and one stored chunk in memory.

        Args:
            part: which rectangle; None reads all of it.
            dtype: to round to; None keeps the stored number format.

        Raises:
            Refused: the file holds something else than the index says.
            OSError: a file cannot be read.
        """
        stored = self.tensors[key]
        part = part or Chunk.whole(stored.shape)
        target = torch.empty(part.size, dtype=stored.dtype)
        items = create_read_items_for_chunk_list(key, self._entry(key, part), [part.stored])
        self._run(key, LoadPlan(items), _Into(target))
        return target if dtype is None else target.to(dtype)

    def _entry(self, key: str, part: Chunk) -> TensorStorageMetadata:
        """The index of a tensor, or of the layer or expert of it that the part lies in."""
        entry = self.metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        lead = contents.leading_axes(key)
        if lead == 0 or part.size[:lead] != (1,) * lead:
            return entry
        if key not in self._leads:
            leads: dict[tuple[int, ...], list[ChunkStorageMetadata]] | None = {}
            for chunk in entry.chunks:
                if tuple(chunk.sizes[:lead]) != (1,) * lead:
                    leads = None
                    break
                leads.setdefault(tuple(chunk.offsets[:lead]), []).append(chunk)
            self._leads[key] = leads
        leads = self._leads[key]
        if leads is None:
            return entry
        chunks = leads.get(part.offset[:lead], [])
        return TensorStorageMetadata(entry.properties, entry.size, chunks)

    def read_blob(self, key: str) -> bytes:
        """The bytes of a stored object, unopened."""
        index, planner = MetadataIndex(key), _Into()
        nothing = torch.Size((0,))
        item = ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
        self._run(key, LoadPlan([item]), planner)
        return planner.data

    def _run(self, key: str, plan: LoadPlan, planner: _Into) -> None:
        try:
            self._reader.read_data(plan, planner).wait()
        except OSError:
            raise
        except Exception as error:  # torch and pickle raise many kinds for a damaged file
            text = " ".join(str(error).split())[:200]
            raise Refused(f"{key} in {self.folder} cannot be read: {text}") from error


def _rename(metadata: Metadata) -> bool:
    """Gives tensors our names; returns whether any had another one."""
    names = other_names(metadata.state_dict_metadata.keys())
    if names:
        entries = metadata.state_dict_metadata
        metadata.state_dict_metadata = {names.get(k, k): x for k, x in entries.items()}
        metadata.storage_data = {
            replace(index, fqn=names.get(index.fqn, index.fqn)): x
            for index, x in (metadata.storage_data or {}).items()
        }
    return bool(names)


def open_archive(source: Path, *, step: int | None, trust_unverified: bool = False) -> Archive:
    """Opens a folder of one iteration, or the latest complete (or the asked-for) one of a `--save`
    directory.

    Args:
        step: iteration that is asked for.
        trust_unverified: see `Archive`.

    Raises:
        Refused: there is no complete checkpoint, or it is of another format.
        UsageError: a step, and the folder of one iteration.
        OSError: a file cannot be read.
    """
    if not source.is_dir():
        raise FileNotFoundError(f"SRC {source} is not a folder")
    source = source.resolve()
    is_one = (source / files.CORE_MARK).is_file()
    if is_one or source.name.startswith("iter_"):
        if step is not None:
            raise UsageError(f"--ckpt-step {step}: SRC {source} is the folder of one iteration")
        return Archive(source, trust_unverified=trust_unverified)
    complete = files.complete_iterations(source)
    try:
        wanted = step if step is not None else files.read_latest(source)
    except ValueError as error:
        raise Refused(f"{error}; name an iteration with --ckpt-step") from error
    if wanted is None:
        if not complete:
            raise Refused(f"SRC {source} holds no complete checkpoint{_yet(source)}")
        wanted = complete[-1]
    if wanted not in complete:
        folder = files.folder_of(source, wanted)
        if folder.is_dir():
            _check_format(folder)
        have = ", ".join(map(str, complete)) or "none"
        raise Refused(
            f"{folder} is {files.unfinished(folder)}; complete are: {have}; name one with "
            "--ckpt-step"
        )
    return Archive(files.folder_of(source, wanted), trust_unverified=trust_unverified)


def _yet(source: Path) -> str:
    """Of a run that has not saved: it may still do."""
    is_run = (source / METRICS_FILE).is_file()
    return " yet; the run there makes one every --save-interval" if is_run else ""


def _check_format(folder: Path) -> None:
    mark = folder / files.CORE_MARK
    if not mark.is_file():
        if any(folder.glob("mp_rank_*")):
            raise Refused(
                f"{folder} is of the legacy format (mp_rank_XX), whose files depend on the layout; "
                "load it with Megatron-LM and save it with --ckpt-format torch_dist"
            )
        raise Refused(f"{folder} is half-written: it has no {files.CORE_MARK}")
    try:
        backend = parse_json(files.read_text(mark, max_bytes=_MARK_BYTES))["sharded_backend"]
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(f"{mark} is damaged ({error})") from error
    if backend != "torch_dist":
        raise Refused(
            f"{folder} is of the format {backend}; only torch_dist holds global tensors: save it "
            "again with --ckpt-format torch_dist"
        )
