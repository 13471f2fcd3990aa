"""The pause of a change of layout, predicted from what has to move; the same on every rank.

The bytes are those of `plan.make_plan`, without its list of messages: what a rank needs after the
change and does not hold before it. A plan of hundreds of ranks takes a tenth of a second, these
sums a few milliseconds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.goodput.costs import Machine, MovedBytes, pause_s
from copus_ext.reshard.ownership import all_of_layout
from copus_ext.reshard.plan import element_bytes, is_stacked
from megatron.trainer.common.extras import defaults_of, extras
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.model_shape import ModelShape
from megatron.trainer.distributed.sharding import Record

MAX_COUNTED = 128
"""Above so many ranks all of the state is taken to move: a layout takes 0.2 s to lay out there."""
_AXES = 4
"""Most axes of a tensor: layers, experts, rows, columns."""


class _Held(NamedTuple):
    """The rectangles that ranks hold, in the order of their tensors, layers and experts."""

    place: Any
    """[n] number of the tensor, layer and expert."""
    rank: Any
    """[n] whose it is."""
    lo: Any
    """[n, 4] first indices."""
    hi: Any
    """[n, 4] one past the last."""
    element_bytes: Any
    """[n] bytes of the state of an element."""

    def by_rank(self, num_ranks: int) -> Any:
        """[ranks] bytes that each holds."""
        return _sums(self.rank, (self.hi - self.lo).prod(axis=1) * self.element_bytes, num_ranks)


class PausePredictor:
    """Seconds of changes between the layouts of one model on one machine; each pair is worked out
    once.
    """

    def __init__(self, shape: ModelShape, machine: Machine) -> None:
        self.shape, self.machine = shape, machine
        self._places: dict[tuple[str, tuple[int, ...]], int] = {}
        self._held: dict[Layout, _Held] = {}
        self._moved: dict[tuple[Layout, Layout], MovedBytes] = {}

    def seconds(self, before: Layout, after: Layout) -> float:
        """Of a change between two layouts of the same ranks; 0 between equal ones.

        Raises:
            ValueError: the model cannot be laid out so.
        """
        if before == after:
            return 0.0
        if after.world_size > MAX_COUNTED:
            return self.max_seconds(before)
        return pause_s(self.moved(before, after), self.machine)

    def max_seconds(self, layout: Layout) -> float:
        """Of a change from a layout to one under which no rank holds anything that it held."""
        held = int(self._of(layout).by_rank(layout.world_size).max())
        node = min(self.machine.ranks_per_node, layout.world_size)
        is_one = node == layout.world_size
        moved = MovedBytes(
            held=held, within=held if is_one else 0, across=0 if is_one else node * held
        )
        return pause_s(moved, self.machine)

    def moved(self, before: Layout, after: Layout) -> MovedBytes:
        """What moves between two layouts of the same ranks.

        Raises:
            ValueError: the model cannot be laid out so.
        """
        pair = before, after
        if pair not in self._moved:
            self._moved[pair] = self._count(*pair)
        return self._moved[pair]

    def received(self, before: Layout, after: Layout) -> tuple[Any, Any]:
        """[ranks] bytes that each gets from ranks of its own node, and [ranks] from other nodes.

        Where copies of a tensor overlap without being equal, those from other nodes are a lower
        bound; both together are exact.
        """
        num, old, new = after.world_size, self._of(before), self._of(after)
        needed = new.by_rank(num)
        kept = _common(old, new, old.rank, new.rank, num)
        node = self.machine.ranks_per_node
        near = needed
        if node < num:
            once = _without_copies(old, old.rank // node)
            near = _common(once, new, once.rank // node, new.rank // node, num)
            near = np.clip(near, kept, needed)
        return near - kept, needed - near

    def _count(self, before: Layout, after: Layout) -> MovedBytes:
        num, node = after.world_size, self.machine.ranks_per_node
        ways = [self.received(before, after)]
        if self.shape.use_distributed_optimizer:
            # An element has one holder, who sends what the way back would bring him: more only of
            # a norm or a tied embedding, of which several ranks get a copy.
            ways.append(self.received(after, before))
        nodes = np.arange(num) // node
        held = max(int(self._of(x).by_rank(num).max()) for x in (before, after))
        return MovedBytes(
            held=held,
            within=max(int(near.max()) for near, _ in ways),
            across=max(int(_sums(nodes, far, int(nodes[-1]) + 1).max()) for _, far in ways),
        )

    def _of(self, layout: Layout) -> _Held:
        if layout not in self._held:
            self._held[layout] = self._table(all_of_layout(self.shape, layout))
        return self._held[layout]

    def _table(self, records: list[list[Record]]) -> _Held:
        places, ranks, lows, highs, sizes = [], [], [], [], []
        for rank, own in enumerate(records):
            for r in own:
                # Rectangles are of one layer and one expert.
                lead = max(len(r.lo) - 2, int(len(r.lo) == 2 and is_stacked(self.shape, r.key)))
                assert all(b - a == 1 for a, b in zip(r.lo[:lead], r.hi[:lead])), r
                place = self._places.setdefault((r.key, r.lo[:lead]), len(self._places))
                places.append(place)
                ranks.append(rank)
                lows.append((0,) * (_AXES - len(r.lo)) + r.lo)
                highs.append((1,) * (_AXES - len(r.hi)) + r.hi)
                sizes.append(element_bytes(self.shape, r.key, len(r.lo)))
        order = np.argsort(np.array(places), kind="stable")
        parts = (np.array(x, dtype=np.int64)[order] for x in (places, ranks, lows, highs, sizes))
        return _Held(*parts)


@functools.lru_cache(maxsize=16)
def predictor_of(shape: ModelShape, machine: Machine) -> PausePredictor:
    return PausePredictor(shape, machine)


def shape_for(spec: ModelSpec, *, tp_sizes: Sequence[int], sharded: bool) -> ModelShape:
    """What the planner's description says of the tensors of a run.

    Args:
        tp_sizes: tensor-parallel sizes that the run may have; the vocabulary is padded for all.
        sharded: whether data-parallel ranks share the optimizer's state out among them.
    """
    rows = int(spec.padded_vocab_size(math.lcm(*tp_sizes)))
    shape = spec.shape(padded_vocab_size=rows)
    chosen = (e for e in extras() if not spec.extras.keys().isdisjoint(defaults_of(e)))
    momenta = any(e.optimizers for e in chosen)
    return replace(shape, use_distributed_optimizer=sharded, keeps_momenta=momenta)


def _sums(groups: Any, values: Any, num: int) -> Any:
    """[num] sums of whole numbers by group. Exact, where `bincount` with weights rounds."""
    total = np.zeros(num, dtype=np.int64)
    np.add.at(total, groups, values)
    return total


def _without_copies(held: _Held, nodes: Any) -> _Held:
    """One of equal rectangles on each node."""
    rows = np.column_stack([held.place, nodes, held.lo, held.hi])
    _, first = np.unique(rows, axis=0, return_index=True)
    first = np.sort(first)
    return _Held(*(part[first] for part in held))


def _common(old: _Held, new: _Held, old_group: Any, new_group: Any, num_ranks: int) -> Any:
    """[ranks] bytes of the new rectangles that old ones of the same group cover; the old ones of
    a group must not overlap."""
    start = np.searchsorted(old.place, new.place, side="left")
    count = np.searchsorted(old.place, new.place, side="right") - start
    mine = np.repeat(np.arange(len(new.place)), count)
    ahead = np.repeat(np.cumsum(count) - count, count)
    other = np.arange(len(mine)) - ahead + np.repeat(start, count)
    together = old_group[other] == new_group[mine]
    mine, other = mine[together], other[together]
    lo = np.maximum(new.lo[mine], old.lo[other])
    hi = np.maximum(np.minimum(new.hi[mine], old.hi[other]), lo)
    size = (hi - lo).prod(axis=1) * new.element_bytes[mine]
    return _sums(new.rank[mine], size, num_ranks)
