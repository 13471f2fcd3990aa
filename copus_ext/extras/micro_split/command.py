"""`copus plan micro-batches`."""

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
    from copus_ext.extras.micro_split.split import UnequalMicroBatches
    from copus_ext.planner.plan import Addition, Plan
    from copus_ext.planner.search import Planner

_NOTHING = "unequal micro-batches make nothing shown here faster"


class MicroBatches(PlanCommand):
    help = "search, and split the samples of layouts without a pipeline unequally"

    def check(self, args: argparse.Namespace, model: ModelSpec, cluster: ClusterSpec) -> None:
        model.check_dense("`micro-batches`")

    def of_batch(self, planner: Planner, plan: Plan, *, top: int) -> Addition | None:
        from copus_ext.extras.micro_split.split import unequal_micro_batches

        return SplitsFound(unequal_micro_batches(planner, plan))


@dataclass(frozen=True)
class SplitsFound:
    """The best unequal micro-batches of ranked layouts of a batch without a pipeline."""

    found: Sequence[UnequalMicroBatches]
    fits: bool = False
    """All of them are of configurations that the ranking has."""

    def add_to(self, record: dict[str, Any]) -> None:
        record["micro_splits"] = [x.to_json() for x in self.found]

    def show(self, console: Console) -> None:
        for text in map(str, self.found or [_NOTHING]):
            console.print(text, highlight=False, markup=False)
