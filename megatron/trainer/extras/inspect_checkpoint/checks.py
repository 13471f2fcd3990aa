"""Proves that a checkpoint is complete; an error names the key or the file."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron.trainer.checkpoint import files
from megatron.trainer.checkpoint.safe_index import stray_file
from megatron.trainer.common.errors import Refused
from megatron.trainer.common.program import other_command
from megatron.trainer.extras.inspect_checkpoint import contents
from megatron.trainer.extras.inspect_checkpoint.archive import Archive, Chunk, StoredTensor

Make: TypeAlias = Callable[[], torch.Tensor]
_OTHER_FORMATS = {
    "dp_reshardable": "its buffers are cut for one data-parallel size and one TP and PP",
    "dp_zero_gather_scatter": "its buffers are one layout's, gathered",
    "fully_sharded_model_space": "it flattens tensors over the ranks",
}
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Contents:
    weights: dict[str, StoredTensor]
    """Weights by key."""
    optimizer: str
    """`distributed`, `plain` or `none`."""
    dtype: torch.dtype
    """Number format of the weights."""
    buffers: Mapping[str, StoredTensor] = field(default_factory=dict)
    """Tensors that are no parameters by key: biases of experts, fp32."""
    matrices: frozenset[str] = frozenset()
    """Weights of which the optimizer keeps one momentum in place of both moments of Adam."""

    @property
    def master(self) -> str | None:
        """Name of the fp32 master weights, or None where the weights are their own."""
        if self.optimizer == "distributed":
            return "param"
        is_half = self.dtype != torch.float32
        return "fp32_param" if self.optimizer == "plain" and is_half else None

    def kinds(self, weight: str) -> tuple[str, ...]:
        """States of the optimizer that a weight has."""
        if self.optimizer == "none":
            return ()
        kept = (contents.MOMENTUM,) if weight in self.matrices else contents.MOMENTS
        return (*((self.master,) if self.master else ()), *kept)


def check_files(archive: Archive, *, checksums: bool = True) -> list[str]:
    """Compares the files with the manifest.

    Args:
        archive: whose files.
        checksums: read them all, instead of looking at their sizes.

    Returns:
        A note if there is no manifest to compare with.

    Raises:
        Refused: a file is missing, cut or changed, or lies elsewhere; or, in a checkpoint that
            COPUS wrote and that is not trusted, nothing says so of a file.
    """
    stray = stray_file(archive.folder, archive.metadata)
    if stray is not None:
        raise Refused(f"{stray} lies outside the folder; put the file itself there")
    problems = files.damage(archive.folder, contents=checksums)
    if problems:
        raise Refused("; ".join(problems[:3]))
    doubt = files.unverified(archive.folder, archive.common, archive.file_names())
    if doubt is not None and not archive.trust_unverified:
        raise Refused(doubt)
    if doubt is not None or files.read_manifest(archive.folder) is None:
        lacking = f"has no {files.MANIFEST} that lists all its files"
        return [f"{archive.folder} {lacking}: its bytes cannot be verified"]
    return []


def check_contents(archive: Archive) -> Contents:
    """Proves format, coverage, names, shapes and pairing from the index alone; reads no tensor.

    Raises:
        Refused: naming the key.
    """
    _check_optimizer_format(archive)
    _check_coverage(archive, archive.tensors)
    for key in archive.blobs:
        if not contents.is_known_blob(key):
            raise Refused(f"{archive.folder} holds the object {key}, which is unknown")
    kept = _checked_weights(archive)
    matrices = {contents.weight_of(key) for key in archive.tensors if _is_momentum(key)}
    found = replace(kept, optimizer=_optimizer_of(archive), matrices=frozenset(matrices))
    _check_pairing(archive, found)
    return found


def check_weights(archive: Archive, dtype: torch.dtype | None) -> Contents:
    """Proves the weights, and ignores damage of the optimizer's state. Reads no tensor.

    Args:
        dtype: number format of the target; None keeps the stored one. Another one is made from the
            masters, if there are any, and then those are proved too.

    Returns:
        The weights, as if there were no optimizer; with masters, as if there were no moments.

    Raises:
        Refused: naming the key.
    """
    stored = {key: t for key, t in archive.tensors.items() if contents.kind_of(key) is None}
    _check_coverage(archive, stored)
    kept = _checked_weights(archive)
    kinds = {contents.kind_of(key) for key in archive.tensors} & set(contents.MASTERS)
    if dtype in (None, kept.dtype) or not kinds:
        return kept
    _check_optimizer_format(archive)
    if len(kinds) > 1:
        raise Refused(_two_masters(archive))
    optimizer = "distributed" if "param" in kinds else "plain"
    found = replace(kept, optimizer=optimizer)
    master = found.master
    if master is not None:
        masters = {contents.state_key(master, weight) for weight in found.weights}
        _check_states(archive, found, lambda _: (master,))
        _check_coverage(archive, {key: archive.tensors[key] for key in masters})
    return found


def _checked_weights(archive: Archive) -> Contents:
    """The weights and buffers that the flags ask for, as if there were no optimizer."""
    expected = contents.expected_weights(archive.arguments)
    weights = {k: t for k, t in archive.tensors.items() if contents.kind_of(k) is None}
    for key in sorted(expected.keys() | weights.keys()):
        if key not in weights:
            raise Refused(f"{archive.folder} lacks {key}, which its flags ask for")
        if key not in expected:
            raise Refused(
                f"{archive.folder} holds {key}, which is unknown to a model with its flags"
            )
        if weights[key].shape != expected[key]:
            raise Refused(
                f"{key} in {archive.folder} has the shape {weights[key].shape}; its flags say "
                f"{expected[key]}"
            )
    buffers = {key: weights.pop(key) for key in [*weights] if contents.is_buffer(key)}
    for key, tensor in buffers.items():
        if tensor.dtype != torch.float32:
            raise Refused(f"{key} is {tensor.dtype}; it is fp32 in every model")
    dtype = weights[contents.EMBEDDING].dtype
    other = next((k for k, t in weights.items() if t.dtype != dtype), None)
    if other is not None:
        raise Refused(f"{other} is {weights[other].dtype}, other weights are {dtype}")
    if dtype not in _WEIGHT_DTYPES:
        raise Refused(f"{contents.EMBEDDING} is {dtype}; weights are fp32, bf16 or fp16")
    return Contents(weights=weights, optimizer="none", dtype=dtype, buffers=buffers)


def _check_optimizer_format(archive: Archive) -> None:
    content = archive.common.get("content_metadata") or {}
    state = archive.common.get("optimizer") or {}
    types = [_type_in(part) for part in optimizers_of(state)]
    for part in (content.get("distrib_optim_sharding_type"), *types):
        if part in _OTHER_FORMATS and any(k.startswith("optimizer.") for k in archive.tensors):
            raise Refused(
                f"the optimizer in {archive.folder} is stored as {part}: {_OTHER_FORMATS[part]}; "
                "save it with --dist-ckpt-optim-fully-reshardable"
            )
    flat = next((k for k in archive.tensors if k.startswith("optimizer.distributed.")), None)
    if flat is not None:
        raise Refused(
            f"{flat} in {archive.folder} is a buffer of one layout; save the optimizer with "
            "--dist-ckpt-optim-fully-reshardable"
        )


def optimizers_of(state: Any) -> list[Any]:
    """The common state of each optimizer: a mixture has one for its experts and one for the rest,
    by number."""
    is_chain = isinstance(state, dict) and state and all(isinstance(key, int) for key in state)
    return list(state.values()) if is_chain else [state]


def _type_in(state: Any) -> Any:
    return state.get("param_state_sharding_type") if isinstance(state, dict) else None


def _check_coverage(archive: Archive, tensors: Mapping[str, StoredTensor]) -> None:
    """Proves that tensors, and all objects that are kept, are there."""
    storage = archive.storage()
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        problem = coverage_problem(tensor.shape, tensor.chunks)
        if problem is not None:
            is_state = contents.kind_of(tensor.key) is not None
            raise Refused(f"{tensor.key} in {archive.folder}: {problem}{_alone() * is_state}")
    places = [MetadataIndex(t.key, chunk.offset) for t in tensors.values() for chunk in t.chunks]
    places += [MetadataIndex(key) for key in archive.blobs if contents.is_known_blob(key)]
    for index in places:
        where = storage.get(index)
        if where is None:
            raise Refused(f"{index.fqn} in {archive.folder} lacks the chunk at {index.offset}")
        name = where.relative_path
        if name not in sizes:
            path = archive.folder / name
            if not path.is_file():
                raise Refused(f"{path} is missing; it holds {index.fqn}")
            sizes[name] = path.stat().st_size
        if where.offset + where.length > sizes[name]:
            raise Refused(f"{archive.folder / name} is cut: {index.fqn} lies beyond its end")


def _is_momentum(key: str) -> bool:
    return contents.kind_of(key) == contents.MOMENTUM


def _optimizer_of(archive: Archive) -> str:
    kinds = {contents.kind_of(key) for key in archive.tensors} - {None}
    known = {*contents.MASTERS, *contents.MOMENTS, contents.MOMENTUM}
    if kinds - known:
        strange = next(k for k in archive.tensors if contents.kind_of(k) in kinds - known)
        raise Refused(
            f"{archive.folder} holds {strange}, which is no state of a known optimizer{_alone()}"
        )
    if not kinds:
        return "none"
    if set(contents.MASTERS) <= kinds:
        raise Refused(f"{_two_masters(archive)}{_alone(of_master=True)}")
    return "distributed" if "param" in kinds else "plain"


def _two_masters(archive: Archive) -> str:
    return f"{archive.folder} holds masters of two optimizers, {' and '.join(contents.MASTERS)}"


def _alone(*, of_master: bool = False) -> str:
    """The way on where the optimizer's state is wrong, for whichever command reads it."""
    kept = " without --dtype" * of_master
    convert = other_command("convert_checkpoint.py")
    return f"; {convert} --optimizer none{kept} keeps the weights alone"


def _check_pairing(archive: Archive, found: Contents) -> None:
    paired = _check_states(archive, found, found.kinds)
    left = {k for k in archive.tensors if contents.kind_of(k) is not None} - paired
    if left:
        raise Refused(f"{archive.folder} holds {min(left)}, which belongs to no weight{_alone()}")
    if found.optimizer != "none" and not archive.common.get("optimizer"):
        raise Refused(
            f"{archive.folder / 'common.pt'} lacks the parameter groups of the optimizer{_alone()}"
        )


def _check_states(
    archive: Archive, found: Contents, kinds_of: Callable[[str], Iterable[str]]
) -> set[str]:
    """Proves that every weight has the states that it should, and returns their keys."""
    keys = set()
    for weight, tensor in found.weights.items():
        for kind in kinds_of(weight):
            key = contents.state_key(kind, weight)
            hint = _alone(of_master=kind in contents.MASTERS)
            state = archive.tensors.get(key)
            if state is None:
                raise Refused(f"{archive.folder} lacks {key}{hint}")
            if state.shape != tensor.shape or state.dtype != torch.float32:
                raise Refused(
                    f"{key} is {state.dtype} {state.shape}, not fp32 {tensor.shape} as its weight "
                    f"needs{hint}"
                )
            keys.add(key)
    return keys


def pieces(tensor: StoredTensor) -> Iterator[Chunk]:
    """The rectangles in which a tensor is worked on: a layer at a time where layers are stacked, of
    experts one at a time, else the whole."""
    for index in contents.leading_indices(tensor.key, tensor.shape):
        yield Chunk.at(tensor.shape, index)


def check_truth(archive: Archive, found: Contents) -> None:
    """Proves that every weight is its master, rounded. Reads both.

    Raises:
        Refused: naming the weight and how many elements differ.
    """
    if found.master is None:
        return
    for key, tensor in found.weights.items():
        master = contents.state_key(found.master, key)
        differ = sum(
            num_different(
                partial(archive.read, master, part, tensor.dtype), partial(archive.read, key, part)
            )
            for part in pieces(tensor)
        )
        if differ:
            raise Refused(
                f"{key} in {archive.folder} is not its master rounded to {tensor.dtype} in "
                f"{differ} elements: one of the two is wrong"
                f"{_alone(of_master=True)}"
            )


def num_different(first: Make, second: Make) -> int:
    """Elements whose bits differ; NaN equals itself.

    Compares digests first, so that the two are in memory together only if they differ.
    """
    if _digest(first()) == _digest(second()):
        return 0
    a, b = first(), second()
    if a.shape != b.shape or a.dtype != b.dtype:
        return max(a.numel(), b.numel())
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return int((a.view(words) != b.view(words)).sum())


def _digest(tensor: torch.Tensor) -> tuple[Any, ...]:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return tensor.dtype, tuple(tensor.shape), hashlib.blake2b(data).digest()


def coverage_problem(shape: Sequence[int], chunks: Sequence[Chunk]) -> str | None:
    """Says what is wrong with a set of chunks, or None if they are disjoint and fill the shape.

    Disjoint chunks fill the shape if and only if their volumes add up to it.

    Args:
        chunks: its stored rectangles, in any order.
    """
    shape = tuple(shape)
    for chunk in chunks:
        if len(chunk.offset) != len(shape) or len(chunk.size) != len(shape):
            return f"chunk at {chunk.offset} has another number of axes than shape {shape}"
        inside = all(o >= 0 and o + s <= n for o, s, n in zip(chunk.offset, chunk.size, shape))
        if not inside:
            return f"chunk at {chunk.offset} of size {chunk.size} leaves the shape {shape}"
    if len(chunks) > 1 and not shape:
        return "it is one number and is stored more than once"
    clash = _clash([chunk for chunk in chunks if chunk.volume])
    if clash is not None:
        return f"chunks at {clash[0].offset} and {clash[1].offset} overlap"
    total, have = math.prod(shape), sum(chunk.volume for chunk in chunks)
    if have != total:
        return f"its chunks hold {have} of {total} elements"
    return None


def _clash(chunks: list[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Two chunks that share an element, or None.

    Compares each chunk with those that begin before it along one axis and have not ended. On the
    axis with the most edges these are few, even where ranks hold hundreds of chunks of each layer.
    """
    if len(chunks) < 2:
        return None
    low = np.array([chunk.offset for chunk in chunks])
    high = low + np.array([chunk.size for chunk in chunks])
    axis = max(range(low.shape[1]), key=lambda a: len(np.unique(low[:, a])))
    order = np.argsort(low[:, axis], kind="stable")
    low, high = low[order], high[order]
    ends = np.maximum.accumulate(high[:, axis])
    starts = np.searchsorted(ends, low[:, axis], side="right")
    for i, start in enumerate(starts):
        meets = np.all((low[start:i] < high[i]) & (low[i] < high[start:i]), axis=1)
        if meets.any():
            return chunks[order[start + int(meets.argmax())]], chunks[order[i]]
    return None
