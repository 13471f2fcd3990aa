"""A layout fitted to nodes and links as they are: the answer of `copus plan nodes`."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from typing import Any

from copus_ext.extras.layer_partition.layers import LayerPartition
from copus_ext.extras.uneven.node_order import Limit, told
from copus_ext.planner.configuration import Configuration


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
    min_s: float
    """No order of nodes with any partition is faster than this."""
    measured_factor: float
    """Measured seconds over predicted ones, the nodes as given; all seconds here have it. 1 where
    nothing was measured."""
    fits_as_given: bool
    """Whether the nodes as given have the memory for even stages."""
    slowness: tuple[float, ...]
    """[pp] seconds of a layer on the slowest node of a stage over those on a usual one."""
    places: tuple[tuple[int, ...], ...]
    """[pp, copies] place of every stage of every replica."""
    limits: tuple[Limit, ...]
    """Links that the slowest stage waits for."""

    @property
    def gain(self) -> float:
        """Part of the step that order and partition save."""
        return 1.0 - self.step_s / self.given_s

    @property
    def sample_s(self) -> float:
        """Seconds of a sample; what cannot split the batch may have taken a smaller one."""
        return self.step_s / self.configuration.global_batch_size

    @property
    def names(self) -> list[str]:
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
        return self.repartitioned.to_flags()

    def name(self, node: int) -> str:
        return self.hosts[node] if self.hosts else str(node)

    def lines(self) -> list[str]:
        alone = "" if self.recut_s is None else f", the best partition alone {self.recut_s:.4g} s"
        lines = [
            f"nodes as given and even stages take {self.given_s:.4g} s"
            f"{'' if self.fits_as_given else ' and do not fit'}, the best order alone "
            f"{self.ordered_s:.4g} s{alone}, both {self.step_s:.4g} s: "
            f"{100 * self.gain:.1f} % less; surely no less than {self.min_s:.4g} s",
            f"  nodes: {','.join(self.names)}",
        ]
        if self.measured_factor != 1:
            lines.append(
                f"  seconds are {self.measured_factor:.3g} times the predicted, as measured"
            )
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
            "min_s": self.min_s,
            "measured_factor": self.measured_factor,
            "gain": self.gain,
            "fits_as_given": self.fits_as_given,
            "slowness": list(self.slowness),
        }
