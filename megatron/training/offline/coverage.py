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

    A sweep along the first axis: chunks are taken in the order of their first row, and each is
    compared with those that have not ended before it. Disjoint chunks fill the shape if and only if
    their volumes add up to it.

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
        active: list[Chunk] = []
        filled = [chunk for chunk in chunks if chunk.volume]
        for chunk in sorted(filled, key=lambda c: c.offset):
            active = [other for other in active if other.end[0] > chunk.offset[0]]
            clash = next((other for other in active if other.meets(chunk)), None)
            if clash is not None:
                return f"chunks at {clash.offset} and {chunk.offset} overlap"
            active.append(chunk)
    elif len(chunks) > 1:
        return "it is one number and is stored more than once"
    total, have = math.prod(shape), sum(chunk.volume for chunk in chunks)
    if have != total:
        return f"its chunks hold {have} of {total} elements"
    return None
