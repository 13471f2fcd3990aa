"""The controller's side of a change of layout: requests it from the loop, makes it in the running
processes or by a relaunch, and records its cost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from copus_ext.controller.decision_log import DecisionLog
from copus_ext.controller.flags import CopusConfig
from copus_ext.goodput.costs import PendingRelaunch
from copus_ext.goodput.state import ControllerState
from copus_ext.reshard.phases import ReshardResult
from copus_ext.reshard.relaunch import (
    LAUNCH_VARIABLE,
    blocked_layouts,
    is_supervised,
    write_request,
)
from copus_ext.reshard.relaunch import Request as LaunchRequest
from megatron.trainer.common.collectives import all_gather_object, broadcast_from_rank0
from megatron.trainer.common.errors import Relaunch, TrainingFailure, UsageError
from megatron.trainer.common.step_settings import Request, StepSettings
from megatron.trainer.config.layout import Layout
from megatron.trainer.train.callbacks import CallbackContext

if TYPE_CHECKING:
    from copus_ext.reshard.host import LayoutHost
    from copus_ext.reshard.inprocess import InProcessResharder


_MAX_PAUSE_S = 3600.0
"""Longest pause of a relaunch. Two processes time it by the wall clock, which somebody may set."""


def _tokens(samples: int, context: CallbackContext) -> int:
    """Tokens of some samples in which the run counts."""
    return samples * context.config.batch.seq_length


@dataclass(frozen=True, kw_only=True)
class LayoutChange:
    number: int | None
    """Of the decision; None for a change that the flags ask for."""
    to: Layout
    settings: StepSettings
    """How steps are taken there."""
    reason: str
    """One line."""
    done: Callable[[ReshardResult], None]
    """Called with the outcome on every rank; of a relaunch, before the new processes start."""


def own_host(job: Any) -> LayoutHost:
    """A job of our own trainer as a change of layout sees it."""
    from copus_ext.reshard.trainer_host import TrainerHost

    return TrainerHost(job)


class LayoutChangeManager:
    """Changes of layout of one run; the same calls on every rank.

    Args:
        flags: of the controller.
        state: of the controller; its `layout_costs` are kept here.
        log: the journal.
        prior_s: seconds that a change to a layout should take, before any change was measured; the
            same on every rank.
        host_of: makes a host of the job that the trainer's loop gives to a `Request.move`, or of
            the context of a callback.
    """

    def __init__(
        self,
        flags: CopusConfig,
        state: ControllerState,
        log: DecisionLog,
        *,
        prior_s: Callable[[Layout], float],
        host_of: Callable[[Any], LayoutHost] = own_host,
    ) -> None:
        self.flags, self._state, self._log, self._prior_s = flags, state, log, prior_s
        self._host_of = host_of
        self._costs = state.layout_costs
        self._resharder: InProcessResharder | None = None
        self._run_dir: Path | None = None
        self._requested: LayoutChange | None = None
        self._saved_tokens = 0
        self.fault: Callable[[str], None] = lambda topic: None
        """A test's way to break a change; see `InProcessResharder`."""
        self.exits_for_relaunch = False
        """Whether the run ends so that new processes go on with it."""

    def open(self, context: CallbackContext) -> None:
        """Opens the resharder and completes the change that this launch is for. All ranks.

        Raises:
            UsageError: the layout cannot be changed in this launch.
        """
        self._run_dir = broadcast_from_rank0(context.run_dir)
        self._saved_tokens = _tokens(context.state.consumed_samples, context)
        if self.flags.copus_relayout == "inprocess":
            from copus_ext.reshard.inprocess import InProcessResharder

            self._resharder = InProcessResharder(
                run_dir=self._run_dir,
                note=self._log.write,
                fault=lambda topic: self.fault(topic),
                prebuild=self.flags.copus_prebuild,
                sample=self.flags.copus_verify_relayout == "sample",
            )
        elif not is_supervised():
            raise UsageError(
                "--copus-relayout relaunch needs a launcher that starts the run again, such as "
                "scripts/local_cpu.sh"
            )
        self._complete_relaunch(context)
        for layout in blocked_layouts():
            self._costs.block(layout, "the run crashed in it")

    def _complete_relaunch(self, context: CallbackContext) -> None:
        """Records the change of layout that this launch was started for, if any. All ranks."""
        pending, self._costs.pending_relaunch = self._costs.pending_relaunch, None
        if pending is None or pending.to != str(context.config.layout):
            return
        pause_s = min(max(broadcast_from_rank0(time.time()) - pending.time, 0.0), _MAX_PAUSE_S)
        self._costs.record_success(seconds=pause_s)
        self._state.elapsed_s += pause_s
        outcome = ReshardResult(kind="moved", pause_s=pause_s)
        about = {"number": pending.number, "start": pending.start, "to": pending.to}
        self._note_relayout(about, context.state.iteration, context.state.consumed_samples, outcome)

    def close(self, context: CallbackContext) -> None:
        """Ends a change that is still requested when training ends. All ranks."""
        asked, self._requested = self._requested, None
        if self._resharder is not None:
            self._resharder.close()
            self._resharder = None
        if asked is not None and self.exits_for_relaunch:
            self._request_launch(asked, context)
        elif asked is not None:
            fields = {"number": asked.number, "to": str(asked.to)}
            self._log.note("relayout.cancelled", **fields, reason="training ended first")

    def on_checkpoint_saved(self, context: CallbackContext) -> None:
        """Notes where the last checkpoint stands. In tokens, whatever the length of samples."""
        self._saved_tokens = _tokens(context.checkpoint_samples or 0, context)

    def prepare(self, layouts: list[Layout], context: CallbackContext) -> None:
        """Builds the process groups of layouts that may come next. All ranks."""
        if self._resharder is not None and self.flags.copus_prebuild:
            self._resharder.build_ahead(self._host_of(context), layouts)

    def request(
        self,
        change: LayoutChange,
        context: CallbackContext,
        now: StepSettings | None = None,
        *,
        saves: bool = False,
    ) -> Request:
        """The request to the loop.

        Args:
            change: to make.
            context: at the end of a step.
            now: settings of the next step whatever becomes of the change, or None.
            saves: whether to save before a change in the running processes even if the last
                checkpoint is new enough to fall back to.
        """
        self._requested = change
        self._log.note(
            "relayout.requested",
            number=change.number,
            iteration=context.state.iteration,
            consumed_samples=context.state.consumed_samples,
            start=str(context.config.layout),
            to=str(change.to),
            way=self.flags.copus_relayout,
            predicted_s=self._costs.seconds_of(self._prior_s(change.to)),
        )
        leaves = self._resharder is None
        kind = "save" if not leaves and (saves or self.saves_first(context)) else "change"
        make = self._change_by_relaunch if leaves else self._change_in_process
        return Request(kind=kind, reason=change.reason, settings=now, move=make, leaves=leaves)

    def saves_first(self, context: CallbackContext) -> bool:
        """Whether the last checkpoint is too old to fall back to."""
        most = self.flags.copus_relayout_checkpoint_tokens
        if most is None or context.config.checkpoint.save is None:
            return False
        return _tokens(context.state.consumed_samples, context) - self._saved_tokens > most

    def _change_in_process(self, job: Any) -> None:
        """Makes the change in the running processes; the loop calls it at a step boundary."""
        change, self._requested = self._requested, None
        assert change is not None and self._resharder is not None
        host = self._host_of(job)
        # Before the clock starts. A save that fails here counts as at any other time.
        host.finish_saving()
        start, about = host.layout, self._about(change, host)
        prior_s = self._prior_s(change.to)
        predicted_s = self._costs.seconds_of(prior_s)
        try:
            outcome = self._resharder.move(
                host, change.to, change.settings, predicted_s=predicted_s
            )
        except Relaunch as error:
            self._log.note("relayout.abandoned", **about, reason=str(error))
            raise
        # The costs are part of checkpoints: the same on every rank.
        outcome.pause_s = broadcast_from_rank0(outcome.pause_s)
        if outcome.peak_bytes:  # on all ranks or on none
            outcome.peak_bytes = max(all_gather_object(outcome.peak_bytes))
        if outcome.kind == "moved":
            self._costs.record_success(seconds=outcome.pause_s, prior_s=prior_s)
        else:
            self._costs.record_failure(start, change.to, outcome.reason, seconds=outcome.pause_s)
        self._state.elapsed_s += outcome.pause_s
        self._note_relayout(about, host.state.iteration, host.state.consumed_samples, outcome)
        change.done(outcome)

    def _change_by_relaunch(self, job: Any) -> str:
        """Makes the change by new processes: the run is saved as it goes on there, and ends.

        Returns:
            Why it ends.
        """
        change = self._requested
        assert change is not None and change.number is not None
        now = broadcast_from_rank0(time.time())
        host = self._host_of(job)
        pending = PendingRelaunch(**self._about(change, host), time=now)
        self.exits_for_relaunch = True
        host.state.settings = change.settings
        change.done(ReshardResult(kind="moved"))
        self._costs.pending_relaunch = pending
        return f"to go on as {change.to} in new processes"

    def _about(self, change: LayoutChange, host: LayoutHost) -> dict[str, Any]:
        return {"number": change.number, "start": str(host.layout), "to": str(change.to)}

    def _note_relayout(
        self, about: dict[str, Any], iteration: int, consumed_samples: int, outcome: ReshardResult
    ) -> None:
        self._log.note(
            "relayout",
            number=about["number"],
            iteration=iteration,
            consumed_samples=consumed_samples,
            start=about["start"],
            to=about["to"],
            outcome=outcome.to_json(),
        )

    def _request_launch(self, change: LayoutChange, context: CallbackContext) -> None:
        """Asks the launcher for the new processes; the checkpoint is there.

        Raises:
            TrainingFailure: on every rank, if the request cannot be written.
        """
        problem = None
        if dist.get_rank() == 0 and self._run_dir is not None:
            request = LaunchRequest(
                launch=os.environ[LAUNCH_VARIABLE],
                kind="relayout",
                iteration=context.state.iteration,
                consumed_samples=context.state.consumed_samples,
                layout=change.to,
                micro_batch_size=change.settings.micro_batch_size,
                global_batch_size=change.settings.global_batch_size,
                checkpoint=context.config.checkpoint.save,
                reason=change.reason,
            )
            try:
                write_request(self._run_dir, request)
            except OSError as error:
                problem = f"the request for a new launch cannot be written: {error}"
        if problem := broadcast_from_rank0(problem):
            raise TrainingFailure(problem)
