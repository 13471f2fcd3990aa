"""Layouts on nodes and links that differ: which node goes where, and which layers it gets.

The search takes order and partition together, since a slow node may cost less at another place or
with fewer layers there. The ranking of even nodes proposes the layouts, and all are priced anew.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from copus_ext.cost_model.cluster_spec import ClusterSpec, NodeSpec, of_gpu
from copus_ext.cost_model.constants import Constants, PartFactors
from copus_ext.cost_model.gpus import GPUS
from copus_ext.cost_model.layer_time import hop_bytes
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.cost_model.spec_file import SpecError
from copus_ext.cost_model.step import end_of_step
from copus_ext.extras.layer_partition.blocks import costs_by_block
from copus_ext.extras.layer_partition.layers import LayerPartition, best_partition, price_partition
from copus_ext.extras.layer_partition.problem import PartitionProblem, measured_costs
from copus_ext.extras.layer_partition.search import MAX_WORK, min_of_all
from copus_ext.extras.uneven.fitted_layout import FittedLayout
from copus_ext.extras.uneven.node_order import (
    equivalent_nodes,
    limits,
    network_of,
    search_orders,
    uniform_links,
)
from copus_ext.extras.uneven.orders import every_order
from copus_ext.extras.uneven.pricing import Job, Placement
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.profile import Timing
from copus_ext.planner.search import Planner
from copus_ext.planner.space import points_of, to_config_batch

EVERY_ORDER_NODES = 5
"""Up to so many nodes the best partition of every order is searched."""
_OF_A_LAYOUT = 2
"""Configurations of a layout that are looked at."""
_LAYOUTS = 64
_FITTED, _CLOSELY = 32, 4
"""Configurations that are fitted to the nodes: of those with memory enough the ones of the least
lower bounds. The fastest of them get a longer search."""
_ENOUGH = 4096
_KNOWN = 8
"""Orders of other layouts that a search starts from."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What the search for one layout may look at: counted, so that every machine answers the
    same."""

    evaluations: int = 8_000
    """Orders for even stages, about."""
    refined: int = 1_000
    """Orders for each partition found, about."""
    work: float = 1e8
    """What may be computed to find partitions, in all; see `partition.search.MAX_WORK`."""
    rounds: int = 2
    """Times that order and partition are improved in turn, from every start."""
    starts: int = 3
    """Orders to start from."""

    @property
    def one_work(self) -> float:
        """What may be computed to find one partition."""
        return self.work / (self.starts * self.rounds)


THOROUGH = Effort()
QUICK = Effort(evaluations=0, refined=400, work=1.5e7, rounds=1, starts=1)
FIRST = Effort(evaluations=2_000, refined=400, work=6e7, rounds=1, starts=4)
"""Where no order is known that suits layouts of as many stages."""


class Site:
    """One configuration on nodes and links as they are.

    Args:
        planner: of the model on the cluster.
        factor: measured seconds over predicted ones; all seconds of an answer have it.

    Raises:
        SpecError: tensor parallelism across nodes, or ranks that do not fill the nodes.
        ValueError: recompute `block`, whose layers have no cost of their own.
    """

    def __init__(self, planner: Planner, configuration: Configuration, factor: float = 1.0) -> None:
        self.planner, self.configuration, self.factor = planner, configuration, factor
        model, cluster, self.constants = planner.model, planner.cluster, planner.constants
        self._base = dataclasses.replace(cluster, nodes=())
        self.rows = to_config_batch(model, self._base, points_of([configuration])).full()
        self.slowness = slowness_of(model, cluster, configuration, self.constants)
        linked = self._base
        if cluster.links is None:
            # Links that were not measured reach a share of the nominal network.
            reached = self._base.network_bytes_per_s(self.constants)
            linked = dataclasses.replace(self._base, nic_bytes_per_s=reached)
            linked = dataclasses.replace(linked, links=uniform_links(linked))
        self.network = network_of(linked, self.constants, self.slowness)
        share = planner.safe_bytes(configuration) / planner.limit_bytes
        share *= 1 - planner.memory_margin
        memory = [node.gpu.memory_bytes for node in cluster.nodes]
        self._limit_bytes = share * np.array(memory or [cluster.gpu.memory_bytes] * self.num_nodes)
        self.layers = spread(model.num_layers, configuration.layout.pp * configuration.layout.vpp)
        self._priced: dict[tuple[int, ...], Placement] = {}
        self._seconds: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}
        self._places = self.placement(self.layers)

    @property
    def num_nodes(self) -> int:
        return self.planner.cluster.num_nodes

    @functools.cached_property
    def _costs(self) -> Any:
        return measured_costs(
            self.rows,
            self.constants,
            correction=self.planner.peaks,
        )

    @functools.cached_property
    def _mean_forward_s(self) -> float:
        """Seconds of the forward pass of a micro-batch on a stage of even nodes."""
        return float(self._costs.blocks.forward_s.sum()) / self.configuration.layout.pp

    def problem(self, order: Any) -> PartitionProblem:
        """The partitions where nodes stand in some order: [places] nodes.

        Every stage is as slow and as small as the worst of its nodes, every hop as slow as that of
        the slowest replica.
        """
        c, costs, places = self.configuration, self._costs, self._places
        orders = np.asarray(order, dtype=np.int64)[None]
        hops = np.zeros(c.layout.pp)
        if c.layout.pp > 1:
            found = places.hops_s(orders)[0].max(axis=0)
            hops[: len(found)] = found
        slow = places.slowness_of_stages(orders)

        def end(held: Any, backward: Any) -> Any:
            behind = end_of_step(self.rows, self.constants, held, backward, self._mean_forward_s)
            reduce, gather, optimizer = behind.seconds(lambda size: places.ring_s(orders, size))
            return reduce + gather + optimizer * slow

        return PartitionProblem.of(
            costs,
            c,
            p2p_time_s=hops,
            limit_bytes=self._limit_bytes[orders[0][places.places]].min(axis=1),
            speed=1.0 / slow[:, 0],
            end_of_step=end,
        )

    def _job(self, layers: Sequence[int]) -> Job:
        c, costs = self.configuration, self._costs
        plain = PartitionProblem.of(costs, c, limit_bytes=1.0, end_of_step=None)
        priced = plain.price([list(layers)])
        backward = priced.backward_s.sum(axis=1)
        return Job(
            layout=c.layout,
            num_microbatches=c.num_microbatches,
            forward_s=priced.forward_s[..., 0],
            backward_s=priced.backward_s[..., 0],
            hop_bytes=float(hop_bytes(self.rows)[0]),
            end=end_of_step(
                self.rows, self.constants, priced.parameters, backward, self._mean_forward_s
            ),
            fixed_s=self.constants.factors.compute * self.constants.step_s,
        )

    def placement(self, layers: Sequence[int]) -> Placement:
        key = tuple(layers)
        if key not in self._priced:
            self._priced[key] = Placement(self._job(key), self.network)
        return self._priced[key]

    def step_s(self, order: Sequence[int], layers: Sequence[int]) -> float:
        """Seconds of a step."""
        key = tuple(order), tuple(layers)
        if key not in self._seconds:
            orders = np.array([order], dtype=np.int64)
            self._seconds[key] = float(self.placement(layers).step_s(orders)[0])
        return self._seconds[key]

    def fits(self, order: Any, layers: Sequence[int]) -> bool:
        """Whether every stage has the memory it needs."""
        problem = self.problem(order)
        return bool(problem.excess(problem.price([list(layers)]))[0] <= 0)

    @functools.cached_property
    def min_s(self) -> float:
        """Seconds that no order of nodes with any partition beats.

        All work at the pace of all stages together, each with the fastest nodes it could have, over
        the best links. With it comes either the way of one micro-batch through all stages, or all
        reductions and the optimizer.
        """
        c, places = self.configuration, self._places
        pp, count = c.layout.pp, c.num_microbatches
        if pp == 1:
            return float(places.min_s(None)[0])
        blocks = self._costs.blocks
        forward, backward = float(blocks.forward_s.sum()), float(blocks.backward_s.sum())
        total = float(self._stage_speeds().sum())
        # A replica may run on faster nodes than its stages do, whose pace is that of their slowest.
        pace = self.slowness or (1.0,)
        fastest, slowest = 1.0 / min(pace), 1.0 / max(pace)
        fixed = self.constants.factors.compute * self.constants.step_s
        held = np.array([[0.0], [float(blocks.parameters.sum())]])
        behind = end_of_step(self.rows, self.constants, held, np.array([[0.0], [backward]]), 0.0)

        def ring(size: Any) -> Any:
            # Of all stages together; only those of the second row are asked for.
            return places.ring_s(None, np.broadcast_to(size, held.shape)[1:]).min()

        reduce, gather, optimizer = (
            float(np.broadcast_to(x, held.shape)[1, 0]) for x in behind.seconds(ring)
        )
        # The first stage hides less than one backward pass of all layers takes, every stage less
        # of its weights than one forward pass of all.
        end = max(reduce - backward, 0.0) + max(gather - pp * forward, 0.0) + optimizer / fastest
        at_end = count * (forward + backward) / total + slowest / total * end
        if c.layout.vpp > 1:
            return at_end + fixed
        hops = places.hops_s(None)[0].min(axis=0)
        turn = (count - 1) * (backward + slowest * 2 * float(hops.sum()))
        turn = (turn + max(count - pp, 0) * forward) / total
        through = (forward + backward) / fastest + 2 * float(hops.sum())
        return max(at_end, through + turn) + fixed

    def _stage_speeds(self) -> Any:
        """[pp] speeds that the fastest, second fastest, ... stage has at most."""
        pp = self.configuration.layout.pp
        speeds = np.sort(1.0 / np.array(self.slowness or [1.0] * self.num_nodes))[::-1]
        if self.num_nodes % pp == 0:
            return speeds.reshape(pp, -1).min(axis=1)
        if pp % self.num_nodes == 0:
            return np.repeat(speeds, pp // self.num_nodes)
        return np.full(pp, speeds[0])

    def best_layers(
        self, order: Any, *, work: float = MAX_WORK, starts: Sequence[Sequence[int]] = ()
    ) -> tuple[int, ...] | None:
        """The fastest partition for an order of the nodes; None where none fits."""
        if self.configuration.layout.pp == 1:
            return self.layers if self.fits(order, self.layers) else None
        found = best_partition(self.problem(order), max_work=work, starts=[self.layers, *starts])
        return found.layers if isinstance(found, LayerPartition) else None

    def fit(
        self, effort: Effort = THOROUGH, *, every: bool = True, starts: Sequence[Any] = ()
    ) -> FittedLayout | None:
        """The order and partition with the shortest step; None where nothing that was tried fits.

        Up to `EVERY_ORDER_NODES` nodes it searches the best partition of every order. Beyond, it
        improves order and partition in turn. It starts from the order given, from the best for even
        stages, and with the fast nodes first or last. The answer is never worse than as given, if
        that fits.

        Args:
            effort: what may be looked at.
            every: search the best partition of every order where there are few nodes.
            starts: orders that suit layouts like this one.
        """
        given = tuple(range(self.num_nodes))
        ordered = search_orders(
            self._places,
            evaluations=effort.evaluations,
            starts=starts,
            greedy=not starts,
            known=(given, self.step_s(given, self.layers)),
        )
        self._seconds[ordered.order, self.layers] = ordered.after_s
        found: dict[tuple[Any, Any], float] = {}
        first = tuple(dict.fromkeys([*starts[:1], ordered.order, given]))
        for order, layers in self._tried(first, effort, every):
            if (order, layers) not in found:
                found[order, layers] = self.step_s(order, layers)
        given_s = self.step_s(given, self.layers)
        for order, seconds in ((given, given_s), (ordered.order, ordered.after_s)):
            if self.fits(order, self.layers):
                found.setdefault((order, self.layers), seconds)
        if not found:
            return None
        # Of equally fast ones that which changes least.
        best = min(
            found, key=lambda k: (round(found[k] / given_s, 9), k[0] != given, k[1] != self.layers)
        )
        fitted = self._fitted(best, found[best], given_s, ordered.after_s)
        return self.finished(fitted, effort.one_work) if every else fitted

    def finished(self, fitted: FittedLayout, work: float) -> FittedLayout:
        """The same with what only those need that are shown: the seconds of the best partition
        alone, which is taken if it is faster, and the links that limit."""
        given = tuple(range(self.num_nodes))
        alone = self.best_layers(given, work=work, starts=[fitted.partition.layers])
        recut_s = None
        if alone is not None:
            given_s, step_s = fitted.given_s / self.factor, self.step_s(given, alone)
            if fitted.fits_as_given and given_s < step_s:
                alone, step_s = self.layers, given_s
            recut_s = self.factor * step_s
            if recut_s < fitted.step_s:
                ordered_s = fitted.ordered_s / self.factor
                fitted = self._fitted((given, alone), step_s, given_s, ordered_s)
        found = limits(self.placement(fitted.partition.layers), np.array(fitted.order))
        return dataclasses.replace(fitted, recut_s=recut_s, limits=found)

    def _fitted(
        self, best: tuple[Any, Any], step_s: float, given_s: float, ordered_s: float
    ) -> FittedLayout:
        """The answer for an order and a partition, whose seconds are predicted ones."""
        order, layers = best
        slow = self._places.slowness_of_stages(np.array([order]))[:, 0]
        partition, factor = price_partition(self.problem(order), layers), self.factor
        return FittedLayout(
            configuration=self.configuration,
            order=order,
            hosts=tuple(self.network.links.hosts),
            partition=partition.times(factor),
            even=self.layers,
            given_s=factor * given_s,
            ordered_s=factor * ordered_s,
            recut_s=None,
            step_s=factor * step_s,
            min_s=factor * self.min_s,
            measured_factor=factor,
            fits_as_given=self.fits(tuple(range(self.num_nodes)), self.layers),
            slowness=tuple(float(x) for x in slow),
            places=tuple(tuple(int(x) for x in row) for row in self._places.places),
            limits=(),
        )

    def _tried(
        self, first: tuple[tuple[int, ...], ...], effort: Effort, every: bool
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        if every and self.num_nodes <= EVERY_ORDER_NODES:
            yield from self._every_order(effort.work)
            return
        pace = self.slowness or (1.0,) * self.num_nodes
        nodes = range(self.num_nodes)
        up = tuple(sorted(nodes, key=lambda n: pace[n]))
        down = tuple(sorted(nodes, key=lambda n: -pace[n]))
        first = tuple(dict.fromkeys((*first, up, down)))[: effort.starts]
        work = effort.one_work
        known: dict[Any, Any] = {}
        for order in first:
            least = float("inf")
            for _ in range(effort.rounds):
                if order not in known:
                    more = [layers for layers in known.values() if layers is not None]
                    known[order] = self.best_layers(order, work=work, starts=more)
                layers = known[order]
                if layers is None:
                    break
                yield order, layers
                step_s = self.step_s(order, layers)
                if not step_s < least or not effort.refined:
                    break
                least = step_s
                found = search_orders(
                    self.placement(layers),
                    evaluations=effort.refined,
                    greedy=False,
                    known=(order, step_s),
                )
                self._seconds[found.order, layers] = found.after_s
                if found.order == order or not self.fits(found.order, layers):
                    break
                order = found.order
                yield order, layers

    def _every_order(self, work: float) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The best partition of every order that could be the best of all."""
        same = tuple(
            g
            for g in equivalent_nodes(self.network)
            if len(set(self._limit_bytes[list(g)].tolist())) == 1
        )
        orders = every_order(self.num_nodes, equivalent=same, turning=self._places.turning)
        bounds = [min_of_all(self.problem(order)) for order in orders]
        fastest = float("inf")
        for i in np.argsort(bounds, kind="stable"):
            order = tuple(int(n) for n in orders[i])
            if bounds[i] > fastest:
                continue
            if layers := self.best_layers(order, work=work / len(orders)):
                fastest = min(fastest, self.step_s(order, layers))
                yield order, layers


def slowness_of(
    model: ModelSpec, cluster: ClusterSpec, configuration: Configuration, constants: Constants
) -> tuple[float, ...]:
    """[nodes] seconds of a layer on every node over those on the cluster's own GPU; empty where all
    nodes are that.

    Args:
        configuration: layout and micro-batch, on which the ratio of two kinds depends.
    """
    if not cluster.nodes:
        return ()
    base = dataclasses.replace(cluster, links=None, nodes=())

    def layer_s(kind: ClusterSpec, fitted: Constants) -> float:
        blocks = costs_by_block(
            to_config_batch(model, kind, points_of([configuration])).full(), fitted
        ).blocks
        return float(blocks.forward_s[1] + blocks.backward_s[1])

    usual = layer_s(base, constants)

    @functools.cache
    def of(node: NodeSpec) -> float:
        kind = dataclasses.replace(base, gpu=node.gpu)
        fitted = constants
        name = node.constants
        if name is None and node.gpu.name != cluster.gpu.name and node.gpu.name in GPUS:
            name = of_gpu(node.gpu.name, nodes=1, gpus_per_node=1).constants
        if name is not None and name != cluster.constants:
            kind = dataclasses.replace(kind, constants=name)
            fitted = kind.load_constants()
        return layer_s(kind, fitted) / usual / node.speed

    return tuple(of(node) for node in cluster.nodes)


def spread(num_layers: int, chunks: int) -> tuple[int, ...]:
    """Layers over chunks as evenly as they go; the first chunks have those left over."""
    each, left = divmod(num_layers, chunks)
    return tuple(each + (k < left) for k in range(chunks))


def rank_on_nodes(planner: Planner, batch: int, *, top: int = 10) -> list[FittedLayout]:
    """The configurations of a batch on nodes and links as they are, fastest first.

    A layout that a lower bound rules out of the best few is not searched. The best of those that
    are get a second, longer search. Measured times enter as factors (`_as_if_even`).

    Args:
        planner: of the model on the cluster.
        top: how many are of interest.

    Raises:
        SpecError: a description that makes no sense, or a mixture of experts.
    """
    planner.model.check_dense("the search over uneven nodes")
    # Imported where it is needed, as every `plan` imports this file.
    from tqdm import tqdm

    sites = sorted(_proposed(planner, batch), key=_min_sample_s)
    found: list[tuple[FittedLayout, Site]] = []
    # No thread for one bar: a program that uses this function may mind signals.
    tqdm.monitor_interval = 0
    for site in tqdm(sites, unit="layout", delay=2, leave=False):
        if len(found) >= top and _min_sample_s(site) > found[top - 1][0].sample_s:
            break
        if len(found) == _FITTED:
            break
        known = _orders_for(site, found)
        fitted = site.fit(QUICK if known else FIRST, every=False, starts=known)
        if fitted is not None:
            found.append((fitted, site))
            found.sort(key=lambda x: x[0].sample_s)
    for i, (fitted, site) in enumerate(found[: max(_CLOSELY, top)]):
        if i < _CLOSELY and _min_sample_s(site) <= min(x.sample_s for x, _ in found):
            again = site.fit(starts=[fitted.order, *_orders_for(site, found)])
            if again is not None and again.step_s < fitted.step_s:
                fitted = again
        if not fitted.limits:
            fitted = site.finished(fitted, QUICK.one_work)
        found[i] = fitted, site
    return sorted((fitted for fitted, _ in found), key=lambda x: x.sample_s)


def _orders_for(site: Site, found: Sequence[tuple[FittedLayout, Site]]) -> list[tuple[int, ...]]:
    """Orders that suit layouts of as many stages, whose ranks are at the same places; the order of
    the fastest of them first."""
    pp = site.configuration.layout.pp
    orders = (fitted.order for fitted, _ in found if fitted.configuration.layout.pp == pp)
    return list(dict.fromkeys(orders))[:_KNOWN]


def _min_sample_s(site: Site) -> float:
    return site.factor * site.min_s / site.configuration.global_batch_size


def _proposed(planner: Planner, batch: int) -> list[Site]:
    """The best few configurations of every layout on even nodes with the most memory there is; of
    those whose layers can be split, and no two that differ in the optimizer's sharding alone."""
    cluster = planner.cluster
    memory = max([cluster.gpu.memory_bytes, *(n.gpu.memory_bytes for n in cluster.nodes)])
    even = dataclasses.replace(
        cluster, gpu=dataclasses.replace(cluster.gpu, memory_bytes=memory), nodes=()
    )
    proposer = _on_even(planner, even)
    ranked = proposer.rank([batch], top=_ENOUGH)[0].ranked
    kept: dict[Any, list[Site]] = {}
    for one in ranked:
        c = one.configuration
        if cluster.gpus_per_node % c.layout.tp == 0 and c.recompute != "block":
            mine = kept.setdefault(c.layout, [])
            same = [(x.configuration.micro_batch_size, x.configuration.recompute) for x in mine]
            is_new = (c.micro_batch_size, c.recompute) not in same
            if is_new and len(mine) < _OF_A_LAYOUT and (mine or len(kept) <= _LAYOUTS):
                factor = 1.0
                if planner.timings:
                    factor = one.prediction.step_s / proposer.raw_step_s(c, PartFactors())
                mine.append(Site(planner, c, factor))
    return list(itertools.chain.from_iterable(kept.values()))


def order_factor(planner: Planner, configuration: Configuration) -> float:
    """What measured times make of the predicted seconds of a configuration on links as they are and
    equal nodes, of which an order is found."""
    if not planner.timings:
        return 1.0
    even = dataclasses.replace(planner.cluster, nodes=())
    linked = planner.on(even)
    linked.retime(planner.timings)
    return _on_even(linked, even).measured_factor(configuration)


def _on_even(planner: Planner, even: ClusterSpec) -> Planner:
    """The planner of a cluster of equal nodes, with the times that they would have."""
    found = planner.on(even)
    found.retime(_as_if_even(planner, found))
    return found


def _as_if_even(planner: Planner, even: Planner) -> list[Timing]:
    """Measured times as even nodes and links would have them.

    A profile was measured on the nodes in their given order. What slow nodes and links cost there
    is predicted for every order anew and must not count twice. So a time is taken relative to the
    prediction for the nodes as given, where it has one.
    """
    found = []
    for timing in planner.timings:
        c = timing.configuration
        # Layers recomputed by blocks have no cost of their own; all of them are near enough.
        plain = (
            c
            if c.recompute != "block"
            else dataclasses.replace(c, recompute="full", recompute_num_layers=0)
        )
        try:
            site = Site(planner, plain)
        except SpecError:
            continue
        as_given = site.step_s(tuple(range(site.num_nodes)), site.layers)
        share = even.raw_step_s(plain, PartFactors()) / as_given
        found.append(dataclasses.replace(timing, step_s=share * timing.step_s))
    return found
