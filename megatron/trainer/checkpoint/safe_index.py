"""Reads the pickles of a checkpoint, the index and the common state, without running what they
hold.

torch would unpickle the index, `.metadata`, without asking. This reader lets through only the names
that an index needs, keeps the file from changing what they name, and checks that the files it
points to lie beside it. torch's own weights-only loader reads the common state.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import zipfile
from argparse import Namespace
from collections.abc import Collection
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from megatron.core.safe_globals import register_safe_globals
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from megatron.trainer.checkpoint.files import (
    COMMON,
    COMMON_STATE,
    CORE_MARK,
    METADATA,
    read_manifest,
)
from megatron.trainer.common.errors import Refused
from megatron.trainer.common.plain_file import open_plain

_CHECKPOINT = "torch.distributed.checkpoint"
_CORE = "megatron.core.dist_checkpointing.strategies.torch"
_ALLOWED = {
    f"{_CHECKPOINT}.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_CHECKPOINT}.planner": {
        "SavePlan",
        "WriteItem",
        "WriteItemType",
        "TensorWriteData",
        "BytesIOWriteData",
    },
    f"{_CHECKPOINT}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    # Older versions of megatron-core kept data of their own beside torch's.
    _CORE: {"MCoreMetadata", "MCoreSavePlan"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
}
_KINDS_IN_COMMON = {
    "args": Namespace,
    "iteration": int,
    "content_metadata": dict,
    "optimizer": dict,
}
COMMON_KEY = MetadataIndex(f"{COMMON_STATE}/shard_0_1")
"""Of the object that holds the common state, in an index of megatron-core 0.19."""
_CALLED_ONLY = ("pathlib", "torch.serialization")
_DTYPES = {
    str(v).removeprefix("torch.") for v in vars(torch).values() if isinstance(v, torch.dtype)
}


def _member_of(kind: Any, name: Any) -> Any:
    """A member of an enumeration. Python 3.11.0 to 3.11.3, that of Debian 12 among them, write
    members with `getattr`; this answers for it and for nothing else."""
    is_enum = isinstance(kind, type) and issubclass(kind, Enum) and isinstance(name, str)
    if not is_enum or name not in kind.__members__:
        raise pickle.UnpicklingError(f"builtins.getattr does not belong into {METADATA}")
    return kind.__members__[name]


class _Unpickler(pickle.Unpickler):
    """Lets the classes of an index through and nothing else.

    A pickle can set attributes of whatever it names. What is only called is therefore hidden behind
    a function of its own; classes that must be named are put back as they were.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._before: dict[type, dict[str, Any]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member_of
        if module == "pathlib._local":  # where Python 3.13 has them
            module = "pathlib"
        is_dtype = module == "torch" and name in _DTYPES
        if not is_dtype and name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into {METADATA}")
        found = super().find_class(module, name)
        if module in _CALLED_ONLY:
            return lambda *args: found(*args)
        if isinstance(found, type):
            self._before.setdefault(found, dict(vars(found)))
        return found

    def put_back(self) -> str | None:
        """Undoes what was done to classes, and names one."""
        changed = None
        for kind, before in self._before.items():
            now = dict(vars(kind))
            for name in now.keys() | before.keys():
                if name in before and name in now and now[name] is before[name]:
                    continue
                changed = kind.__name__
                if name in before:
                    setattr(kind, name, before[name])
                else:
                    delattr(kind, name)
        return changed


def read_index(path: Path) -> Metadata:
    """The index of a checkpoint, proved to consist of what an index consists of.

    Raises:
        Refused: it is damaged, or is no index.
        OSError: the file cannot be read.
    """
    with open_plain(path, follow=True) as file:
        unpickler = _Unpickler(file)
        try:
            metadata, error = unpickler.load(), None
        except OSError as caught:
            if caught.errno != errno.EINVAL:  # that is a place which a damaged file names
                raise
            metadata, error = None, caught
        except Exception as caught:  # a damaged pickle raises anything
            metadata, error = None, caught
        finally:
            changed = unpickler.put_back()
    if error is not None:
        raise unreadable(path, error) from error
    if changed is not None:
        raise Refused(f"{path} cannot be read: it would change the class {changed}")
    if not isinstance(metadata, Metadata):
        raise Refused(f"{path} is no index of a checkpoint")
    problem = _problem(metadata)
    if problem is not None:
        raise Refused(f"{path} is damaged: {problem}")
    for used in {where.relative_path for where in (metadata.storage_data or {}).values()}:
        file = os.path.join(path.parent, used)
        if os.path.exists(file) and not os.path.isfile(file):  # torch would wait for a pipe
            raise Refused(f"{file} is not a plain file")
    return metadata


def read_common(folder: Path) -> dict[str, Any]:
    """The common state of a checkpoint: `common.pt`, or from megatron-core 0.19 on an object that
    lies in a file with tensors.

    Raises:
        Refused: torch cannot read it, or it holds other kinds of entries than a common state.
        OSError: the file cannot be read.
    """
    path, among = folder / COMMON, None
    # A file that our manifest does not list is a stray one.
    is_listed = path.exists() and COMMON in (_manifest(folder) or [COMMON])
    if not is_listed and (folder / METADATA).is_file():
        path, among = _common_among_tensors(folder) or (path, None)
    register_safe_globals()
    try:
        with among or open_plain(path, follow=True) as file, _stand_ins(file):
            common = torch.load(file, map_location="cpu", weights_only=True)
        if among is not None:
            (common,) = common
    except OSError as error:
        if error.errno != errno.EINVAL:  # that is a place which a damaged file names
            raise
        raise unreadable(path, error) from error
    except Exception as error:  # torch and pickle raise many kinds; all mean an unreadable file
        raise unreadable(path, error) from error
    if not isinstance(common, dict):
        kind = type(common).__name__
        raise Refused(f"{path} is damaged: it holds a {kind} instead of a dictionary")
    for name, kind in _KINDS_IN_COMMON.items():
        value = common.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise Refused(f"{path} is damaged: {name} is a {type(value).__name__}")
    return common


class _OfAnotherRelease:
    """An object of megatron-core that this release does not know, such as a member of a new
    enumeration. It does nothing."""

    def __new__(cls, *_: Any) -> _OfAnotherRelease:
        return super().__new__(cls)


def _stand_ins(file: Any) -> AbstractContextManager[Any]:
    """Lets torch's loader read what another release of megatron-core names in a file, without
    looking for it."""
    start = file.tell()
    try:
        names = get_unsafe_globals_in_checkpoint(file)
    except Exception:  # of any kind, where the file is damaged: loading says so
        names = []
    file.seek(start)
    unknown = [name for name in names if name.startswith("megatron.")]
    return safe_globals([(_OfAnotherRelease, name) for name in unknown])


def _manifest(folder: Path) -> Collection[str] | None:
    """Names that our manifest lists; None without one that can be read, which others refuse."""
    with contextlib.suppress(ValueError):
        return read_manifest(folder)
    return None


def _common_among_tensors(folder: Path) -> tuple[Path, io.BytesIO] | None:
    """The file that holds the common state of megatron-core 0.19, and the bytes of that object,
    whose checksums torch would not compare; None where there is no such object.

    Raises:
        Refused: the index or the object is damaged.
        OSError: a file cannot be read.
    """
    where = (read_index(folder / METADATA).storage_data or {}).get(COMMON_KEY)
    if where is None:
        return None
    path = folder / where.relative_path
    if Path(where.relative_path).name != where.relative_path or path.is_symlink():
        raise Refused(f"{path} lies outside the checkpoint")
    with open_plain(path) as file:
        file.seek(where.offset)
        data = io.BytesIO(file.read(where.length))
    try:
        with zipfile.ZipFile(data) as archive:
            changed = archive.testzip()
    except Exception as error:  # zipfile raises many kinds; all mean a damaged file
        raise unreadable(path, error) from error
    if changed is not None:
        raise Refused(f"{path} has changed since it was written ({changed})")
    data.seek(0)
    return path, data


def unreadable(path: Path, error: Exception) -> Refused:
    """The error for a file whose contents led to another one; a `Refused` stays as it is."""
    if isinstance(error, Refused):
        return error
    text = " ".join(str(error).split())[:300]
    return Refused(f"{path} cannot be read: {type(error).__name__}: {text}")


def file_names(metadata: Metadata) -> list[str]:
    """The files that a checkpoint consists of, sorted: index, what the index uses, common state and
    mark."""
    used = {where.relative_path for where in (metadata.storage_data or {}).values()}
    alone = set() if COMMON_KEY in (metadata.storage_data or {}) else {COMMON}
    return sorted(used | alone | {METADATA, CORE_MARK})


def stray_file(folder: Path, metadata: Metadata) -> Path | None:
    """The first file of a checkpoint that is not a plain file in its folder, or None."""
    for name in file_names(metadata):
        path = folder / name
        if Path(name).name != name or path.is_symlink():
            return path
    return None


def _problem(metadata: Metadata) -> str | None:
    entries = getattr(metadata, "state_dict_metadata", None)
    places = getattr(metadata, "storage_data", None)
    if not isinstance(entries, dict) or not isinstance(places, dict):
        return "it lacks the tensors, or the places where they are stored"
    for key, entry in entries.items():
        if not isinstance(key, str) or not _is_entry(entry):
            return f"the entry {str(key)[:80]!r} is neither a tensor nor an object"
    for index, where in places.items():
        if not isinstance(index, MetadataIndex) or not _is_place(where):
            return f"the place of {str(index)[:80]!r} is none"
    return None


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, TensorStorageMetadata):
        return isinstance(entry, BytesStorageMetadata)
    try:
        properties, size, chunks = entry.properties, entry.size, entry.chunks
        return (
            isinstance(properties.dtype, torch.dtype)
            and _are_sizes(size)
            and isinstance(chunks, list)
            and all(isinstance(c, ChunkStorageMetadata) for c in chunks)
            and all(_are_sizes(c.offsets) and _are_sizes(c.sizes) for c in chunks)
        )
    except AttributeError:
        return False


def _are_sizes(sizes: Any) -> bool:
    return isinstance(sizes, (tuple, list)) and all(type(n) is int and n >= 0 for n in sizes)


def _is_place(where: Any) -> bool:
    if not isinstance(where, _StorageInfo):
        return False
    try:
        name, offset, length = where.relative_path, where.offset, where.length
    except AttributeError:
        return False
    return isinstance(name, str) and _are_sizes((offset, length))
