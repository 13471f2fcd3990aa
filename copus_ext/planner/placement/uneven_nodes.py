"""Layouts on nodes and links that differ: which node goes where, and which layers it gets.

The search takes order and partition together, since a slow node may cost less at another place or
with fewer layers there. The ranking of even nodes proposes the layouts, and all are priced anew.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from copus_ext.cost_model.blocks import costs_by_block
from copus_ext.cost_model.cluster_spec import GPUS, ClusterSpec, NodeSpec, of_gpu
from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.layer_time import hop_bytes
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.cost_model.step import end_of_step
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.partition.layers import LayerPartition, best_partition, price_partition
from copus_ext.planner.partition.problem import PartitionProblem
from copus_ext.planner.placement.node_order import (
    EVALUATIONS,
    Limit,
    equivalent_nodes,
    find_order,
    limits,
    network_of,
    told,
    uniform_links,
)
from copus_ext.planner.placement.orders import every_order
from copus_ext.planner.placement.pricing import Job, Placement
from copus_ext.planner.search import Planner
from copus_ext.planner.space import points_of, to_rows

EVERY_ORDER_NODES = 5
"""Up to so many nodes the best partition of every order is searched."""
_ROUNDS = 4
_OF_A_LAYOUT = 2
"""Configurations of a layout that are looked at."""
_LAYOUTS = 64
_CLOSELY = 6
"""Layouts that get a whole search where there are many nodes."""
_QUICK = 1500
_ENOUGH = 4096


@dataclass(frozen=True, kw_only=True)
class FittedLayout:
    """A configuration with the order of nodes and the partition of layers that suit it best."""

    configuration: Configuration
    """Layout, batch and memory options, as for even nodes."""
    order: tuple[int, ...]
    """Node at every place, by its number in the cluster file."""
    hosts: tuple[str, ...]
    """Names of the nodes by number; empty if they have none."""
    partition: LayerPartition
    """Layers of every chunk."""
    even: tuple[int, ...]
    """Layers of every chunk with even stages."""
    given_s: float
    """Seconds of a step with the nodes as given and even stages."""
    ordered_s: float
    """The same with the best order of nodes alone."""
    recut_s: float | None
    """The same with the best partition alone; None where none fits."""
    step_s: float
    """With both."""
    fits_as_given: bool
    """Whether the nodes as given have the memory for even stages."""
    slowness: tuple[float, ...]
    """[pp] seconds of a layer on the slowest node of a stage over those on a usual one."""
    places: tuple[tuple[int, ...], ...]
    """[pp, dp] place of every stage of every replica."""
    limits: tuple[Limit, ...]
    """Links that the slowest stage waits for."""

    @property
    def gain(self) -> float:
        """Part of the step that order and partition save."""
        return 1.0 - self.step_s / self.given_s

    @property
    def names(self) -> list[str]:
        """The nodes in their order."""
        return [self.name(node) for node in self.order]

    @property
    def repartitioned(self) -> Configuration:
        """The configuration with its partition."""
        layout = dataclasses.replace(
            self.configuration.layout, layer_partition=self.partition.layers
        )
        return dataclasses.replace(self.configuration, layout=layout)

    @property
    def flags(self) -> list[str]:
        """Megatron's flags."""
        return self.repartitioned.to_flags()

    def name(self, node: int) -> str:
        """What a node is called."""
        return self.hosts[node] if self.hosts else str(node)

    def lines(self) -> list[str]:
        """What was found and why, for people."""
        alone = "" if self.recut_s is None else f", the best partition alone {self.recut_s:.4g} s"
        lines = [
            f"nodes as given and even stages take {self.given_s:.4g} s"
            f"{'' if self.fits_as_given else ' and do not fit'}, the best order alone "
            f"{self.ordered_s:.4g} s{alone}, both {self.step_s:.4g} s: "
            f"{100 * self.gain:.1f} % less",
            f"  nodes: {','.join(self.names)}",
        ]
        pp, vpp = self.configuration.layout.pp, self.configuration.layout.vpp
        for stage in range(pp):
            now, even = (
                sum(partition[stage::pp]) for partition in (self.partition.layers, self.even)
            )
            nodes = sorted({self.order[place] for place in self.places[stage]})
            slow = self.slowness[stage]
            if now == even and not slow > 1.001:
                continue
            pace = f" at {1 / slow:.2f} of the usual speed" if abs(slow - 1) > 1e-3 else ""
            chunks = f" in {vpp} chunks" if vpp > 1 else ""
            which = "node" if len(nodes) == 1 else "nodes"
            names = ",".join(self.name(node) for node in nodes)
            instead = f" instead of {even}" if now != even else ""
            lines.append(f"  stage {stage} on {which} {names}{pace}: {now} layers{chunks}{instead}")
        lines += [f"  limit: {told(limit, self.name)}" for limit in self.limits]
        return [*lines, f"  flags: {shlex.join(self.flags)}"]

    def to_json(self, rank: int) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "rank": rank,
            "configuration": {**self.repartitioned.to_json(), "node_order": self.names},
            "flags": self.flags,
            "order": self.names,
            "cut": self.partition.to_json(),
            "given_s": self.given_s,
            "ordered_s": self.ordered_s,
            "recut_s": self.recut_s,
            "step_s": self.step_s,
            "gain": self.gain,
            "fits_as_given": self.fits_as_given,
            "slowness": list(self.slowness),
        }


class Site:
    """One configuration on nodes and links as they are.

    Args:
        planner: of the model on the cluster.
        configuration: layout, batch and memory options.

    Raises:
        SpecError: tensor parallelism across nodes, or ranks that do not fill the nodes.
        ValueError: recompute `block`, whose layers have no cost of their own.
    """

    def __init__(self, planner: Planner, configuration: Configuration) -> None:
        self.planner, self.configuration = planner, configuration
        model, cluster, self.constants = planner.model, planner.cluster, planner.constants
        self._base = dataclasses.replace(cluster, nodes=())
        self.rows = to_rows(model, self._base, points_of([configuration])).full()
        self.slowness = slowness_of(model, cluster, configuration, self.constants)
        linked = dataclasses.replace(self._base, links=cluster.links or uniform_links(cluster))
        self.network = network_of(linked, self.constants, self.slowness)
        share = planner.safe_bytes / planner.limit_bytes * (1 - planner.memory_margin)
        memory = [node.gpu.memory_bytes for node in cluster.nodes]
        self._limit_bytes = share * np.array(memory or [cluster.gpu.memory_bytes] * self.num_nodes)
        self.layers = spread(model.num_layers, configuration.layout.pp * configuration.layout.vpp)
        self._places = Placement(self._job(self.layers), self.network)

    @property
    def num_nodes(self) -> int:
        """Nodes of the cluster."""
        return self.planner.cluster.num_nodes

    @functools.cached_property
    def _costs(self) -> Any:
        context = self.planner.context_bytes
        return costs_by_block(self.rows, self.constants, context_bytes=context)

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
            same = np.repeat(orders, held.shape[1], axis=0)
            behind = end_of_step(self.rows, self.constants, held, backward)
            reduce, gather, optimizer = behind.seconds(lambda size: places.ring_s(same, size))
            return reduce + gather + optimizer * slow

        return PartitionProblem.of(
            costs,
            c,
            hop_s=hops,
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
            end=end_of_step(self.rows, self.constants, priced.parameters, backward),
            fixed_s=self.constants.factors.compute * self.constants.step_s,
        )

    def placement(self, layers: Sequence[int]) -> Placement:
        """Prices orders for a partition."""
        return Placement(self._job(layers), self.network)

    def step_s(self, order: Sequence[int], layers: Sequence[int]) -> float:
        """Seconds of a step."""
        return float(self.placement(layers).step_s(np.array([order], dtype=np.int64))[0])

    def fits(self, order: Any, layers: Sequence[int]) -> bool:
        """Whether every stage has the memory it needs."""
        problem = self.problem(order)
        return bool(problem.excess(problem.price([list(layers)]))[0] <= 0)

    def best_layers(self, order: Any) -> tuple[int, ...] | None:
        """The fastest partition for an order of the nodes; None where none fits."""
        if self.configuration.layout.pp == 1:
            return self.layers if self.fits(order, self.layers) else None
        found = best_partition(self.problem(order))
        return found.layers if isinstance(found, LayerPartition) else None

    def fit(self, *, evaluations: int = EVALUATIONS, every: bool = True) -> FittedLayout | None:
        """The order and partition with the shortest step; None where nothing that was tried fits.

        Up to `EVERY_ORDER_NODES` nodes it searches the best partition of every order. Beyond, it
        improves order and partition in turn. It starts from the order given, from the best for even
        stages, and with the fast nodes first or last. The answer is never worse than as given, if
        that fits.

        Args:
            evaluations: orders to price in each search for one, about.
            every: search the best partition of every order where there are few nodes.
        """
        given = tuple(range(self.num_nodes))
        ordered = find_order(self._job(self.layers), self.network, evaluations=evaluations)
        found: dict[tuple[Any, Any], float] = {}
        for order, layers in self._tried(given, ordered.order, evaluations, every):
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
        order, layers = best
        alone = self.best_layers(given)
        placement = self.placement(layers)
        hosts = self.network.links.hosts
        return FittedLayout(
            configuration=self.configuration,
            order=order,
            hosts=tuple(hosts),
            partition=price_partition(self.problem(order), layers),
            even=self.layers,
            given_s=given_s,
            ordered_s=ordered.after_s,
            recut_s=self.step_s(given, alone) if alone else None,
            step_s=found[best],
            fits_as_given=self.fits(given, self.layers),
            slowness=tuple(float(x) for x in placement.slowness_of_stages(np.array([order]))[:, 0]),
            places=tuple(tuple(int(x) for x in row) for row in self._places.places),
            limits=limits(placement, np.array(order)),
        )

    def _tried(
        self, given: tuple[int, ...], ordered: tuple[int, ...], evaluations: int, every: bool
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Orders with partitions that fit."""
        if every and self.num_nodes <= EVERY_ORDER_NODES:
            same = [
                g for g in equivalent_nodes(self.network) if len(set(self._limit_bytes[g])) == 1
            ]
            for order in every_order(self.num_nodes, equivalent=same, turning=self._places.turning):
                if layers := self.best_layers(order):
                    yield tuple(int(n) for n in order), layers
            return
        pace = self.slowness or (1.0,) * self.num_nodes
        up = tuple(sorted(given, key=lambda n: pace[n]))
        down = tuple(sorted(given, key=lambda n: -pace[n]))
        for start in dict.fromkeys((given, ordered, up, down)):
            order, least = start, float("inf")
            for _ in range(_ROUNDS):
                layers = self.best_layers(order)
                if layers is None:
                    break
                yield order, layers
                step_s = self.step_s(order, layers)
                if not step_s < least:
                    break
                least = step_s
                found = find_order(self._job(layers), self.network, evaluations=evaluations)
                if found.order == order or not self.fits(found.order, layers):
                    break
                order = found.order
                yield order, layers


def slowness_of(
    model: ModelSpec, cluster: ClusterSpec, configuration: Configuration, constants: Constants
) -> tuple[float, ...]:
    """[nodes] seconds of a layer on every node over those on the cluster's own GPU; empty where all
    nodes are that.

    Args:
        model: what is trained.
        cluster: with its nodes.
        configuration: layout and micro-batch, on which the ratio of two kinds depends.
        constants: of the cluster's own GPU.
    """
    if not cluster.nodes:
        return ()
    base = dataclasses.replace(cluster, links=None, nodes=())

    def layer_s(kind: ClusterSpec, fitted: Constants) -> float:
        blocks = costs_by_block(
            to_rows(model, kind, points_of([configuration])).full(), fitted
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


def rank_on_nodes(planner: Planner, batch: int) -> list[FittedLayout]:
    """The configurations of a batch on nodes and links as they are, fastest first.

    Times are the cost model's: measured ones are of the nodes as they stood, and are not used.

    Args:
        planner: of the model on the cluster.
        batch: samples of a step.

    Raises:
        SpecError: a description that makes no sense.
    """
    proposed = _proposed(planner, batch)
    found = _fitted(planner, proposed, evaluations=_QUICK, every=False)
    closely = [x.configuration for x in found[:_CLOSELY]]
    rest = found[len(closely) :]
    whole = _fitted(planner, closely, evaluations=EVALUATIONS, every=True)
    return sorted([*whole, *rest], key=_seconds_per_sample)


def _proposed(planner: Planner, batch: int) -> list[Configuration]:
    """The best few configurations of every layout on even nodes with the most memory there is; of
    those whose layers can be split, and no two that differ in the optimizer's sharding alone."""
    cluster = planner.cluster
    memory = max([cluster.gpu.memory_bytes, *(n.gpu.memory_bytes for n in cluster.nodes)])
    even = dataclasses.replace(
        cluster, gpu=dataclasses.replace(cluster.gpu, memory_bytes=memory), links=None, nodes=()
    )
    ranked = planner.on(even).rank([batch], top=_ENOUGH)[0].ranked
    kept: dict[Any, list[Configuration]] = {}
    for c in (one.configuration for one in ranked):
        if cluster.gpus_per_node % c.layout.tp == 0 and c.recompute != "block":
            mine = kept.setdefault(c.layout, [])
            same = [(x.micro_batch_size, x.recompute) for x in mine]
            is_new = (c.micro_batch_size, c.recompute) not in same
            if is_new and len(mine) < _OF_A_LAYOUT:
                mine.append(c)
    return list(itertools.chain.from_iterable(list(kept.values())[:_LAYOUTS]))


def _fitted(planner: Planner, proposed: Sequence[Configuration], **how: Any) -> list[FittedLayout]:
    # No thread for one bar: a program that uses this function may mind signals.
    tqdm.monitor_interval = 0
    some = tqdm(proposed, unit="layout", delay=2, leave=False)
    found = (Site(planner, c).fit(**how) for c in some)
    return sorted((x for x in found if x is not None), key=_seconds_per_sample)


def _seconds_per_sample(x: FittedLayout) -> float:
    """A layout that cannot split the batch may have taken a smaller one."""
    return x.step_s / x.configuration.global_batch_size
