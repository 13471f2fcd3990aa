"""Keeps the run's record and journal: what was changed, what came of it, and what went wrong. Every
rank keeps the same record; rank 0 alone has a journal."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from copus_ext.controller.decision_log import DecisionLog
from copus_ext.goodput.inputs import Decision, DecisionInputs
from copus_ext.goodput.lr_scaling import Ramp
from copus_ext.goodput.messages import decision_scalars, outcome_scalars, summary
from copus_ext.goodput.state import History
from megatron.training.common.step_settings import StepInfo
from megatron.training.train.callbacks import CallbackContext

logger = logging.getLogger(__name__)

_HOLD_HALF_LIVES = 2.0
"""A loss spike after growth stops growth for so long."""


@dataclass(frozen=True, kw_only=True)
class CurrentConfiguration:
    """How steps are taken."""

    layout: str
    """Of the job."""
    batch: int
    """Samples of the next step."""

    @classmethod
    def of(cls, context: CallbackContext) -> CurrentConfiguration:
        """After a step."""
        assert context.step is not None
        batch = context.state.settings.global_batch_size or context.step.global_batch_size
        return cls(layout=str(context.config.layout), batch=batch)


class Ledger:
    """The account of one run.

    Args:
        history: whose record it fills.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self.journal: DecisionLog | None = None
        self._scalars: dict[str, float] = {}

    def write(self, kind: str, **fields: Any) -> None:
        """Writes a line that must be on disk before what it speaks of is done.

        Raises:
            OSError: it is not.
        """
        if self.journal is not None:
            self.journal.append(kind, **fields)

    def note(self, kind: str, **fields: Any) -> None:
        """Writes a line that nothing depends on."""
        try:
            self.write(kind, **fields)
        except (OSError, ValueError) as error:
            logger.warning("the journal cannot be written: %s", error)

    def take_scalars(self) -> dict[str, float]:
        """Numbers by tag that came up since they were last taken."""
        taken, self._scalars = self._scalars, {}
        return taken

    def _tell(self, scalars: Callable[[], dict[str, float]]) -> None:
        """Takes numbers for the sinks in; the run and its decisions do not depend on them."""
        try:
            self._scalars |= scalars()
        except Exception as error:
            logger.warning("a number of the controller is left out: %r", error)

    def decided(
        self,
        situation: DecisionInputs,
        decision: Decision,
        *,
        number: int,
        obeyed: bool,
        seconds: float,
    ) -> None:
        """Writes a decision with all that it depends on; on rank 0.

        Args:
            situation: where the run stands.
            decision: what to do.
            number: of the decision, from 1.
            obeyed: whether it will be done.
            seconds: that it took to decide.

        Raises:
            OSError: it is not on disk.
        """
        self.write(
            "decision",
            number=number,
            iteration=situation.iteration,
            consumed_samples=situation.consumed_samples,
            obeyed=obeyed,
            seconds=seconds,
            situation=situation.to_json(),
            decision=decision.to_json(),
        )
        self._tell(lambda: decision_scalars(situation, decision, number=number))

    def grade(self, *, now: bool = False) -> None:
        """Writes what came of a change, once enough steps have followed it.

        Args:
            now: take what there is.
        """
        outcome = self.history.close_if_due(now=now)
        if outcome is None:
            return
        if not outcome.get("spiked") and outcome["to_batch"] > outcome["from_batch"]:
            self.history.record["spikes_in_a_row"] = 0
        self.note("outcome", **outcome)
        changes = self.history.record["num_changes"]
        self._tell(lambda: outcome_scalars(outcome, changes=changes))

    def end(self, iteration: int, *, mode: str) -> None:
        """Sums up; on rank 0."""
        changes = self.history.record["changes"]
        self.note("end", iteration=iteration, changes=len(changes))
        print(summary(changes, mode=mode), flush=True)

    def guard(self, step: StepInfo, *, half_life_samples: float, total_samples: int) -> None:
        """Stops growth for a while after a loss spike that followed a growth; twice in a row for
        good.

        Args:
            step: just done.
            half_life_samples: of the noise scale's average.
            total_samples: of the run.
        """
        record = self.history.record
        if not self.history.is_spike():
            return
        record["open"]["spiked"] = True
        record["spikes_in_a_row"] += 1
        until = step.consumed_samples + int(_HOLD_HALF_LIVES * half_life_samples)
        if record["spikes_in_a_row"] > 1:
            until = total_samples
        record["hold_growth_until_samples"] = until
        self.note("spike", iteration=step.iteration, hold_growth_until_samples=until)
        if dist.get_rank() == 0:
            logger.warning("the loss rose after the batch grew: no growth until sample %d", until)

    def enter(
        self,
        decision: Decision,
        step: StepInfo,
        *,
        before: CurrentConfiguration,
        layout: str,
        ramp: Ramp | None,
        critical_batch_size: float | None,
        length: str,
    ) -> None:
        """Takes a change in that follows or, of a layout, has come about.

        Args:
            decision: that is obeyed.
            step: just done.
            before: how it was taken.
            layout: of the steps that follow.
            ramp: the learning rate's way to another batch.
            critical_batch_size: c times the noise scale, samples.
            length: how it changes the number of steps, a line; empty if it does not.
        """
        record, to = self.history.record, decision.to
        self.grade(now=True)
        self.history.change(
            number=record["num_decisions"],
            fields={
                "iteration": step.iteration,
                "consumed_samples": step.consumed_samples,
                "from_batch": before.batch,
                "from_micro_batch": step.micro_batch_size,
                "from_layout": before.layout,
                "to_batch": to.global_batch_size,
                "to_micro_batch": to.micro_batch_size,
                "to_layout": layout,
                "predicted_samples_per_s": to.samples_per_s,
                "gain": decision.gain,
                "reason": decision.reason,
            },
        )
        self.history.resize(
            to,
            from_batch=before.batch,
            consumed_samples=step.consumed_samples,
            ramp=ramp,
            critical_batch_size=critical_batch_size,
        )
        if dist.get_rank() == 0:
            print(f"copus: {decision.reason}", *filter(None, [length]), sep="\n", flush=True)
