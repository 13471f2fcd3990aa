"""Sums over the global state that do not depend on who holds it: equal before and after a change of
layout, or elements were lost, doubled, moved or altered.

Each element's bits, taken as a signed integer, are multiplied by odd 64-bit weights of its places
on all axes, modulo 2^64. A single wrong element changes the sum for certain, several wrong ones all
but certainly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.trainer.distributed.sharding import Record
from megatron.trainer.model.shards import ALL_KINDS, HasChunks, Shards, is_expert, weights_of

_SAMPLED = 16
"""With `sample` one of so many tensors is summed."""
_CHUNK = 1 << 22
"""Elements at once on a GPU: enough to keep it busy, few enough for its memory."""
_BITS = {4: torch.int32, 2: torch.int16}


class Mismatch(ArithmeticError):
    """The state after a change is not the state before."""


def checked_keys(keys: Sequence[str], *, sample: bool) -> list[str]:
    """Names of the tensors that are summed: all, or a sixteenth of them, at least one."""
    keys = sorted(set(keys))
    return keys[::_SAMPLED] if sample else keys


@torch.no_grad()
def local_sums(shards: Shards, keys: Sequence[str]) -> torch.Tensor:
    """This rank's part of the sums, modulo 2^64: for each tensor those of the copy that counts,
    those of all other copies, and the numbers of their elements. Not collective.

    Args:
        keys: of the tensors, the same on every rank.
    """
    place = {key: i for i, key in enumerate(keys)}
    # Those of a rank without shards are added to the others', on its GPU if they lie on one.
    where = shards.tensors[0]["param"].device if shards.tensors else torch.cuda.current_device()
    shape = (len(keys), 2, len(ALL_KINDS) + 1)
    sums: Any = torch.zeros(shape, dtype=torch.int64, device=where)
    device = sums.device
    if not sums.is_cuda:
        sums = np.zeros(shape, dtype=np.int64)
    for record in shards.records:
        if record.key in place:
            into = sums[place[record.key], 0 if record.is_first else 1]
            tensors = shards.tensors[record.shard]
            weights = _weights(record, device)
            for column, kind in enumerate(ALL_KINDS):
                if kind not in tensors:
                    continue
                part = tensors[kind][record.offset : record.offset + record.numel]
                into[column, ...] += _sum(part, weights)
            into[-1] += record.numel
    return sums if isinstance(sums, torch.Tensor) else torch.from_numpy(sums)


def all_sums(own: torch.Tensor, keys: Sequence[str], *, group: Any) -> dict[str, int]:
    """Sums over the whole run's state. Collective over the group.

    Args:
        own: `local_sums` of this rank.
        keys: of the tensors, the same on every rank.

    Returns:
        By `kind.key`, a signed 64-bit integer; equal on every rank.

    Raises:
        Mismatch: on every rank, if copies of a tensor differ.
    """
    total = own.clone()
    dist.all_reduce(total, group=group)
    return sums_of(total, keys)


def sums_of(total: torch.Tensor, keys: Sequence[str]) -> dict[str, int]:
    """The sums out of those of all ranks; see `all_sums`."""
    first, others = total.unbind(1)
    num_others = others[:, -1:] // first[:, -1:].clamp(min=1)
    # Every other copy is complete, too: together they are so many times the first.
    is_wrong = (first[:, :-1] * num_others != others[:, :-1]).any(dim=1)
    is_wrong |= (first[:, -1:] * num_others != others[:, -1:]).any(dim=1)
    wrong = [key for key, bad in zip(keys, is_wrong.tolist()) if bad]
    if wrong:
        raise Mismatch(f"copies of {len(wrong)} tensors differ, the first: {wrong[0]}")
    rows = first.tolist()
    return {
        f"{kind}.{key}": rows[i][column]
        for i, key in enumerate(keys)
        for column, kind in enumerate(ALL_KINDS)
    }


def _weights(record: Record, device: torch.device) -> list[Any]:
    """Of the places of a record, axis by axis: tensors on a GPU, else arrays."""
    found = [
        axis_weights(record.key, axis, lo, hi)
        for axis, (lo, hi) in enumerate(zip(record.lo, record.hi))
    ]
    return [torch.from_numpy(of).to(device) for of in found] if device.type == "cuda" else found


def _sum(flat: torch.Tensor, weights: list[Any]) -> Any:
    """Of the elements of one record: a tensor of no axes, or such an array."""
    *outer, inner = weights
    rows = flat.view(_BITS[flat.element_size()]).view(-1, len(inner))
    total = _sums_of_rows(rows, inner).reshape([len(of) for of in outer])
    for of_axis in reversed(outer):
        total = (total * of_axis).sum(-1)
    return total


def _sums_of_rows(rows: torch.Tensor, weights: Any) -> Any:
    """The products of each row with the weights, modulo 2^64."""
    if rows.is_cuda:
        per_chunk = max(_CHUNK // len(weights), 1)
        return torch.cat([(part * weights).sum(dim=1) for part in rows.split(per_chunk)])
    # Twice as fast as torch, which has no such product of integers and widens all of them first.
    return np.einsum("ij,j->i", rows.numpy(), weights, dtype=np.int64)


def axis_weights(name: str, axis: int, start: int, stop: int) -> np.ndarray:
    """[stop - start] odd 64-bit numbers, one for each global index of an axis."""
    seed = hashlib.blake2b(f"{name}/{axis}".encode(), digest_size=8).digest()
    # splitmix64: https://prng.di.unimi.it/splitmix64.c
    x = np.arange(start, stop, dtype=np.uint64) + np.uint64(1)
    x = x * np.uint64(0x9E3779B97F4A7C15) + np.frombuffer(seed, dtype=np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    return x.view(np.int64)


def compare(before: dict[str, int], after: dict[str, int]) -> None:
    """Compares two sets of sums.

    Raises:
        Mismatch: naming tensors.
    """
    wrong = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
    if wrong:
        raise Mismatch(f"{len(wrong)} of {len(before)} sums changed, the first: {wrong[0]}")


@torch.no_grad()
def check_weights(
    model: HasChunks, shards: Shards, groups: Any, keys: Collection[str] | None = None
) -> None:
    """Checks, where this rank holds both, that the model's weights are its rounded masters.

    Args:
        keys: of the tensors to check; None for all.

    Raises:
        Mismatch: naming a tensor.
    """
    own: dict[str, list[Record]] = {}
    for record in shards.records:
        own.setdefault(record.key, []).append(record)
    for place, weight in weights_of(model, groups):
        if keys is not None and place.key not in keys:
            continue
        for record in own.get(place.key, ()):
            inside = all(a <= b for a, b in zip(place.lo, record.lo))
            if not inside or any(a < b for a, b in zip(place.hi, record.hi)):
                continue
            lead = len(place.lo) - weight.dim()
            view = weight
            for axis in range(weight.dim()):
                start, stop = record.lo[lead + axis], record.hi[lead + axis]
                view = view.narrow(axis, start - place.lo[lead + axis], stop - start)
            master = shards.tensors[record.shard]["param"]
            master = master[record.offset : record.offset + record.numel].view(view.shape)
            bits = _BITS[view.element_size()]
            # As bits: a weight that is not a number is equal to itself.
            if not torch.equal(view.view(bits), master.to(view.dtype).view(bits)):
                raise Mismatch(f"weight {place.key} is not its rounded master")


@torch.no_grad()
def weight_sum(model: HasChunks, groups: Any, keys: Collection[str] | None = None) -> torch.Tensor:
    """Numbers for the weights of this rank's chunks, those of `keys` or all: [2] of the dense ones
    and of the experts; 0 where there are no copies to compare with. Not collective."""
    total = torch.zeros(2, dtype=torch.int64, device=torch.cuda.current_device())
    has_copies = groups.dp_cp.size() > 1, groups.expt_dp.size() > 1
    for place, weight in weights_of(model, groups) if any(has_copies) else ():
        kind = int(is_expert(place.key))
        if has_copies[kind] and (keys is None or place.key in keys):
            found = _sum(weight.reshape(-1), _weights(place, weight.device))
            total[kind] += torch.as_tensor(found, device=total.device)
    return total


def check_replicas(own: torch.Tensor, groups: Any) -> None:
    """Checks that the ranks with the same parameters have the same `weight_sum`. Collective over
    the copies of the model and those of each expert.

    Raises:
        Mismatch: on every rank of a group in which they differ.
    """
    for one, group in zip(own, (groups.dp_cp, groups.expt_dp), strict=True):
        highest = torch.stack([one, ~one])
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        if highest[0] != ~highest[1]:
            raise Mismatch("replicas have different weights")
