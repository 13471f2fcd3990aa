"""Which stage runs which nodes of a model with branches.

A partition is a chain of sets of nodes that need nothing outside: each stage is what one set has
more than the set before. Branches may lie on different stages that run at the same time. A chain
of nodes goes to the search over layer partitions, whose results it keeps.

Where there are few partitions all are simulated. Else branch and bound follows the most promising
first, and `GraphPartition.proved` says whether the answer is surely the best.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from copus_ext.extras.graph_stages.stage_graph import StageGraph, check_series_parallel
from copus_ext.extras.graph_stages.timeline import Timeline, simulate
from copus_ext.extras.layer_partition.blocks import Blocks
from copus_ext.extras.layer_partition.layers import LayerPartition, NoPartition, best_partition
from copus_ext.extras.layer_partition.problem import PartitionProblem

GIB = 2.0**30
MAX_SETS = 2_000
"""Sets of nodes that a search looks at; beyond them nodes that follow each other are joined."""
MAX_PASSES = 600_000
"""Passes that a search simulates: a second or two."""
_EDGES_OF_A_PASS = 32
"""Looks at an edge of a stage that take as long as a pass."""
_MAX_NODES = 60
"""So many fit the bits of a number."""
_SAME = 1e-9
_COSTS = (
    "forward_s",
    "backward_s",
    "parameters",
    "static_bytes",
    "saved_bytes",
    "working_bytes",
    "message_s",
)


@dataclass(frozen=True, kw_only=True)
class GraphProblem:
    """Nodes, edges, stages, and what limits them. All stages have the same GPUs.

    Raises:
        ValueError: a graph that is not series-parallel, or a number that makes no sense.
    """

    names: tuple[str, ...]
    """Of the nodes, each behind those that it needs."""
    edges: tuple[tuple[int, int], ...]
    """Node that makes an output, and one that takes it."""
    num_stages: int
    """Stages; all of them get nodes."""
    num_microbatches: int
    """Of a step."""
    forward_s: Any
    """[nodes] seconds of a forward pass of one micro-batch."""
    backward_s: Any
    """[nodes] the same of the backward pass."""
    message_s: Any = 0.0
    """[nodes] seconds of the message with the output, or with its gradient."""
    parameters: Any = 0.0
    """[nodes] parameters."""
    static_bytes: Any = 0.0
    """[nodes] bytes of weights, gradients and optimizer."""
    saved_bytes: Any = 0.0
    """[nodes] bytes kept for every micro-batch in flight."""
    working_bytes: Any = 0.0
    """[nodes] bytes that come and go; one node of a stage at a time has them."""
    limit_bytes: float = np.inf
    """Bytes that a stage may use."""
    joined: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    """Nodes of the problem as it was given that each node stands for; empty: they are the same."""

    def __post_init__(self) -> None:
        for name in ("num_stages", "num_microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        if self.num_stages > len(self.names):
            raise ValueError(
                f"{len(self.names)} nodes cannot fill {self.num_stages} stages; use fewer stages"
            )
        for name in _COSTS:
            values = np.asarray(getattr(self, name), dtype=float)
            if values.shape not in ((), (len(self.names),)):
                raise ValueError(f"{name} must be a number for each of {len(self.names)} nodes")
            if not np.isfinite(values).all() or (values < 0).any():
                raise ValueError(f"{name} must be finite and at least 0")
            object.__setattr__(self, name, np.broadcast_to(values, len(self.names)))
        if not self.limit_bytes > 0:
            raise ValueError(f"limit_bytes {self.limit_bytes} must be more than 0")
        # Checks the edges as well.
        StageGraph(num_nodes=len(self.names), edges=self.edges, stage_of=(0,) * len(self.names))
        check_series_parallel(self.names, self.edges)

    @property
    def is_chain(self) -> bool:
        """Whether each node needs the one before, and nothing else."""
        return set(self.edges) == {(n, n + 1) for n in range(len(self.names) - 1)}

    def graph(self, stage_of: Sequence[int], *, is_sequential: bool = False) -> StageGraph:
        return StageGraph(
            num_nodes=len(self.names),
            edges=self.edges,
            stage_of=tuple(stage_of),
            is_sequential=is_sequential,
        )

    def peak_bytes(self, graph: StageGraph) -> list[float]:
        """Bytes that every stage needs, with the micro-batches in flight that its longest path to
        the end asks for."""
        found = []
        for order, count in zip(graph.order, graph.in_flight(self.num_microbatches)):
            nodes = list(order)
            saved = count * self.saved_bytes[nodes].sum() + self.working_bytes[nodes].max()
            found.append(float(self.static_bytes[nodes].sum() + saved))
        return found

    def step_s(self, graph: StageGraph) -> float:
        """Seconds of a step, simulated exactly."""
        return self.timeline(graph).step_s

    def timeline(self, graph: StageGraph) -> Timeline:
        """When every pass of a step begins and ends."""
        there, back = self.forward_s.tolist(), self.backward_s.tolist()
        return simulate(graph, there, back, self.message_s.tolist(), self.num_microbatches)

    def layers(self) -> PartitionProblem | None:
        """The same as a problem of layers, where the graph is a chain that megatron-core's pipeline
        can run; else None."""
        if not self.is_chain or len(self.names) < 3 or self.num_stages < 2:
            return None
        if np.ptp(self.message_s[:-1]) > 0:
            return None
        blocks = Blocks(**{name: getattr(self, name) for name in _COSTS if name != "message_s"})
        return PartitionProblem(
            pp=self.num_stages,
            num_microbatches=self.num_microbatches,
            blocks=blocks,
            p2p_time_s=float(self.message_s[0]),
            # Beyond all sums of bytes, so that the arithmetic stays finite.
            limit_bytes=min(self.limit_bytes, 1e30),
            bare_ends=True,
        )


@dataclass(frozen=True, kw_only=True)
class GraphPartition:
    """Stages of the nodes, and what they cost."""

    graph: StageGraph
    names: tuple[str, ...]
    """Of the nodes."""
    num_microbatches: int
    """Of a step."""
    step_s: float
    """Seconds of a step, simulated."""
    min_step_s: float
    """No partition that fits is faster than this; `step_s` where `proved`."""
    proved: bool
    """Whether surely none is faster."""
    peak_bytes: tuple[float, ...]
    """Bytes that every stage needs."""
    num_simulated: int
    """Partitions that were simulated to find it."""
    layers: LayerPartition | None = None
    """The answer of the search over layer partitions, for a chain."""

    @property
    def stages(self) -> list[list[str]]:
        """Names of the nodes of every stage, in the order of the forward pass."""
        return [[self.names[n] for n in order] for order in self.graph.order]


def best_graph_partition(
    problem: GraphProblem, *, is_sequential: bool = False, max_passes: int = MAX_PASSES
) -> GraphPartition | NoPartition:
    """The partition with the shortest simulated step among those that fit on every stage.

    Args:
        problem: nodes, edges and limits.
        is_sequential: the plain pipeline over the nodes in the order in which they are given.
        max_passes: what may be simulated.

    Raises:
        ValueError: more branches beside each other than a search can look at.
    """
    if (chain := problem.layers()) is not None:
        return _of_chain(problem, best_partition(chain))
    if is_sequential:
        small, sets = problem, _in_order(problem)
    else:
        small, sets = _reduced(problem)
    search = _Search(small, sets, is_sequential=is_sequential, max_passes=max_passes)
    found = search.run()
    if small is problem:
        return found
    if not isinstance(found, NoPartition):
        return _spread(found, problem, small)
    # Nodes were joined: cut between them something may fit.
    last = _Search(problem, _in_order(problem), is_sequential=False, max_passes=max_passes).run()
    if isinstance(last, NoPartition):
        return replace(last, proved=False)
    own = tuple((n,) for n in range(len(problem.names)))
    return _spread(last, problem, replace(problem, joined=own))


def _in_order(problem: GraphProblem) -> list[int]:
    """The sets of nodes in the order in which they are given."""
    return [(1 << k) - 1 for k in range(len(problem.names) + 1)]


def _of_chain(
    problem: GraphProblem, found: LayerPartition | NoPartition
) -> GraphPartition | NoPartition:
    if isinstance(found, NoPartition):
        return found
    counts = list(found.layers)
    counts[0] += 1
    counts[-1] += 1
    stage_of = [r for r, count in enumerate(counts) for _ in range(count)]
    return GraphPartition(
        graph=problem.graph(stage_of),
        names=problem.names,
        num_microbatches=problem.num_microbatches,
        step_s=found.step_s,
        min_step_s=found.min_step_s,
        proved=found.proved,
        peak_bytes=found.peak_bytes,
        num_simulated=found.num_simulated,
        layers=found,
    )


def closed_sets(num_nodes: int, edges: Sequence[tuple[int, int]], most: int) -> list[int] | None:
    """All sets of nodes, as bits, that hold what each of their nodes needs; smaller ones first.

    Args:
        most: None where there are more.
    """
    needs = [0] * num_nodes
    for a, b in edges:
        needs[b] |= 1 << a
    found, layer = [0], {0}
    while layer:
        following = set()
        for one in layer:
            for n in range(num_nodes):
                if not one >> n & 1 and needs[n] & one == needs[n]:
                    following.add(one | 1 << n)
        found += sorted(following)
        if len(found) > most:
            return None
        layer = following
    return found


def _reduced(problem: GraphProblem) -> tuple[GraphProblem, list[int]]:
    """The problem with nodes joined until the search can look at all its sets, and these sets."""
    while True:
        num = len(problem.names)
        if num <= _MAX_NODES:
            sets = closed_sets(num, problem.edges, MAX_SETS)
            if sets is not None:
                return problem, sets
        joined = _join_one(problem)
        if joined is None:
            raise ValueError(
                "too many branches stand beside each other for the search; join some into one node"
            )
        problem = joined


def _join_one(problem: GraphProblem) -> GraphProblem | None:
    """The problem with the two nodes joined that follow each other, with nothing beside, and have
    the least work together."""
    graph, num = problem.graph([0] * len(problem.names)), len(problem.names)
    if num <= problem.num_stages:
        return None
    work = problem.forward_s + problem.backward_s
    pairs = [
        (work[a] + work[b], a, b)
        for a, b in problem.edges
        if len(graph.consumers[a]) == 1 and len(graph.producers[b]) == 1
    ]
    if not pairs:
        return None
    _, a, b = min(pairs)
    to = [n - (n > b) for n in range(num)]
    # The first of both may stand before nodes that the second needs nothing of: numbers stay.
    to[b] = to[a]
    edges = tuple(sorted({(to[x], to[y]) for x, y in problem.edges if to[x] != to[y]}))
    groups = problem.joined or tuple((n,) for n in range(num))
    own = {name: np.delete(getattr(problem, name), b) for name in _COSTS}
    for name in _COSTS:
        pick: Any = {"working_bytes": max, "message_s": lambda _, last: last}.get(name)
        values = float(getattr(problem, name)[a]), float(getattr(problem, name)[b])
        own[name] = own[name].copy()
        own[name][to[a]] = pick(*values) if pick else sum(values)
    return replace(
        problem,
        names=tuple(name for n, name in enumerate(problem.names) if n != b),
        edges=edges,
        joined=tuple(groups[n] + (groups[b] if n == a else ()) for n in range(num) if n != b),
        **own,
    )


def _spread(found: GraphPartition, problem: GraphProblem, small: GraphProblem) -> GraphPartition:
    """The partition of the nodes as they were given."""
    stage_of = [0] * len(problem.names)
    for group, stage in zip(small.joined, found.graph.stage_of):
        for n in group:
            stage_of[n] = stage
    graph = problem.graph(stage_of)
    step_s = problem.step_s(graph)
    # Others may be faster that part what was joined.
    total = float((problem.forward_s + problem.backward_s).sum()) * problem.num_microbatches
    least = total / problem.num_stages
    return replace(
        found,
        graph=graph,
        names=problem.names,
        step_s=step_s,
        min_step_s=min(least, step_s),
        proved=step_s <= least * (1 + _SAME),
        peak_bytes=tuple(problem.peak_bytes(graph)),
    )


class _Search:
    """Branch and bound over chains of sets.

    Args:
        problem: of at most `_MAX_NODES` nodes where it is not sequential.
        sets: as bits, from the empty one to that of all nodes.
        is_sequential: as for `best_graph_partition`.
        max_passes: what may be simulated.
    """

    def __init__(
        self, problem: GraphProblem, sets: list[int], *, is_sequential: bool, max_passes: int
    ) -> None:
        self.problem, self.sets = problem, sets
        self.is_sequential, self.most, self.left = is_sequential, max_passes, max_passes
        self.best: GraphPartition | None = None
        self.spent: tuple[float, int] = np.inf, 0
        self.seen: set[tuple[int, ...]] = set()
        self.unseen_s = np.inf
        self.min_lack = np.inf
        work = problem.forward_s + problem.backward_s
        members = [[n for n in range(len(problem.names)) if s >> n & 1] for s in sets]
        self.work = np.array([work[m].sum() for m in members])
        self.held = np.array(
            [(problem.static_bytes[m] + problem.saved_bytes[m]).sum() for m in members]
        )
        self.bottleneck, self.fullest = self._min_of_max(self.work, self.held)

    @functools.cached_property
    def contained(self) -> list[Any]:
        """For every set the numbers of those that hold more."""
        if all(a & b == a for a, b in itertools.pairwise(self.sets)):
            return [np.arange(k + 1, len(self.sets)) for k in range(len(self.sets))]
        bits = np.array(self.sets, dtype=np.uint64)
        return [np.flatnonzero(((bits & one) == one) & (bits != one)) for one in bits]

    def _min_of_max(self, *amounts: Any) -> list[Any]:
        """[stages + 1, sets] for each amount of the sets, the least that the stage with most of it
        has, of so many stages that hold what a set lacks."""
        shape = self.problem.num_stages + 1, len(self.sets)
        results = [np.full(shape, np.inf) for _ in amounts]
        for amount, found in zip(amounts, results):
            found[0, -1] = 0.0
            for k in range(1, len(found)):
                for i, more in enumerate(self.contained):
                    if len(more):
                        own = np.maximum(amount[more] - amount[i], found[k - 1, more])
                        found[k, i] = own.min()
        return results

    def run(self) -> GraphPartition | NoPartition:
        self._follow(0, (), 0.0)
        if self.best is None:
            return self._nothing()
        least = min(self.unseen_s, self.best.step_s)
        return replace(
            self.best,
            proved=not self.unseen_s < self.best.step_s * (1 - _SAME),
            min_step_s=least,
            num_simulated=len(self.seen),
        )

    def _follow(self, at: int, stages: tuple[int, ...], slowest: float) -> None:
        """Looks at all partitions that begin with some stages.

        Args:
            at: number of the set that these stages make up.
        """
        p, left = self.problem, self.problem.num_stages - len(stages)
        if not left:
            self._try(stages)
            return
        more = self.contained[at] if left > 1 else np.array([len(self.sets) - 1])
        bound = np.maximum(self.work[more] - self.work[at], self.bottleneck[left - 1, more])
        bound = np.maximum(bound, slowest)
        held = np.maximum(self.held[more] - self.held[at], self.fullest[left - 1, more])
        ok = np.isfinite(bound) & (held <= p.limit_bytes)
        lacks = held[np.isfinite(bound) & ~ok] - p.limit_bytes
        self.min_lack = min([self.min_lack, *lacks])
        more, bound = more[ok], bound[ok]
        # Ways on that lead to no partition count, too: one edge of one takes so much less.
        self.left -= len(more) * len(p.edges) // _EDGES_OF_A_PASS
        cut = [self._cut(self.sets[int(i)] & ~self.sets[at]) for i in more]
        for i in np.lexsort((cut, bound)):
            least = p.num_microbatches * float(bound[i])
            if self.best is not None and least >= self.best.step_s * (1 - _SAME):
                break
            # Where nothing has fitted yet, it goes on for longer.
            if self.left <= (0 if self.best is not None else -9 * self.most):
                self.unseen_s = min(self.unseen_s, least)
                break
            own = self.sets[int(more[i])] & ~self.sets[at]
            if self._is_first(stages, own):
                busiest = max(slowest, float(self.work[more[i]] - self.work[at]))
                self._follow(int(more[i]), (*stages, own), busiest)

    def _cut(self, own: int) -> int:
        return sum((own >> a & 1) != (own >> b & 1) for a, b in self.problem.edges)

    def _is_first(self, stages: tuple[int, ...], own: int) -> bool:
        """Whether no other order of the same stages is looked at, too: of two that do not need each
        other, the one with the first node comes first."""
        if self.is_sequential or not stages:
            return True
        last = stages[-1]
        needs = any(last >> a & 1 and own >> b & 1 for a, b in self.problem.edges)
        return needs or (last & -last) < (own & -own)

    def _try(self, stages: tuple[int, ...]) -> None:
        if (key := tuple(sorted(stages)) if not self.is_sequential else stages) in self.seen:
            return
        self.seen.add(key)
        p = self.problem
        stage_of = [
            next(r for r, own in enumerate(stages) if own >> n & 1) for n in range(len(p.names))
        ]
        graph = p.graph(stage_of, is_sequential=self.is_sequential)
        self.left -= 2 * p.num_microbatches * sum(map(len, graph.segments))
        peaks = p.peak_bytes(graph)
        lacks = max(peaks) - p.limit_bytes
        if lacks > 0:
            self.min_lack = min(self.min_lack, lacks)
            return
        step_s = p.step_s(graph)
        limit = np.inf if self.best is None else self.best.step_s
        # Of equally fast ones, that with the most memory to spare, then that with fewer messages.
        spent = max(peaks), len(graph.messages)
        is_same = step_s <= limit * (1 + _SAME) and spent < self.spent
        if step_s < limit * (1 - _SAME) or is_same:
            self.spent = spent
            self.best = GraphPartition(
                graph=graph,
                names=p.names,
                num_microbatches=p.num_microbatches,
                step_s=step_s,
                min_step_s=0.0,
                proved=False,
                peak_bytes=tuple(peaks),
                num_simulated=0,
            )

    def _nothing(self) -> NoPartition:
        p = self.problem
        return NoPartition(
            code="memory",
            detail=(
                f"no partition of {len(p.names)} nodes over {p.num_stages} stages fits in "
                f"{p.limit_bytes / GIB:.1f} GiB"
            ),
            fix=(
                f"{self.min_lack / GIB:.1f} GiB too much at least; use more stages or a "
                "smaller micro-batch"
            ),
            proved=not np.isfinite(self.unseen_s),
        )
