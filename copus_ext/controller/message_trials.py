"""Tries messages of 8 bits between stages in the running job, and goes on with what is faster."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from copus_ext.controller.decision_log import DecisionLog
from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.throughput_table import ThroughputTable
from copus_ext.gns.observer import NoiseObserver
from copus_ext.goodput.fork_result import ForkResult
from copus_ext.goodput.inputs import Decision, DecisionInputs
from copus_ext.goodput.message_rule import MessageTrial, trial, verdict
from copus_ext.goodput.state import ControllerState
from megatron.training.common.step_settings import Request
from megatron.training.train.callbacks import CallbackContext

if TYPE_CHECKING:
    from copus_ext.controller.fork_test import ForkTests

_AGAIN = 1.1
"""Growth of the consumed samples after a trial that could not be made, before the next."""


class MessageTrials:
    """The trials of a launch, if the controller may make any.

    Args:
        flags: of the controller.
        log: the journal, on rank 0.
    """

    def __init__(self, flags: CopusConfig, log: DecisionLog) -> None:
        self.may_try = flags.copus_mode == "act" and flags.copus_message_bits == "try"
        self.pending: dict[str, Any] | None = None
        """The trial that rank 0 wants at the next boundary, and where that is in present samples;
        the same on every rank."""
        self._log = log
        self._forks: ForkTests | None = None
        if self.may_try:
            # It needs our own trainer, and the controller also runs in others.
            from copus_ext.controller.fork_test import ForkTests

            self._forks = ForkTests(log)

    def bits(self, state: ControllerState) -> int | None:
        """Bits of a number in the messages that earlier trials have found to pay; None otherwise,
        and where no trial may be made any more."""
        return state.pipeline_message_bits if self.may_try else None

    def resume(self, state: ControllerState, context: CallbackContext) -> None:
        """Goes on from a checkpoint. Where the form of messages is another from here on, times of
        the form before tell nothing.

        Args:
            state: of the controller, as restored.
            context: of the setup.
        """
        before, bits = context.state.settings.pipeline_message_bits, self.bits(state)
        if before == bits:
            return
        state.forget_times_between_stages()
        if dist.get_rank() == 0:
            form = f"have {bits} bits a number" if bits else "are whole"
            print(f"note: messages between stages {form} from here on (message_bits)", flush=True)

    def due(
        self,
        inputs: DecisionInputs,
        decision: Decision,
        table: ThroughputTable | None,
        state: ControllerState,
        context: CallbackContext,
        observer: NoiseObserver,
    ) -> dict[str, Any] | None:
        """The trial to make after a decision, as plain JSON types; None if there is none, and
        where the run changes otherwise. On rank 0.

        Args:
            inputs: of the decision.
            decision: what else the run does.
            table: of throughputs.
            state: of the controller.
            context: of the step.
            observer: of the noise scale.
        """
        settles = inputs.in_warmup or inputs.in_ramp or inputs.paused or decision.kind != "stay"
        settles |= state.open_change is not None
        settles |= inputs.consumed_samples < state.message_trials_not_before
        if self._forks is None or settles or table is None:
            return None
        if state.pipeline_message_bits is not None or self._forks.ended is not None:
            return None
        now, batch = inputs.now, context.config.batch
        found = trial(
            global_batch_size=now.global_batch_size,
            micro_batch_size=now.micro_batch_size,
            step_s=now.global_batch_size / now.samples_per_s,
            saved_s=table.saved_by_short_messages_s(now.configuration),
            exact_share=1.0 / observer.interval_at(now.global_batch_size),
            loss_slope=state.loss_slope,
            held_out_samples=batch.eval_iters * batch.initial_global_batch_size,
            consumed_samples=inputs.consumed_samples,
            samples_left=inputs.total_samples - inputs.consumed_samples,
            trials_at=state.message_trials_at,
        )
        return found and {"trial": found.to_json(), "at": inputs.consumed_samples}

    def request(self, state: ControllerState, *, taken: Callable[[], Any]) -> Request | None:
        """The request for the pending trial, once; None if there is none.

        Args:
            state: of the controller; it keeps what comes out.
            taken: called on every rank if the run goes on with short messages.
        """
        pending, self.pending = self.pending, None
        if pending is None or self._forks is None:
            return None
        made, at = MessageTrial(**pending["trial"]), pending["at"]

        def done(result: ForkResult) -> None:
            state.elapsed_s += result.seconds
            if result.kind != "done":
                # Near the end of a phase there are too few samples; later there may be enough.
                state.message_trials_not_before = math.ceil(_AGAIN * at)
                return
            state.message_trials_at.append(at)
            # So that the step time is known again before anything is decided.
            state.last_decision_samples = at + made.samples
            found, is_taken = verdict(result, made), result.kept == 1
            if is_taken:
                state.pipeline_message_bits = 8
                state.forget_times_between_stages()
                taken()
            self._log.note(
                "messages",
                iteration=result.iteration,
                bits=8 if is_taken else None,
                verdict=found.to_json(),
                line=str(found),
            )
            if dist.get_rank() == 0:
                print(f"copus: {found}", flush=True)

        return self._forks.request(made.plan(), done=done)
