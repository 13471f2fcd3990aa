"""Stages as a graph: exact clocks, the search against enumeration, chains as before."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from copus_ext.cost_model.schedule import pipeline_time
from copus_ext.extras.graph_stages.search import (
    GraphPartition,
    GraphProblem,
    best_graph_partition,
    closed_sets,
)
from copus_ext.extras.graph_stages.stage_graph import StageGraph, check_series_parallel
from copus_ext.extras.graph_stages.timeline import problems, simulate
from copus_ext.extras.layer_partition.layers import LayerPartition, NoPartition, best_partition

Edges = tuple[tuple[int, int], ...]
numbers = st.integers(1, 9).map(lambda x: x / 4)


def names(count: int) -> tuple[str, ...]:
    return tuple(f"n{i}" for i in range(count))


def branches(count: int, layers: int, behind: int) -> tuple[int, Edges]:
    """Number of nodes and edges of equal branches before a chain."""
    first = count * layers
    own = [(b * layers + i, b * layers + i + 1) for b in range(count) for i in range(layers - 1)]
    own += [(b * layers + layers - 1, first) for b in range(count)]
    return first + behind, tuple(
        sorted([*own, *((first + i, first + i + 1) for i in range(behind - 1))])
    )


def series_parallel(count: int, seed: int) -> Edges:
    """The edges of a random graph made by series and parallel composition of nodes.

    It starts as one edge from start to end. A node then divides an edge into two, or stands beside
    one. Start and end are no nodes: what they join begins or ends the model.
    """
    rng = random.Random(seed)
    start, end = -1.0, 1e9
    edges, place = [(start, end)], [start, end]
    for _ in range(count):
        a, b = rng.choice(edges)
        # Its place is behind all that it needs and before all that needs it.
        node = rng.uniform(a, min(b, a + 1e6))
        if rng.random() < 0.5:
            edges.remove((a, b))
        edges += [(a, node), (node, b)]
        place.append(node)
    number = {x: i for i, x in enumerate(sorted(place)[1:-1])}
    kept = {(number[a], number[b]) for a, b in edges if a in number and b in number}
    return tuple(sorted(kept))


@st.composite
def graph_problems(draw: Any, most: int = 7) -> GraphProblem:
    count = draw(st.integers(1, most))
    edges = series_parallel(count, draw(st.integers(0, 10**6)))
    costs = {
        name: draw(st.lists(numbers, min_size=count, max_size=count))
        for name in ("forward_s", "backward_s", "static_bytes", "saved_bytes", "working_bytes")
    }
    hops = st.sampled_from([0.0, 0.1, 1.0])
    return GraphProblem(
        names=names(count),
        edges=edges,
        num_stages=draw(st.integers(1, min(count, 4))),
        num_microbatches=draw(st.integers(1, 6)),
        message_s=draw(st.lists(hops, min_size=count, max_size=count)),
        limit_bytes=draw(st.sampled_from([1e9, 12.0, 8.0, 5.0])) + 0.0123,
        **costs,
    )


def partitions(count: int, blocks: int) -> Iterator[list[int]]:
    """All ways to share nodes out over so many stages, numbered as they first come."""

    def grow(given: list[int], used: int) -> Iterator[list[int]]:
        if len(given) == count:
            if used == blocks:
                yield given
            return
        for k in range(min(used + 1, blocks)):
            yield from grow([*given, k], max(used, k + 1))

    yield from grow([], 0)


@settings(max_examples=150, deadline=None)
@given(problem=graph_problems())
def test_the_search_finds_what_enumeration_finds(problem: GraphProblem) -> None:
    best = np.inf
    for stage_of in partitions(len(problem.names), problem.num_stages):
        try:
            graph = problem.graph(stage_of)
        except ValueError:  # stages that wait for each other
            continue
        if max(problem.peak_bytes(graph)) <= problem.limit_bytes:
            best = min(best, problem.step_s(graph))
    if problem.layers() is not None:  # a chain has the clocks of megatron-core's own schedule
        return
    found = best_graph_partition(problem)
    if isinstance(found, NoPartition):
        assert best == np.inf and found.proved and found.code == "memory"
        return
    assert found.step_s == pytest.approx(best, rel=1e-12) and found.proved
    assert max(found.peak_bytes) <= problem.limit_bytes


def naive_end(graph: StageGraph, costs: Any, count: int) -> float:
    """The step without time for messages: the longest path through what waits for what, node by
    node, from the rules alone."""
    forward, backward = costs
    before: dict[Any, Any] = {}
    for r, order in enumerate(graph.order):
        early = min(graph.ahead[r], count)
        turns: list[Any] = [(m, False) for m in range(early)]
        for m in range(count):
            turns += [(m + early, False)] if m + early < count else []
            turns += [(m, True)]
        last = None
        for m, back in turns:
            for n in reversed(order) if back else order:
                before[n, m, back] = last
                last = n, m, back

    @functools.cache
    def end(n: int, m: int, back: bool) -> float:
        needs = graph.consumers[n] if back else graph.producers[n]
        waits = [end(x, m, back) for x in needs]
        if before[n, m, back] is not None:
            waits.append(end(*before[n, m, back]))
        return max(waits, default=0.0) + (backward if back else forward)[n]

    return max(end(*key) for key in before)


@settings(max_examples=150, deadline=None)
@given(problem=graph_problems(), seed=st.integers(0, 1000))
def test_clocks_are_valid_and_those_of_the_longest_path(problem: GraphProblem, seed: int) -> None:
    ways = []
    for stage_of in partitions(len(problem.names), problem.num_stages):
        try:
            ways.append(problem.graph(stage_of))
        except ValueError:
            continue
    graph, count = ways[seed % len(ways)], problem.num_microbatches
    there, back = problem.forward_s.tolist(), problem.backward_s.tolist()
    timeline = simulate(graph, there, back, problem.message_s.tolist(), count)
    assert problems(timeline, graph, count) == []
    quick = simulate(graph, there, back, [0.0] * len(there), count)
    assert quick.step_s == pytest.approx(naive_end(graph, (there, back), count), rel=1e-12)
    assert timeline.step_s >= quick.step_s - 1e-9
    for order, kept in zip(graph.order, graph.in_flight(count)):
        assert kept >= 1 and order
    live = most_live(timeline, graph)
    assert live == graph.in_flight(count)


def most_live(timeline: Any, graph: StageGraph) -> list[int]:
    """Micro-batches that each stage holds at most, counted along its passes."""
    held: list[set[int]] = [set() for _ in range(graph.num_stages)]
    most = [0] * graph.num_stages
    for p, _, _ in timeline.passes:
        if p.is_backward and p.segment == 0:
            held[p.stage].discard(p.micro_batch)
        elif not p.is_backward:
            held[p.stage].add(p.micro_batch)
        most[p.stage] = max(most[p.stage], len(held[p.stage]))
    return most


def test_a_broken_timeline_is_found() -> None:
    graph = StageGraph(num_nodes=3, edges=((0, 2), (1, 2)), stage_of=(0, 1, 2))
    good = simulate(graph, [1.0] * 3, [2.0] * 3, [0.5] * 3, 2)
    assert problems(good, graph, 2) == []
    early = [(p, start - 0.6 * (p.stage == 2), end) for p, start, end in good.passes]
    bad = type(good)(passes=tuple(early), sent=good.sent, stage_s=good.stage_s)
    assert any("too late" in line or "at once" in line for line in problems(bad, graph, 2))


@settings(max_examples=30, deadline=None)
@given(
    work=st.lists(numbers, min_size=3, max_size=12),
    hop=st.sampled_from([0.0, 0.1, 1.0]),
    stages=st.integers(2, 5),
    count=st.integers(1, 12),
    limit=st.sampled_from([1e9, 30.0, 15.0]),
)
def test_a_chain_has_the_results_of_the_search_over_layers(
    work: list[float], hop: float, stages: int, count: int, limit: float
) -> None:
    num = len(work)
    problem = GraphProblem(
        names=names(num),
        edges=tuple((n, n + 1) for n in range(num - 1)),
        num_stages=min(stages, num),
        num_microbatches=count,
        forward_s=work,
        backward_s=[2 * x for x in work],
        message_s=hop,
        static_bytes=work,
        saved_bytes=work,
        limit_bytes=limit + 0.0123,
    )
    layers = problem.layers()
    assert layers is not None
    before, found = best_partition(layers), best_graph_partition(problem)
    assert best_graph_partition(problem, is_sequential=True) == found
    if isinstance(before, NoPartition):
        assert found == before
        return
    assert isinstance(found, GraphPartition) and isinstance(before, LayerPartition)
    # Bit for bit.
    assert found.layers == before and found.step_s == before.step_s
    assert found.peak_bytes == before.peak_bytes
    sizes = [len(nodes) for nodes in found.stages]
    assert sizes == [n + (r in (0,)) + (r == len(sizes) - 1) for r, n in enumerate(before.layers)]
    # The memory of the graph counts the same micro-batches.
    assert problem.peak_bytes(found.graph) == pytest.approx(list(before.peak_bytes))


@settings(max_examples=30, deadline=None)
@given(
    work=st.lists(numbers, min_size=2, max_size=5),
    count=st.integers(1, 9),
    is_sequential=st.booleans(),
)
def test_a_chain_is_as_fast_as_plain_1f1b_or_faster(
    work: list[float], count: int, is_sequential: bool
) -> None:
    pp = len(work)
    edges = tuple((n, n + 1) for n in range(pp - 1))
    graph = StageGraph(
        num_nodes=pp, edges=edges, stage_of=tuple(range(pp)), is_sequential=is_sequential
    )
    back = [1.7 * x for x in work]
    found = simulate(graph, work, back, [0.0] * pp, count)
    f, g = np.array(work)[:, None, None], np.array(back)[:, None, None]
    clocks = pipeline_time(f, g, np.zeros((pp, 1)), np.array([count]), vpp=1)[:, 0]
    # Plain 1F1B waits for the receiver of a message, too; equal stages do not notice.
    assert (np.array(found.stage_s) <= clocks * (1 + 1e-12)).all()
    if len(set(work)) == 1:
        assert np.allclose(found.stage_s, clocks, rtol=1e-12)


@pytest.mark.parametrize("is_sequential", [False, True])
def test_a_last_node_that_fits_nowhere_ends_the_search_at_once(is_sequential: bool) -> None:
    # All ways to it would be followed to their end: more than can be.
    num, edges = branches(2, 16, 16)
    found = best_graph_partition(
        GraphProblem(
            names=names(num),
            edges=edges,
            num_stages=8,
            num_microbatches=4,
            forward_s=[1.0] * num,
            backward_s=[2.0] * num,
            static_bytes=[1.0] * (num - 1) + [99.0],
            limit_bytes=10.0,
        ),
        is_sequential=is_sequential,
    )
    assert isinstance(found, NoPartition)


def equal_branches(count: int, num_microbatches: int) -> GraphProblem:
    num, edges = branches(count, 1, 1)
    return GraphProblem(
        names=names(num),
        edges=edges,
        num_stages=num,
        num_microbatches=num_microbatches,
        forward_s=1.0,
        backward_s=2.0,
        message_s=0.01,
    )


def test_four_equal_branches_gain_a_quarter_and_chains_nothing() -> None:
    problem = equal_branches(4, 8)
    graph, plain = best_graph_partition(problem), best_graph_partition(problem, is_sequential=True)
    assert isinstance(graph, GraphPartition) and isinstance(plain, GraphPartition)
    assert plain.step_s / graph.step_s >= 1.25
    assert graph.graph.in_flight(8) == [2, 2, 2, 2, 1]
    assert plain.graph.in_flight(8) == [5, 4, 3, 2, 1]
    chain = equal_branches(1, 8)
    graph, plain = best_graph_partition(chain), best_graph_partition(chain, is_sequential=True)
    assert isinstance(graph, GraphPartition) and isinstance(plain, GraphPartition)
    assert plain.step_s / graph.step_s == pytest.approx(1.0, abs=0.01)


def test_two_stages_run_their_branches_at_the_same_time() -> None:
    num, edges = branches(4, 4, 1)
    problem = GraphProblem(
        names=names(num),
        edges=edges,
        num_stages=2,
        num_microbatches=4,
        forward_s=[1.0] * 16 + [0.1],
        backward_s=[2.0] * 16 + [0.2],
    )
    graph, plain = best_graph_partition(problem), best_graph_partition(problem, is_sequential=True)
    assert isinstance(graph, GraphPartition) and isinstance(plain, GraphPartition)
    assert graph.proved and plain.step_s / graph.step_s > 1.2


def test_a_large_graph_is_joined_until_the_search_can_look_at_it() -> None:
    num, edges = branches(4, 12, 24)
    problem = GraphProblem(
        names=names(num),
        edges=edges,
        num_stages=6,
        num_microbatches=8,
        forward_s=1.0,
        backward_s=2.0,
        limit_bytes=1e9,
    )
    found = best_graph_partition(problem, max_passes=5_000)
    assert isinstance(found, GraphPartition)
    assert sum(map(len, found.stages)) == num and len(found.stages) == 6
    assert found.step_s == problem.step_s(found.graph) and found.min_step_s <= found.step_s
    assert closed_sets(num, edges, 2_000) is None


def test_where_nothing_fits_nodes_are_joined_no_more() -> None:
    # 13 nodes of a branch fit on a stage, and those that the search joins are larger.
    num, edges = branches(4, 13, 26)
    problem = GraphProblem(
        names=names(num),
        edges=edges,
        num_stages=6,
        num_microbatches=4,
        forward_s=[1.0 + n % 2 for n in range(num)],
        backward_s=2.0,
        static_bytes=1.0,
        limit_bytes=13.0,
    )
    found = best_graph_partition(problem, max_passes=5_000)
    assert isinstance(found, GraphPartition) and not found.proved
    assert found.peak_bytes == (13.0,) * 6 and found.step_s == problem.step_s(found.graph)


def test_closed_sets_hold_what_they_need() -> None:
    assert closed_sets(3, [(0, 2), (1, 2)], 100) == [0b000, 0b001, 0b010, 0b011, 0b111]


@pytest.mark.parametrize(
    "edges",
    [
        ((0, 2), (0, 3), (1, 2), (1, 3)),
        ((0, 1), (0, 2), (1, 2), (1, 3), (2, 3), (0, 3), (3, 4)),
    ],
)
def test_other_graphs_are_refused_in_one_line(edges: Edges) -> None:
    count = 1 + max(b for _, b in edges)
    with pytest.raises(ValueError, match="not series-parallel") as caught:
        check_series_parallel(names(count), edges)
    assert "\n" not in str(caught.value) and "n0" in str(caught.value)


@given(count=st.integers(1, 12), seed=st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_composed_graphs_are_series_parallel(count: int, seed: int) -> None:
    check_series_parallel(names(count), series_parallel(count, seed))


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"edges": ((1, 0),)}, "larger number"),
        ({"edges": ((0, 1), (0, 1))}, "twice"),
        ({"stage_of": (0, 2, 1), "num_nodes": 3, "edges": ((0, 1),)}, None),
        ({"stage_of": (0, 2), "edges": ()}, "gap"),
        ({"stage_of": (0, 1, 0), "num_nodes": 3, "edges": ((0, 1), (1, 2))}, "circle"),
    ],
)
def test_stages_that_make_no_sense_are_refused(given_: dict[str, Any], said: str | None) -> None:
    values = {"num_nodes": 2, "edges": ((0, 1),), "stage_of": (0, 1), **given_}
    if said is None:
        StageGraph(**values)
        return
    with pytest.raises(ValueError, match=said):
        StageGraph(**values)
