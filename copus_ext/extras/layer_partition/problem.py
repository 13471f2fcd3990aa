"""What a layer partition costs where stages may differ in work, speed and memory.

A partition gives every chunk its number of layers, in the order of the model: chunk k runs on stage
k mod pp. Embedding and head stay with the first and the last chunk.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.peak_correction import AS_PREDICTED, PeakCorrection
from copus_ext.cost_model.rows import ConfigBatch
from copus_ext.cost_model.schedule import pipeline_time
from copus_ext.extras.layer_partition import bound
from copus_ext.extras.layer_partition.blocks import (
    Blocks,
    SecondsBehind,
    StageCosts,
    costs_by_block,
    in_flight_chunks,
)
from copus_ext.planner.configuration import Configuration


def measured_costs(
    rows: ConfigBatch,
    c: Constants,
    *,
    correction: PeakCorrection = AS_PREDICTED,
) -> StageCosts:
    """`costs_by_block` with the bytes that measured peaks say.

    Args:
        rows: as there.
        c: as there.
        correction: of the bytes that come and go, and of those of a process.

    Raises:
        ValueError: as there.
    """
    costs = costs_by_block(rows, c)
    blocks, moving = costs.blocks, correction.moving
    resting = max(costs.resting_bytes + correction.fixed_bytes, 0.0)
    return replace(
        costs,
        blocks=replace(
            blocks,
            saved_bytes=moving * blocks.saved_bytes,
            working_bytes=moving * blocks.working_bytes,
        ),
        fixed_bytes=moving * (costs.fixed_bytes - costs.resting_bytes) + resting,
        resting_bytes=resting,
        chunk_bytes=moving * costs.chunk_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class Priced:
    """What some partitions cost before their schedule is simulated."""

    forward_s: Any
    """[pp, vpp, n] seconds of a chunk and micro-batch."""
    backward_s: Any
    """[pp, vpp, n] the same of the backward pass."""
    end_s: Any
    """[pp, n] seconds behind the last backward pass."""
    peak_bytes: Any
    """[pp, n] bytes that a stage needs."""
    parameters: Any
    """[pp, n] parameters that a rank of a stage holds."""

    def take(self, at: Any) -> Priced:
        return Priced(
            forward_s=self.forward_s[..., at],
            backward_s=self.backward_s[..., at],
            end_s=self.end_s[:, at],
            peak_bytes=self.peak_bytes[:, at],
            parameters=self.parameters[:, at],
        )


@dataclass(frozen=True, kw_only=True)
class PartitionProblem:
    """Layers, stages, and what limits them.

    Raises:
        ValueError: a size or an array that makes no sense; it names the field.
    """

    pp: int
    """Stages."""
    vpp: int = 1
    """Chunks of a stage."""
    num_microbatches: int
    """Of a replica and step."""
    blocks: Blocks
    """Costs of embedding, layers and head, on a GPU of speed 1."""
    p2p_time_s: Any
    """[pp] seconds of a message from stage r to r + 1; the last from the last to the first."""
    limit_bytes: Any
    """[pp] bytes that a stage may use."""
    speed: Any = None
    """[pp] work per second of a stage's GPU over that of speed 1; None: all 1."""
    fixed_bytes: float = 0.0
    """Bytes of every stage, besides those of its blocks."""
    resting_bytes: float = 0.0
    """Of them, those that a process needs before it has any tensor."""
    copied_bytes: float = 0.0
    """For each parameter, when the optimizer steps and nothing is kept for the passes."""
    chunk_bytes: float = 0.0
    """Bytes kept for every chunk and micro-batch in flight, besides those of its blocks."""
    chunk_s: float = 0.0
    """Seconds of a pass of every chunk on a GPU of speed 1, besides those of its blocks."""
    end_of_step: SecondsBehind | None = None
    """Seconds behind the last backward pass; None: none."""
    fixed_s: float = 0.0
    """Seconds of a step that no partition can change."""
    bare_ends: bool = False
    """Whether the first chunk may hold the embedding alone, and the last the head alone."""
    prefix: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """[pp, L + 3] sums of each cost but the working bytes over the first blocks, on every stage."""

    @classmethod
    def of(cls, costs: StageCosts, c: Configuration, **own: Any) -> PartitionProblem:
        """The partitions of one configuration.

        Args:
            costs: of its blocks and stages.
            c: the configuration.
            own: fields that are not those of `costs`, `limit_bytes` among them.

        Raises:
            ValueError: a size that makes no sense.
        """
        values = {f.name: getattr(costs, f.name) for f in fields(costs)} | own
        count, layout = c.num_microbatches, c.layout
        return cls(pp=layout.pp, vpp=layout.vpp, num_microbatches=count, **values)

    def __post_init__(self) -> None:
        for name in ("pp", "vpp", "num_microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        if self.vpp > 1 and (self.pp == 1 or self.num_microbatches % self.pp):
            raise ValueError(
                f"vpp {self.vpp} needs pp of at least 2 and num_microbatches "
                f"{self.num_microbatches} a multiple of pp {self.pp}; change one or use vpp 1"
            )
        for name in ("p2p_time_s", "limit_bytes", "speed"):
            given = 1.0 if getattr(self, name) is None else getattr(self, name)
            values = np.asarray(given, dtype=float)
            if values.shape not in ((), (self.pp,)) or not (values >= 0).all():
                raise ValueError(f"{name} must be {self.pp} numbers of at least 0, one per stage")
            object.__setattr__(self, name, np.broadcast_to(values, self.pp))
            if name != "p2p_time_s" and not (values > 0).all():
                raise ValueError(f"{name} {values.tolist()} must be positive on every stage")
        for name in ("forward_s", "backward_s", "parameters", "static_bytes", "saved_bytes"):
            values = self.of_stages(name)
            if name.endswith("_s"):
                values = values / self.speed[:, None]
            zero = np.zeros((self.pp, 1))
            self.prefix[name] = np.concatenate([zero, np.cumsum(values, axis=1)], axis=1)

    def of_stages(self, name: str) -> Any:
        """[pp, L + 2] a field of the blocks, for every stage."""
        values = getattr(self.blocks, name)
        if values.ndim == 2 and len(values) != self.pp:
            raise ValueError(f"blocks.{name} has {len(values)} stages; give {self.pp} or one row")
        return np.broadcast_to(values, (self.pp, values.shape[-1]))

    @property
    def num_chunks(self) -> int:
        return self.pp * self.vpp

    @property
    def min_layers(self) -> Any:
        """[chunks] layers that a chunk must hold."""
        least = np.ones(self.num_chunks, dtype=np.int64)
        if self.bare_ends and self.num_chunks > 1:
            least[[0, -1]] = 0
        return least

    @property
    def num_partitions(self) -> int:
        """How many partitions there are, fitting or not."""
        spare = self.blocks.num_layers - int(self.min_layers.sum())
        if spare < 0:
            return 0
        return math.comb(spare + self.num_chunks - 1, self.num_chunks - 1)

    def all_partitions(self) -> Any:
        """[n, chunks] layers of every chunk, of every partition."""
        spare = self.blocks.num_layers - int(self.min_layers.sum())
        places, bars = spare + self.num_chunks - 1, self.num_chunks - 1
        chosen = itertools.chain.from_iterable(itertools.combinations(range(places), bars))
        at = np.fromiter(chosen, dtype=np.int64).reshape(self.num_partitions, bars)
        edges = np.full((len(at), 1), -1), np.full((len(at), 1), places)
        return np.diff(np.concatenate([edges[0], at, edges[1]], axis=1)) - 1 + self.min_layers

    @functools.cached_property
    def max_working_bytes(self) -> Any:
        """[pp, i, k] greatest working bytes of the blocks i to k - 1."""
        values = self.of_stages("working_bytes")
        num = values.shape[1]
        most = np.zeros((self.pp, num + 1, num + 1))
        for i in range(num):
            most[:, i, i + 1 :] = np.maximum.accumulate(values[:, i:], axis=1)
        return most

    def price(self, partitions: Any) -> Priced:
        """Seconds and bytes of [n, chunks] layers of every chunk."""
        partitions = np.asarray(partitions, dtype=np.int64)
        assert partitions.shape[1] == self.num_chunks
        assert (partitions.sum(axis=1) == self.blocks.num_layers).all(), (
            "a partition has all layers"
        )
        first = np.concatenate(
            [
                np.zeros((len(partitions), 1), dtype=np.int64),
                1 + np.cumsum(partitions, axis=1)[:, :-1],
                np.full((len(partitions), 1), self.blocks.num_layers + 2),
            ],
            axis=1,
        )
        shape = (self.vpp, self.pp, len(partitions))
        start, stop = first[:, :-1].T.reshape(shape), first[:, 1:].T.reshape(shape)
        stage = np.arange(self.pp)[None, :, None]
        parts = {
            name: (values[stage, stop] - values[stage, start]).swapaxes(0, 1)
            for name, values in self.prefix.items()
        }
        peak = self.max_working_bytes[stage, start, stop].max(axis=0) + self.fixed_bytes
        static, held = parts["static_bytes"].sum(axis=1), parts["parameters"].sum(axis=1)
        peak = peak + static
        saved = parts["saved_bytes"] + self.chunk_bytes
        for r in range(self.pp):
            counts = in_flight_chunks(self.pp, self.vpp, self.num_microbatches, r)
            peak[r] += (counts @ saved[r]).max(axis=0)
        peak = np.maximum(peak, static + self.copied_bytes * held + self.resting_bytes)
        end = np.zeros_like(peak)
        if self.end_of_step is not None:
            backward = parts["backward_s"].sum(axis=1)
            end = np.broadcast_to(self.end_of_step(held, backward), peak.shape)
        own_s = self.chunk_s / self.speed[:, None, None]
        return Priced(
            forward_s=parts["forward_s"] + own_s,
            backward_s=parts["backward_s"] + own_s,
            end_s=end,
            peak_bytes=peak,
            parameters=held,
        )

    def step_s(self, priced: Priced) -> Any:
        """[n] seconds of a step, simulated exactly."""
        num = priced.end_s.shape[1]
        hop = np.repeat(self.p2p_time_s[:, None], num, axis=1)
        count = np.full(num, self.num_microbatches)
        clocks = pipeline_time(priced.forward_s, priced.backward_s, hop, count, vpp=self.vpp)
        return (clocks + priced.end_s).max(axis=0) + self.fixed_s

    def excess(self, priced: Priced) -> Any:
        """[n] bytes that the worst stage lacks; at most 0 where a partition fits."""
        return (priced.peak_bytes - self.limit_bytes[:, None]).max(axis=0)

    def own_s(self, forward: Any, backward: Any) -> Any:
        """[pp, ...] seconds of all passes and, in plain 1F1B, exchanges of every stage.

        Args:
            forward: [pp, ...] seconds of a forward pass of a stage.
            backward: [pp, ...] the same of the backward pass.
        """
        hop, plain = self._hop(forward.ndim), self.vpp == 1
        return bound.own_s(forward, backward, hop, self.num_microbatches, plain=plain)

    def turn_s(self, forward: Any, backward: Any) -> Any:
        """[pp, ...] seconds of every stage in plain 1F1B besides one micro-batch's way through all
        stages and back."""
        return bound.turn_s(forward, backward, self._hop(forward.ndim), self.num_microbatches)

    def min_step_s(self, priced: Priced) -> Any:
        """[n] a lower bound of `step_s`."""
        f, g, end = priced.forward_s, priced.backward_s, priced.end_s
        return bound.min_step_s(f, g, self._hop(2), end, self.num_microbatches) + self.fixed_s

    def _hop(self, dimensions: int) -> Any:
        """[pp, 1, ...]"""
        return self.p2p_time_s.reshape(-1, *[1] * (dimensions - 1))
