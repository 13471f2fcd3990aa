"""Which rank sends which elements to which in a change of layout. Pure and the same on every rank:
no communication, no hashing order, no floats."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from copus_ext.reshard.ownership import all_of_layout
from copus_ext.reshard.parameters import OUTPUT, WORDS
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.model_shape import ModelShape
from megatron.trainer.distributed.sharding import Box, Record, digest, volume

BYTES_PER_ELEMENT = 12
"""fp32 master weight and two moments."""
BYTES_WITH_MOMENTUM = 8
"""fp32 master weight and one momentum."""
_ENDS = (WORDS, OUTPUT)
"""Matrices that keep both moments under every optimizer."""
_KEPT = 8


def element_bytes(shape: ModelShape | None, key: str, num_axes: int) -> int:
    """Bytes of the fp32 state of an element of a global tensor.

    Args:
        shape: of the model; None: its optimizer keeps both moments of everything.
        num_axes: of the tensor, those that count layers and experts among them.
    """
    if shape is None or not shape.keeps_momenta or key in _ENDS:
        return BYTES_PER_ELEMENT
    counted = int(is_stacked(shape, key)) + (".mlp.experts." in key)
    return BYTES_WITH_MOMENTUM if num_axes - counted == 2 else BYTES_PER_ELEMENT


def is_stacked(shape: ModelShape, key: str) -> bool:
    """Whether the first axis of a tensor counts layers."""
    is_mixed = shape.experts is not None and shape.experts.is_mixed
    return key.startswith("decoder.layers.") and not is_mixed


class Incomplete(ValueError):
    """Elements of the target that no rank holds; the message names tensor and rectangle."""


class TransferOp(NamedTuple):
    """Elements that go from one record to another."""

    source_rank: int
    """Rank that holds them."""
    source: int
    """Number of its record."""
    target_rank: int
    """Rank that needs them."""
    target: int
    """Number of its record."""
    lo: tuple[int, ...]
    """First global index on every axis."""
    hi: tuple[int, ...]
    """One past the last global index on every axis."""

    @property
    def numel(self) -> int:
        return volume(self.lo, self.hi)


@dataclass(frozen=True, kw_only=True)
class ReshardPlan:
    """A planned change of layout; the same on every rank."""

    source: Sequence[Sequence[Record]]
    """By rank, records before."""
    target: Sequence[Sequence[Record]]
    """By rank, records after."""
    ops: list[TransferOp]
    """Every element of every target record once, sorted."""
    sent_bytes: list[int]
    """By rank, bytes that it sends to other ranks."""
    received_bytes: list[int]
    """By rank, bytes that it receives, the least possible: what it does not hold itself."""
    target_bytes: list[int]
    """By rank, bytes of the fp32 state that it holds after."""

    @property
    def keys(self) -> list[str]:
        return sorted({record.key for own in self.source for record in own})

    @property
    def wire_bytes(self) -> int:
        """Bytes that leave a rank."""
        return sum(self.sent_bytes)

    @property
    def minimum_bytes(self) -> int:
        """Bytes that have to leave a rank: what the ranks together need and do not hold."""
        return sum(self.received_bytes)

    @property
    def busiest_bytes(self) -> int:
        """Bytes of the rank that sends or receives most."""
        return max([*self.sent_bytes, *self.received_bytes], default=0)

    def digest(self) -> str:
        """A short text that is equal for equal plans."""
        parts = [digest(own) for own in (*self.source, *self.target)]
        parts += [repr(tuple(op)) for op in self.ops]
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


class ReshardPlanCache:
    """The last few plans of one model on one set of ranks.

    Args:
        ranks_per_node: consecutive ranks that share a node.
    """

    def __init__(self, shape: ModelShape, *, ranks_per_node: int | None = None) -> None:
        self._shape, self._ranks_per_node = shape, ranks_per_node
        self._kept: OrderedDict[tuple[Layout, Layout], ReshardPlan] = OrderedDict()

    def between(self, before: Layout, after: Layout) -> ReshardPlan:
        """The plan between two layouts of the same ranks.

        Raises:
            ValueError: the model cannot be laid out so, or the state is incomplete.
        """
        pair = before, after
        if pair not in self._kept:
            source, target = (all_of_layout(self._shape, layout) for layout in pair)
            self._kept[pair] = make_plan(
                source, target, ranks_per_node=self._ranks_per_node, shape=self._shape
            )
        self._kept.move_to_end(pair)
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return self._kept[pair]


class _Place(NamedTuple):
    rank: int
    number: int
    lo: tuple[int, ...]
    hi: tuple[int, ...]


@dataclass
class _Choice:
    holders: list[_Place]
    """Equal records, by rank."""
    target: _Place
    box: Box
    element_bytes: int


@dataclass
class _Draft:
    ranks_per_node: int
    element_bytes: int = BYTES_PER_ELEMENT
    """Of the tensor that is being planned."""
    ops: list[TransferOp] = field(default_factory=list)
    choices: list[_Choice] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def take(self, source: _Place, target: _Place, box: Box) -> None:
        """Adds an operation from one record."""
        self.ops.append(TransferOp(source.rank, source.number, target.rank, target.number, *box))
        if source.rank != target.rank:
            size = volume(*box) * self.element_bytes
            self.sent[source.rank] += size
            self.received[target.rank] += size

    def give(self, holders: list[_Place], target: _Place, box: Box) -> None:
        """Takes the target's own record or the only holder; postpones a choice among several."""
        if len(holders) == 1:
            self.take(holders[0], target, box)
            return
        own = next((h for h in holders if h.rank == target.rank), None)
        if own is not None:
            self.take(own, target, box)
        else:
            self.choices.append(_Choice(holders, target, box, self.element_bytes))

    def best(self, holders: list[_Place], target: _Place) -> _Place:
        """Of ranks of the target's node, or else of all, the one that sends least so far."""
        node = self.node_of(target.rank)
        near = [h for h in holders if self.node_of(h.rank) == node]
        return min(near or holders, key=lambda h: (self.sent[h.rank], h.rank))


def make_plan(
    source: Sequence[Sequence[Record]],
    target: Sequence[Sequence[Record]],
    *,
    ranks_per_node: int | None = None,
    shape: ModelShape | None = None,
) -> ReshardPlan:
    """Plans a change of layout.

    A rank keeps the elements that it holds. The others come from the same node if possible, and
    from the rank that sends least so far if several hold them.

    Args:
        source: by rank, the records it holds.
        target: by rank, the records it is to hold.
        ranks_per_node: consecutive ranks that share a node; None for all.
        shape: of the model; see `element_bytes`.

    Raises:
        Incomplete: elements of the target that nobody holds.
    """
    num = len(target)
    draft = _Draft(ranks_per_node or max(num, 1), sent=[0] * num, received=[0] * num)
    needed, held = _by_tensor(target), _by_tensor(source)
    for key in sorted(needed):
        draft.element_bytes = element_bytes(shape, key, len(needed[key][0].lo))
        for name, wanted, there in _by_layer(key, needed[key], held.get(key, [])):
            _plan_tensor(draft, name, wanted, there)
    # Large ones first: the small ones then even the load out.
    draft.choices.sort(key=lambda c: (-volume(*c.box), c.target.rank, c.target.number, c.box))
    for choice in draft.choices:
        draft.element_bytes = choice.element_bytes
        draft.take(draft.best(choice.holders, choice.target), choice.target, choice.box)
    draft.ops.sort()
    return ReshardPlan(
        source=source,
        target=target,
        ops=draft.ops,
        sent_bytes=draft.sent,
        received_bytes=draft.received,
        target_bytes=[
            sum(r.numel * element_bytes(shape, r.key, len(r.lo)) for r in own) for own in target
        ],
    )


def _by_tensor(records: Sequence[Sequence[Record]]) -> dict[str, list[_Place]]:
    found: dict[str, list[_Place]] = {}
    for rank, own in enumerate(records):
        for number, r in enumerate(own):
            found.setdefault(r.key, []).append(_Place(rank, number, r.lo, r.hi))
    return found


def _by_layer(
    key: str, wanted: list[_Place], there: list[_Place]
) -> Iterator[tuple[str, list[_Place], list[_Place]]]:
    """Parts of a tensor that can be planned apart: layers, where no record spans two."""
    if len(wanted[0].lo) == 1 or any(p.hi[0] - p.lo[0] != 1 for p in (*wanted, *there)):
        yield key, wanted, there
        return
    parts: dict[int, tuple[list[_Place], list[_Place]]] = {}
    for side, places in enumerate((wanted, there)):
        for place in places:
            parts.setdefault(place.lo[0], ([], []))[side].append(place)
    for index in sorted(parts):
        yield f"{key}[{index}]", *parts[index]


def _plan_tensor(draft: _Draft, name: str, wanted: list[_Place], there: list[_Place]) -> None:
    targets, sources = _equal(wanted), _equal(there)
    if not targets:
        return
    if not sources:
        raise Incomplete(f"{name}: no rank holds any of it")
    s_lo, s_hi = _corners(sources)
    t_lo, t_hi = _corners(targets)
    if _volumes(*_intersect(s_lo, s_hi, s_lo, s_hi)).sum() > _volumes(s_lo, s_hi).sum():
        _plan_overlapping(draft, name, targets, there)
        return
    lo, hi = _intersect(t_lo, t_hi, s_lo, s_hi)
    found = _volumes(lo, hi)
    short = np.flatnonzero(found.sum(axis=1) != _volumes(t_lo, t_hi))
    if len(short):
        first = targets[int(short[0])][0]
        raise Incomplete(f"{name}: nobody holds all of {first.lo} to {first.hi}")
    for i, j in np.argwhere(found):
        box = tuple(lo[i, j].tolist()), tuple(hi[i, j].tolist())
        for target in targets[i]:
            draft.give(sources[j], target, box)


def _plan_overlapping(
    draft: _Draft, name: str, targets: list[list[_Place]], there: list[_Place]
) -> None:
    """For records that share elements without being equal, as those of a tied embedding: takes from
    one after the other what is still missing."""
    for target in (t for group in targets for t in group):
        missing: list[Box] = [(target.lo, target.hi)]
        node = draft.node_of(target.rank)
        order = sorted(
            there,
            key=lambda p: (
                p.rank != target.rank,
                draft.node_of(p.rank) != node,
                draft.sent[p.rank],
                p.rank,
                p.number,
            ),
        )
        for place in order:
            left: list[Box] = []
            for box in missing:
                common = _common(box, (place.lo, place.hi))
                if common is None:
                    left.append(box)
                    continue
                draft.take(place, target, common)
                left += _without(box, common)
            missing = left
        if missing:
            raise Incomplete(f"{name}: nobody holds {missing[0][0]} to {missing[0][1]}")


def _equal(places: list[_Place]) -> list[list[_Place]]:
    """Records of the same elements together, in the order of the elements and of the ranks."""
    groups: dict[Box, list[_Place]] = {}
    for place in sorted(places, key=lambda p: (p.lo, p.hi, p.rank, p.number)):
        groups.setdefault((place.lo, place.hi), []).append(place)
    return list(groups.values())


def _corners(groups: list[list[_Place]]) -> tuple[np.ndarray, np.ndarray]:
    """[n, axes] first and one past the last indices."""
    return np.array([g[0].lo for g in groups]), np.array([g[0].hi for g in groups])


def _intersect(
    a_lo: np.ndarray, a_hi: np.ndarray, b_lo: np.ndarray, b_hi: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """[a, b, axes] corners of what every two have in common; empty where one is not below the
    other."""
    lo = np.maximum(a_lo[:, None], b_lo[None])
    return lo, np.maximum(np.minimum(a_hi[:, None], b_hi[None]), lo)


def _volumes(lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    return (hi - lo).prod(axis=-1)


def _common(a: Box, b: Box) -> Box | None:
    lo, hi = tuple(map(max, a[0], b[0])), tuple(map(min, a[1], b[1]))
    return (lo, hi) if all(x < y for x, y in zip(lo, hi)) else None


def _without(box: Box, part: Box) -> list[Box]:
    """What is left of a rectangle without a part of it: at most two rectangles per axis."""
    left: list[Box] = []
    lo, hi = list(box[0]), list(box[1])
    for axis, (start, stop) in enumerate(zip(*part)):
        if lo[axis] < start:
            left.append((tuple(lo), (*hi[:axis], start, *hi[axis + 1 :])))
            lo[axis] = start
        if stop < hi[axis]:
            left.append(((*lo[:axis], stop, *lo[axis + 1 :]), tuple(hi)))
            hi[axis] = stop
    return left
