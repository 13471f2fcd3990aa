"""The part of a job that runs on one node, as node 0 decides. docs/decisions/017 says why each
launch is a process of its own."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from copus_ext.launch.board import NodeRendezvous
from copus_ext.launch.messages import Ended, Plan
from copus_ext.launch.options import Options
from copus_ext.launch.say import say
from copus_ext.launch.stops import Stops
from copus_ext.launch.verdict import FAILED
from copus_ext.launch.workers import Launch, Workers
from megatron.training.common.errors import UsageError

TICK_S = 0.1
"""Between two looks at everything."""
_PLAN_LOOK_S = 0.5
_LINGER_S = 60.0
"""Ranks that are left when the launch has ended well elsewhere are ended after so long."""


class Node:
    """The part of a job that runs on this node.

    Args:
        options: of the command line.
        run_dir: directory of the run.
    """

    def __init__(self, options: Options, run_dir: Path) -> None:
        self.options, self.run_dir = options, run_dir
        self.stops = Stops(run_dir, options.stop_margin_s)
        self.board = NodeRendezvous(
            run_dir,
            node=options.node_rank,
            num_nodes=options.nnodes,
            processes=options.processes,
            lost_s=options.node_timeout_s,
        )

    def run(self, plan: Plan) -> Ended:
        """Runs this node's ranks of a launch to their end, and reports it."""
        launch = Launch(
            name=plan.launch,
            node=self.options.node_rank,
            nodes=plan.nodes,
            processes=plan.shares[str(self.options.node_rank)],
            endpoint=self.options.endpoint,
            command=[*self.options.program, *plan.flags],
            barred=plan.barred,
        )
        with tempfile.TemporaryDirectory(prefix="copus-", ignore_cleanup_errors=True) as folder:
            workers = Workers(launch, Path(folder))
            try:
                self._watch(workers, plan)
            finally:
                workers.end()
            ended = workers.ended()
        self.board.report(ended)
        return ended

    def _watch(self, workers: Workers, plan: Plan) -> None:
        over_s: float | None = None
        while workers.is_running():
            time.sleep(TICK_S)
            self.tick(workers)
            if over_s is None and self.board.is_over(plan.launch):
                over_s = time.monotonic()
            lingers = over_s is not None and time.monotonic() - over_s > _LINGER_S
            lost = [node for node in self.board.lost() if node in plan.nodes]
            if lost:
                say(f"node {lost[0]} shows no life: the launch ends")
                self.board.fail(plan.launch)
            if lost or lingers or self.board.has_failed(plan.launch):
                return

    def tick(self, workers: Workers | None = None, *, starting: bool = False) -> None:
        """What has to be done often."""
        self.stops.obey(workers)
        self.board.tick(starting=starting)


class WorkerNode(Node):
    """Another node, which does what node 0 decides."""

    def __init__(self, options: Options) -> None:
        """Takes the run's directory from the flags.

        Raises:
            UsageError: they name none, and it has to be the same on all nodes.
        """
        if options.run_dir is None:
            raise UsageError("with several nodes give --run-dir or --save, which all nodes can see")
        super().__init__(options, options.run_dir)

    def run_job(self) -> int:
        """Runs what it is asked to.

        Returns:
            The exit code.
        """
        self.stops.install()
        number = -1
        while (plan := self._next(number)) is not None:
            if plan.leave is not None:
                return plan.leave
            number = plan.number
            if str(self.options.node_rank) in plan.shares:
                self.run(plan)
        return FAILED

    def _next(self, number: int) -> Plan | None:
        """The next decision; None if there will be none."""
        deadline_s = time.monotonic() + self.options.join_timeout_s
        is_first, looked_s = number < 0, float("-inf")
        while True:
            self.tick(starting=is_first)
            now_s = time.monotonic()
            if now_s - looked_s >= _PLAN_LOOK_S:
                looked_s = now_s
                if (plan := self.board.plan_after(number)) is not None:
                    return plan
                if is_first and now_s > deadline_s:
                    say(f"node 0 has not come within {self.options.join_timeout_s:g} s")
                    return None
                if not is_first and self.board.lost():
                    say("node 0 shows no life")
                    return None
            if self.stops.is_final:
                return None
            time.sleep(TICK_S)
