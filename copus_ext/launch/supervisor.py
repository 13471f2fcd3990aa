"""Starts the ranks of a run, and starts them again when the run asks for it or crashes.

python -m copus_ext.launch.supervisor [flags] -- pretrain_gpt.py FLAGS
copus launch [flags] -- FLAGS

Every node has a supervisor. Node 0 leads: it decides what to launch and when the run is over
(`restart_policy`), and the others follow its plans (`rendezvous`). Each starts and watches the
ranks of its own node (`workers`).
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from copus_ext.launch.checkpoint_flags import TRUST, recorded_flags, stored_flags
from copus_ext.launch.failure import Failure, first_failure
from copus_ext.launch.options import Options, read_options
from copus_ext.launch.rendezvous import LaunchPlan, LaunchResult, NodeRendezvous, assign_ranks
from copus_ext.launch.restart_policy import (
    AGAIN,
    DONE,
    FAILED,
    LaunchEnd,
    NextLaunch,
    RestartPolicy,
    progress_of,
)
from copus_ext.launch.scratch import launch_folder
from copus_ext.launch.slurm_job import SIGNAL_LEAD, watch_of
from copus_ext.launch.workers import (
    FENCED,
    RELEASED,
    Launch,
    Workers,
)
from copus_ext.reshard.relaunch import Request, read_request, resumed
from megatron.trainer.checkpoint import files
from megatron.trainer.common.control import SIGNALLED, STACKS, STOP_FILE, write_stop
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.program import tell
from megatron.trainer.common.signals import SAME_S, leave_on_interrupt
from megatron.trainer.logging import metrics
from megatron.trainer.resilience.lock import Lock

_TICK_S, _PLAN_LOOK_S, _SLURM_LOOK_S = 0.1, 0.5, 1.0
_DRAIN_S = 60.0
"""Ranks may run so long after the launch has ended well on another node."""
_LAST_CALL_S = 5.0
"""Wait for further nodes once there are enough to start."""
_GATHER_S = 30.0
"""Wait at least for the results of other nodes, and again after all were told to end."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def say(line: str) -> None:
    tell("supervisor", line)


class StopSignals:
    """Notes signals when they come and acts on them when asked to: the first makes the run save and
    stop, another one ends it.

    Args:
        run_dir: directory of the run, whose stop file all ranks and nodes see.
        margin_s: seconds that saving may take. A second signal counts only after them. A second
            Ctrl-C counts at once, but not as long as it may be the first one, handed on by a
            wrapper such as `timeout`.
    """

    def __init__(self, run_dir: Path, margin_s: float) -> None:
        self._run_dir, self._margin_s = run_dir, margin_s
        self._path = run_dir / STOP_FILE
        self._new: list[tuple[int, float]] = []
        self._since_s = 0.0
        self.first: int | None = None
        """The signal that asked to stop; None if none came."""
        self.is_final = False
        """Whether a second one ended the ranks."""

    def install(self) -> None:
        for number in _STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        self._new.append((number, time.monotonic()))

    def clear(self) -> None:
        """Removes the stop file of an earlier job."""
        self._path.unlink(missing_ok=True)

    @property
    def asked(self) -> int | None:
        """Signal that asked the run to stop; 0 for the stop file alone; None if nobody asked."""
        if self.first is not None:
            return self.first
        return 0 if self._path.exists() else None

    def act(self, workers: Workers | None) -> None:
        """Acts on the signals that have come since the last call.

        Args:
            workers: the ranks, if they are running.
        """
        while self._new:
            number, now_s = self._new.pop(0)
            if self.first is None:
                self.first, self._since_s = number, now_s
                self._write()
                if workers is not None:
                    workers.ask_to_stop()
                continue
            after_s = now_s - self._since_s
            if after_s <= SAME_S:
                continue
            if number == signal.SIGINT or after_s >= self._margin_s:
                say(f"{signal.Signals(number).name} again: ends the ranks at once")
                self.is_final = True
                if workers is not None:
                    workers.end()
            else:
                say(
                    f"the run saves and stops; {signal.Signals(number).name} ends it "
                    f"from {self._margin_s:g} s after the first signal on, Ctrl-C at once"
                )

    def _write(self) -> None:
        try:
            write_stop(self._run_dir, SIGNALLED)
        except OSError as error:
            say(f"{self._path} cannot be written: {error.strerror or error}")


class Node:
    """One node's part of a job.

    Args:
        options: of the command line.
    """

    def __init__(self, options: Options, run_dir: Path) -> None:
        self.options, self.run_dir = options, run_dir
        self.stops = StopSignals(run_dir, options.stop_margin_s)
        self.rendezvous = NodeRendezvous(
            run_dir,
            node=options.node_rank,
            num_nodes=options.nnodes,
            num_ranks=options.nproc_per_node,
            lost_s=options.node_timeout_s,
        )

    def run(self, plan: LaunchPlan) -> LaunchResult:
        """Runs this node's ranks of a launch to their end and reports the result."""
        with launch_folder() as folder:
            launch = Launch(
                name=plan.launch,
                node=self.options.node_rank,
                nodes=plan.nodes,
                num_ranks=plan.num_ranks[str(self.options.node_rank)],
                endpoint=self.options.endpoint,
                folder=folder,
                **self._launcher_fields(plan.launch),
            )
            command = [*self.options.program, *plan.flags]
            workers = Workers(launch, command, plan.blocked_layouts)
            try:
                self._watch(workers, plan)
            finally:
                workers.end()
            result = workers.result()
        self.rendezvous.report(result)
        return result

    @property
    def _goes_on(self) -> bool:
        """Whether a launch goes on without ranks that it has lost."""
        return self.options.launcher is not None

    def _launcher_fields(self, launch: str) -> dict[str, str]:
        """Of `Launch`, for another launcher than torch's."""
        launcher = self.options.launcher
        if launcher is None:
            return {}
        os.environ.update(launcher.environment)
        shared = (self.run_dir / "control" / launcher.folder / launch).absolute()
        return {"module": launcher.module, "shared": str(shared)}

    def _watch(self, workers: Workers, plan: LaunchPlan) -> None:
        """Returns when the ranks have ended, or have to be ended. Where a launch goes on,
        the ranks of a node continue, whatever happens to the others."""
        over_s: float | None = None
        while workers.is_running():
            time.sleep(_TICK_S)
            self.tick(workers)
            if self._goes_on:
                continue
            if over_s is None and self.rendezvous.is_over(plan.launch):
                over_s = time.monotonic()
            drains = over_s is not None and time.monotonic() - over_s > _DRAIN_S
            lost = [node for node in self.rendezvous.lost() if node in plan.nodes]
            restarted = [node for node in self.rendezvous.restarted() if node in plan.nodes]
            if gone := lost + restarted:
                why = "shows no life" if lost else "was started again"
                say(f"node {gone[0]} {why}: the launch ends")
                self.rendezvous.fail(plan.launch)
            if gone or drains or self.rendezvous.has_failed(plan.launch):
                return

    def tick(self, workers: Workers | None = None, *, starting: bool = False) -> None:
        """Acts on signals and shows that this node is there; called often."""
        self.stops.act(workers)
        self.rendezvous.tick(starting=starting)


class WorkerNode(Node):
    """A node that follows the plans of node 0.

    Raises:
        UsageError: the flags do not name the run's directory, which all nodes have to share.
    """

    def __init__(self, options: Options) -> None:
        if options.run_dir is None:
            raise UsageError("with several nodes give --run-dir or --save, which all nodes can see")
        super().__init__(options, options.run_dir)

    def run_job(self) -> int:
        """Runs what node 0 plans; returns the exit code."""
        self.stops.install()
        number, ended = -1, None
        while (plan := self._next(number)) is not None:
            if plan.exit_code is not None:
                # A run that goes on may have ended well without node 0.
                is_done = self._goes_on and ended is not None and ended.code == DONE
                return DONE if is_done else plan.exit_code
            number = plan.number
            if str(self.options.node_rank) in plan.num_ranks:
                ended = self.run(plan)
                if ended.code == RELEASED:
                    say("the run goes on without this node: it asks for fewer ranks")
                    return DONE
        if ended is None or not self._goes_on:
            return FAILED
        # The run went on without node 0, to its end or until it could not.
        return ended.code if ended.is_clean else AGAIN

    def _next(self, number: int) -> LaunchPlan | None:
        """The next plan; None if there will be none."""
        deadline_s = time.monotonic() + self.options.join_timeout_s
        is_first, looked_s = number < 0, float("-inf")
        while True:
            self.tick(starting=is_first)
            now_s = time.monotonic()
            if now_s - looked_s >= _PLAN_LOOK_S:
                looked_s = now_s
                if (plan := self.rendezvous.plan_after(number)) is not None:
                    return plan
                if is_first and now_s > deadline_s:
                    say(f"node 0 has not come within {self.options.join_timeout_s:g} s")
                    return None
                if not is_first and self.rendezvous.lost():
                    say("node 0 shows no life")
                    return None
            if self.stops.is_final:
                return None
            time.sleep(_TICK_S)


class LeaderNode(Node):
    """Node 0, which decides for all."""

    def __init__(self, options: Options) -> None:
        now = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}"
        if options.run_dir is None:
            flags = (*options.flags, "--run-dir", f"runs/{now}-{os.getpid()}")
            options = dataclasses.replace(options, flags=flags)
        if options.step is not None and options.step.restarts > 0:
            # The batch script gives the flags of the first start, which may begin somewhere else.
            options = dataclasses.replace(options, flags=tuple(resumed(options.flags)))
        assert options.run_dir is not None
        super().__init__(options, options.run_dir)
        self._policy = RestartPolicy(
            options.flags, stored=self._stored, limits=options.limits, has_gpu=options.has_gpu
        )
        job = os.environ.get("SLURM_JOB_ID") or f"{now}-{os.getpid()}"
        self._prefix = f"{job}.{os.environ.get('SLURM_RESTART_COUNT') or 0}"
        self._number = 0
        self._lost = set[int]()
        self._running: LaunchPlan | None = None
        self._slurm, self._slurm_at = watch_of(options.step, self.run_dir), float("-inf")

    def run_job(self) -> int:
        """Runs launches until one ends the run; returns the exit code.

        Raises:
            UsageError: another run lives in the directory; nothing of it was touched.
        """
        self._refuse_second_run()  # may wait two minutes, which a signal ends at once
        self.stops.install()
        code = FAILED
        try:
            self._number = next_number(self._prefix, metrics.previous_launches(self.run_dir))
            code = self._run_launches()
        except OSError as error:
            say(f"{error.filename or self.run_dir}: {error.strerror or error}")
        finally:
            end = LaunchPlan(launch=self._name, number=self._number + 1, exit_code=code)
            try:
                if self._goes_on:
                    self.rendezvous.newcomers(now=True)  # they are to end, too
                self.rendezvous.publish(end)
            except OSError as error:
                say(f"the end cannot be published to the other nodes: {error.strerror or error}")
            if self._slurm is not None:
                self._slurm.close()
        return code

    def _refuse_second_run(self) -> None:
        """Takes the lock as the ranks will, and releases it. This supervisor removes and writes
        files before its ranks start, which would harm another run."""
        lock = Lock(
            self.run_dir,
            flag="--run-dir",
            launch=f"{self._prefix}.0",
            is_supervised=True,
            force_unlock="--force-unlock" in self.options.flags,
        )
        # Whoever writes next says that it cannot.
        with suppress(OSError), lock:
            pass

    def _stored(self, save: Path) -> Mapping[str, Any]:
        """The flags of the latest checkpoint in a folder."""
        latest = files.read_latest(save)
        found = None if latest is None else recorded_flags(self.run_dir, save, latest)
        trust = TRUST in self.options.flags
        return found or stored_flags(save, self.tick, trust_unverified=trust)

    def tick(self, workers: Workers | None = None, *, starting: bool = False) -> None:
        """The same, and watches the job's time limit, and lets nodes into a launch that
        goes on."""
        super().tick(workers, starting=starting)
        if self._running is not None and (nodes := self.rendezvous.newcomers()):
            ranks = {str(node): self.rendezvous.there[node].num_ranks for node in nodes}
            self._running = dataclasses.replace(
                self._running, num_ranks={**self._running.num_ranks, **ranks}
            )
            self.rendezvous.publish(self._running)
            self._lost -= set(nodes)
            say(f"node {', '.join(map(str, nodes))} comes in")
        now_s = time.monotonic()
        if self._slurm is not None and now_s - self._slurm_at >= _SLURM_LOOK_S:
            self._slurm_at = now_s
            self._slurm.tick()

    @property
    def _asked(self) -> int | None:
        """Signal that asked the run to stop; 0 if it has to stop without one."""
        is_ending = self._slurm is not None and self._slurm.is_ending
        return 0 if self.stops.asked is None and is_ending else self.stops.asked

    @property
    def _name(self) -> str:
        return f"{self._prefix}.{self._number}"

    def _run_launches(self) -> int:
        # The batch script has removed an old stop file; one that is there was written since.
        if self.options.step is None or SIGNAL_LEAD not in os.environ:
            self.stops.clear()
        self.rendezvous.clear()
        if missing := self._wait_for_nodes():
            after = f"{self.options.join_timeout_s:g} s"
            say(f"node {missing[0]} of {self.options.nnodes} has not come within {after}")
            return FAILED
        following = self._policy.first(sum(self._available().values()))
        while following.exit_code is None:
            if following.line:
                say(following.line + (f" (in {following.wait_s:g} s)" if following.wait_s else ""))
            if self._wait(following.wait_s):
                number = self.stops.first
                code = AGAIN if not number else 128 + number
                following = NextLaunch(exit_code=code, line="stopped before the next launch")
                break
            plan = self._plan(following)
            self.rendezvous.publish(plan)
            self._running = plan if self._goes_on else None
            own = self.run(plan)
            self._running = None
            following = self._after(plan, self._gather(plan, own))
            self._number += 1
        assert following.exit_code is not None
        if following.gives_up:
            self._show(following)
        elif following.line:
            say(following.line)
        return following.exit_code

    def _wait_for_nodes(self) -> list[int]:
        """Nodes that have not come in time, though the job needs them."""
        now_s = time.monotonic()
        deadline_s, changed_s, before = now_s + self.options.join_timeout_s, now_s, -1
        while missing := self.rendezvous.missing():
            now_s = time.monotonic()
            if len(missing) != before:
                before, changed_s = len(missing), now_s
            is_enough = self.options.nnodes - len(missing) >= self.options.min_nodes
            if is_enough and now_s - changed_s > _LAST_CALL_S:
                return []
            if now_s > deadline_s or self.stops.first is not None:
                break
            time.sleep(_TICK_S)
            self.tick()
        return missing

    def _wait(self, seconds: float) -> bool:
        """Waits; returns True at once if somebody asks the run to stop."""
        end_s = time.monotonic() + seconds
        while True:
            self.tick()
            if self._asked is not None:
                return True
            if (left_s := end_s - time.monotonic()) <= 0:
                return False
            time.sleep(min(left_s, _TICK_S))

    def _available(self) -> dict[int, int]:
        there = self.rendezvous.there
        return {node: one.num_ranks for node, one in there.items() if node not in self._lost}

    def _plan(self, following: NextLaunch) -> LaunchPlan:
        return LaunchPlan(
            launch=self._name,
            number=self._number,
            num_ranks=assign_ranks(following.num_ranks, self._available()),
            flags=following.flags,
            blocked_layouts=[str(layout) for layout in following.blocked_layouts],
        )

    def _gather(self, plan: LaunchPlan, own: LaunchResult) -> list[LaunchResult]:
        """The results of all nodes; a node without a result is lost, until its supervisor comes
        again."""
        if self._goes_on and own.code in (DONE, FENCED):
            return [own]
        # A scheduler that starts the supervisor of a lost node again needs some time.
        wait_s = _GATHER_S if own.is_clean else max(_GATHER_S, self.options.node_timeout_s)
        results = self._wait_for_results(plan, wait_s)
        if own.is_clean and len(results) < len(plan.nodes) - 1:
            self.rendezvous.fail(plan.launch)
            results = self._wait_for_results(plan, wait_s)
        silent = sorted(set(plan.nodes) - {result.node for result in (own, *results)})
        lost = [self._result_of_lost(plan, node) for node in silent]
        self._lost |= set(silent)
        self._lost -= set(self.rendezvous.newcomers(now=True))
        return [own, *results, *lost]

    def _wait_for_results(self, plan: LaunchPlan, wait_s: float) -> list[LaunchResult]:
        deadline_s = time.monotonic() + wait_s
        while True:
            results = self.rendezvous.results(plan)
            gone = [*self.rendezvous.lost(), *self.rendezvous.restarted()]
            known = {self.options.node_rank, *gone, *(one.node for one in results)}
            if known >= set(plan.nodes) or time.monotonic() > deadline_s:
                return results
            time.sleep(_TICK_S)
            self.tick()

    def _result_of_lost(self, plan: LaunchPlan, node: int) -> LaunchResult:
        error = f"node {node} is lost: it does not say how its ranks ended"
        host = self.rendezvous.there[node].host
        failure = Failure(rank=-1, host=host, code=1, time_s=time.time(), error=error)
        return LaunchResult.of(plan.launch, node, failure)

    def _after(self, plan: LaunchPlan, results: Sequence[LaunchResult]) -> NextLaunch:
        try:
            request: Request | None = read_request(self.run_dir, launch=plan.launch)
        except ValueError as error:
            return NextLaunch(exit_code=FAILED, line=str(error), gives_up=True)
        failure = failure_of(results)
        if failure is not None and failure.code == FENCED:
            return NextLaunch(exit_code=FAILED, line=failure.line)
        end = LaunchEnd(
            code=0 if failure is None else failure.exit_code,
            request=request,
            failure=failure,
            progress=progress_of(self.run_dir, plan.launch),
            stopped_by=self._asked,
        )
        if failure is not None and failure.traceback:
            say(f"{failure.line}\n{failure.traceback.rstrip()}")
        num_ranks = sum(self._available().values())
        return self._policy.after(end, num_ranks=num_ranks, now_s=time.monotonic())

    def _show(self, following: NextLaunch) -> None:
        """Prints all that an operator needs, on one screen."""
        save, budget = self._policy.save, self._policy.budget
        checkpoint = "none: the flags name no --save"
        if save is not None:
            try:
                latest = self._policy.latest()
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


def failure_of(results: Sequence[LaunchResult]) -> Failure | None:
    """The first failure over all nodes. Ranks that a supervisor killed tell nothing, unless there
    are no others."""
    telling = [result for result in results if not result.was_killed] or results
    return first_failure(result.failure for result in telling if result.failure is not None)


def next_number(prefix: str, previous: Sequence[str]) -> int:
    """The first number that no launch of a job had yet."""
    return metrics.next_number(f"{prefix}.", previous)


def main(argv: Sequence[str] | None = None) -> int:
    """Supervises a job on this node.

    Returns:
        The exit code: 0 done, 1 given up, 2 wrong usage, 85 to be started again elsewhere, 128 + N
        after signal N, else that of the ranks.
    """
    leave_on_interrupt(is_told=True)  # until there are ranks to be stopped
    try:
        options = read_options(sys.argv[1:] if argv is None else argv)
        node = LeaderNode(options) if options.node_rank == 0 else WorkerNode(options)
        return node.run_job()
    except UsageError as error:
        say(str(error))
        return 2


if __name__ == "__main__":
    sys.exit(main())
