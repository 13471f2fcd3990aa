"""What a run expects a change of its layout to take before it has measured one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.link_timing import Link, ranks_of_a_node
from copus_ext.cost_model.cluster_spec import ClusterSpec
from copus_ext.goodput.costs import RELAUNCH_S, Machine
from copus_ext.reshard.parameters import shape_of
from copus_ext.reshard.pause import predictor_of
from megatron.trainer.config.layout import Layout

if TYPE_CHECKING:
    from megatron.trainer.config import Config


def machine_of(config: Config, cluster: ClusterSpec | None, link: Link | None) -> Machine:
    """What a change goes over: the planner's cluster, or what little is known without one.

    Args:
        config: of the run.
        cluster: of the planner; None where nothing describes the machine.
        link: between nodes, as timed.
    """
    if cluster is not None:
        return Machine.of(cluster)
    return Machine.unknown(
        config.runtime.device,
        ranks_per_node=ranks_of_a_node(config.layout.world_size),
        across_bytes_per_s=link and link.bytes_per_s,
    )


class PausePrior:
    """Seconds of a change from the present layout, the same on every rank.

    Args:
        config: of the run under its present layout.
        flags: of the controller.
        machine: the same on every rank.
    """

    def __init__(self, config: Config, flags: CopusConfig, machine: Machine) -> None:
        self._here = config.layout
        self._given = flags.copus_relayout_cost_s
        if self._given is None and flags.copus_relayout == "relaunch":
            self._given = RELAUNCH_S
        self._predictor = None
        if self._given is None:
            try:
                self._predictor = predictor_of(shape_of(config), machine)
            except (ValueError, AttributeError):  # another trainer, which has to start again
                self._given = RELAUNCH_S

    @property
    def any_s(self) -> float:
        """Of a change that moves all of the state."""
        if self._predictor is None:
            assert self._given is not None
            return self._given
        return self._predictor.max_seconds(self._here)

    def to_s(self, layout: Layout) -> float:
        """Of a change to one layout."""
        if self._predictor is None:
            return self.any_s
        try:
            return self._predictor.seconds(self._here, layout)
        except ValueError:  # a layout that the model cannot have; nobody changes to it
            return self.any_s

    def of_layouts(self, layouts: Iterable[Layout]) -> dict[Layout, float]:
        """Of changes to each of some layouts but the present one."""
        return {to: self.to_s(to) for to in dict.fromkeys(layouts) if to != self._here}
