"""The controller's side of a change of layout: asks the loop for it, carries it out or leaves for
it, and keeps account of what it cost."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from copus_ext.config import CopusConfig
from copus_ext.goodput.costs import Costs
from copus_ext.reconfigure.inprocess import Mover
from copus_ext.reconfigure.phases import Outcome
from copus_ext.reconfigure.relaunch import LAUNCH_VARIABLE, is_supervised, write_request
from copus_ext.reconfigure.relaunch import Request as LaunchRequest
from megatron.training.agree import from_rank_zero
from megatron.training.callbacks import CallbackContext
from megatron.training.job import Job
from megatron.training.layout import Layout
from megatron.training.settings import Request, StepSettings


@dataclass(frozen=True, kw_only=True)
class Move:
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
    """Told what came of it, on every rank."""


class Moves:
    """Changes of layout of one run; the same calls on every rank.

    Args:
        flags: of the controller.
        costs: the account.
        note: writes the journal, on rank 0 alone.
    """

    def __init__(self, flags: CopusConfig, costs: Costs, note: Callable[..., None]) -> None:
        self.flags, self.costs, self._note = flags, costs, note
        self._mover: Mover | None = None
        self._run_dir: Path | None = None
        self._asked: Move | None = None
        self._saved_samples: int | None = None
        self.fault: Callable[[str], None] = lambda topic: None
        """A test's way to break a change; see `Mover`."""
        self.leaves = False
        """Whether the run ends so that new processes go on with it."""

    def open(self, context: CallbackContext) -> None:
        """Gets ready. All ranks."""
        self._run_dir = from_rank_zero(context.run_dir)
        if self.flags.copus_relayout == "inprocess":
            self._mover = Mover(
                run_dir=self._run_dir,
                note=self._note,
                fault=lambda topic: self.fault(topic),
                prebuild=self.flags.copus_prebuild,
                sample=self.flags.copus_verify_switch == "sample",
            )

    def close(self, context: CallbackContext) -> None:
        """At the end of training: says what became of a change that was asked for. All ranks."""
        asked, self._asked = self._asked, None
        if self._mover is not None:
            self._mover.close()
            self._mover = None
        if asked is None:
            return
        if self.leaves:
            self._leave(asked, context)
        else:
            fields = {"number": asked.number, "to": str(asked.to)}
            self._note("switch.cancelled", **fields, reason="training ended first")

    def on_checkpoint_saved(self, context: CallbackContext) -> None:
        """A checkpoint is there."""
        self._saved_samples = context.state.consumed_samples

    def why_not(self) -> str:
        """Why the layout cannot be changed in this launch; empty if it can."""
        if self.flags.copus_relayout == "relaunch" and not is_supervised():
            return (
                "--copus-relayout relaunch needs a launcher that starts the run again, such as "
                "scripts/local_cpu.sh"
            )
        return ""

    def get_ready(self, layouts: list[Layout], context: CallbackContext) -> None:
        """Builds the groups of layouts that may come next. All ranks."""
        if self._mover is not None and self.flags.copus_prebuild:
            self._mover.build_ahead(context.config, layouts)

    def request(self, move: Move, context: CallbackContext, now: StepSettings | None) -> Request:
        """What the loop is asked to do.

        Args:
            move: that was decided.
            context: at the end of a step.
            now: settings to take on in any case, or None.
        """
        self._asked = move
        self._note(
            "switch.requested",
            number=move.number,
            iteration=context.state.iteration,
            consumed_samples=context.state.consumed_samples,
            start=str(context.config.layout),
            to=str(move.to),
            way=self.flags.copus_relayout,
            predicted_s=self.costs.seconds,
        )
        if self._mover is None:
            self.leaves = True
            # Into the checkpoint that is written on the way out; no step is taken before.
            context.state.settings = move.settings
            return Request(kind="stop", reason=f"to go on as {move.to} in new processes")
        kind = "save" if self._saves_first(context) else "change"
        return Request(kind=kind, reason=move.reason, settings=now, move=self._carry_out)

    def _saves_first(self, context: CallbackContext) -> bool:
        """Whether the last checkpoint is too old to fall back to."""
        most = self.flags.copus_switch_checkpoint_tokens
        if most is None or context.config.checkpoint.save is None:
            return False
        since = context.state.consumed_samples - (self._saved_samples or 0)
        return since * context.config.batch.seq_length > most

    def _carry_out(self, job: Job) -> None:
        """Called by the loop at the end of the boundary."""
        move, self._asked = self._asked, None
        assert move is not None and self._mover is not None
        start = job.config.layout
        outcome = self._mover.move(job, move.to, move.settings, predicted_s=self.costs.seconds)
        # The account is part of checkpoints: the same on every rank.
        outcome.pause_s = from_rank_zero(outcome.pause_s)
        if outcome.kind == "moved":
            self.costs.moved(seconds=outcome.pause_s, iteration=job.state.iteration)
        else:
            self.costs.failed(start, move.to, outcome.reason, seconds=outcome.pause_s)
        self._note(
            "switch",
            number=move.number,
            iteration=job.state.iteration,
            consumed_samples=job.state.consumed_samples,
            start=str(start),
            to=str(move.to),
            outcome=outcome.to_json(),
        )
        move.done(outcome)

    def _leave(self, move: Move, context: CallbackContext) -> None:
        """Writes down what the launcher is to do; the checkpoint is there."""
        if dist.get_rank() == 0 and self._run_dir is not None:
            write_request(
                self._run_dir,
                LaunchRequest(
                    launch=os.environ[LAUNCH_VARIABLE],
                    kind="relayout",
                    iteration=context.state.iteration,
                    consumed_samples=context.state.consumed_samples,
                    layout=move.to,
                    micro_batch_size=move.settings.micro_batch_size,
                    global_batch_size=move.settings.global_batch_size,
                    checkpoint=context.config.checkpoint.save,
                    reason=move.reason,
                ),
            )
