"""The controller's side of a change of layout: asks the loop for it, carries it out or leaves for
it, and keeps account of what it cost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.ledger import Ledger
from copus_ext.goodput.costs import Costs
from copus_ext.reshard.phases import ReshardResult as Outcome
from copus_ext.reshard.relaunch import (
    LAUNCH_VARIABLE,
    blocked_layouts,
    is_supervised,
    write_request,
)
from copus_ext.reshard.relaunch import Request as LaunchRequest
from megatron.training.common.collectives import broadcast_from_rank0
from megatron.training.common.errors import Relaunch, TrainingFailure, UsageError
from megatron.training.common.step_settings import Request, StepSettings
from megatron.training.config.layout import Layout
from megatron.training.train.callbacks import CallbackContext

if TYPE_CHECKING:
    # In a Megatron-LM checkout our trainer is not there, and nothing moves.
    from copus_ext.reshard.inprocess import InProcessResharder
    from megatron.training.common.train_state import TrainState
    from megatron.training.train.job import Job


_MOST_PAUSE_S = 3600.0
"""Of a relaunch, which two processes time by the wall: a clock that is set costs no more."""


@dataclass(frozen=True, kw_only=True)
class LayoutChange:
    """A change that was decided."""

    number: int
    """Of the decision."""
    to: Layout
    """Layout to change to."""
    settings: StepSettings
    """How steps are taken there."""
    reason: str
    """One line."""
    done: Callable[[Outcome], None]
    """Told what came of it, on every rank; after a relaunch before it has come about."""


class LayoutChangeManager:
    """Changes of layout of one run; the same calls on every rank.

    Args:
        flags: of the controller.
        costs: the account.
        ledger: writes the journal, on rank 0 alone.
    """

    def __init__(self, flags: CopusConfig, costs: Costs, ledger: Ledger) -> None:
        self.flags, self.costs, self._ledger = flags, costs, ledger
        self._mover: InProcessResharder | None = None
        self._run_dir: Path | None = None
        self._asked: LayoutChange | None = None
        self._saved_samples = 0
        self.fault: Callable[[str], None] = lambda topic: None
        """A test's way to break a change; see `InProcessResharder`."""
        self.leaves = False
        """Whether the run ends so that new processes go on with it."""

    def open(self, context: CallbackContext) -> None:
        """Gets ready, and takes in a change that new processes were started for. All ranks.

        Raises:
            UsageError: the layout cannot be changed in this launch.
        """
        self._run_dir = broadcast_from_rank0(context.run_dir)
        self._saved_samples = context.state.consumed_samples
        if self.flags.copus_relayout == "inprocess":
            from copus_ext.reshard.inprocess import InProcessResharder

            self._mover = InProcessResharder(
                run_dir=self._run_dir,
                note=self._ledger.write,
                fault=lambda topic: self.fault(topic),
                prebuild=self.flags.copus_prebuild,
                sample=self.flags.copus_verify_switch == "sample",
            )
        elif not is_supervised():
            raise UsageError(
                "--copus-relayout relaunch needs a launcher that starts the run again, such as "
                "scripts/local_cpu.sh"
            )
        self._arrive(context)
        for layout in blocked_layouts():
            self.costs.bar(layout, "the run crashed in it")

    def _arrive(self, context: CallbackContext) -> None:
        """Takes in a change that new processes were started for. All ranks."""
        left = self.costs.record.get("left")
        self.costs.record["left"] = None
        if not left or left["to"] != str(context.config.layout):
            return
        pause_s = min(max(broadcast_from_rank0(time.time()) - left["time"], 0.0), _MOST_PAUSE_S)
        self.costs.moved(seconds=pause_s, iteration=context.state.iteration)
        self._ledger.history.record["elapsed_s"] += pause_s
        self._note_switch(left, context.state, Outcome(kind="moved", pause_s=pause_s))

    def close(self, context: CallbackContext) -> None:
        """At the end of training: says what became of a change that was asked for. All ranks."""
        asked, self._asked = self._asked, None
        if self._mover is not None:
            self._mover.close()
            self._mover = None
        if asked is not None and self.leaves:
            self._leave(asked, context)
        elif asked is not None:
            fields = {"number": asked.number, "to": str(asked.to)}
            self._ledger.note("switch.cancelled", **fields, reason="training ended first")

    def on_checkpoint_saved(self, context: CallbackContext) -> None:
        """A checkpoint is there."""
        self._saved_samples = context.checkpoint_samples or 0

    def get_ready(self, layouts: list[Layout], context: CallbackContext) -> None:
        """Builds the groups of layouts that may come next. All ranks."""
        if self._mover is not None and self.flags.copus_prebuild:
            self._mover.build_ahead(context.config, layouts)

    def request(
        self, move: LayoutChange, context: CallbackContext, now: StepSettings | None
    ) -> Request:
        """What the loop is asked to do.

        Args:
            move: that was decided.
            context: at the end of a step.
            now: settings to take on in any case, or None.
        """
        self._asked = move
        self._ledger.note(
            "switch.requested",
            number=move.number,
            iteration=context.state.iteration,
            consumed_samples=context.state.consumed_samples,
            start=str(context.config.layout),
            to=str(move.to),
            way=self.flags.copus_relayout,
            predicted_s=self.costs.seconds,
        )
        kind = "save" if self._mover is not None and self._saves_first(context) else "change"
        leaves = self._mover is None
        carry_out = self._set_out if leaves else self._carry_out
        return Request(kind=kind, reason=move.reason, settings=now, move=carry_out, leaves=leaves)

    def _saves_first(self, context: CallbackContext) -> bool:
        """Whether the last checkpoint is too old to fall back to."""
        most = self.flags.copus_switch_checkpoint_tokens
        if most is None or context.config.checkpoint.save is None:
            return False
        since = context.state.consumed_samples - self._saved_samples
        return since * context.config.batch.seq_length > most

    def _carry_out(self, job: Job) -> None:
        """Called by the loop at the end of the boundary."""
        move, self._asked = self._asked, None
        assert move is not None and self._mover is not None
        if job.checkpointer is not None:
            # Before anybody looks at the clock; if it fails, that counts as at any other time.
            job.checkpointer.finish()
        start, about = job.config.layout, self._about(move, job)
        try:
            outcome = self._mover.move(job, move.to, move.settings, predicted_s=self.costs.seconds)
        except Relaunch as error:
            self._ledger.note("switch.abandoned", **about, reason=str(error))
            raise
        # The account is part of checkpoints: the same on every rank.
        outcome.pause_s = broadcast_from_rank0(outcome.pause_s)
        if outcome.kind == "moved":
            self.costs.moved(seconds=outcome.pause_s, iteration=job.state.iteration)
        else:
            self.costs.failed(start, move.to, outcome.reason, seconds=outcome.pause_s)
        self._note_switch(about, job.state, outcome)
        move.done(outcome)

    def _set_out(self, job: Job) -> str:
        """The same where new processes are needed: the run is saved as it goes on there, and ends.

        Returns:
            Why.
        """
        move = self._asked
        assert move is not None
        about = {**self._about(move, job), "time": broadcast_from_rank0(time.time())}
        self.leaves = True
        job.state.settings = move.settings
        move.done(Outcome(kind="moved"))
        self.costs.record["left"] = about
        return f"to go on as {move.to} in new processes"

    def _about(self, move: LayoutChange, job: Job) -> dict[str, Any]:
        return {"number": move.number, "start": str(job.config.layout), "to": str(move.to)}

    def _note_switch(self, about: dict[str, Any], state: TrainState, outcome: Outcome) -> None:
        self._ledger.note(
            "switch",
            number=about["number"],
            iteration=state.iteration,
            consumed_samples=state.consumed_samples,
            start=about["start"],
            to=about["to"],
            outcome=outcome.to_json(),
        )

    def _leave(self, move: LayoutChange, context: CallbackContext) -> None:
        """Writes down what the launcher is to do; the checkpoint is there.

        Raises:
            TrainingFailure: on every rank, if it cannot be written.
        """
        problem = None
        if dist.get_rank() == 0 and self._run_dir is not None:
            try:
                write_request(self._run_dir, self._launch_request(move, context))
            except OSError as error:
                problem = f"the request for a new launch cannot be written: {error}"
        if problem := broadcast_from_rank0(problem):
            raise TrainingFailure(problem)

    def _launch_request(self, move: LayoutChange, context: CallbackContext) -> LaunchRequest:
        return LaunchRequest(
            launch=os.environ[LAUNCH_VARIABLE],
            kind="relayout",
            iteration=context.state.iteration,
            consumed_samples=context.state.consumed_samples,
            layout=move.to,
            micro_batch_size=move.settings.micro_batch_size,
            global_batch_size=move.settings.global_batch_size,
            checkpoint=context.config.checkpoint.save,
            reason=move.reason,
        )
