"""The order of nodes: equal to brute force where that can be had, near the best known beyond."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from copus_ext.cost_model.cluster_spec import Links, Matrix, preset
from copus_ext.cost_model.models import PRESETS
from copus_ext.cost_model.schedule import pipeline_time
from copus_ext.cost_model.spec_file import SpecError
from copus_ext.cost_model.step import EndOfStep
from copus_ext.extras.uneven import node_order
from copus_ext.extras.uneven.node_order import (
    equivalent_nodes,
    find_order,
    job_of,
    network_of,
    order_for,
)
from copus_ext.extras.uneven.orders import every_order
from copus_ext.extras.uneven.pricing import Job, Network, Placement
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.search import Planner
from copus_ext.planner.space import Limits
from megatron.trainer.config.layout import Layout

SLOW = settings(max_examples=12, deadline=None)


def matrix(values: Any) -> Matrix:
    square = np.array(values, dtype=np.float64)
    np.fill_diagonal(square, 0.0)
    return tuple(tuple(row) for row in square.tolist())


def network(speed: Any, latency: Any = 1e-5, *, gpus_per_node: int = 4, **how: Any) -> Network:
    speed = np.array(speed, dtype=np.float64)
    latency = np.broadcast_to(latency, speed.shape)
    links = Links(bytes_per_s=matrix(speed), latency_s=matrix(latency))
    return Network(
        gpus_per_node=gpus_per_node,
        inside_bytes_per_s=100e9,
        nic_bytes_per_s=45e9,
        links=links,
        exchange_s=3e-5,
        ring_s=1e-5,
        **how,
    )


def job(tp: int, pp: int, dp: int, *, vpp: int = 1, count: int = 8, seed: int = 0) -> Job:
    rng = np.random.default_rng(seed)
    size = rng.uniform(1e8, 4e8, (pp, 1))
    return Job(
        layout=Layout(tp=tp, pp=pp, vpp=vpp, dp=dp),
        num_microbatches=count,
        forward_s=rng.uniform(0.005, 0.01, (pp, vpp)),
        backward_s=rng.uniform(0.01, 0.02, (pp, vpp)),
        hop_bytes=2e7,
        end=EndOfStep(
            gradient_bytes=size,
            passes=np.ones((1, 1)),
            min_bytes=np.where(np.arange(pp)[:, None] == 0, size / 8, 0.0),
            hidden_s=np.where(np.arange(pp)[:, None] == 0, 0.01, 0.0),
            gather_bytes=size / 2,
            first_bytes=np.where(np.arange(pp)[:, None] == 0, size / 16, 0.0),
            needed=((1.0, 0.003 * np.arange(pp)[:, None]), (1.0, 0.005)),
            optimizer_s=rng.uniform(0.001, 0.002, (pp, 1)),
        ),
        fixed_s=0.004,
    )


def wires(net: Network, pairs: Any) -> Any:
    """Seconds per byte of a message between two nodes, where the messages of all these pairs are
    under way."""
    pairs = [pair for pair in pairs if pair[0] != pair[1]]
    speed, link = net.links.bytes_per_s, Counter(pairs)
    out, into = Counter(a for a, _ in pairs), Counter(b for _, b in pairs)

    def of(a: int, b: int) -> float:
        if a == b:
            return 1 / net.inside_bytes_per_s
        return max(link[a, b] / speed[a][b], max(out[a], into[b]) / net.nic_bytes_per_s)

    return of


def by_hand(work: Job, net: Network, order: Any) -> float:
    """The step time rank by rank, from the words that describe it."""
    t, p, v, d = work.layout.sizes
    per_node = net.gpus_per_node
    latency = net.links.latency_s
    pace = net.slowness or (1.0,) * len(order)

    def node(r: int, k: int, j: int = 0) -> int:
        return order[(j + t * (k + d * r)) // per_node]

    def hop(r: int, k: int) -> float:
        s = (r + 1) % p
        down = wires(net, [(node(r, x, j), node(s, x, j)) for x in range(d) for j in range(t)])
        up = wires(net, [(node(s, x, j), node(r, x, j)) for x in range(d) for j in range(t)])
        a, b = node(r, k), node(s, k)
        ways = [latency[a][b] + work.hop_bytes * down(a, b)]
        ways.append(latency[b][a] + work.hop_bytes * up(b, a))
        return net.exchange_s + max(ways)

    def ring(size: Any) -> Any:
        if d == 1:
            return np.zeros((p, 1))
        ends = [(r, k, (k + 1) % d) for r in range(p) for k in range(d)]
        flat = wires(net, [(node(r, a, j), node(r, b, j)) for r, a, b in ends for j in range(t)])
        groups = [list(dict.fromkeys(node(r, k) for k in range(d))) for r in range(p)]
        members = [Counter(node(r, k) for k in range(d)) for r in range(p)]
        even = len({count for m in members for count in m.values()}) == 1
        crossing = wires(
            net,
            [
                (g[i], g[(i + 1) % len(g)])
                for r, g in enumerate(groups)
                for i in range(len(g))
                for _ in range(t * members[r][g[i]])
            ],
        )
        found = []
        for r in range(p):
            num_bytes = float(np.broadcast_to(size, (p, 1))[r, 0])
            steps = []
            for k in range(d):
                a, b = node(r, k), node(r, (k + 1) % d)
                per_byte = max(flat(a, b), 1 / net.inside_bytes_per_s)
                steps.append(latency[a][b] + num_bytes / d * per_byte)
            seconds = (d - 1) * max(steps)
            g = groups[r]
            if even and len(g) > 1:
                m = d // len(g)
                pairs = [(g[i], g[(i + 1) % len(g)]) for i in range(len(g))]
                over = max(latency[a][b] + num_bytes / d * crossing(a, b) for a, b in pairs)
                within = (m - 1) / m * num_bytes / net.inside_bytes_per_s
                seconds = min(seconds, (len(g) - 1) * over + within)
            found.append([seconds + net.ring_s])
        return np.array(found)

    clocks = []
    for k in range(d):
        factor = np.array([pace[node(r, k)] for r in range(p)])[:, None]
        hops = np.array([[hop(r, k)] for r in range(p)])
        forward, backward = (
            (np.array(x) * factor)[..., None] for x in (work.forward_s, work.backward_s)
        )
        count = np.array([work.num_microbatches])
        clocks.append(pipeline_time(forward, backward, hops, count, vpp=v)[:, 0])
    reduce, gather, optimizer = work.end.seconds(ring)
    slowest = [max(pace[node(r, k)] for k in range(d)) for r in range(p)]
    optimizer = optimizer * np.array(slowest)[:, None]
    return float((np.max(clocks, axis=0)[:, None] + reduce + gather + optimizer).max()) + 0.004


LAYOUTS = [
    # tp, pp, vpp, dp, GPUs of a node, nodes
    (4, 4, 1, 1, 4, 4),
    (2, 3, 1, 4, 4, 6),
    (4, 2, 1, 3, 4, 6),
    (1, 4, 1, 2, 4, 2),
    (2, 4, 2, 3, 4, 6),
    (2, 2, 1, 5, 4, 5),
    (1, 3, 1, 8, 4, 6),
    (1, 5, 1, 4, 4, 5),
    (4, 1, 1, 6, 4, 6),
    (1, 8, 1, 3, 4, 6),
    (2, 3, 1, 3, 6, 3),
]


@st.composite
def cases(draw: Any) -> tuple[Job, Network]:
    tp, pp, vpp, dp, per_node, nodes = draw(st.sampled_from(LAYOUTS))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    kinds = draw(st.sampled_from([1, 2, 100]))
    speed = rng.choice(rng.uniform(2e9, 60e9, kinds), (nodes, nodes))
    latency = rng.choice(rng.uniform(0, 1e-3, kinds), (nodes, nodes))
    if draw(st.booleans()):
        speed, latency = np.minimum(speed, speed.T), np.maximum(latency, latency.T)
    pace = tuple(rng.choice([1.0, 1.3], nodes).tolist()) if draw(st.booleans()) else ()
    count = pp * draw(st.integers(1, 3)) if vpp > 1 else draw(st.integers(1, 12))
    work = job(tp, pp, dp, vpp=vpp, count=count, seed=int(rng.integers(100)))
    return work, network(speed, latency, gpus_per_node=per_node, slowness=pace)


@given(cases(), st.randoms(use_true_random=False))
@SLOW
def test_an_order_costs_what_its_description_says(case: tuple[Job, Network], random: Any) -> None:
    work, net = case
    order = list(range(net.links.num_nodes))
    random.shuffle(order)
    found = Placement(work, net).step_s(np.array([order]))
    assert found[0] == pytest.approx(by_hand(work, net, order), rel=1e-9)


@given(cases())
@SLOW
def test_up_to_eight_nodes_the_order_is_the_best_of_all(case: tuple[Job, Network]) -> None:
    work, net = case
    num = net.links.num_nodes
    every = np.array(list(itertools.permutations(range(num))))
    costs = Placement(work, net).step_s(every)
    found = find_order(work, net)
    assert found.exact and found.num_priced <= len(every)
    assert found.after_s == pytest.approx(costs.min(), rel=1e-9)
    assert found.before_s == costs[0] and found.after_s <= found.before_s
    assert by_hand(work, net, found.order) == pytest.approx(found.after_s, rel=1e-9)


@given(cases())
@SLOW
def test_no_order_beats_its_bound_nor_that_of_all(case: tuple[Job, Network]) -> None:
    work, net = case
    placement = Placement(work, net)
    every = every_order(net.links.num_nodes)
    costs, least = placement.step_s(every), placement.min_s(every)
    assert (least <= costs * (1 + 1e-9)).all()
    assert placement.min_s(None)[0] <= least.min() * (1 + 1e-9)
    found = find_order(work, net, evaluations=30)
    assert found.min_s <= costs.min() * (1 + 1e-9) and found.after_s <= costs[0]


@pytest.mark.parametrize("vpp", [1, 2])
def test_what_a_search_looks_at_is_bounded(vpp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = Counter[str]()
    for name in ("step_s", "min_s"):
        whole = getattr(Placement, name)

        def counted(self: Any, orders: Any, name: str = name, whole: Any = whole) -> Any:
            looked[name] += 1 if orders is None else len(orders)
            return whole(self, orders)

        monkeypatch.setattr(Placement, name, counted)
    rng = np.random.default_rng(1)
    net = network(rng.uniform(1e9, 40e9, (24, 24)))
    found = find_order(job(2, 4, 12, vpp=vpp, count=8), net, evaluations=2000)
    assert found.num_priced < 4000 and found.after_s < found.before_s
    assert looked["min_s"] < 4000, "a start, moves, and swaps of the best"
    assert looked["step_s"] < 1000


@given(cases())
@SLOW
def test_what_symmetry_leaves_out_costs_the_same(case: tuple[Job, Network]) -> None:
    work, net = case
    placement, num = Placement(work, net), net.links.num_nodes
    speed, latency = np.array(net.links.bytes_per_s), np.array(net.links.latency_s)
    even = np.array_equal(speed, speed.T) and np.array_equal(latency, latency.T)
    kept = every_order(
        num, equivalent=equivalent_nodes(net), turning=placement.turning, reversible=even
    )
    every = every_order(num)
    np.testing.assert_array_equal(
        np.unique(placement.step_s(kept)).min(), placement.step_s(every).min()
    )
    assert set(placement.step_s(kept)) == set(placement.step_s(every))


def test_equal_links_leave_one_order() -> None:
    net = network(np.full((7, 7), 1e10))
    assert equivalent_nodes(net) == (tuple(range(7)),)
    found = find_order(job(4, 7, 1), net)
    assert found.num_priced == 1 and found.is_given and found.gain == 0.0


def test_a_uniform_matrix_predicts_what_the_planner_does() -> None:
    model, cluster = PRESETS["llama-2-13b"], preset("h100-80g:32")
    bound = cluster.network_bytes_per_s(cluster.load_constants())
    links = Links(bytes_per_s=matrix(np.full((4, 4), bound)), latency_s=matrix(np.zeros((4, 4))))
    linked = replace(cluster, links=links, nic_bytes_per_s=bound)
    limits = Limits(max_micro_batch=2)
    (plan,) = Planner(model, cluster, limits=limits).rank([64], top=100)
    (same,) = Planner(model, linked, limits=limits).rank([64], top=100)
    assert plan == same
    checked = set()
    for answer in plan.ranked:
        c = answer.configuration
        if c.layout.ranks_of_a_stage < 8:
            continue  # The planner takes all GPUs of a node to send at once, and here fewer do.
        found = order_for(model, linked, c)
        assert found.before_s == pytest.approx(answer.prediction.step_s, rel=1e-9), str(c)
        assert found.is_given
        checked.add(c.layout)
    assert len(checked) > 8 and {1, 2} <= {layout.cp for layout in checked}


def test_few_stages_in_a_node_share_the_network_among_fewer() -> None:
    model, cluster = PRESETS["llama-2-13b"], preset("h100-80g:32")
    bound = cluster.network_bytes_per_s(cluster.load_constants())
    links = Links(bytes_per_s=matrix(np.full((4, 4), bound)), latency_s=matrix(np.zeros((4, 4))))
    linked = replace(cluster, links=links, nic_bytes_per_s=bound)
    what = Configuration(layout=Layout(tp=1, pp=8, dp=4), micro_batch_size=1, global_batch_size=64)
    c = linked.load_constants()
    work = job_of(model, linked, what, c)
    hops = Placement(work, network_of(linked, c)).hops_s(np.arange(4)[None])[0, 0]
    assert work.hop_bytes == 2 * model.seq_length * model.hidden_size
    assert hops[1] == pytest.approx(c.exchange_s + work.hop_bytes / (bound / 4))
    assert hops[0] < hops[1]


@pytest.mark.parametrize("name", ["gradient_bytes", "gather_bytes", "further_bytes"])
def test_all_that_replicas_send_is_traffic(name: str) -> None:
    work, net = job(4, 2, 4), network(np.full((8, 8), 1e9))
    end = replace(work.end, **{name: getattr(work.end, name) + 1e9})
    before, after = (Placement(w, net).traffic for w in (work, replace(work, end=end)))
    assert (after >= before).all() and (after > before).any()


@pytest.mark.parametrize(("nodes", "pp"), [(16, 1), (16, 16), (32, 8)])
def test_a_planted_order_is_found_again(nodes: int, pp: int) -> None:
    rng = np.random.default_rng(nodes + pp)
    work = job(4, pp, nodes // pp, count=2 * pp)
    used = Placement(work, network(np.full((nodes, nodes), 1e9))).traffic > 0
    speed = rng.uniform(2e9, 20e9, (nodes, nodes))
    speed = np.where(used | used.T, rng.uniform(38e9, 40e9, (nodes, nodes)), speed)
    hidden = rng.permutation(nodes)
    net = network(speed[np.ix_(hidden, hidden)])
    planted = float(Placement(work, net).step_s(np.argsort(hidden)[None])[0])
    found = find_order(work, net, evaluations=4000)
    assert not found.exact and found.num_priced < 8000
    assert sorted(found.order) == list(range(nodes))
    assert found.after_s <= 1.03 * planted < found.before_s


def test_racks_are_found_again() -> None:
    """Nodes of one rack are near each other, and the given order mixes the racks."""
    pp, rng = 2, np.random.default_rng(2)
    rack = rng.permutation(32) % 4
    speed = np.where(rack[:, None] == rack, 40e9, 5e9) * rng.uniform(0.9, 1.1, (32, 32))
    net, work = network(speed), job(4, pp, 32 // pp, count=16)
    inside = Placement(work, net).step_s(np.argsort(rack, kind="stable")[None])[0]
    found = find_order(work, net, evaluations=8000)
    assert found.after_s <= 1.03 * inside < found.before_s


@given(st.integers(0, 10**6), st.sampled_from([1, 3, 9]))
@example(18255, 3)  # no swap of two helps there, and a turn of three does
@settings(max_examples=2, deadline=None)
def test_many_nodes_are_never_worse_and_always_the_same(seed: int, pp: int) -> None:
    rng = np.random.default_rng(seed)
    net = network(rng.uniform(1e9, 40e9, (9, 9)), rng.uniform(0, 1e-4, (9, 9)))
    work = job(2, pp, 18 // pp, count=6)
    found, again = (find_order(work, net, evaluations=3000) for _ in range(2))
    assert found == again and not found.exact
    assert found.after_s <= found.before_s
    near = []
    for some in (x for size in (2, 3) for x in itertools.permutations(range(9), size)):
        order = list(found.order)
        for at, other in zip(some, (*some[1:], some[0])):
            order[at] = found.order[other]
        near.append(order)
    least = Placement(work, net).step_s(np.array(near)).min()
    assert least >= found.after_s * (1 - 1e-9)


# Seed 13 is out of reach, as about one in four are: no other of its 10,080 orders is within 1 %
# of the best, and only two of the best one's neighbours are within 5 %. After 3000 orders the
# search is 4 % above it; a longer polish or hotter chains do not help. Up to eight nodes it
# prices all orders, unless that is forbidden as here.
@pytest.mark.parametrize("seed", [5, 22])
def test_a_search_finds_what_no_greedy_order_is_near(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    net = network(rng.uniform(1e9, 40e9, (8, 8)), rng.uniform(0, 1e-4, (8, 8)))
    work = job(2, 2, 8, count=6)
    best = find_order(work, net).after_s
    monkeypatch.setattr(node_order, "EXACT_NODES", 7)
    found = find_order(work, net, evaluations=3000)
    assert not found.exact and found.after_s <= 1.01 * best < found.before_s


def test_units_do_not_matter() -> None:
    rng = np.random.default_rng(3)
    speed = rng.uniform(1e9, 40e9, (12, 12))
    net, work = network(speed, 0.0), job(4, 4, 3)
    milli = replace(
        net,
        links=Links(bytes_per_s=matrix(speed / 1024), latency_s=matrix(np.zeros((12, 12)))),
        **{n: getattr(net, n) / 1024 for n in ("inside_bytes_per_s", "nic_bytes_per_s")},
    )
    end = replace(
        work.end,
        **{
            n: getattr(work.end, n) / 1024
            for n in ("gradient_bytes", "min_bytes", "gather_bytes", "first_bytes")
        },
    )
    light = replace(work, hop_bytes=work.hop_bytes / 1024, end=end)
    one, other = find_order(work, net, evaluations=2000), find_order(light, milli, evaluations=2000)
    assert one.order == other.order


@pytest.mark.parametrize("slow", [0, 2, 4])
def test_a_node_with_slow_links_goes_to_an_end_of_the_pipeline(slow: int) -> None:
    speed = np.full((5, 5), 40e9)
    speed[slow] = speed[:, slow] = 2e9
    net = network(speed)
    net = replace(net, links=replace(net.links, hosts=tuple("abcde")))
    found = find_order(job(4, 5, 1, count=16), net)
    # One slow hop instead of two.
    assert slow in (found.order[0], found.order[-1])
    assert found.hosts == tuple("abcde"[i] for i in found.order)
    (limit,) = found.limits_after
    assert limit.kind == "pipeline" and slow in (limit.source, limit.target)
    assert limit.bytes_per_s == 2e9 and limit.seconds > 2e7 * 4 / 2e9


def test_slow_links_stay_out_of_rings() -> None:
    """Two pairs of nodes are far apart: replicas reduce inside a pair, messages cross once."""
    near = np.array([0, 1, 0, 1])
    speed = np.where(near[:, None] == near, 40e9, 1e9)
    light = replace(job(4, 2, 2, count=4), hop_bytes=1e4)
    found = find_order(light, network(speed))
    assert {frozenset(found.order[:2]), frozenset(found.order[2:])} == {
        frozenset({0, 2}),
        frozenset({1, 3}),
    }
    (limit,) = [x for x in found.limits_before if x.kind == "replicas"]
    assert limit.bytes_per_s == 1e9
    (limit,) = [x for x in found.limits_after if x.kind == "replicas"]
    assert limit.bytes_per_s == 40e9


def test_what_does_not_fit_is_refused() -> None:
    net = network(np.full((3, 3), 1e10))
    with pytest.raises(SpecError, match=r"tp2\.pp2\.dp2 are 8 ranks and 3 nodes of 4 have 12"):
        Placement(job(2, 2, 2), net)
    with pytest.raises(SpecError, match="tp does not divide the 4 GPUs"):
        Placement(job(12, 1, 1), net)
    with pytest.raises(SpecError, match="slowness has 2 values for 3 nodes"):
        Placement(job(4, 3, 1), replace(net, slowness=(1.0, 2.0)))
    model, cluster = PRESETS["llama-2-7b"], preset("h100-80g:16")
    what = Configuration(layout=Layout(tp=8, pp=2, dp=1), micro_batch_size=1, global_batch_size=8)
    with pytest.raises(SpecError, match='has no "links"'):
        order_for(model, cluster, what)
