"""Node 0, which decides for all: launches, relaunches, the end."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from copus_ext.launch.cause import Failure, root_of
from copus_ext.launch.messages import Ended, Plan, shares_of
from copus_ext.launch.node import TICK_S, Node
from copus_ext.launch.options import Options
from copus_ext.launch.progress import progress_of, saved_with
from copus_ext.launch.say import say
from copus_ext.launch.slurm_watch import SIGNAL_LEAD, watch_of
from copus_ext.launch.stored import TRUST, stored_arguments
from copus_ext.launch.verdict import AGAIN, FAILED, Ending, Next, RestartPolicy
from copus_ext.launch.workers import Workers
from copus_ext.reshard.relaunch import Request, read_request, resumed
from megatron.training.checkpoint import files
from megatron.training.common.control import STACKS
from megatron.training.logging import metrics
from megatron.training.resilience.lock import Lock

_GATHER_S = 30.0
"""Reports of other nodes are waited for so long, and once more after all were told to end."""
_SLURM_S = 1.0
"""Between two looks at what SLURM says."""


class LeaderNode(Node):
    """Node 0, which decides."""

    def __init__(self, options: Options) -> None:
        """Finds the run's directory, giving it one if the flags name none."""
        now = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}"
        if options.run_dir is None:
            flags = (*options.flags, "--run-dir", f"runs/{now}-{os.getpid()}")
            options = dataclasses.replace(options, flags=flags)
        if options.step is not None and options.step.restarts > 0:
            # The batch script gives the flags of the first start, which may begin somewhere else.
            options = dataclasses.replace(options, flags=tuple(resumed(options.flags)))
        assert options.run_dir is not None
        super().__init__(options, options.run_dir)
        self._judge = RestartPolicy(
            options.flags, limits=options.limits, stored=self._stored, has_gpu=options.has_gpu
        )
        job = os.environ.get("SLURM_JOB_ID") or f"{now}-{os.getpid()}"
        self._prefix = f"{job}.{os.environ.get('SLURM_RESTART_COUNT') or 0}"
        self._number = 0
        self._lost = set[int]()
        self._slurm, self._asked_slurm_s = watch_of(options.step, self.run_dir), float("-inf")

    def run_job(self) -> int:
        """Runs launches until one ends the run.

        Returns:
            The exit code.

        Raises:
            UsageError: another run lives in the directory; nothing of it was touched.
        """
        self.stops.install()
        self._refuse_second_run()
        code = FAILED
        try:
            self._number = next_number(self._prefix, metrics.previous_launches(self.run_dir))
            code = self._launches()
        except OSError as error:
            say(f"{error.filename or self.run_dir}: {error.strerror or error}")
        finally:
            self._publish(Plan(launch=self._name, number=self._number + 1, leave=code))
            if self._slurm is not None:
                self._slurm.close()
        return code

    def _refuse_second_run(self) -> None:
        """Takes the lock as the ranks will, and lets go of it: what is cleared and told before they
        start would harm a run that they cannot harm."""
        # What cannot be written is said by whoever writes next.
        with (
            suppress(OSError),
            Lock(self.run_dir, flag="--run-dir", launch=f"{self._prefix}.0", is_supervised=True),
        ):
            pass

    def _stored(self, save: Path) -> Mapping[str, Any]:
        """The flags of the latest checkpoint in a folder."""
        latest = files.read_latest(save)
        found = None if latest is None else saved_with(self.run_dir, save, latest)
        trust = TRUST in self.options.flags
        return found or stored_arguments(save, self.tick, trust_unverified=trust)

    def tick(self, workers: Workers | None = None, *, starting: bool = False) -> None:
        """What has to be done often; on the head with an eye on the job's time limit."""
        super().tick(workers, starting=starting)
        now_s = time.monotonic()
        if self._slurm is not None and now_s - self._asked_slurm_s >= _SLURM_S:
            self._asked_slurm_s = now_s
            self._slurm.tick()

    @property
    def _asked(self) -> int | None:
        """Signal that asked the run to stop; 0 if it has to stop without one."""
        is_ending = self._slurm is not None and self._slurm.is_ending
        return 0 if self.stops.asked is None and is_ending else self.stops.asked

    @property
    def _name(self) -> str:
        return f"{self._prefix}.{self._number}"

    def _launches(self) -> int:
        # The batch script has removed an old stop file; one that is there was written since.
        if self.options.step is None or SIGNAL_LEAD not in os.environ:
            self.stops.clear()
        self.board.clear()
        if missing := self._wait_for_nodes():
            after = f"{self.options.join_timeout_s:g} s"
            say(f"node {missing[0]} of {self.options.nnodes} has not come within {after}")
            return FAILED
        following = self._judge.first(self._places())
        while following.leave is None:
            if following.line:
                say(following.line + (f" (in {following.wait_s:g} s)" if following.wait_s else ""))
            if self._wait(following.wait_s):
                following = self._stopped()
                break
            plan = self._plan(following)
            self.board.publish(plan)
            reports = self._gather(plan, self.run(plan))
            following = self._after(plan, reports)
            self._number += 1
        assert following.leave is not None
        if following.gives_up:
            self._show(following)
        elif following.line:
            say(following.line)
        return following.leave

    def _stopped(self) -> Next:
        """Instead of a launch that would have come next."""
        number = self.stops.first
        code = AGAIN if not number else 128 + number
        return Next(leave=code, line="stopped before the next launch")

    def _wait_for_nodes(self) -> list[int]:
        """Those that have not come in time."""
        deadline_s = time.monotonic() + self.options.join_timeout_s
        while missing := self.board.missing():
            if time.monotonic() > deadline_s or self.stops.first is not None:
                break
            time.sleep(TICK_S)
            self.tick()
        return missing

    def _wait(self, seconds: float) -> bool:
        """Lets time pass; whether the run was asked to stop by then."""
        end_s = time.monotonic() + seconds
        while True:
            self.tick()
            if self._asked is not None:
                return True
            if (left_s := end_s - time.monotonic()) <= 0:
                return False
            time.sleep(min(left_s, TICK_S))

    def _places(self) -> int:
        """Ranks that can be started."""
        return sum(self._processes().values())

    def _processes(self) -> dict[int, int]:
        there = self.board.there
        return {node: one.processes for node, one in there.items() if node not in self._lost}

    def _plan(self, following: Next) -> Plan:
        return Plan(
            launch=self._name,
            number=self._number,
            shares=shares_of(following.ranks, self._processes()),
            tokens={str(node): one.token for node, one in self.board.there.items()},
            flags=following.flags,
            barred=[str(layout) for layout in following.barred],
        )

    def _publish(self, plan: Plan) -> None:
        tokens = {str(node): one.token for node, one in self.board.there.items()}
        try:
            self.board.publish(dataclasses.replace(plan, tokens=tokens))
        except OSError as error:
            say(f"the other nodes cannot be told to leave: {error.strerror or error}")

    def _gather(self, plan: Plan, own: Ended) -> list[Ended]:
        """How the launch ended on all nodes; a node that does not say is lost."""
        reports = self._wait_for_reports(plan)
        if own.is_clean and len(reports) < len(plan.nodes) - 1:
            self.board.fail(plan.launch)
            reports = self._wait_for_reports(plan)
        silent = sorted(set(plan.nodes) - {report.node for report in (own, *reports)})
        self._lost |= set(silent)
        return [own, *reports, *(self._silence(plan, node) for node in silent)]

    def _wait_for_reports(self, plan: Plan) -> list[Ended]:
        deadline_s = time.monotonic() + _GATHER_S
        while True:
            reports = self.board.reports(plan)
            known = {self.options.node_rank, *self.board.lost(), *(one.node for one in reports)}
            if known >= set(plan.nodes) or time.monotonic() > deadline_s:
                return reports
            time.sleep(TICK_S)
            self.tick()

    def _silence(self, plan: Plan, node: int) -> Ended:
        """Stands for the report of a node that is lost."""
        error = f"node {node} is lost: it does not say how its ranks ended"
        host = self.board.there[node].host
        failure = Failure(rank=-1, host=host, code=1, time_s=time.time(), error=error)
        return Ended(launch=plan.launch, node=node, code=1, failure=failure)

    def _after(self, plan: Plan, reports: Sequence[Ended]) -> Next:
        try:
            request: Request | None = read_request(self.run_dir, launch=plan.launch)
        except ValueError as error:
            return Next(leave=FAILED, line=str(error), gives_up=True)
        ending = ending_of(reports, request)
        ending = dataclasses.replace(
            ending,
            progress=progress_of(self.run_dir, plan.launch),
            stopped_by=self._asked,
        )
        if ending.failure is not None and ending.failure.traceback:
            say(f"{ending.failure.line}\n{ending.failure.traceback.rstrip()}")
        ranks, now_s = self._places(), time.monotonic()
        return self._judge.after(ending, ranks=ranks, now_s=now_s)

    def _show(self, following: Next) -> None:
        """All that an operator needs, on one screen."""
        save, budget = self._judge.save, self._judge.budget
        checkpoint = "none: the flags name no --save"
        if save is not None:
            try:
                latest = self._judge.latest()
                checkpoint = f"none in {save}"
                if latest is not None:
                    checkpoint = f"iteration {latest} in {files.folder_of(save, latest)}"
            except (ValueError, OSError) as error:
                checkpoint = str(error)
        stacks = self.run_dir / STACKS
        rows = {
            "crashes": f"{budget.num_crashes}, {budget.num_counted} without a new checkpoint",
            "checkpoint": checkpoint,
            "stacks": f"{stacks}" if stacks.is_dir() else "none were written",
            "go on with": self.options.command,
        }
        lines = [f"  {name:<12}{text}" for name, text in rows.items()]
        say("\n".join([f"given up: {following.line}", *lines]))


def ending_of(reports: Sequence[Ended], request: Request | None) -> Ending:
    """How a launch ended, from how it ended on each node: what was ended on account of a failure
    elsewhere tells nothing."""
    telling = [report for report in reports if not report.told] or reports
    failure = root_of(report.failure for report in telling if report.failure is not None)
    code = 0 if failure is None else failure.exit_code
    return Ending(code=code, request=request, failure=failure)


def next_number(prefix: str, previous: Sequence[str]) -> int:
    """The first number that no launch of a job had yet."""
    counts = [name[len(prefix) + 1 :] for name in previous if name.startswith(f"{prefix}.")]
    return max((int(n) for n in counts if n.isdecimal()), default=-1) + 1
