"""Asks once, in the middle of the warm-up, whether the learning rate is plainly too low or high."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from copus_ext.controller.decision_log import DecisionLog
from copus_ext.controller.flags import CopusConfig
from copus_ext.goodput import rate_rule
from copus_ext.goodput.fork_result import ForkResult
from copus_ext.goodput.inputs import Decision, DecisionInputs
from copus_ext.goodput.state import ControllerState
from megatron.training.common.step_settings import Request
from megatron.training.train.callbacks import CallbackContext

if TYPE_CHECKING:
    from copus_ext.controller.fork_test import ForkTests


class LearningRateTest:
    """The test of a launch, if the controller may make it.

    Args:
        flags: of the controller.
        log: the journal, on rank 0.
    """

    def __init__(self, flags: CopusConfig, log: DecisionLog) -> None:
        self.pending: dict[str, Any] | None = None
        """The test that rank 0 wants at the next boundary; the same on every rank."""
        self._log = log
        self._is_over = self._was_before = False
        self._forks: ForkTests | None = None
        if flags.copus_mode == "act" and flags.copus_lr_test == "warn":
            # It needs our own trainer, and the controller also runs in others.
            from copus_ext.controller.fork_test import ForkTests

            self._forks = ForkTests(log)

    def due(
        self,
        inputs: DecisionInputs,
        decision: Decision,
        state: ControllerState,
        context: CallbackContext,
    ) -> dict[str, Any] | None:
        """The test to make after a decision, as plain JSON types; None if there is none, and where
        the run changes otherwise. On rank 0.

        Args:
            inputs: of the decision.
            decision: what else the run does.
            state: of the controller.
            context: of the step.
        """
        settles = inputs.in_ramp or inputs.paused or decision.kind != "stay"
        if self._forks is None or self._is_over or state.lr_tested_at is not None:
            return None
        batch, warmup = context.config.batch, context.config.optim.lr_warmup_samples
        has_passed = context.state.lr_samples > rate_rule.PLACE[1] * warmup
        self._is_over, self._was_before = has_passed, self._was_before or not has_passed
        if has_passed and self._was_before:
            line = "no fork test of the learning rate: the batch or its rate changed in the warm-up"
            self._log.note("lr_test", iteration=inputs.iteration, verdict=None, line=line)
            print(f"note: {line}", flush=True)
        if has_passed or settles:
            return None
        found = rate_rule.due(
            global_batch_size=inputs.now.global_batch_size,
            micro_batch_size=inputs.now.micro_batch_size,
            warmup_samples=warmup,
            warmed_samples=context.state.lr_samples,
            held_out_samples=batch.eval_iters * batch.initial_global_batch_size,
        )
        return found and {"test": found.to_json(), "at": inputs.consumed_samples}

    def request(self, state: ControllerState) -> Request | None:
        """The request for the pending test, once; None if there is none.

        Args:
            state: of the controller; it keeps that the test was made.
        """
        pending, self.pending = self.pending, None
        if pending is None or self._forks is None:
            return None
        made, at = rate_rule.RateTest(**pending["test"]), pending["at"]

        def done(result: ForkResult) -> None:
            state.elapsed_s += result.seconds
            # What was refused or stopped may be made by the next launch.
            self._is_over = True
            if result.kind != "done":
                return
            state.lr_tested_at = at
            # So that the step time is known again before anything is decided.
            state.last_decision_samples = at + made.samples
            found = rate_rule.verdict(result)
            self._log.note(
                "lr_test", iteration=result.iteration, verdict=found.to_json(), line=str(found)
            )
            if dist.get_rank() == 0:
                print(f"copus: {found}", flush=True)

        return self._forks.request(made.plan(), done=done)
