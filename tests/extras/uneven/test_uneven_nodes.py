"""Layouts on unequal nodes and links: equal to trying everything, never worse than as given."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from copus_ext.cost_model.cluster_spec import ClusterSpec, Links, NodeSpec, preset
from copus_ext.cost_model.memory import PeakCorrection
from copus_ext.cost_model.models import PRESETS
from copus_ext.cost_model.spec_file import SpecError
from copus_ext.extras.layer_partition.layers import repartitions
from copus_ext.extras.layer_partition.problem import PartitionProblem
from copus_ext.extras.uneven.node_order import job_of
from copus_ext.extras.uneven.nodes import (
    Effort,
    Site,
    rank_on_nodes,
    slowness_of,
    spread,
)
from copus_ext.extras.uneven.pricing import Placement
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.plan import Ranked
from copus_ext.planner.profile import Timing
from copus_ext.planner.search import Planner
from copus_ext.planner.space import Limits
from megatron.trainer.config.layout import Layout

MODEL = dataclasses.replace(PRESETS["llama-2-7b"].with_seq_length(2048), num_layers=8)
GPU = preset("h100-80g:8").gpu
FEW = settings(max_examples=5, deadline=None)


def cluster(
    num: int, *, per_node: int = 2, speeds: Any = None, memory: Any = None, links: Any = None
) -> ClusterSpec:
    """Nodes of a few GPUs."""
    base = dataclasses.replace(preset("h100-80g:8"), gpus_per_node=per_node, num_nodes=num)
    nodes = tuple(
        NodeSpec(
            gpu=dataclasses.replace(GPU, memory_bytes=(memory or [GPU.memory_bytes] * num)[i]),
            speed=(speeds or [1.0] * num)[i],
        )
        for i in range(num)
    )
    return dataclasses.replace(base, nodes=nodes, links=links)


def links_of(values: Any) -> Links:
    num = len(values)
    rows = [tuple(0.0 if i == j else float(values[i][j]) for j in range(num)) for i in range(num)]
    return Links(bytes_per_s=tuple(rows), latency_s=((0.0,) * num,) * num)


def what(tp: int, pp: int, dp: int, *, vpp: int = 1, batch: int = 16, **how: Any) -> Configuration:
    return Configuration(
        layout=Layout(tp=tp, pp=pp, vpp=vpp, dp=dp),
        micro_batch_size=1,
        global_batch_size=batch,
        sequence_parallel=tp > 1,
        **how,
    )


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("tp", "pp", "vpp", "dp"), [(2, 4, 1, 1), (1, 2, 2, 4), (2, 1, 1, 4)])
def test_even_nodes_cost_what_they_cost_elsewhere(
    tp: int, pp: int, vpp: int, dp: int, recompute: Any
) -> None:
    c = what(tp, pp, dp, vpp=vpp, recompute=recompute)
    alike = dataclasses.replace(cluster(4), nodes=())
    planner = Planner(MODEL, alike)
    site = Site(planner, c)
    here, there = site._job(site.layers), job_of(MODEL, alike, c, planner.constants)
    assert np.asarray(here.forward_s) == pytest.approx(np.asarray(there.forward_s))
    assert np.asarray(here.backward_s) == pytest.approx(np.asarray(there.backward_s))
    names = "gradient_bytes gather_bytes first_bytes optimizer_s min_bytes hidden_s"
    for name in names.split():
        ours, theirs = (np.broadcast_to(getattr(j.end, name), (pp, 1)) for j in (here, there))
        assert ours == pytest.approx(theirs), name
    for ours, theirs in zip(here.end.needed, there.end.needed, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert np.asarray(one) == pytest.approx(np.asarray(other))
    fitted = site.fit()
    assert fitted is not None and fitted.order == (0, 1, 2, 3)
    assert fitted.ordered_s == fitted.given_s and fitted.slowness == (1.0,) * pp
    assert fitted.step_s == pytest.approx(fitted.recut_s)


def test_even_stages_need_what_measured_peaks_say(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = PeakCorrection(moving=1.25, fixed_bytes=-2e8)
    before = Site(Planner(MODEL, cluster(4)), what(2, 4, 1))
    monkeypatch.setattr("copus_ext.planner.known_peaks.correction_of", lambda *_: measured)
    planner = Planner(MODEL, cluster(4))
    site, told = Site(planner, what(2, 4, 1)), planner.explain(what(2, 4, 1))
    assert isinstance(told, Ranked)
    need, usual = (x.problem(range(4)).price([x.layers]).peak_bytes.max() for x in (site, before))
    assert need == pytest.approx(told.prediction.peak_bytes, rel=1e-9) != pytest.approx(usual)


def test_the_cut_over_even_nodes_is_that_of_the_search_for_cuts() -> None:
    alike = dataclasses.replace(cluster(4), nodes=())
    planner = Planner(MODEL, alike, limits=Limits(recompute=("none",), max_micro_batch=2))
    plan = planner.rank([16], top=200)[0]
    ours = {str(x.configuration): x for x in rank_on_nodes(planner, 16)}
    seen = 0
    for other in repartitions(planner, plan):
        c = other.configuration
        mine = ours.get(str(c))
        # With several stages in a node the table takes all of its GPUs to send at once.
        if mine is not None and c.layout.tp * c.layout.dp % alike.gpus_per_node == 0:
            seen += 1
            assert mine.step_s == pytest.approx(other.partition.step_s, rel=1e-9)
    assert seen


@FEW
@given(st.data())
def test_one_replica_gets_the_best_of_all_orders_and_cuts(data: Any) -> None:
    num = data.draw(st.integers(2, 3))
    pace = st.sampled_from([0.3, 0.5, 0.8, 1.0, 1.5])
    speeds = data.draw(st.lists(pace, min_size=num, max_size=num))
    wire = st.sampled_from([1e9, 5e9, 2e10])
    links = links_of([[data.draw(wire) for _ in range(num)] for _ in range(num)])
    memory = data.draw(st.lists(st.sampled_from([9e9, 12e9, 80e9]), min_size=num, max_size=num))
    planner = Planner(MODEL, cluster(num, speeds=speeds, links=links, memory=memory))
    site = Site(planner, what(2, num, 1))
    found = site.fit()
    least = min(
        (
            site.step_s(order, layers)
            for order in itertools.permutations(range(num))
            for layers in itertools.product(range(1, 9), repeat=num)
            if sum(layers) == 8 and site.fits(order, layers)
        ),
        default=None,
    )
    assert (found is None) == (least is None)
    if found is not None and least is not None:
        assert found.step_s == pytest.approx(least, rel=1e-9)
        assert site.fits(found.order, found.partition.layers)
        assert sum(found.partition.layers) == 8


@FEW
@given(st.data())
def test_replicas_are_never_worse_off_than_as_given(data: Any) -> None:
    num = data.draw(st.sampled_from([4, 6]))
    pace = st.sampled_from([0.3, 0.5, 0.8, 1.0, 1.5])
    speeds = data.draw(st.lists(pace, min_size=num, max_size=num))
    wire = st.sampled_from([1e9, 5e9, 2e10])
    links = links_of([[data.draw(wire) for _ in range(num)] for _ in range(num)])
    planner = Planner(MODEL, cluster(num, speeds=speeds, links=links))
    tp, pp, dp = data.draw(st.sampled_from([(1, num, 2), (2, num // 2, 2), (1, 2, num)]))
    site = Site(planner, what(tp, pp, dp, batch=12 * dp))
    found = site.fit(Effort(evaluations=800))
    assert found is not None
    assert found.step_s <= min(found.given_s, found.ordered_s) * (1 + 1e-9)
    assert found.recut_s is not None and found.step_s <= found.recut_s * (1 + 1e-9)
    assert found.step_s == pytest.approx(site.step_s(found.order, found.partition.layers))
    assert sorted(found.order) == list(range(num))


@FEW
@given(st.data())
def test_no_order_with_any_partition_beats_the_bound(data: Any) -> None:
    num = data.draw(st.sampled_from([2, 4]))
    pace = st.sampled_from([0.3, 0.8, 1.0, 1.5])
    speeds = data.draw(st.lists(pace, min_size=num, max_size=num))
    wire = st.sampled_from([1e9, 2e10])
    links = links_of([[data.draw(wire) for _ in range(num)] for _ in range(num)])
    planner = Planner(MODEL, cluster(num, speeds=speeds, links=links))
    pp = data.draw(st.sampled_from([1, 2, 2 * num]))
    vpp = data.draw(st.sampled_from([1, 2])) if 1 < pp <= 4 else 1
    dp = 2 * num // pp
    site = Site(planner, what(1, pp, dp, vpp=vpp, batch=8 * dp))
    problem = site.problem(range(num))
    for order in itertools.permutations(range(num)):
        priced = site.placement
        for layers in problem.all_partitions()[::7].tolist():
            seconds = priced(layers).step_s(np.array([order]))[0]
            assert site.min_s <= seconds * (1 + 1e-9), (order, layers)


def test_a_replica_on_faster_nodes_than_its_stages_is_bounded() -> None:
    """Stage 0 is as slow as node 1 and stage 1 as node 3. Node 0 makes up for the latter."""
    model = dataclasses.replace(MODEL, num_layers=40, seq_length=16384)
    spec = cluster(4, speeds=[3.0, 1.0, 1.0, 0.9], links=links_of(np.full((4, 4), 1e12)))
    site = Site(
        Planner(model, dataclasses.replace(spec, nic_bytes_per_s=1e12)), what(1, 2, 4, batch=48)
    )
    seconds = site.step_s((1, 3, 2, 0), (20, 20))
    assert 0.95 * seconds <= site.min_s <= seconds * (1 + 1e-9)


def uneven_nodes(num: int) -> ClusterSpec:
    rng = np.random.default_rng(num)
    wires = rng.uniform(3e10, 4e10, (num, num))
    wires[0, 1] = wires[1, 0] = wires[2, 3] = 2e9
    return cluster(
        num, speeds=[0.7 if i % 5 == 2 else 1.0 for i in range(num)], links=links_of(wires)
    )


def test_a_ranking_of_many_nodes_looks_at_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    orders, partitions = 0, 0
    bounded, simulated = Placement.min_s, PartitionProblem.step_s

    def of_orders(self: Any, some: Any) -> Any:
        nonlocal orders
        orders += 1 if some is None else len(some)
        return bounded(self, some)

    def of_partitions(self: Any, priced: Any) -> Any:
        nonlocal partitions
        partitions += priced.end_s.shape[1]
        return simulated(self, priced)

    monkeypatch.setattr(Placement, "min_s", of_orders)
    monkeypatch.setattr(PartitionProblem, "step_s", of_partitions)
    few = Limits(recompute=("none",), max_micro_batch=2)
    planner = Planner(MODEL, uneven_nodes(12), limits=few)
    found = rank_on_nodes(planner, 48)
    assert len(found) > 3 and orders < 200_000 and partitions < 40_000
    for x in found:
        assert x.min_s <= x.step_s * (1 + 1e-9)
        assert not x.fits_as_given or x.step_s <= x.given_s * (1 + 1e-9)
    assert found[0].gain > 0
    assert found == rank_on_nodes(planner, 48), "counted and not timed: the same once more"


@pytest.mark.parametrize("times", [1.0, 1.5])
def test_a_profile_is_a_factor_on_what_the_nodes_as_given_take(times: float) -> None:
    spec = uneven_nodes(6)
    few = Limits(recompute=("none",), max_micro_batch=2)
    plain = Planner(MODEL, spec, limits=few)
    before = rank_on_nodes(plain, 24)
    timings = [
        Timing(configuration=x.configuration, step_s=times * x.given_s, num_steps=100)
        for x in before
    ]
    measured = rank_on_nodes(Planner(MODEL, spec, limits=few, timings=timings), 24)
    same = {str(x.configuration): x for x in before}
    assert {x.measured_factor for x in before} == {1.0} and measured
    for x in measured:
        assert x.measured_factor == pytest.approx(times, rel=0.02)
        if (y := same.get(str(x.configuration))) is not None:
            assert x.given_s == pytest.approx(x.measured_factor * y.given_s)
            assert x.min_s == pytest.approx(x.measured_factor * y.min_s)
            assert x.partition.step_s == pytest.approx(x.step_s, rel=0.05)
    said = "\n".join(measured[0].lines())
    assert ("times the predicted, as measured" in said) == (measured[0].measured_factor != 1)


def test_a_slow_node_gets_fewer_layers_and_a_slow_link_few_bytes() -> None:
    speeds = [1.0, 0.4, 1.0, 1.0]
    wires = [[1e9 if {i, j} == {0, 1} else 4e10 for j in range(4)] for i in range(4)]
    planner = Planner(MODEL, cluster(4, speeds=speeds, links=links_of(wires)))
    found = Site(planner, what(2, 4, 1)).fit()
    assert found is not None
    at = found.order.index(1)
    assert found.partition.layers[at] == min(found.partition.layers) < 2
    assert abs(found.order.index(0) - at) > 1, "their link carries nothing"
    assert found.step_s < min(found.ordered_s, found.recut_s or np.inf) < found.given_s
    text = "\n".join(found.lines())
    assert "on node 1 at 0.40 of the usual speed: 1 layers instead of 2" in text
    assert "--pipeline-model-parallel-layout" in text or "--decoder" in text


def test_a_small_node_gets_what_fits_it() -> None:
    def of(small: float) -> Site:
        return Site(Planner(MODEL, cluster(2, memory=[small, 80e9])), what(2, 2, 1))

    sizes = np.arange(20e9, 4e9, -0.5e9)
    # Neither stage of an even partition fits the small node any more.
    site = next(s for s in map(of, sizes) if not (s.fits((0, 1), (4, 4)) or s.fits((1, 0), (4, 4))))
    found = site.fit()
    assert found is not None and not found.fits_as_given
    assert found.partition.layers[found.order.index(0)] < 4
    assert site.fits(found.order, found.partition.layers)
    assert Site(Planner(MODEL, cluster(2, memory=[4e9, 4e9])), what(2, 2, 1)).fit() is None


def test_a_node_of_another_kind_is_as_fast_as_its_data_sheet_says() -> None:
    a100 = preset("a100-80g:8").gpu
    mixed = dataclasses.replace(
        cluster(2), nodes=(NodeSpec(gpu=GPU), NodeSpec(gpu=a100, speed=1.0))
    )
    constants = mixed.load_constants()
    fast, slow = slowness_of(MODEL, mixed, what(2, 2, 1), constants)
    assert fast == 1.0 and 1.5 < slow < 4.0
    half = dataclasses.replace(
        mixed, nodes=(mixed.nodes[0], dataclasses.replace(mixed.nodes[1], speed=0.5))
    )
    assert slowness_of(MODEL, half, what(2, 2, 1), constants)[1] == pytest.approx(2 * slow)


def test_tensor_parallelism_never_spans_nodes() -> None:
    few = Limits(recompute=("none",), max_micro_batch=1)
    planner = Planner(MODEL, cluster(2, speeds=[1.0, 0.5]), limits=few)
    with pytest.raises(SpecError, match="tp does not divide"):
        Site(planner, what(4, 1, 1))
    assert {x.configuration.layout.tp for x in rank_on_nodes(planner, 16)} <= {1, 2}


@given(st.integers(1, 40), st.integers(1, 8))
def test_layers_are_spread(layers: int, chunks: int) -> None:
    found = spread(layers, chunks)
    assert sum(found) == layers and max(found) - min(found) <= 1


def test_nodes_come_back_from_json() -> None:
    data = {
        **dataclasses.replace(cluster(4), nodes=()).to_json(),
        "nodes": [
            {"count": 2},
            {"speed": 0.5, "memory_bytes": "40GiB"},
            {"gpu": "A100-80GB", "constants": "a100-80g"},
        ],
    }
    read = ClusterSpec.from_json(data)
    assert [node.speed for node in read.nodes] == [1.0, 1.0, 0.5, 1.0]
    assert read.nodes[2].gpu.memory_bytes == 40 * 2**30 and read.nodes[3].gpu.name == "A100-80GB"
    assert ClusterSpec.from_json(json.loads(json.dumps(read.to_json()))) == read
    assert Planner(MODEL, read).limit_bytes < Planner(MODEL, cluster(4)).limit_bytes
    assert read.resize(2).nodes == ()


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([{"count": 3}], "3 nodes and the cluster has 4"),
        ([{"count": 0}, {"count": 4}], "nodes.count 0"),
        ([{"count": True}, {"count": 3}], "nodes.count True"),
        ([{"count": 1 << 30}], "nodes.count"),
        ([{"count": 4, "speed": 0}], "nodes.speed"),
        ([{"count": 4, "speed": "fast"}], "nodes.speed"),
        ([{"count": 4, "gpu": 3}], "nodes.gpu"),
        ([{"count": 4, "gpu": "H900"}], "H900"),
        ([{"count": 4, "pace": 1}], "unknown nodes keys: pace"),
        ([{"count": 4, "constants": 1}], "nodes.constants"),
        ({"count": 4}, "must be a list"),
        ([4], "must be a list"),
    ],
)
def test_nodes_that_make_no_sense(nodes: Any, words: str) -> None:
    data = {**dataclasses.replace(cluster(4), nodes=()).to_json(), "nodes": nodes}
    with pytest.raises(SpecError, match=words):
        ClusterSpec.from_json(data)
