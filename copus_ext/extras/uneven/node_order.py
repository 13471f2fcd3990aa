"""Which node goes where: the order of nodes with the shortest predicted step.

The order is that of the hosts before any process group exists: ranks are numbered along it. It
depends on the nodes, on the layout and a little on the batch; nothing here runs while training.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from copus_ext.cost_model.cluster_spec import ClusterSpec, Links
from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.layer_time import hop_bytes
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.cost_model.spec_file import SpecError
from copus_ext.cost_model.step import stage_work
from copus_ext.extras.uneven.orders import (
    Array,
    Found,
    Orders,
    anneal,
    cheapest,
    every_order,
    greedy_orders,
)
from copus_ext.extras.uneven.pricing import Job, Network, Placement
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.space import points_of, to_config_batch

EXACT_NODES = 8
"""Up to so many nodes every order is priced, if there are no more than may be looked at."""
_FEW = 24
"""Orders that may always be."""
EVALUATIONS = 40_320
"""Orders that are looked at, about: all of eight nodes."""
_PRICED = 0.5
"""Of these, the share that the chains price where there are no stages; less with more of them."""
_POLISHED, _SHORT = 0.25, 8
"""As many again, as a share, are looked at around the best one; fewer where a pipeline has more
than some chunks in a row, as those take longer."""
_NO_GAIN = 1e-9
"""Relative gain below which the given order stays."""


@dataclass(frozen=True, kw_only=True)
class Limit:
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
    seconds: float
    """Of one pipeline message, or of a whole reduction, over it."""


@dataclass(frozen=True, kw_only=True)
class NodeOrder:
    order: tuple[int, ...]
    """Node at every place, by its number in the matrix; ranks are numbered along it."""
    before_s: float
    """Predicted seconds of a step in the given order."""
    after_s: float
    """The same in this order; never more."""
    exact: bool
    """Whether no order is better; otherwise it is the best that a search of bounded length saw."""
    min_s: float
    """No order is faster than this; `after_s` where `exact`."""
    num_priced: int
    """Orders that were looked at."""
    limits_before: tuple[Limit, ...]
    """What limits the given order: the slowest hop of the slowest replica and the slowest link of a
    ring, for the stage that is through last; those between nodes only."""
    limits_after: tuple[Limit, ...]
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
        return self.names[self.order.index(node)]

    def times(self, factor: float) -> NodeOrder:
        """The same with steps so many times as long; what one message takes stays."""
        names = ("before_s", "after_s", "min_s")
        return replace(self, **{name: factor * getattr(self, name) for name in names})

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        return {n: list(v) if isinstance(v, tuple) else v for n, v in data.items()}

    def lines(self) -> list[str]:
        seen = "no order is better"
        if not self.exact:
            seen = f"the best of {self.num_priced} looked at, and none takes less than "
            seen += f"{self.min_s:.4g} s"
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


def find_order(
    job: Job,
    network: Network,
    *,
    evaluations: int = EVALUATIONS,
    seed: int = 0,
    starts: Sequence[Sequence[int]] = (),
    greedy: bool = True,
) -> NodeOrder:
    """The order of nodes with the least predicted step time.

    Exact up to `EXACT_NODES` nodes, unless they have more orders than may be looked at. Beyond,
    simulated annealing. Never worse than the given order, and the same answer for the same input.

    Args:
        evaluations: orders to look at where it cannot be all, about.
        starts: orders to start from there, besides the given one.
        greedy: whether to start there from greedy orders, too.

    Raises:
        SpecError: the layout does not fit the nodes.
    """
    placement = Placement(job, network)
    found = search_orders(
        placement, evaluations=evaluations, seed=seed, starts=starts, greedy=greedy
    )
    given, names = np.arange(placement.num_nodes), network.links.hosts
    return NodeOrder(
        order=found.order,
        before_s=found.before_s,
        after_s=found.after_s,
        exact=found.exact,
        min_s=found.after_s if found.exact else float(placement.min_s(None)[0]),
        num_priced=found.num_priced,
        limits_before=limits(placement, given),
        limits_after=limits(placement, np.array(found.order)),
        hosts=tuple(names[node] for node in found.order) if names else (),
    )


@dataclass(frozen=True, kw_only=True)
class Searched:
    """The end of a search for an order; fields as those of `NodeOrder`."""

    order: tuple[int, ...]
    before_s: float
    after_s: float
    exact: bool
    num_priced: int


def search_orders(
    placement: Placement,
    *,
    evaluations: int = EVALUATIONS,
    seed: int = 0,
    starts: Sequence[Sequence[int]] = (),
    greedy: bool = True,
    known: tuple[Sequence[int], float] | None = None,
) -> Searched:
    """What `find_order` finds, for a placement that there is already.

    Args:
        placement: prices the orders.
        evaluations: as for `find_order`.
        seed: as for `find_order`.
        starts: as for `find_order`.
        greedy: as for `find_order`.
        known: an order and its seconds, in place of the given order.
    """
    network = placement.network
    if known is None:
        given = np.arange(placement.num_nodes)[None]
        before = float(placement.step_s(given)[0])
    else:
        given, before = np.array(known[0], dtype=np.int64)[None], known[1]
    orders = None
    if placement.num_nodes <= EXACT_NODES:
        orders = every_order(
            placement.num_nodes,
            equivalent=equivalent_nodes(network),
            turning=placement.turning,
            reversible=_is_symmetric(network.links),
        )
    exact = orders is not None and len(orders) <= max(evaluations, _FEW)
    if orders is not None and exact:
        at, after, _ = cheapest(placement.step_s, placement.min_s, orders)
        best, priced = orders[at], len(orders)
    else:
        first = [given, np.array(starts, dtype=np.int64).reshape(-1, placement.num_nodes)]
        found = _anneal(placement, first, evaluations, seed, greedy)
        best, after, priced = found.order, found.cost, found.num_priced
    if not after < before * (1 - _NO_GAIN):
        best, after = given[0], before
    return Searched(
        order=tuple(int(node) for node in best),
        before_s=before,
        after_s=after,
        exact=exact or after <= float(placement.min_s(None)[0]) * (1 + _NO_GAIN),
        num_priced=priced,
    )


def _anneal(
    placement: Placement, first: list[Orders], evaluations: int, seed: int, greedy: bool
) -> Found:
    links, traffic = placement.network.links, placement.traffic
    speed = np.array(links.bytes_per_s, dtype=np.float64)
    np.fill_diagonal(speed, np.inf)
    size = placement.job.hop_bytes or 1.0
    seconds = 1.0 / speed + np.array(links.latency_s) / size
    places = np.nonzero(traffic)

    def strain(orders: Orders) -> Array:
        a, b = orders[:, places[0]], orders[:, places[1]]
        return (seconds[a, b] * traffic[places]).sum(axis=1) + 1e-30

    layout = placement.job.layout
    return anneal(
        placement.step_s,
        placement.min_s,
        strain,
        np.concatenate([*first, *([greedy_orders(traffic, seconds)] if greedy else [])]),
        evaluations=evaluations,
        polish=int(_POLISHED * evaluations) // max(layout.pp * layout.vpp // _SHORT, 1),
        seed=seed,
    )


def _is_symmetric(links: Links) -> bool:
    return all(
        np.array_equal(m, m.T) for m in (np.array(links.bytes_per_s), np.array(links.latency_s))
    )


def equivalent_nodes(network: Network) -> tuple[tuple[int, ...], ...]:
    """Groups of nodes that can be exchanged without any effect."""
    links = network.links
    matrices = [np.array(links.bytes_per_s), np.array(links.latency_s)]
    groups: list[list[int]] = []
    for node in range(links.num_nodes):
        for group in groups:
            swap = np.arange(links.num_nodes)
            swap[[group[0], node]] = node, group[0]
            same = all(np.array_equal(m, m[np.ix_(swap, swap)]) for m in matrices)
            pace = network.slowness
            if same and (not pace or pace[node] == pace[group[0]]):
                group.append(node)
                break
        else:
            groups.append([node])
    return tuple(tuple(group) for group in groups if len(group) > 1)


def limits(placement: Placement, order: Any) -> tuple[Limit, ...]:
    """The links between nodes that the stage which is through last waits for."""
    job, orders = placement.job, np.asarray(order)[None]
    stage = int(np.argmax(placement.stages_s(orders)[:, 0]))
    found = []
    if job.layout.pp > 1:
        path = int(np.argmax(placement.clocks_s(orders)[stage, 0]))
        hops = placement.hops_s(orders)[0, path]
        r = int(np.argmax(hops))
        places = placement.paths[path, [r, (r + 1) % job.layout.pp]]
        found.append(("pipeline", r, *places, float(hops[r])))
    if placement.ring is not None:
        size = job.end.gradient_bytes
        ring = placement.ring_s(orders, size)[stage, 0]
        edges, seconds = placement.ring, placement.ring_links_s(orders, size)[:, 0]
        if placement.across is not None:
            edges, seconds = placement.across, placement.across_links_s(orders, size)[:, 0]
        mine = np.flatnonzero(edges.stage == stage)
        at = int(mine[np.argmax(seconds[mine])])
        passes = float(np.broadcast_to(job.end.passes, (job.layout.pp, 1))[stage, 0])
        ends = edges.source[at], edges.target[at]
        found.append(("replicas", stage, *ends, passes * float(ring)))
    links = placement.network.links
    return tuple(
        Limit(
            kind=kind,
            stage=r,
            source=int(orders[0, a]),
            target=int(orders[0, b]),
            bytes_per_s=links.bytes_per_s[orders[0, a]][orders[0, b]],
            latency_s=links.latency_s[orders[0, a]][orders[0, b]],
            seconds=seconds,
        )
        for kind, r, a, b, seconds in found
        if a != b
    )


def network_of(cluster: ClusterSpec, c: Constants, slowness: Sequence[float] = ()) -> Network:
    """The network of a cluster whose links were measured.

    Args:
        slowness: [nodes] factor on the seconds of passes on a node; none: all are equal.

    Raises:
        SpecError: the links were not measured.
    """
    if cluster.links is None:
        raise SpecError('the cluster has no "links"; measure them and give --cluster FILE.json')
    return Network(
        gpus_per_node=cluster.gpus_per_node,
        inside_bytes_per_s=min(c.dp_bytes_per_s * cluster.intra_share, cluster.intra_bytes_per_s),
        nic_bytes_per_s=cluster.network_bytes_per_s(c),
        links=cluster.links.both_ways(),
        exchange_s=c.exchange_s,
        ring_s=c.tp_latency_s / 2,
        slowness=tuple(slowness),
    )


def job_of(model: ModelSpec, cluster: ClusterSpec, what: Configuration, c: Constants) -> Job:
    """What a configuration computes and sends, as the cost model has it."""
    rows = to_config_batch(model, cluster, points_of([what])).full()
    forward, backward, end = stage_work(rows, c, what.layout.pp, what.layout.vpp)
    return Job(
        layout=what.layout,
        num_microbatches=what.num_microbatches,
        forward_s=forward[..., 0],
        backward_s=backward[..., 0],
        hop_bytes=float(hop_bytes(rows)[0]),
        end=end,
        fixed_s=c.factors.compute * c.step_s,
    )


def uniform_links(cluster: ClusterSpec) -> Links:
    """Links as the rest of the description of a cluster has them."""
    return _equal_links(cluster.num_nodes, cluster.nic_bytes_per_s)


@functools.lru_cache(maxsize=4)
def _equal_links(num: int, speed: float) -> Links:
    # A search asks for every layout, and each value of the matrices is checked.
    rows = [tuple(speed if i != j else 0.0 for j in range(num)) for i in range(num)]
    return Links(bytes_per_s=tuple(rows), latency_s=((0.0,) * num,) * num)


def order_for(
    model: ModelSpec,
    cluster: ClusterSpec,
    what: Configuration,
    c: Constants | None = None,
    **how: Any,
) -> NodeOrder:
    """The order of a cluster's nodes for one configuration; `how` as for `find_order`.

    Raises:
        SpecError: the links were not measured, the layout does not fit the nodes, or the model is a
            mixture of experts.
    """
    model.check_dense("the order of nodes")
    constants = c or cluster.load_constants()
    network = network_of(cluster, constants)
    return find_order(job_of(model, cluster, what, constants), network, **how)
