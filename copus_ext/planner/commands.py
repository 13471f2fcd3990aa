"""Commands of `copus plan` that extras bring: each searches as usual, and says more about what was
found."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron.trainer.common.extras import plan_commands

if TYPE_CHECKING:
    from copus_ext.cost_model.cluster_spec import ClusterSpec
    from copus_ext.cost_model.model_spec import ModelSpec
    from copus_ext.planner.plan import Addition, Plan, Ranked
    from copus_ext.planner.search import Planner


class PlanCommand:
    """One command. All methods but `check` may do nothing."""

    help = ""
    """A line for `copus plan --help`."""
    takes_configuration = False
    """Whether a configuration may follow its name, as with `explain`."""

    def add_flags(self, group: Any) -> None:
        """Adds flags of its own to a group of argparse."""

    def check(self, args: argparse.Namespace, model: ModelSpec, cluster: ClusterSpec) -> None:
        """Refuses what it does not know.

        Raises:
            UsageProblem: one line with the flag and the fix.
            SpecError: the model or the cluster.
        """

    def of_configuration(self, planner: Planner, found: Ranked) -> Addition | None:
        """More about the first configuration of a batch, or about the one that was named."""
        return None

    def of_batch(self, planner: Planner, plan: Plan, *, top: int) -> Addition | None:
        """More about a batch.

        Args:
            planner: that made the plan.
            plan: the ranking.
            top: rows that are shown.
        """
        return None

    def finish(self, args: argparse.Namespace, found: Sequence[Addition]) -> None:
        """Writes files that were asked for.

        Args:
            args: flags.
            found: the additions that fit, in the order of batches.

        Raises:
            UsageProblem: a file cannot be written.
        """


def command_of(name: str) -> PlanCommand:
    """The command of an extra; one that adds nothing where the core has it."""
    kind = plan_commands().get(name, PlanCommand)
    return kind()


def helps() -> dict[str, str]:
    """A line about each command of the extras, by name."""
    return {name: kind.help for name, kind in plan_commands().items()}
