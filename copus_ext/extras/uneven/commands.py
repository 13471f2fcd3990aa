"""`copus plan order` and `copus plan nodes`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from copus_ext.planner.commands import PlanCommand
from copus_ext.planner.request import UsageProblem, uses_tp_pp_dp_mapping

if TYPE_CHECKING:
    from rich.console import Console

    from copus_ext.cost_model.cluster_spec import ClusterSpec
    from copus_ext.cost_model.model_spec import ModelSpec
    from copus_ext.extras.uneven.fitted_layout import FittedLayout
    from copus_ext.extras.uneven.node_order import NodeOrder
    from copus_ext.planner.plan import Addition, Plan, Ranked
    from copus_ext.planner.search import Planner

_COLUMNS = ["rank", "B", "tp", "pp", "vpp", "dp", "b", "recompute"]
_COLUMNS += ["given,s", "order,s", "partition,s", "both,s", "nodes", "layers"]


class _OfNodes(PlanCommand):
    name = ""

    def add_flags(self, group: Any) -> None:
        words = "write the hosts in the order found, one a line"
        group.add_argument("--hostfile", type=Path, help=words)

    def check(self, args: argparse.Namespace, model: ModelSpec, cluster: ClusterSpec) -> None:
        model.check_dense(f"`{self.name}`")
        if uses_tp_pp_dp_mapping(args):
            raise UsageProblem(
                f"`{self.name}` numbers ranks tensor, data, pipeline; drop --use-tp-pp-dp-mapping"
            )
        hosts = cluster.links.hosts if cluster.links is not None else ()
        if args.hostfile is not None and not hosts:
            raise UsageProblem(
                '--hostfile needs "hosts", the names of the nodes, in "links"; add them'
            )

    def finish(self, args: argparse.Namespace, found: Sequence[Addition]) -> None:
        if args.hostfile is None or not found:
            return
        orders = [_hosts_of(addition) for addition in found]
        if any(other != orders[0] for other in orders):
            raise UsageProblem("--hostfile: the batches want different orders; ask for one batch")
        try:
            args.hostfile.write_text("".join(f"{host}\n" for host in orders[0]))
        except OSError as error:
            raise UsageProblem(f"--hostfile {args.hostfile}: {error}") from error


class Order(_OfNodes):
    name = "order"
    help = "search, and say which node goes where for the best of every batch"
    takes_configuration = True

    def check(self, args: argparse.Namespace, model: ModelSpec, cluster: ClusterSpec) -> None:
        super().check(args, model, cluster)
        if cluster.links is None:
            raise UsageProblem('an order needs measured "links" in --cluster FILE.json; add them')

    def of_configuration(self, planner: Planner, found: Ranked) -> Addition | None:
        from copus_ext.extras.uneven.node_order import order_for
        from copus_ext.extras.uneven.nodes import order_factor

        what = found.configuration
        order = order_for(planner.model, planner.cluster, what, planner.constants)
        return OrderFound(order.times(order_factor(planner, what)))


class Nodes(_OfNodes):
    name = "nodes"
    help = "search, and rank again over unequal links and nodes as they are"

    def check(self, args: argparse.Namespace, model: ModelSpec, cluster: ClusterSpec) -> None:
        super().check(args, model, cluster)
        if cluster.links is None and not cluster.nodes:
            raise UsageProblem(
                '`nodes` needs "links" or "nodes" in --cluster FILE.json; all nodes are alike '
                "without"
            )

    def of_batch(self, planner: Planner, plan: Plan, *, top: int) -> Addition | None:
        from copus_ext.extras.uneven.nodes import rank_on_nodes

        if plan.status == "no_legal":
            return NodesFound([], top)
        return NodesFound(rank_on_nodes(planner, plan.global_batch_size, top=top), top)


@dataclass(frozen=True)
class OrderFound:
    """The order of nodes for one configuration."""

    order: NodeOrder
    fits: bool = True

    def add_to(self, record: dict[str, Any]) -> None:
        record["configuration"]["node_order"] = self.order.names
        record["order"] = self.order.to_json()

    def show(self, console: Console) -> None:
        for line in self.order.lines():
            console.print(line, highlight=False, markup=False)


@dataclass(frozen=True)
class NodesFound:
    """Layouts of a batch fitted to the nodes, fastest first."""

    found: Sequence[FittedLayout]
    top: int

    @property
    def fits(self) -> bool:
        return bool(self.found)

    def add_to(self, record: dict[str, Any]) -> None:
        record["uneven"] = [x.to_json(i + 1) for i, x in enumerate(self.found[: self.top])]

    def show(self, console: Console) -> None:
        from rich.table import Table

        if not self.found:
            console.print(
                "over these links and nodes: nothing that was tried fits", highlight=False
            )
            return
        console.print("over these links and nodes:", highlight=False)
        shown = Table(box=None, header_style="bold", pad_edge=False)
        shows_cp = any(x.configuration.layout.cp > 1 for x in self.found[: self.top])
        after = _COLUMNS.index("dp") + 1
        for name in [*_COLUMNS[:after], *(["cp"] if shows_cp else []), *_COLUMNS[after:]]:
            shown.add_column(name, justify="right", no_wrap=True)
        for i, x in enumerate(self.found[: self.top]):
            row = _cells(i + 1, x, shows_cp=shows_cp)
            shown.add_row(*row, style="green" if i == 0 else None)
        console.print(shown)
        best = self.found[0]
        fast = min(
            (x for x in self.found if x.fits_as_given),
            key=lambda x: x.given_s / x.configuration.global_batch_size,
            default=None,
        )
        if fast is not None and fast.configuration != best.configuration:
            text = f"the fastest with nodes as given and even stages is {fast.configuration}: "
            console.print(f"{text}{fast.given_s:.4g} s", highlight=False, markup=False)
        for line in best.lines():
            console.print(line, highlight=False, markup=False)


def _cells(rank: int, x: FittedLayout, *, shows_cp: bool) -> list[str]:
    c = x.configuration
    sizes = (rank, c.global_batch_size, *c.layout.sizes, *((c.layout.cp,) if shows_cp else ()))
    alone = "-" if x.recut_s is None else f"{x.recut_s:.4g}"
    times = f"{x.given_s:.4g}", f"{x.ordered_s:.4g}", alone, f"{x.step_s:.4g}"
    partition = str(x.partition).replace(",", " ")
    return [
        *map(str, (*sizes, c.micro_batch_size, c.recomputation)),
        *(*times, ",".join(x.names), partition),
    ]


def _hosts_of(addition: Any) -> list[str]:
    if isinstance(addition, NodesFound):
        return addition.found[0].names
    return list(addition.order.hosts)
