"""Reads and writes folders of safetensors, with one tensor in memory at a time."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.trainer.checkpoint import files
from megatron.trainer.common.errors import Refused, UsageError
from megatron.trainer.common.outside import parse_json
from megatron.trainer.extras.convert.writing import Piece, grouped

INDEX = "model.safetensors.index.json"
_INDEX_BYTES, _LONGEST_NAME = 1 << 28, 255
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_WRITTEN = {**_NAMES, torch.int32: "I32", torch.int64: "I64"}
"""What is written: also the words and shapes of quantised weights."""


def _safe_open(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise UsageError(
            'Hugging Face models need safetensors; run: pip install -e ".[hf]"'
        ) from None
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise Refused(f"{path} is no intact safetensors file: {error}") from error


class SafetensorsFolder:
    """The tensors of all safetensors files of a folder.

    Args:
        folder: holds one file, or several with an index.

    Raises:
        Refused: a file is missing or damaged, or index and files contradict each other.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = _read_index(folder / INDEX)
        names = sorted(set(listed.values())) if listed else _only_file(folder)
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        for name in names:
            if Path(name).name != name or len(name.encode(errors="replace")) > _LONGEST_NAME:
                raise Refused(f"{folder / INDEX} points at {name[:80]}, outside the folder")
            if not (folder / name).is_file():
                raise Refused(f"{folder / name} is missing")
            self._files[name] = _safe_open(folder / name)
            for key in self._files[name].keys():  # noqa: SIM118
                if key in self._file_of:
                    raise Refused(f"{key} is in {name} and in {self._file_of[key]}")
                self._file_of[key] = name
        for key in sorted(listed.keys() ^ self._file_of.keys()) if listed else ():
            where = "the files lack it" if key in listed else "the index lacks it"
            raise Refused(f"{key} of {folder}: {where}")

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def describe(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Number format and shape of a tensor.

        Raises:
            Refused: a number format that no model here is trained in.
        """
        with self._readable(name):
            view = self._files[self._file_of[name]].get_slice(name)
            kind, shape = view.get_dtype(), tuple(view.get_shape())
        if kind not in _DTYPES:
            raise Refused(f"{name} in {self.folder} is {kind}; use F32, BF16 or F16")
        return _DTYPES[kind], shape

    def read(self, name: str) -> torch.Tensor:
        """One tensor.

        Raises:
            Refused: the file holds something else than its header says.
        """
        with self._readable(name):
            return self._files[self._file_of[name]].get_tensor(name)

    def read_rows(self, name: str, index: int, first: int, last: int) -> torch.Tensor:
        """Some rows of one of the matrices that a tensor consists of.

        Raises:
            Refused: the file holds something else than its header says.
        """
        with self._readable(name):
            view = self._files[self._file_of[name]].get_slice(name)
            return view[index : index + 1, first:last][0]

    @contextlib.contextmanager
    def _readable(self, name: str) -> Iterator[None]:
        from safetensors import SafetensorError

        try:
            yield
        except SafetensorError as error:
            path = self.folder / self._file_of[name]
            raise Refused(f"{name} in {path} cannot be read: {error}") from error


def _read_index(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    try:
        listed = parse_json(files.read_text(path, max_bytes=_INDEX_BYTES))["weight_map"]
        return {str(key): str(value) for key, value in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"{path} is damaged ({error})") from error


def _only_file(folder: Path) -> list[str]:
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    if not found:
        raise Refused(
            f"{folder} has no safetensors file; other files of weights are pickles and are not "
            "opened: save the model with safe_serialization=True"
        )
    if len(found) > 1:
        raise Refused(f"{folder} has {len(found)} safetensors files and no {INDEX}")
    return found


def write_folder(folder: Path, tensors: Sequence[Piece], *, shard_bytes: int) -> None:
    """Writes tensors into one file, or into several with an index where they exceed `shard_bytes`.

    safetensors' own writer wants all tensors of a file at once. The format is a length, a JSON
    header and the data, so this one makes, writes and drops one tensor after another.
    """
    shards = list(grouped(tensors, shard_bytes))
    if len(shards) == 1:
        _write_file(folder / "model.safetensors", shards[0])
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / name, shard)
        weight_map.update({t.key: name for t in shard})
    total = sum(t.num_bytes for t in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_file(path: Path, tensors: Sequence[Piece]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        header[tensor.key] = {
            "dtype": _WRITTEN[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.num_bytes],
        }
        offset += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for tensor in tensors:
            data = tensor.make().contiguous()
            assert data.dtype == tensor.dtype and tuple(data.shape) == tensor.shape, tensor.key
            file.write(data.reshape(-1).view(torch.uint8).numpy().data)
