"""The way from one layout to another, worked out without touching the job: who holds what before
and after, and who sends what."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from copus_ext.reshard.ownership import ModelShape, all_of_layout
from copus_ext.reshard.plan import Plan, make_plan
from megatron.training.config.layout import Layout
from megatron.training.distributed.sharding import Record, digest

_KEPT = 8


@dataclass(frozen=True, kw_only=True)
class Route:
    """A planned change of layout; the same on every rank."""

    source: list[list[Record]]
    """By rank, records before."""
    target: list[list[Record]]
    """By rank, records after."""
    plan: Plan
    """What moves."""

    @property
    def keys(self) -> list[str]:
        """Names of all global tensors."""
        return sorted({record.key for own in self.source for record in own})

    def digest(self) -> str:
        """A short text that is equal for equal routes."""
        parts = [digest(own) for own in (*self.source, *self.target)]
        parts += [repr(tuple(piece)) for piece in self.plan.pieces]
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


class ReshardPlanCache:
    """Routes of one model on one set of ranks; the last few are kept.

    Args:
        shape: of the model.
        ranks_per_node: consecutive ranks that share a node.
    """

    def __init__(self, shape: ModelShape, *, ranks_per_node: int | None = None) -> None:
        self._shape, self._ranks_per_node = shape, ranks_per_node
        self._kept: OrderedDict[tuple[Layout, Layout], Route] = OrderedDict()

    def between(self, before: Layout, after: Layout) -> Route:
        """The route between two layouts of the same ranks.

        Raises:
            ValueError: the model cannot be laid out so, or the state is incomplete.
        """
        pair = before, after
        if pair not in self._kept:
            source, target = (all_of_layout(self._shape, layout) for layout in pair)
            plan = make_plan(source, target, ranks_per_node=self._ranks_per_node)
            self._kept[pair] = Route(source=source, target=target, plan=plan)
        self._kept.move_to_end(pair)
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return self._kept[pair]
