"""Step time of a layout on nodes in some order, each pair of nodes linked in its own way.

Ranks are numbered tensor, data, pipeline (`tp-cp-ep-dp-pp`) and fill one node after the other:
place 0 of an order holds ranks 0 to G - 1. An order says which node takes which place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from copus_ext.cost_model.cluster_spec import Links
from copus_ext.cost_model.schedule import pipeline_time
from copus_ext.cost_model.spec_file import SpecError
from copus_ext.cost_model.step import EndOfStep
from copus_ext.extras.layer_partition import bound
from megatron.trainer.config.layout import Layout

Array = NDArray[np.float64]
Orders = NDArray[np.int64]

_COLUMNS = 8192
"""Pipelines simulated together: enough to share work, few enough for the memory."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a layout computes and sends in a step, whatever the network is."""

    layout: Layout
    """How the ranks share the model; tp divides the ranks of a node."""
    num_microbatches: int
    """Micro-batches of a replica and step."""
    forward_s: Any
    """[pp, vpp] seconds of the forward pass of a chunk, one micro-batch."""
    backward_s: Any
    """[pp, vpp] seconds of its backward pass."""
    hop_bytes: float
    """Bytes of a pipeline message of one rank."""
    end: EndOfStep
    """What follows the last backward pass: [pp, 1]."""
    fixed_s: float = 0.0
    """Seconds of a step that nothing here changes."""


@dataclass(frozen=True, kw_only=True)
class Network:
    gpus_per_node: int
    """Ranks of a node."""
    inside_bytes_per_s: float
    """Link of a rank to the others of its node."""
    nic_bytes_per_s: float
    """What a whole node can send at a time, whatever its links are."""
    links: Links
    """The pairs of nodes."""
    exchange_s: float = 0.0
    """Fixed time of a pipeline message, on top of its link's latency."""
    ring_s: float = 0.0
    """Fixed time of a collective over the replicas, on top of its links' latencies."""
    slowness: tuple[float, ...] = ()
    """[nodes] factor on the seconds of passes and optimizer on a node; none: all are equal."""


@dataclass(frozen=True, kw_only=True)
class Edges:
    """Links that a ring of every stage uses, stage by stage."""

    source: NDArray[np.int64]
    """[e] place that sends."""
    target: NDArray[np.int64]
    """[e] place that receives; the same inside a node."""
    starts: NDArray[np.int64]
    """[pp] first edge of each stage."""
    lanes: NDArray[np.int64]
    """[e, 2] ranks that share the link, and ranks that share a node's network."""
    kind: NDArray[np.int64]
    """[e] row of the table of seconds per byte."""

    @cached_property
    def stage(self) -> NDArray[np.int64]:
        """[e] whose ring it is."""
        counts = np.diff(np.append(self.starts, len(self.source)))
        return np.repeat(np.arange(len(self.starts)), counts)


class Placement:
    """Prices orders of nodes for one job on one network.

    A hop takes as long as its slower direction. Ranks that cross a boundary together share the link
    of their nodes and each node's network; so do the rings of the replicas. A ring follows the
    order of ranks through all of them, or runs inside the nodes and then across, whichever is
    sooner; its slowest link sets the pace.

    Raises:
        SpecError: ranks that do not fill the nodes, or a tensor-parallel group across nodes.
    """

    def __init__(self, job: Job, network: Network) -> None:
        self.job, self.network = job, network
        self.num_nodes = network.links.num_nodes
        _check(job, network)
        at = job.layout
        first_rank = at.tp * np.arange(at.pp * at.copies).reshape(at.pp, at.copies)
        self.places = first_rank // network.gpus_per_node
        """[pp, copies] where every stage of every replica is, with those ranks that share its
        samples."""
        self.paths, self._replica = np.unique(self.places.T, axis=0, return_index=True)
        """[paths, pp] the replicas that differ in their places."""
        self._slowness = np.array(network.slowness) if network.slowness else None
        self._lay()

    def _lay(self) -> None:
        """Who shares which wires does not depend on the order: counted once."""
        job, links, inside = self.job, self.network.links, self.network.inside_bytes_per_s
        boundaries = job.layout.pp if job.layout.vpp > 1 else job.layout.pp - 1
        self._following = (np.arange(boundaries) + 1) % job.layout.pp
        hops = [
            _lanes(self.places[r], self.places[s], job.layout.tp)[self._replica]
            for r, s in enumerate(self._following)
        ]
        ring, across = self._ring_edges(), self._across_edges()
        uses = [*hops, *(e["lanes"] for e in (ring, across) if e is not None)]
        shares, kinds = np.unique(
            np.concatenate([*uses, np.ones((1, 2), dtype=np.int64)]), axis=0, return_inverse=True
        )
        parts = np.split(kinds.ravel(), np.cumsum([len(use) for use in uses]))
        self._hop_kind = np.array(parts[:boundaries], dtype=np.int64).T
        self.ring = None if ring is None else Edges(**ring, kind=parts[boundaries])
        self.across = None if across is None else Edges(**across, kind=parts[boundaries + 1])
        self._latency = np.array(links.latency_s, dtype=np.float64)
        speed = np.array(links.bytes_per_s, dtype=np.float64)
        own = np.eye(self.num_nodes, dtype=bool)
        speed[own] = 1.0
        link, node = (shares[:, i, None, None] for i in (0, 1))
        inverse = np.maximum(link / speed, node / self.network.nic_bytes_per_s)
        inverse[:, own] = 1.0 / inside
        self._across_inverse = inverse
        # A ring through all ranks also runs inside the nodes.
        self._ring_inverse = np.maximum(inverse, 1.0 / inside)
        p2p_time_s = self.network.exchange_s + self._latency + job.hop_bytes * inverse
        self._p2p_time_s = np.maximum(p2p_time_s, p2p_time_s.transpose(0, 2, 1))
        # The best link of all, where not one order but all of them are asked for.
        self._away = ~own if self.num_nodes > 1 else own
        self._min_p2p_time_s = self._p2p_time_s[:, self._away].min(axis=1)
        self._min_latency = float(self._latency[self._away].min())

    def _ring_edges(self) -> dict[str, Any] | None:
        job = self.job
        if job.layout.copies == 1:
            return None
        source, target = self.places, np.roll(self.places, -1, axis=1)
        lanes = _lanes(source.ravel(), target.ravel(), job.layout.tp)
        stage = np.repeat(np.arange(job.layout.pp), job.layout.copies)
        rows = np.stack([stage, source.ravel(), target.ravel()], axis=1)
        rows, at = np.unique(rows, axis=0, return_index=True)
        return _edges(rows, lanes[at], job.layout.pp)

    def _across_edges(self) -> dict[str, Any] | None:
        """None where the ranks of a stage do not lie in several nodes, equally many in each."""
        job = self.job
        seen = [np.unique(stage, return_counts=True) for stage in self.places]
        counts = np.concatenate([count for _, count in seen])
        if min(len(nodes) for nodes, _ in seen) == 1 or np.ptp(counts):
            return None
        self._inside = int(counts[0])
        rows = np.concatenate(
            [
                np.stack([np.full(len(nodes), r), nodes, np.roll(nodes, -1)], axis=1)
                for r, (nodes, _) in enumerate(seen)
            ]
        )
        lanes = _lanes(rows[:, 1], rows[:, 2], job.layout.tp * self._inside)
        return _edges(rows, lanes, job.layout.pp)

    @property
    def num_columns(self) -> int:
        """Pipelines that are simulated to price one order."""
        return len(self.paths) if self.job.layout.pp > 1 or self._slowness is not None else 1

    @property
    def turning(self) -> int:
        """q, where the places k q to k q + q - 1 are those of one stage: to turn all these rings
        together, or to run them backwards, changes nothing. 1 where there is nothing to turn."""
        ranks, per_node = self.job.layout.tp * self.job.layout.copies, self.network.gpus_per_node
        return ranks // per_node if ranks % per_node == 0 else 1

    @property
    def traffic(self) -> Array:
        """[places, places] bytes of a step from place to place."""
        job, total = self.job, np.zeros((self.num_nodes, self.num_nodes))
        size = 2 * job.num_microbatches * job.layout.vpp * job.layout.tp * job.hop_bytes
        for r, s in enumerate(self._following):
            np.add.at(total, (self.places[r], self.places[s]), size)
        if self.ring is not None:
            end = job.end
            sent = end.passes * end.gradient_bytes + end.gather_bytes + end.further_bytes
            per_lane = np.broadcast_to(sent, (job.layout.pp, 1))[self.ring.stage, 0]
            lanes = self.ring.lanes[:, 0]
            np.add.at(total, (self.ring.source, self.ring.target), per_lane * lanes)
        np.fill_diagonal(total, 0.0)
        return total

    def step_s(self, orders: Orders) -> Array:
        """Seconds of a step.

        Args:
            orders: [m, places] the node at every place.

        Returns:
            [m] seconds.
        """
        size = max(_COLUMNS // self.num_columns, 1)
        parts = [self.stages_s(orders[i : i + size]) for i in range(0, len(orders), size)]
        return np.concatenate([part.max(axis=0) for part in parts])

    def min_s(self, orders: Orders | None) -> Array:
        """Lower bounds of the seconds of a step, for much less than `step_s`.

        Args:
            orders: [m, places] the node at every place; None: all orders together.

        Returns:
            [m] seconds, or [1] that no order beats.
        """
        job = self.job
        forward, backward = self._work(orders)
        hop = np.zeros((job.layout.pp, 1, 1))
        if job.layout.pp > 1:
            hops = np.moveaxis(self.hops_s(orders), 2, 0)
            hop = np.zeros((job.layout.pp, *hops.shape[1:]))
            hop[: len(hops)] = hops
        end = self._end_s(orders)[..., None]
        least = bound.min_step_s(forward, backward, hop, end, job.num_microbatches)
        if orders is None and self._slowness is not None:
            # The slowest node is somewhere, and does the passes of some stage.
            work = (forward + backward).sum(axis=1).min() / self._slowness.min()
            slowest = job.num_microbatches * work * self._slowness.max()
            least = np.maximum(least, slowest)
        num = 1 if orders is None else len(orders)
        return np.broadcast_to(least.max(axis=1), num) + job.fixed_s

    def stages_s(self, orders: Orders) -> Array:
        """[pp, m] when every stage of the slowest replica is through with a step."""
        return self.clocks_s(orders).max(axis=2) + self._end_s(orders) + self.job.fixed_s

    def _end_s(self, orders: Orders | None) -> Array:
        """[pp, m] seconds behind the last backward pass."""
        reduce, gather, optimizer = self.job.end.seconds(self._rings(orders))
        return reduce + gather + optimizer * self.slowness_of_stages(orders)

    def slowness_of_stages(self, orders: Orders | None) -> Array:
        """[pp, m] that of the slowest node of every stage; of all orders the least there is."""
        if self._slowness is None:
            return np.ones((self.job.layout.pp, 1 if orders is None else len(orders)))
        if orders is None:
            return np.full((self.job.layout.pp, 1), self._slowness.min())
        return np.moveaxis(self._slowness[orders[:, self.places]], 0, 2).max(axis=1)

    def _work(self, orders: Orders | None) -> tuple[Array, Array]:
        """[pp, vpp, m, paths] seconds of the passes of a chunk, or what broadcasts to them."""
        job, factor = self.job, 1.0
        if self._slowness is not None:
            factor = self._slowness.min()
            if orders is not None:
                factor = np.moveaxis(self._slowness[orders[:, self.paths]], 2, 0)[:, None]
        shape = (job.layout.pp, job.layout.vpp, 1, 1)
        return np.reshape(job.forward_s, shape) * factor, np.reshape(job.backward_s, shape) * factor

    def clocks_s(self, orders: Orders) -> Array:
        """[pp, m, paths] when the last pass of a stage is done."""
        job, num, columns = self.job, len(orders), self.num_columns
        pp, vpp = job.layout.pp, job.layout.vpp
        shape, flat = (pp, vpp, num, columns), (pp, vpp, num * columns)
        forward, backward = (
            np.broadcast_to(part, shape).reshape(flat) for part in self._work(orders)
        )
        hop = np.zeros((1, flat[2]))
        if pp > 1:
            hop = np.moveaxis(self.hops_s(orders), 2, 0).reshape(-1, flat[2])
        count = np.full(flat[2], job.num_microbatches, dtype=np.int64)
        clocks = pipeline_time(forward, backward, hop, count, vpp=vpp)
        return clocks.reshape(pp, num, columns)

    def hops_s(self, orders: Orders | None) -> Array:
        """[m, paths, boundaries] seconds of a pipeline message; the boundary from the last stage to
        the first only where stages have several chunks. Of all orders the least there is."""
        if orders is None:
            following = self.paths[:, self._following]
            same = self.paths[:, : following.shape[1]] == following
            inside, away = (
                self._p2p_time_s[self._hop_kind, 0, 0],
                self._min_p2p_time_s[self._hop_kind],
            )
            return np.where(same, inside, away)[None]
        nodes = orders[:, self.paths]
        following = nodes[..., self._following]
        return self._p2p_time_s[self._hop_kind, nodes[..., : following.shape[2]], following]

    def ring_s(self, orders: Orders | None, num_bytes: Any) -> Array:
        """[pp, m] seconds to reduce-scatter or all-gather [pp, 1 or m] bytes over the replicas; of
        all orders the least there is."""
        return self._rings(orders)(num_bytes)

    def _rings(self, orders: Orders | None) -> Callable[[Any], Array]:
        """`ring_s` of some orders, as a function of the bytes."""
        job = self.job
        if self.ring is None:
            nothing = np.zeros((job.layout.pp, 1 if orders is None else len(orders)))
            return lambda num_bytes: nothing
        flat, across = self._wires(self.ring, orders, self._ring_inverse), None
        if self.across is not None:
            across = self._wires(self.across, orders, self._across_inverse)

        def seconds(num_bytes: Any) -> Array:
            assert self.ring is not None
            links = self._links_s(self.ring, flat, num_bytes)
            found = np.maximum.reduceat(links, self.ring.starts, axis=0) * (job.layout.copies - 1)
            if self.across is not None and across is not None:
                links = self._links_s(self.across, across, num_bytes)
                number = job.layout.copies // self._inside
                staged = np.maximum.reduceat(links, self.across.starts, axis=0) * (number - 1)
                share = (self._inside - 1) / self._inside / self.network.inside_bytes_per_s
                found = np.minimum(found, staged + share * num_bytes)
            return found + self.network.ring_s

        return seconds

    def ring_links_s(self, orders: Orders, num_bytes: Any) -> Array:
        """[edges, m] seconds of a ring's step over every link, through all ranks."""
        assert self.ring is not None
        wires = self._wires(self.ring, orders, self._ring_inverse)
        return self._links_s(self.ring, wires, num_bytes)

    def across_links_s(self, orders: Orders, num_bytes: Any) -> Array:
        """The same for the rings across nodes, after those inside them."""
        assert self.across is not None
        wires = self._wires(self.across, orders, self._across_inverse)
        return self._links_s(self.across, wires, num_bytes)

    def _wires(self, edges: Edges, orders: Orders | None, inverse: Array) -> tuple[Array, Array]:
        """[edges, m] latency, and seconds per byte."""
        if orders is None:
            away = (edges.source != edges.target)[:, None]
            best = inverse[:, self._away].min(axis=1)[edges.kind, None]
            per_byte = np.where(away, best, inverse[edges.kind, 0, 0, None])
            return np.where(away, self._min_latency, 0.0), per_byte
        a, b = orders[:, edges.source].T, orders[:, edges.target].T
        return self._latency[a, b], inverse[edges.kind[:, None], a, b]

    def _links_s(self, edges: Edges, wires: tuple[Array, Array], num_bytes: Any) -> Array:
        # All ranks of a stage in a node take their part: of the bytes, and of the links.
        size = np.asarray(num_bytes) / self.job.layout.copies
        columns = size.shape[1] if size.ndim == 2 else 1
        size = np.broadcast_to(size, (self.job.layout.pp, columns))
        return wires[0] + size[edges.stage] * wires[1]


def _check(job: Job, network: Network) -> None:
    layout, per_node, nodes = job.layout, network.gpus_per_node, network.links.num_nodes
    num = layout.world_size
    if num != per_node * nodes:
        raise SpecError(
            f"{layout} are {num} ranks and {nodes} nodes of {per_node} have {per_node * nodes}; "
            "use another layout"
        )
    if per_node % layout.tp:
        raise SpecError(
            f"{layout}: no order of nodes is modelled where tp does not divide the {per_node} GPUs "
            "of a node; use another tp"
        )
    if network.slowness and len(network.slowness) != nodes:
        raise SpecError(
            f"slowness has {len(network.slowness)} values for {nodes} nodes; give one per node"
        )


def _lanes(source: Any, target: Any, ranks: int) -> NDArray[np.int64]:
    """[e, 2] ranks that share the link of a message, and ranks that share the network of a node at
    one of its ends. Every message stands for `ranks` ranks."""
    num = int(max(source.max(), target.max())) + 1
    away = source != target
    pairs = np.bincount(source * num + target, minlength=num * num)
    out = np.bincount(source[away], minlength=num)
    into = np.bincount(target[away], minlength=num)
    node = np.maximum(out[source], into[target])
    return ranks * np.maximum(np.stack([pairs[source * num + target], node], axis=1), 1)


def _edges(rows: NDArray[np.int64], lanes: NDArray[np.int64], pp: int) -> dict[str, Any]:
    """Rows of (stage, source, target), sorted by stage."""
    starts = np.searchsorted(rows[:, 0], np.arange(pp))
    return {"source": rows[:, 1], "target": rows[:, 2], "starts": starts, "lanes": lanes}
