"""The rectangles of the run's global tensors that a rank holds: arithmetic on names and shapes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import NamedTuple

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First and one past the last index on every axis."""


class Record(NamedTuple):
    """A rectangle of a global tensor and where a rank keeps its elements, contiguous and
    row-major."""

    key: str
    """Name of the global tensor, as in a checkpoint."""
    shape: tuple[int, ...]
    """Global shape; stacked layers are a leading axis."""
    lo: tuple[int, ...]
    """First index on every axis."""
    hi: tuple[int, ...]
    """One past the last index on every axis."""
    shard: int
    """Number of the rank's flat shard."""
    offset: int
    """First element in that shard."""
    is_first: bool
    """Whether this copy of the elements is the one that counts in sums over all ranks."""

    @property
    def numel(self) -> int:
        return volume(self.lo, self.hi)


def volume(lo: Iterable[int], hi: Iterable[int]) -> int:
    return math.prod(b - a for a, b in zip(lo, hi))


def flat_to_rects(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Cuts a range of a row-major block into rectangles that are each contiguous in it.

    Args:
        start: first element of the flattened block.
        stop: one past the last.

    Returns:
        At most 2k - 1 rectangles of a k-dimensional block, in the order of their elements.
    """
    assert 0 <= start <= stop <= math.prod(shape), (shape, start, stop)
    if start == stop:
        return []
    if len(shape) == 1:
        return [((start,), (stop,))]
    inner = shape[1:]
    row = math.prod(inner)
    first, begin = divmod(start, row)
    last, end = divmod(stop, row)
    if first == last:
        return [((first, *lo), (first + 1, *hi)) for lo, hi in flat_to_rects(inner, begin, end)]
    rects: list[Box] = []
    if begin:
        head = flat_to_rects(inner, begin, row)
        rects += [((first, *lo), (first + 1, *hi)) for lo, hi in head]
        first += 1
    if last > first:
        rects.append(((first, *(0 for _ in inner)), (last, *inner)))
    if end:
        tail = flat_to_rects(inner, 0, end)
        rects += [((last, *lo), (last + 1, *hi)) for lo, hi in tail]
    return rects


def records_of_block(
    *,
    key: str,
    shape: tuple[int, ...],
    corner: tuple[int, ...],
    block: tuple[int, ...],
    start: int,
    stop: int,
    shard: int,
    offset: int,
    is_first: bool,
) -> list[Record]:
    """Records of a range of a block of a global tensor.

    Args:
        corner: global index of the block's first element; may have more axes than the block, which
            it then holds at one place (the layer).
        start: first element of the flattened block that is held.
        stop: one past the last.
        offset: of element `start` in the shard.
        is_first: see `Record`.
    """
    lead = corner[: len(corner) - len(block)]
    rest = corner[len(lead) :]
    records = []
    for lo, hi in flat_to_rects(block, start, stop):
        low = (*lead, *(a + b for a, b in zip(lo, rest)))
        high = (*(a + 1 for a in lead), *(a + b for a, b in zip(hi, rest)))
        records.append(Record(key, shape, low, high, shard, offset, is_first))
        offset += volume(lo, hi)
    return records


def digest(records: Iterable[Record]) -> str:
    """A short text that is equal for equal records and shards, whatever their order."""
    lines = sorted(repr(tuple(record)) for record in records)
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
