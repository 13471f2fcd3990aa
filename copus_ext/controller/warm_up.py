"""Holds the learning rate of a run to a warm-up that counts steps, and says so."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from copus_ext.controller import rules
from copus_ext.controller.decision_log import DecisionLog
from copus_ext.controller.flags import CopusConfig
from copus_ext.goodput.messages import warm_up_line
from megatron.training.train.callbacks import CallbackContext


class WarmUpGuard:
    """What the warm-up leaves of the schedule's rate. A function of the counters of the run, so
    that a resumed run goes on as it would have.

    Args:
        flags: of the controller.
        config: of the run.
    """

    def __init__(self, flags: CopusConfig, config: Any) -> None:
        self._rule = rules.warm_up_of(flags, config)
        self._held_batch: int | None = None

    def factor(self, batch: int, context: CallbackContext) -> float:
        """The factor of the next step at a batch; 1 where nothing holds the rate."""
        if self._rule is None:
            return 1.0
        state = context.state
        return self._rule.factor(batch, steps=state.updates + 1, samples=state.lr_samples)

    def report(self, batch: int, context: CallbackContext, log: DecisionLog) -> None:
        """Says once for each batch that the rate is held below the schedule's, and until when.
        Records also that it is held no longer.

        Args:
            batch: of the next step.
            context: after a step.
            log: the journal.
        """
        factor, state = self.factor(batch, context), context.state
        held = batch if factor < 1.0 else None
        if self._rule is None or held == self._held_batch:
            return
        self._held_batch = held
        fields: dict[str, Any] = {
            "factor": factor,
            "after_shrinking": (state.updates + 1) * batch < state.lr_samples,
            "full_at_step": state.iteration - state.updates + self._rule.steps(batch),
        }
        log.note("warmup", iteration=state.iteration, **fields)
        if held and dist.get_rank() == 0:
            print(f"copus: {warm_up_line(**fields)}", flush=True)
