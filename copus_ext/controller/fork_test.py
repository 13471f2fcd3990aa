"""Fork tests: trains the same samples in several ways from one state of the running job, and goes
on from that state or from the end of one way.

A test runs at a step boundary, on all ranks, and keeps the state in memory. Every branch starts
from it, takes the job's own train steps, and is judged on the same held-out samples, by its last
weights and by the average of its weights over its second half. A test that is not kept leaves no
trace in the job. A kept branch is a run that took those steps.

Steps of branches reach no callback, record, log line or checkpoint. They feed the watchdog. All
ranks vote after each part. What fails on all ranks ends the test and restores the state. What fails
on one rank while others wait for it in a collective ends the processes, as an error of a step does.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from copus_ext.controller.decision_log import DecisionLog
from copus_ext.controller.peak_memory import step_bytes
from copus_ext.goodput.fork_result import Branch, BranchResult, ForkPlan, ForkResult
from copus_ext.reshard.consensus import Consensus, Deadline, NoAnswer
from copus_ext.reshard.kept_state import (
    KeptState,
    WeightAverage,
    empty_host_cache,
    goes_to_host,
    keep_state,
    live_shards,
    put_back,
    settle,
)
from copus_ext.reshard.saved_state import share_weights
from megatron.training.common.errors import Relaunch
from megatron.training.common.signals import StopReason
from megatron.training.common.step_settings import Request
from megatron.training.distributed.stragglers import RankTimes
from megatron.training.model.shards import Shards
from megatron.training.resilience.watchdog import Watchdog, exit_immediately
from megatron.training.train.callbacks import Callbacks
from megatron.training.train.evaluate import held_out_loss
from megatron.training.train.job import Job
from megatron.training.train.step import train_step

_PATIENCE_S = 10.0


class _Stopped(Exception):
    """All ranks have seen that the run is to stop."""


class _Failed(Exception):
    """A part failed on some rank; raised on all of them."""


def _place_of(job: Job) -> dict[str, Any]:
    return {name: getattr(job.state, name) for name in ("iteration", "consumed_samples")}


class _FedWatchdog(Watchdog):
    """Passes signs of progress on to the watchdog of the run, but not the count of steps."""

    def __init__(self, run: Watchdog) -> None:
        super().__init__()
        self._run = run

    def beat(self) -> None:
        """Progress was made."""
        self._run.beat()

    def step(self, iteration: int, seconds: float) -> None:
        """A step of a branch is done."""
        self._run.beat()


@contextlib.contextmanager
def _unseen(job: Job) -> Iterator[None]:
    """Takes steps that nobody but the watchdog is told of."""
    names = ("callbacks", "context", "rank_times", "outside")
    before = {name: getattr(job, name) for name in names}
    job.callbacks, job.context = Callbacks(), copy.copy(job.context)
    # What the step before was asked for counts for none of these.
    job.context.needs_exact_step = False
    job.rank_times = RankTimes()
    job.outside = replace(job.outside, watchdog=_FedWatchdog(job.watchdog))
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(job, name, value)


class _Fork:
    """One fork test of one job.

    Args:
        job: at a step boundary.
        plan: of the test.
        consensus: votes of this test.
        deadline: watches it.
        fault: see `run_fork`.
        patience_s: see `run_fork`.
    """

    def __init__(
        self,
        job: Job,
        plan: ForkPlan,
        consensus: Consensus,
        deadline: Deadline,
        fault: Callable[[str], None],
        patience_s: float,
    ) -> None:
        self.job, self.plan = job, plan
        self._consensus, self._deadline = consensus, deadline
        self._fault, self._patience_s = fault, patience_s
        self._on_host = False
        self._average: WeightAverage | None = None
        self._start: KeptState | None = None
        self._ends: dict[int, KeptState] = {}
        self._results: list[BranchResult] = []
        self._loss_start: float | None = None
        self._live = Shards(records=[], tensors=[])
        self._at = _place_of(job)

    def run(self) -> ForkResult:
        """All of it. The job can train on.

        Raises:
            Relaunch: the state cannot be restored.
        """
        try:
            self._part("plan", self._agree)
            if (problem := self._problem()) is not None:
                return self._result("refused", problem)
            self._part("keep", self._keep)
        except _Failed as error:
            return self._result("refused", str(error))
        kind, reason, kept = "done", "", None
        try:
            with _unseen(self.job):
                self._loss_start = self._loss("loss at the fork")
                for number in range(len(self.plan.branches)):
                    self._results.append(self._branch(number))
            kept = self._choose()
        except _Stopped:
            kind, reason = "stopped", "the run is asked to stop"
        except _Failed as error:
            kind, reason = "failed", str(error)
        try:
            if kind == "failed":
                self._part("settle", lambda: settle(self.job), waits=True)
            self._go_to(self._start if kept is None else self._ends[kept], "end")
        except _Failed as error:
            raise Relaunch(f"the state before a fork test cannot be restored: {error}") from error
        return self._result(kind, reason, kept)

    def release(self) -> None:
        """Gives back the memory of all copies, after the test."""
        self._start = self._average = None
        self._ends.clear()
        if self._on_host:
            empty_host_cache()

    def _problem(self) -> str | None:
        """Why the job cannot make the test; the same on every rank."""
        job, reader = self.job, self.job.valid_data
        return self.plan.problem(
            job.config,
            iteration=job.state.iteration,
            samples_left=job.samples_left_in_phase,
            held_out_samples=0 if reader is None else reader.num_samples,
        )

    def _result(self, kind: Any, reason: str = "", kept: int | None = None) -> ForkResult:
        return ForkResult(
            kind=kind,
            reason=reason,
            **self._at,
            samples=self.plan.samples,
            eval_samples=self.plan.eval_samples,
            loss_start=self._loss_start,
            branches=tuple(self._results),
            kept=kept,
        )

    def _part(self, topic: str, act: Callable[[], Any], *, waits: bool = False) -> Any:
        """Does a part; all ranks vote on it.

        Args:
            topic: not used before in this test.
            act: the part.
            waits: whether ranks wait for each other inside.

        Raises:
            _Failed: on every rank, if it failed on any.
            NoAnswer: a rank has not voted.
        """

        def part() -> Any:
            self._fault(topic)
            return act()

        result, problems = self._consensus.carry_out(
            topic,
            part,
            deadline=self._deadline,
            is_collective=waits,
            patience_s=self._patience_s,
        )
        if problems:
            raise _Failed(f"{topic}: {problems[0]}")
        return result

    def _agree(self) -> None:
        """All ranks want the same."""
        plan = self.plan
        wanted = repr((plan.branches, plan.samples, plan.eval_samples, plan.num_ends))
        if dist.get_rank() == 0:
            self._consensus.share("plan", wanted)
        if (of_rank_0 := self._consensus.share("plan")) != wanted:
            raise ValueError(f"this rank wants {wanted} and rank 0 {of_rank_0}")

    def _keep(self) -> None:
        """Copies the state of the fork, if all copies that will be made fit."""
        job, plan = self.job, self.plan
        # The optimizer changes these tensors in place.
        self._live = live = live_shards(job)
        self._on_host = goes_to_host(
            job,
            live,
            states=1 + plan.num_ends,
            micro_batch_size=max(branch.micro_batch_size for branch in plan.branches),
            step_bytes=step_bytes(),
        )
        start = keep_state(job, live, on_host=self._on_host)
        self._average = WeightAverage(live, on_host=self._on_host)
        self._start = start

    def _branch(self, number: int) -> BranchResult:
        """Trains and judges one branch."""
        job, branch, average = self.job, self.plan.branches[number], self._average
        topic = f"branch {number}: "
        assert average is not None
        average.count = 0
        self._go_to(self._start, topic + "start")
        job.state.settings = branch.settings(job.state.settings)
        job.set_rates()
        skipped, seconds = self._part(
            topic + "train", lambda: self._train(topic, branch, average), waits=True
        )
        if skipped is None:
            raise _Stopped
        loss_last = self._loss(topic + "last loss")
        if self.plan.may_keep(number):
            self._part(topic + "keep", lambda: self._keep_end(number))
        self._part(topic + "average", lambda: average.put_into(job, self._live))
        self._share_weights(topic + "share average")
        return BranchResult(
            branch=branch,
            samples=self.plan.samples,
            steps=branch.num_steps(self.plan.samples),
            skipped_steps=skipped,
            loss_last=loss_last,
            loss_averaged=self._loss(topic + "averaged loss"),
            averaged_steps=average.count,
            seconds=seconds,
        )

    def _train(
        self, topic: str, branch: Branch, average: WeightAverage
    ) -> tuple[int | None, float]:
        """The steps of a branch.

        Returns:
            Steps that were skipped, or None if the run is asked to stop; and the seconds.
        """
        samples, skipped, seconds = self.plan.samples, 0, 0.0
        for step in range(1, branch.num_steps(samples) + 1):
            self._fault(f"{topic}step {step}")
            info, shared = train_step(self.job)
            skipped, seconds = skipped + (not info.updated), seconds + info.elapsed_s
            if shared.stop is not None and shared.stop.is_urgent:
                return None, seconds
            if 2 * step * branch.global_batch_size > samples:
                average.add(self._live)
        return skipped, seconds

    def _keep_end(self, number: int) -> None:
        self._ends[number] = keep_state(self.job, self._live, on_host=self._on_host)

    def _loss(self, topic: str) -> float | None:
        """The held-out loss of the present weights; None if it is not finite.

        Raises:
            _Stopped: the run is asked to stop.
        """
        job, reader = self.job, self.job.valid_data
        assert reader is not None
        loss = self._part(
            topic,
            lambda: held_out_loss(job, reader, num_samples=self.plan.eval_samples),
            waits=True,
        )
        if isinstance(loss, StopReason):
            raise _Stopped
        return loss if math.isfinite(loss) else None

    def _go_to(self, kept: KeptState | None, topic: str) -> None:
        """Gives the job a state that was kept."""
        assert kept is not None
        self._part(topic, lambda: put_back(self.job, self._live, kept))
        self._share_weights(topic + ", share")

    def _share_weights(self, topic: str) -> None:
        job = self.job
        timeout_s = 60.0 * job.config.parallel.distributed_timeout_minutes
        self._part(
            topic,
            lambda: share_weights(job.config, job.model, job.groups, timeout_s=timeout_s),
            waits=True,
        )

    def _choose(self) -> int | None:
        """Number of the branch to go on from, the same on every rank."""
        keep = self.plan.keep
        if not callable(keep):
            return keep

        def ask() -> None:
            if dist.get_rank() == 0:
                kept = keep(self._result("done"))
                if kept not in (None, *self._ends):
                    raise ValueError(f"there is no branch {kept} to keep")
                self._consensus.share("kept", "" if kept is None else str(kept))

        self._part("choose", ask)
        text = self._consensus.share("kept")
        return int(text) if text else None


def run_fork(
    job: Job,
    plan: ForkPlan,
    *,
    fault: Callable[[str], None] = lambda topic: None,
    patience_s: float = _PATIENCE_S,
) -> ForkResult:
    """Makes a fork test. All ranks take part, at a step boundary.

    Args:
        job: gradients are applied, no evaluation and no save is being begun.
        plan: of the test.
        fault: called with the topic of each part and step as it begins; lets tests break one.
        patience_s: a rank that has failed waits so long for the others to fail too.

    Returns:
        The result; the job can train on in any case.

    Raises:
        Relaunch: the job must be started again. Raised on every rank that is alive.
    """
    started = time.perf_counter()
    store = dist.distributed_c10d._get_default_store()
    number = int(store.add(f"copus-forks/{dist.get_rank()}", 1))
    timeout_s = 60.0 * job.config.parallel.distributed_timeout_minutes
    consensus = Consensus(
        store,
        f"fork-{number}",
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        timeout_s=timeout_s,
    )
    # A rank that only stands still has as long as in any step; one that died breaks the messages.
    deadline = Deadline(
        consensus,
        deadline_s=math.inf,
        patience_s=patience_s,
        silence_s=timeout_s,
        on_expire=_exit_immediately,
    )
    with job.phase("fork test"), deadline:
        fork = _Fork(job, plan, consensus, deadline, fault, patience_s)
        try:
            result = fork.run()
        except NoAnswer as error:
            consensus.abort()
            raise Relaunch(f"a fork test failed: {error}") from error
        fork.release()
    job.watchdog.iteration = job.state.iteration
    seconds = _seconds_of_rank_0(consensus, time.perf_counter() - started)
    return replace(result, seconds=seconds)


def _seconds_of_rank_0(consensus: Consensus, own_s: float) -> float:
    """Rank 0's seconds on every rank."""
    if consensus.rank == 0:
        consensus.share("seconds", repr(own_s))
    return float(consensus.share("seconds"))


def _exit_immediately(reason: str) -> None:
    """Ends this process, which waits in a collective that nothing can cancel."""
    message = f"copus: rank {dist.get_rank()} leaves a fork test: {reason}"
    try:
        print(message, file=sys.stderr, flush=True)
    finally:
        exit_immediately(Relaunch.exit_code)


class ForkTests:
    """The fork tests of a launch; the same calls on every rank.

    Args:
        log: the journal, on rank 0.
    """

    def __init__(self, log: DecisionLog) -> None:
        self._log = log
        self.ended: str | None = None
        """Why there are no more in this launch; None while there may be."""
        self.fault: Callable[[str], None] = lambda topic: None
        """A test's way to break one; see `run_fork`."""
        self.patience_s = _PATIENCE_S
        """See `run_fork`."""

    def request(
        self,
        plan: ForkPlan,
        *,
        done: Callable[[ForkResult], None] = lambda result: None,
    ) -> Request:
        """The request to the loop.

        Args:
            plan: of the test.
            done: called with the result on every rank.
        """

        def move(job: Job) -> None:
            result = self._make(job, plan)
            done(result)
            if result.kept is not None:
                self._make_up(job, result)

        return Request(kind="change", reason="fork test", move=move)

    def _make(self, job: Job, plan: ForkPlan) -> ForkResult:
        where, ratio = _place_of(job), job.config.phase.ratio
        # The journal is told positions in samples of the present phase.
        told = {**where, "consumed_samples": where["consumed_samples"] // ratio}
        self._log.note("fork.begin", **told)
        if self.ended is None:
            result = run_fork(job, plan, fault=self.fault, patience_s=self.patience_s)
        else:
            about: dict[str, Any] = {"samples": plan.samples, "eval_samples": plan.eval_samples}
            result = ForkResult(kind="refused", reason=self.ended, **where, **about)
        self._log.note("fork", **told, outcome=result.to_json())
        if result.kind in ("refused", "failed") and self.ended is None and dist.get_rank() == 0:
            end = "; there are no more in this launch" if result.kind == "failed" else ""
            print(f"note: fork test {result.kind}: {result.reason}{end}", flush=True)
        if result.kind == "failed":
            self.ended = "a fork test of this launch has failed"
        return result

    def _make_up(self, job: Job, result: ForkResult) -> None:
        """Records the steps of a kept branch as one event, and saves if they passed a turn to."""
        where, interval = _place_of(job), job.config.checkpoint.save_interval
        before, now = result.iteration, job.state.iteration
        job.tracker.event("fork", **where, steps=now - before, samples=result.samples)
        if interval and now // interval > before // interval:
            job.save(must=False)
