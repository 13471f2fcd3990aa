"""Tells the user what there is to gain: when a run starts, and once its noise scale is known."""

from __future__ import annotations

import logging
from collections.abc import Callable

from copus_ext.controller.segments import config_of
from copus_ext.controller.throughput_table import ThroughputTable
from copus_ext.goodput import headroom
from copus_ext.goodput.headroom import Headroom
from copus_ext.goodput.inputs import DecisionInputs, Rules, belief_of
from copus_ext.goodput.state import ControllerState
from megatron.trainer.train.callbacks import CallbackContext

logger = logging.getLogger(__name__)


class HeadroomNotice:
    """Prints a line at the start of a launch, and another when the noise scale is known. An error
    is only a warning."""

    def __init__(self) -> None:
        self._said = ""

    def at_start(
        self,
        context: CallbackContext,
        table: ThroughputTable,
        rules: Rules,
        state: ControllerState,
    ) -> Headroom | None:
        """The headroom of any batch of the grid before the first step of a launch; None if it is
        unknown.

        Args:
            context: of the setup.
            table: of throughputs.
            rules: of the decisions.
            state: what this run has measured before.
        """
        config, settings = config_of(context), context.state.settings
        batch = settings.global_batch_size or rules.first_batch

        def find() -> Headroom | None:
            rows, current = table.rows(
                sorted({*rules.grid, batch}),
                micro_batch_size=settings.micro_batch_size or config.batch.micro_batch_size,
                global_batch_size=batch,
                measured=state.measured_step_time,
                end_share=state.end_share,
                visited=state.timed_layouts,
            )
            belief = belief_of(rules, state.looks, config.batch.train_samples)
            start = context.state.consumed_samples / rules.length_ratio
            return headroom.of_rows(rows, current, belief, start=start)

        return self._say(find)

    def at_decision(self, inputs: DecisionInputs) -> Headroom | None:
        """The headroom as of a decision; None if it is unknown."""
        return self._say(lambda: headroom.of_inputs(inputs))

    def _say(self, find: Callable[[], Headroom | None]) -> Headroom | None:
        try:
            found = find()
        except Exception as error:
            logger.warning("what there is to gain is unknown: %r", error)
            return None
        if found is not None and self._said not in (found.source, "measured"):
            self._said = found.source
            print(f"copus: {found}", flush=True)
        return found
