"""What a search for the order of nodes answers. JSON and words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A link that others wait for."""

    kind: Literal["pipeline", "replicas"]
    """What goes over it: messages between stages, or the reduction of gradients."""
    stage: int
    """The stage that sends, or whose replicas reduce."""
    source: int
    """Node that sends."""
    target: int
    """Node that receives."""
    bytes_per_s: float
    """Bandwidth of the link."""
    latency_s: float
    """Its latency."""
    seconds: float
    """Of one pipeline message, or of a whole reduction, over it."""


@dataclass(frozen=True, kw_only=True)
class NodeOrder:
    """The order found for one layout."""

    order: tuple[int, ...]
    """Node at every place, by its number in the matrix; ranks are numbered along it."""
    before_s: float
    """Predicted seconds of a step in the given order."""
    after_s: float
    """The same in this order; never more."""
    exact: bool
    """Whether no order is better; otherwise it is the best that a search of bounded length saw."""
    num_priced: int
    """Orders that were priced."""
    limits_before: tuple[Limit, ...]
    """What limits the given order: the slowest hop of the slowest replica and the slowest link of a
    ring, for the stage that is through last; those between nodes only."""
    limits_after: tuple[Limit, ...]
    """What limits this one."""
    hosts: tuple[str, ...] = ()
    """Names of the nodes in this order; empty if they have none."""

    @property
    def names(self) -> list[str]:
        """What the nodes are called, in this order: host names or numbers."""
        return list(self.hosts) or [str(node) for node in self.order]

    @property
    def gain(self) -> float:
        """Part of the step that the order saves."""
        return 1.0 - self.after_s / self.before_s

    @property
    def is_given(self) -> bool:
        """Whether the nodes stay as they were."""
        return self.order == tuple(range(len(self.order)))

    def name(self, node: int) -> str:
        """What a node is called."""
        return self.names[self.order.index(node)]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        data = asdict(self)
        return {n: list(v) if isinstance(v, tuple) else v for n, v in data.items()}

    def lines(self) -> list[str]:
        """What was found and why, for people."""
        seen = "no order is better" if self.exact else f"the best of {self.num_priced} looked at"
        if self.is_given:
            lines = [f"node order: as given, step {self.before_s:.4g} s over these links; {seen}"]
        else:
            lines = [
                f"node order: {','.join(self.names)}",
                f"  over these links a step takes {self.before_s:.4g} s as given, "
                f"{self.after_s:.4g} s in this order: {100 * self.gain:.1f} % less; {seen}",
            ]
        ways = [("limit", self.limits_after)]
        if not self.is_given:
            ways.insert(0, ("limit as given", self.limits_before))
        return lines + [
            f"  {when}: {told(limit, self.name)}" for when, all_ in ways for limit in all_
        ]


def told(limit: Limit, name: Callable[[int], str]) -> str:
    """One line on a link that others wait for.

    Args:
        limit: the link.
        name: what a node is called.
    """
    what = (
        f"messages of stage {limit.stage}, {1e3 * limit.seconds:.3g} ms each,"
        if limit.kind == "pipeline"
        else f"gradients of stage {limit.stage}, {1e3 * limit.seconds:.3g} ms,"
    )
    return (
        f"{what} from {name(limit.source)} to {name(limit.target)} "
        f"({limit.bytes_per_s / 1e9:.3g} GB/s, {1e6 * limit.latency_s:.3g} us)"
    )
