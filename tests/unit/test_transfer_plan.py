"""A plan gives every element of every target exactly once, at the least cost on the wire."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from copus_ext.reshard.plan import BYTES_PER_ELEMENT, Incomplete, ReshardPlan, make_plan
from megatron.trainer.distributed.sharding import Box, Record, flat_to_rects

Ownership = list[list[Record]]


def cut(
    draw: st.DrawFn, key: str, shape: tuple[int, ...], num_ranks: int, *, copies: int
) -> Ownership:
    """A tensor handed out to ranks: flat ranges, `copies` times over."""
    size = math.prod(shape)
    ranks: Ownership = [[] for _ in range(num_ranks)]
    for _ in range(copies):
        ends = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=4))})
        for start, stop in itertools.pairwise(ends):
            rank = draw(st.integers(0, num_ranks - 1))
            for lo, hi in flat_to_rects(shape, start, stop):
                ranks[rank].append(Record(key, shape, lo, hi, 0, 0, True))
    return ranks


@st.composite
def changes(draw: st.DrawFn) -> tuple[Ownership, Ownership]:
    num = draw(st.integers(1, 6))
    source: Ownership = [[] for _ in range(num)]
    target: Ownership = [[] for _ in range(num)]
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
        for side in (source, target):
            copies = draw(st.integers(1, 3))
            for rank, more in enumerate(cut(draw, f"k{number}", shape, num, copies=copies)):
                side[rank] += more
    return source, target


def cells(lo: tuple[int, ...], hi: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, lo, hi)))


def check(source: Ownership, target: Ownership, plan: ReshardPlan) -> None:
    """Every cell of every target record from exactly one place that holds it; bytes as counted."""
    sent, received = Counter(), Counter()
    got: dict[tuple[int, int], Counter] = {}
    for p in plan.ops:
        s, t = source[p.source_rank][p.source], target[p.target_rank][p.target]
        assert s.key == t.key
        for record in (s, t):
            assert all(a <= b for a, b in zip(record.lo, p.lo))
            assert all(a >= b for a, b in zip(record.hi, p.hi))
        got.setdefault((p.target_rank, p.target), Counter()).update(cells(p.lo, p.hi))
        if p.source_rank != p.target_rank:
            sent[p.source_rank] += p.numel * BYTES_PER_ELEMENT
            received[p.target_rank] += p.numel * BYTES_PER_ELEMENT
    needs = 0
    for rank, records in enumerate(target):
        own = {(r.key, c) for r in source[rank] for c in cells(r.lo, r.hi)}
        for number, record in enumerate(records):
            wanted = cells(record.lo, record.hi)
            assert got.get((rank, number), Counter()) == Counter(wanted)
            needs += sum((record.key, c) not in own for c in wanted)
    assert plan.wire_bytes == plan.minimum_bytes == needs * BYTES_PER_ELEMENT
    assert plan.sent_bytes == [sent[r] for r in range(len(target))]
    assert plan.received_bytes == [received[r] for r in range(len(target))]


@settings(max_examples=80, deadline=None)
@given(changes())
def test_every_element_arrives_once_by_the_shortest_way(case: tuple[Ownership, Ownership]) -> None:
    check(*case, make_plan(*case))


@settings(max_examples=30, deadline=None)
@given(changes(), st.randoms())
def test_a_hole_is_refused(case: tuple[Ownership, Ownership], random: object) -> None:
    source, target = case
    keys = sorted({r.key for records in target for r in records})
    lost = [[r for r in records if r.key != keys[0]] for records in source]
    with pytest.raises(Incomplete, match=keys[0]):
        make_plan(lost, target)


def record(rank_box: Box, *, shape: tuple[int, ...] = (8,)) -> Record:
    return Record("k", shape, *rank_box, 0, 0, True)


def test_a_partial_hole_is_named() -> None:
    with pytest.raises(Incomplete, match=r"k: nobody holds all of \(0,\) to \(8,\)"):
        make_plan([[record(((0,), (5,)))]], [[record(((0,), (8,)))]])
    overlapping = [record(((0,), (5,))), record(((3,), (6,)))]
    with pytest.raises(Incomplete, match=r"k: nobody holds \(6,\) to \(8,\)"):
        make_plan([overlapping], [[record(((0,), (8,)))]])


def test_copies_share_the_sending() -> None:
    whole = record(((0,), (8,)))
    source = [[whole] for _ in range(4)] + [[] for _ in range(8)]
    target = [[] for _ in range(4)] + [[whole] for _ in range(8)]
    plan = make_plan(source, target)
    assert plan.sent_bytes[:4] == [2 * 8 * BYTES_PER_ELEMENT] * 4
    # Node 0 holds ranks 0 to 5, so that its two receivers never ask another node.
    near = make_plan(
        source[:2] + [[]] * 4 + source[:2] + [[]] * 4, [[]] * 4 + [[whole]] * 8, ranks_per_node=6
    )
    for p in near.ops:
        assert p.source_rank // 6 == p.target_rank // 6
