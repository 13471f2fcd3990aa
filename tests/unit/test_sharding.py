"""Rectangles of a flat range: they are the range, each once, in its order."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.trainer.distributed.sharding import digest, flat_to_rects, records_of_block, volume


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    size = math.prod(shape)
    start = draw(st.integers(0, size))
    return shape, start, draw(st.integers(start, size))


@settings(max_examples=120, deadline=None)
@given(ranges())
def test_the_rectangles_are_the_range_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    block = np.arange(math.prod(shape)).reshape(shape)
    rects = flat_to_rects(shape, start, stop)
    assert len(rects) <= 2 * len(shape) - 1
    found = [block[tuple(map(slice, lo, hi))].ravel() for lo, hi in rects]
    flat = np.concatenate(found) if found else np.arange(0)
    assert flat.tolist() == list(range(start, stop))
    assert [len(f) for f in found] == [volume(lo, hi) for lo, hi in rects]


@settings(max_examples=40, deadline=None)
@given(ranges(), st.integers(0, 5), st.integers(0, 3))
def test_a_block_lies_where_its_corner_says(
    case: tuple[tuple[int, ...], int, int], layer: int, shift: int
) -> None:
    block, start, stop = case
    corner = (layer, *(shift + i for i in range(len(block))))
    shape = (6, *(n + c for n, c in zip(block, corner[1:])))
    records = records_of_block(
        key="k",
        shape=shape,
        corner=corner,
        block=block,
        start=start,
        stop=stop,
        shard=3,
        offset=10,
        is_first=True,
    )
    everything = np.full(shape, -1)
    local = tuple(slice(c, c + n) for c, n in zip(corner[1:], block))
    everything[layer][local] = np.arange(math.prod(block)).reshape(block)
    held = [everything[tuple(map(slice, r.lo, r.hi))].ravel() for r in records]
    assert [x for part in held for x in part] == list(range(start, stop))
    offset = 10
    for record in records:
        assert (record.shard, record.offset) == (3, offset)
        offset += record.numel
    assert offset - 10 == stop - start


def test_the_digest_sees_every_field_and_no_order() -> None:
    one = records_of_block(
        key="k",
        shape=(4, 4),
        corner=(0, 0),
        block=(4, 4),
        start=2,
        stop=11,
        shard=0,
        offset=0,
        is_first=True,
    )
    assert digest(one) == digest(reversed(one))
    others = [one[0]._replace(offset=1), one[0]._replace(is_first=False)]
    assert len({digest([other, *one[1:]]) for other in [one[0], *others]}) == 3
