"""`copus plan partition`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from copus_ext.planner.commands import PlanCommand

if TYPE_CHECKING:
    from rich.console import Console

    from copus_ext.cost_model.cluster_spec import ClusterSpec
    from copus_ext.cost_model.model_spec import ModelSpec
    from copus_ext.extras.layer_partition.layers import Repartition
    from copus_ext.planner.plan import Addition, Plan
    from copus_ext.planner.search import Planner


class Partition(PlanCommand):
    help = "search, and split the layers of every ranked pipeline unevenly"

    def check(self, args: argparse.Namespace, model: ModelSpec, cluster: ClusterSpec) -> None:
        model.check_dense("`partition`")

    def of_batch(self, planner: Planner, plan: Plan, *, top: int) -> Addition | None:
        from copus_ext.extras.layer_partition.layers import repartitions

        return PartitionsFound(repartitions(planner, plan))


@dataclass(frozen=True)
class PartitionsFound:
    """The fastest layer partition of each ranked pipeline of a batch."""

    found: Sequence[Repartition]
    fits: bool = False
    """All of them are of configurations that the ranking has."""

    def add_to(self, record: dict[str, Any]) -> None:
        record["cuts"] = [x.to_json() for x in self.found]

    def show(self, console: Console) -> None:
        from copus_ext.extras.layer_partition.layers import lines

        for line in lines(self.found):
            console.print(line, highlight=False, markup=False)
