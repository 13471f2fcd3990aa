"""Whether the chunks of a stored tensor fill it exactly once. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A rectangle of a tensor."""

    offset: tuple[int, ...]
    """First index along each axis."""
    size: tuple[int, ...]
    """Length along each axis."""

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last index along each axis."""
        return tuple(o + s for o, s in zip(self.offset, self.size))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    def meets(self, other: Chunk) -> bool:
        """Whether the two share an element."""
        return all(
            a < d and c < b for a, b, c, d in zip(self.offset, self.end, other.offset, other.end)
        )


def coverage_problem(shape: Sequence[int], chunks: Sequence[Chunk]) -> str | None:
    """Says what is wrong with a set of chunks, or None if they are disjoint and fill the shape.

    Disjoint chunks fill the shape if and only if their volumes add up to it.

    Args:
        shape: global shape of the tensor.
        chunks: its stored rectangles, in any order.
    """
    shape = tuple(shape)
    for chunk in chunks:
        if len(chunk.offset) != len(shape) or len(chunk.size) != len(shape):
            return f"chunk at {chunk.offset} has another number of axes than shape {shape}"
        inside = all(o >= 0 and o + s <= n for o, s, n in zip(chunk.offset, chunk.size, shape))
        if not inside:
            return f"chunk at {chunk.offset} of size {chunk.size} leaves the shape {shape}"
    if shape:
        clash = _clash([chunk for chunk in chunks if chunk.volume], len(shape))
        if clash is not None:
            return f"chunks at {clash[0].offset} and {clash[1].offset} overlap"
    elif len(chunks) > 1:
        return "it is one number and is stored more than once"
    total, have = math.prod(shape), sum(chunk.volume for chunk in chunks)
    if have != total:
        return f"its chunks hold {have} of {total} elements"
    return None


def _clash(chunks: list[Chunk], axes: int) -> tuple[Chunk, Chunk] | None:
    """Two chunks that share an element, or None.

    Chunks are split again and again at places that no chunk crosses, along any axis; only those
    that cannot be split are compared with each other. What ranks hold can be split down to single
    chunks, so that hundreds of them in each of many layers take hardly longer than to sort them.
    """
    waiting = [chunks]
    while waiting:
        group = waiting.pop()
        if len(group) < 2:
            continue
        for axis in range(axes):
            parts = _split(group, axis)
            if len(parts) > 1:
                waiting += parts
                break
        else:
            clash = _sweep(group)
            if clash is not None:
                return clash
    return None


def _split(chunks: list[Chunk], axis: int) -> list[list[Chunk]]:
    """Groups of chunks between places on an axis that none of them crosses."""
    groups: list[list[Chunk]] = []
    end = -1
    for chunk in sorted(chunks, key=lambda c: c.offset[axis]):
        start = chunk.offset[axis]
        if not groups or start >= end:
            groups.append([])
        groups[-1].append(chunk)
        end = max(end, start + chunk.size[axis])
    return groups


def _sweep(chunks: list[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Compares each chunk with those that begin before it and have not ended, along the first
    axis."""
    active: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda c: c.offset):
        active = [other for other in active if other.end[0] > chunk.offset[0]]
        clash = next((other for other in active if other.meets(chunk)), None)
        if clash is not None:
            return clash, chunk
        active.append(chunk)
    return None
