"""Stages of a model that has branches: which stage runs which nodes, what it sends, in which order.

A node is a part of the model that no stage splits. Nodes are numbered so that each comes behind
those it needs. The planner simulates the order that stands here, and the trainer runs it.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Message:
    """An output that one stage gives to another, and its gradient on the way back."""

    producer: int
    """Node whose output it is; it may have come to the source in a message itself."""
    source: int
    """Stage that sends the output and receives the gradient."""
    target: int
    """Stage that receives the output and sends the gradient."""
    leaves: int
    """Node of the source: the output goes behind its forward pass, its backward pass waits for the
    gradient."""
    enters: int
    """Node of the target: its forward pass waits for the output, the gradient goes behind its
    backward pass."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Some nodes of a stage, one behind the other, on one micro-batch."""

    stage: int
    segment: int
    """Place of these nodes among those of the stage; see `StageGraph.segments`."""
    micro_batch: int
    is_backward: bool


@dataclass(frozen=True, kw_only=True)
class StageGraph:
    """Nodes, edges, and the stage of every node.

    Each stage runs 1F1B: as many forward passes ahead as stages follow it on the longest path, then
    one backward pass for each forward pass. Inside a stage, nodes that need no other stage come
    first in the forward pass and last in the backward pass. So stages that do not need each other
    run at the same time, and so does the part of a stage that does not need another.

    Raises:
        ValueError: edges or stages that make no sense, or stages that wait for each other.
    """

    num_nodes: int
    edges: tuple[tuple[int, int], ...]
    """Node that makes an output, and one that takes it; in order, each once."""
    stage_of: tuple[int, ...]
    is_sequential: bool = False
    """Whether the stages are those of a plain pipeline, which run one after the other even where
    they do not need each other: each hands on what later ones need."""

    def __post_init__(self) -> None:
        if len(self.stage_of) != self.num_nodes or not self.num_nodes:
            raise ValueError(f"{self.num_nodes} nodes need as many stages and at least one node")
        if any(not 0 <= a < b < self.num_nodes for a, b in self.edges):
            raise ValueError("an edge must lead from a node to one of a larger number")
        if len(set(self.edges)) < len(self.edges):
            raise ValueError("an edge is there twice")
        if set(self.stage_of) != set(range(self.num_stages)):
            raise ValueError(f"stages {sorted(set(self.stage_of))} must be 0, 1, ... without a gap")
        if self.is_sequential and any(self.stage_of[a] > self.stage_of[b] for a, b in self.edges):
            raise ValueError("a node of a sequential pipeline needs a later stage")
        _ = self.ahead

    @property
    def num_stages(self) -> int:
        return max(self.stage_of) + 1

    @functools.cached_property
    def stage_edges(self) -> frozenset[tuple[int, int]]:
        """Stages that wait for each other: the earlier and the later one."""
        if self.is_sequential:
            return frozenset((r, r + 1) for r in range(self.num_stages - 1))
        both = ((self.stage_of[a], self.stage_of[b]) for a, b in self.edges)
        return frozenset((a, b) for a, b in both if a != b)

    @functools.cached_property
    def ahead(self) -> tuple[int, ...]:
        """Stages behind every stage on the longest path to the end: the forward passes that it does
        before its first backward pass, besides that of its own micro-batch."""
        behind = [0] * self.num_stages
        waiting = [sum(a == r for a, _ in self.stage_edges) for r in range(self.num_stages)]
        ready = [r for r in range(self.num_stages) if not waiting[r]]
        done = 0
        while ready:
            r = ready.pop()
            done += 1
            for a, b in self.stage_edges:
                if b == r:
                    behind[a] = max(behind[a], behind[r] + 1)
                    waiting[a] -= 1
                    if not waiting[a]:
                        ready.append(a)
        if done < self.num_stages:
            raise ValueError("stages wait for each other in a circle")
        return tuple(behind)

    @functools.cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """Nodes that take the output of every node."""
        return tuple(tuple(b for a, b in self.edges if a == n) for n in range(self.num_nodes))

    @functools.cached_property
    def producers(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(a for a, b in self.edges if b == n) for n in range(self.num_nodes))

    @functools.cached_property
    def order(self) -> tuple[tuple[int, ...], ...]:
        """Nodes of every stage in the order of the forward pass; the backward pass turns it round.

        What needs no other stage comes first, and there what another stage waits for.
        """
        own: list[list[int]] = [[] for _ in range(self.num_stages)]
        for node, stage in enumerate(self.stage_of):
            own[stage].append(node)
        if self.is_sequential:
            return tuple(map(tuple, own))
        needs, feeds = [False] * self.num_nodes, [False] * self.num_nodes
        for n in range(self.num_nodes):
            needs[n] = any(self._crosses(p, n) or needs[p] for p in self.producers[n])
        for n in reversed(range(self.num_nodes)):
            feeds[n] = any(self._crosses(n, c) or feeds[c] for c in self.consumers[n])
        found = []
        for nodes in own:
            left = {n: sum(not self._crosses(p, n) for p in self.producers[n]) for n in nodes}
            ready = [(needs[n], not feeds[n], n) for n in nodes if not left[n]]
            heapq.heapify(ready)
            order: list[int] = []
            while ready:
                n = heapq.heappop(ready)[-1]
                order.append(n)
                for c in self.consumers[n]:
                    if not self._crosses(n, c):
                        left[c] -= 1
                        if not left[c]:
                            heapq.heappush(ready, (needs[c], not feeds[c], c))
            found.append(tuple(order))
        return tuple(found)

    def _crosses(self, a: int, b: int) -> bool:
        return self.stage_of[a] != self.stage_of[b]

    @functools.cached_property
    def messages(self) -> tuple[Message, ...]:
        """All messages of a micro-batch. Their order, in which a stage sends those that it has at
        the same time, does not depend on the numbers of stages."""
        found = self._handed_on() if self.is_sequential else self._direct()
        return tuple(sorted(found, key=lambda m: (m.producer, m.enters, m.leaves)))

    def _direct(self) -> list[Message]:
        found = []
        for node in range(self.num_nodes):
            source = self.stage_of[node]
            for target in sorted({self.stage_of[c] for c in self.consumers[node]} - {source}):
                enters = next(n for n in self.order[target] if n in self.consumers[node])
                found.append(
                    Message(producer=node, source=source, target=target, leaves=node, enters=enters)
                )
        return found

    def _handed_on(self) -> list[Message]:
        found = []
        for node in range(self.num_nodes):
            last = max((self.stage_of[c] for c in self.consumers[node]), default=-1)
            for r in range(self.stage_of[node], last):
                leaves, enters = self.order[r][-1], self.order[r + 1][0]
                found.append(
                    Message(producer=node, source=r, target=r + 1, leaves=leaves, enters=enters)
                )
        return found

    @functools.cached_property
    def segments(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Nodes of every stage in runs: messages enter only at the start of a run, and leave only
        at its end."""
        starts = {m.enters for m in self.messages}
        ends = {m.leaves for m in self.messages}
        found = []
        for order in self.order:
            runs: list[list[int]] = [[]]
            for n in order:
                if runs[-1] and (n in starts or runs[-1][-1] in ends):
                    runs.append([])
                runs[-1].append(n)
            found.append(tuple(map(tuple, runs)))
        return tuple(found)

    def in_flight(self, num_microbatches: int) -> list[int]:
        """Micro-batches that every stage keeps at a time."""
        return [min(k + 1, num_microbatches) for k in self.ahead]

    def program(self, stage: int, num_microbatches: int) -> list[Pass]:
        """Passes of a stage in order."""
        early = min(self.ahead[stage], num_microbatches)
        turns = [(m, False) for m in range(early)]
        for m in range(early, num_microbatches):
            turns += [(m, False), (m - early, True)]
        turns += [(m, True) for m in range(num_microbatches - early, num_microbatches)]
        count = len(self.segments[stage])
        return [
            Pass(stage=stage, segment=k, micro_batch=m, is_backward=back)
            for m, back in turns
            for k in (reversed(range(count)) if back else range(count))
        ]

    def entering(self, stage: int, segment: int) -> list[int]:
        """Numbers of the messages that a segment waits for in its forward pass, and whose gradients
        it sends behind its backward pass."""
        first = self.segments[stage][segment][0]
        return [i for i, m in enumerate(self.messages) if m.target == stage and m.enters == first]

    def leaving(self, stage: int, segment: int) -> list[int]:
        """Numbers of the messages that a segment sends behind its forward pass, and whose gradients
        it waits for in its backward pass."""
        last = self.segments[stage][segment][-1]
        return [i for i, m in enumerate(self.messages) if m.source == stage and m.leaves == last]


def check_series_parallel(names: Sequence[str], edges: Sequence[tuple[int, int]]) -> None:
    """Checks that a graph is made by series and parallel composition alone: by replacing edges that
    run side by side, or one behind the other, by one, it becomes a single edge.

    Args:
        edges: each from a node to one of a larger number. Nodes without one begin or end the model.

    Raises:
        ValueError: it is not; the message names the nodes in question.
    """
    num = len(names)
    start, end = num, num + 1
    after: dict[int, set[int]] = {n: set() for n in range(num + 2)}
    before: dict[int, set[int]] = {n: set() for n in range(num + 2)}

    def join(a: int, b: int) -> None:
        after[a].add(b)
        before[b].add(a)

    for a, b in edges:
        join(a, b)
    for n in range(num):
        if not before[n]:
            join(start, n)
        if not after[n]:
            join(n, end)
    ready = list(range(num))
    left = set(ready)
    while ready:
        n = ready.pop()
        if n not in left or len(before[n]) != 1 or len(after[n]) != 1:
            continue
        (a,), (b,) = before[n], after[n]
        left.discard(n)
        after[a].discard(n)
        before[b].discard(n)
        join(a, b)
        ready += [m for m in (a, b) if m in left]
    if left:
        some = ", ".join(names[n] for n in sorted(left)[:6])
        more = ", ..." if len(left) > 6 else ""
        raise ValueError(
            f"the graph is not series-parallel: look at {some}{more}; branches must part at one "
            "node and meet at one node, so put a node between where several meet several"
        )
