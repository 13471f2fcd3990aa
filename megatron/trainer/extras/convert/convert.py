"""Converts a `torch_dist` checkpoint: layout, vocabulary, number format, optimizer.

Stored tensors are global, so another layout rewrites none of them. The files are copied, the flags
in the common state change, and the checks prove that the target loads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch

from megatron.trainer.checkpoint import files
from megatron.trainer.checkpoint.formats import model_formats
from megatron.trainer.common.errors import Refused, VerificationFailed
from megatron.trainer.extras.convert.target import (
    DTYPES,
    Changes,
    Target,
    common_of,
    target_of,
)
from megatron.trainer.extras.convert.writing import (
    FILE_BYTES,
    Piece,
    staged,
    write_common,
    write_tensors,
)
from megatron.trainer.extras.inspect_checkpoint import contents
from megatron.trainer.extras.inspect_checkpoint.archive import (
    Archive,
    Chunk,
    StoredTensor,
    open_archive,
)
from megatron.trainer.extras.inspect_checkpoint.checks import (
    Contents,
    check_contents,
    check_files,
    check_truth,
    check_weights,
    num_different,
    pieces,
)
from megatron.trainer.extras.inspect_checkpoint.layouts import stored_layout


@dataclass(frozen=True, kw_only=True)
class ConversionResult:
    source: str
    """Folder read."""
    destination: str
    """Folder made."""
    iteration: int | None
    """Iteration of the checkpoint; None for a model of another format."""
    layout: str | None
    """Layout the flags of the result name."""
    num_tensors: int
    num_rewritten: int
    """Tensors that were written anew; 0 where files were copied."""
    num_bytes: int
    num_compared: int | None
    """Tensors compared element by element, or None without `--verify`."""
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "notes": list(self.notes)}


def convert(
    source: Path,
    destination: Path,
    changes: Changes,
    *,
    step: int | None = None,
    verify: bool = False,
    trust_unverified: bool = False,
    file_bytes: int = FILE_BYTES,
) -> ConversionResult:
    """Converts a checkpoint into a new `--save` directory. Never changes the source.

    Args:
        source: a `--save` directory, or the folder of one iteration.
        destination: becomes a `--save` directory with this one iteration.
        step: iteration of `source`; default the latest complete one.
        verify: also prove that weights are their masters, and compare every tensor written.
        trust_unverified: see `Archive`.
        file_bytes: tensors that share a file, see `writing`.

    Raises:
        Refused: the source cannot be proved complete, or the target would not load.
        VerificationFailed: the result is not what it should be.
        UsageError: changes that make no sense, or a destination that is taken.
        OSError: the file system refuses.
    """
    archive = open_archive(source, step=step, trust_unverified=trust_unverified)
    notes = check_files(archive)
    if changes.optimizer == "none":
        found = check_weights(archive, DTYPES[changes.dtype] if changes.dtype else None)
    else:
        found = check_contents(archive)
    target = target_of(archive.arguments, found, changes)
    dropped: list[str] = []
    if stored_layout(archive.arguments) != target.layout:
        dropped = [key for key in archive.blobs if contents.is_per_layout(key)]
    if dropped:
        notes.append(f"random streams of another layout are left out: {', '.join(dropped)}")
    recipe = _recipe(archive, found, target, set(dropped))
    if verify or recipe.is_derived:  # weights alone, of their own format, have no master here
        check_truth(archive, found)
    return write_checkpoint(
        source,
        destination,
        recipe,
        common=common_of(archive.common, found, target),
        target=target,
        archive=archive,
        side=_side_files(archive.folder),
        verify=verify,
        file_bytes=file_bytes,
        notes=(*notes, *target.notes),
    )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How every tensor of the result is made."""

    pieces: list[Piece]
    """Rectangles of all tensors."""
    blobs: dict[str, Callable[[], bytes]]
    """Stored objects by key."""
    is_copy: bool = False
    """Whether every file of tensors can be copied as it is."""
    is_derived: bool = False
    """Whether weights are made from masters or masters from weights."""


def write_checkpoint(
    source: Path,
    destination: Path,
    recipe: Recipe,
    *,
    common: Mapping[str, Any],
    target: Target,
    archive: Archive | None,
    side: Mapping[str, Path],
    verify: bool,
    file_bytes: int,
    notes: tuple[str, ...],
) -> ConversionResult:
    """Writes a checkpoint into a new `--save` directory and reads it back.

    Args:
        recipe: how its tensors are made.
        common: its common state, which names the iteration.
        archive: the checkpoint it is made from, if it is made from one.
        side: files that are copied into the directory, by their place in it.

    Raises:
        Refused: a file of the source has changed since it was checked.
        VerificationFailed: the result is not what it should be.
        OSError: the file system refuses.
    """
    iteration = common.get("iteration") or 0
    with staged(source, destination) as root:
        for name, path in side.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            copyfile(path, root / name)
        folder = files.begin(root, iteration)
        if archive is not None and recipe.is_copy:
            _copy_tensors(archive, folder)
        else:
            write_tensors(folder, recipe.pieces, recipe.blobs, file_bytes=file_bytes)
        write_common(folder, common)
        sums = files.checksums(folder, files.data_files(folder))
        files.finish(root, iteration, sums)
        num_compared = _read_back(folder, target, recipe if verify else None)
        num_bytes = files.stored_bytes(folder)
    num_tensors = len({piece.key for piece in recipe.pieces})
    return ConversionResult(
        source=str(archive.folder if archive else source),
        destination=str(files.folder_of(destination, iteration)),
        iteration=iteration,
        layout=str(target.layout),
        num_tensors=num_tensors,
        num_rewritten=0 if recipe.is_copy else num_tensors,
        num_bytes=num_bytes,
        num_compared=num_compared,
        notes=notes,
    )


def _copy_tensors(archive: Archive, folder: Path) -> None:
    """Copies all files but the common state and the mark, which are made anew.

    Raises:
        Refused: a copy differs from what the source's manifest lists, if it has one.
    """
    listed = files.read_manifest(archive.folder)
    for name in archive.file_names():
        if name in (files.COMMON, files.COMMON_FILE, files.CORE_MARK):
            continue
        copyfile(archive.folder / name, folder / name)
        if listed and files.checksum(folder / name) != listed[name]:
            raise Refused(f"{archive.folder / name} has changed since it was checked")


def _recipe(archive: Archive, found: Contents, target: Target, dropped: set[str]) -> Recipe:
    is_derived = target.dtype != found.dtype or target.optimizer != found.optimizer
    made: list[Piece] = []
    kept = [key for key in archive.blobs if contents.is_known_blob(key) and key not in dropped]
    for weight in sorted(found.weights):
        for key, dtype, origin in _states(weight, found, target):
            made += _pieces_of(archive, key, dtype, archive.tensors[origin], target)
    for key, stored in found.buffers.items():
        made += _pieces_of(archive, key, stored.dtype, stored, target)
    is_all = {piece.key for piece in made} | set(kept) == archive.tensors.keys() | {*archive.blobs}
    is_same_vocabulary = target.vocab == archive.arguments["padded_vocab_size"]
    return Recipe(
        pieces=made,
        blobs={key: partial(archive.read_blob, key) for key in kept},
        is_copy=is_all and is_same_vocabulary and not (is_derived or archive.is_renamed),
        is_derived=is_derived,
    )


def _states(weight: str, found: Contents, target: Target) -> list[tuple[str, torch.dtype, str]]:
    """Key and number format of each tensor of the result that belongs to a weight, and the stored
    tensor it is made from."""
    master = contents.state_key(found.master, weight) if found.master else weight
    origin = weight if target.dtype == found.dtype else master
    wanted = replace(found, optimizer=target.optimizer, dtype=target.dtype)
    states = [(weight, target.dtype, origin)]
    for kind in wanted.kinds(weight):
        key = contents.state_key(kind, weight)
        states.append((key, torch.float32, master if kind in contents.MASTERS else key))
    return states


def _pieces_of(
    archive: Archive, key: str, dtype: torch.dtype, stored: StoredTensor, target: Target
) -> list[Piece]:
    if contents.weight_of(key) in (contents.EMBEDDING, contents.HEAD):
        shape = (target.vocab, *stored.shape[1:])
        return [
            Piece.whole(key, dtype, shape, partial(_rows, archive, stored, target.vocab, dtype))
        ]
    return [
        Piece(
            key=key,
            dtype=dtype,
            shape=stored.shape,
            part=part,
            make=partial(archive.read, stored.key, part, dtype),
        )
        for part in pieces(stored)
    ]


def _rows(archive: Archive, stored: StoredTensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """The first rows of a table, and rows of zeros where it has fewer."""
    kept = min(rows, stored.shape[0])
    data = archive.read(stored.key, Chunk.whole((kept, *stored.shape[1:])), dtype)
    return data if kept == rows else with_zero_rows(data, rows)


def with_zero_rows(table: torch.Tensor, rows: int) -> torch.Tensor:
    """The table with rows of zeros after its own, `rows` in all."""
    padded = torch.zeros((rows, *table.shape[1:]), dtype=table.dtype)
    padded[: table.shape[0]] = table
    return padded


def _read_back(folder: Path, target: Target, expected: Recipe | None) -> int | None:
    """Opens a result as a stranger would, and checks it like any source.

    Args:
        expected: what every tensor should hold, or None to leave the elements alone.

    Returns:
        How many tensors were compared.

    Raises:
        VerificationFailed: naming the tensor.
    """
    try:
        result = Archive(folder)
        check_files(result)
        found = check_contents(result)
    except Refused as error:
        raise VerificationFailed(f"the result does not pass its own checks: {error}") from error
    if (found.dtype, found.optimizer) != (target.dtype, target.optimizer):
        raise VerificationFailed(f"the result holds {found.dtype} and {found.optimizer} state")
    if expected is None:
        return None
    keys = {piece.key for piece in expected.pieces}
    if keys != result.tensors.keys():
        raise VerificationFailed(f"the result differs in {min(keys ^ result.tensors.keys())}")
    for piece in expected.pieces:
        differ = num_different(piece.make, partial(result.read, piece.key, piece.part))
        if differ:
            raise VerificationFailed(
                f"{piece.key} at {piece.part.offset} differs in {differ} elements"
            )
    for key, make in expected.blobs.items():
        if result.read_blob(key) != make():
            raise VerificationFailed(f"the object {key} differs")
    return len(keys)


def _side_files(checkpoint: Path) -> dict[str, Path]:
    """What the imports of all formats kept beside a checkpoint; see `ModelFormat.side_files`."""
    found: dict[str, Path] = {}
    for one in model_formats().values():
        found |= one.side_files(checkpoint)
    return found
