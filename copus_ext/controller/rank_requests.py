"""Asks for more or fewer ranks in an elastic run, where that lowers the price of progress.

It only asks: the launchers let nodes go, and ask the cluster for more. The run goes on in a new
generation then, from the state of the controller as it is.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from typing import Any

from copus_ext.controller import rules
from copus_ext.controller.decision_log import DecisionLog
from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.throughput_table import ThroughputTable
from copus_ext.goodput.inputs import Decision, DecisionInputs
from copus_ext.goodput.ranks import (
    ELASTIC_S,
    RankInputs,
    choose_ranks,
    ranks_of,
    read_range,
    whole_nodes,
)
from copus_ext.goodput.state import ControllerState, RankChange
from megatron.training.common.control import GENERATION_VARIABLE, write_ranks
from megatron.training.common.errors import UsageError
from megatron.training.train.callbacks import CallbackContext

logger = logging.getLogger(__name__)


class RankRequests:
    """Decides on rank 0 about the number of ranks, beside each decision about batch and layout.

    Args:
        flags: of the controller.
        log: the journal.

    Raises:
        UsageError: flags that make no sense, or a run that cannot change its ranks.
    """

    def __init__(self, flags: CopusConfig, log: DecisionLog) -> None:
        self._flags, self._log = flags, log
        self._range = rank_range(flags)
        self._watched: int | None = None
        is_elastic = GENERATION_VARIABLE in os.environ
        if self._range is not None and flags.copus_mode == "act" and not is_elastic:
            raise UsageError(
                "--copus-ranks needs an elastic run: start it with `python -m "
                "copus_ext.launch.supervisor --elastic`, or use --copus-mode observe"
            )

    def due(
        self,
        inputs: DecisionInputs,
        table: ThroughputTable | None,
        state: ControllerState,
        context: CallbackContext,
        decision: Decision,
        *,
        moving_s: float,
    ) -> dict[str, Any] | None:
        """Asks the launchers for another number of ranks, if the run should have one.

        Args:
            inputs: of the decision about batch and layout.
            table: throughputs.
            state: of the controller.
            context: of the run.
            decision: about batch and layout. One change at a time.
            moving_s: upper estimate of the seconds in which the state moves.

        Returns:
            What was asked for, to be kept in the state on every rank; None if nothing was.
        """
        if self._range is None or table is None or table.planner is None:
            return None
        if inputs.paused or decision.kind != "stay":
            return None
        of_node = table.planner.cluster.gpus_per_node
        counts = [of_node * nodes for nodes in whole_nodes(*self._range, of_node)]
        batches = rules.batches_to_weigh(inputs.rules, inputs.now.global_batch_size)
        rows = [*inputs.rows, *table.rows_of_ranks(counts, batches, now=inputs.now)]
        last, present = state.rank_change, ranks_of(inputs.now)
        has_come = last is not None and last.after == present
        if last is not None and has_come:
            at = max(last.iteration, inputs.last_relayout_iteration or 0)
            inputs = dataclasses.replace(inputs, last_relayout_iteration=at)
        found = choose_ranks(
            RankInputs.of(
                inputs,
                rows,
                cost_of_time=self._flags.copus_cost_of_time or 0.0,
                pause_s=ELASTIC_S + moving_s,
                last=last if has_come else None,
            )
        )
        after = ranks_of(found.to)
        is_asked = last is not None and (last.before, last.after) == (present, after)
        if not found.changes or is_asked or self._watched == after:
            return None
        change = RankChange(
            before=present,
            after=after,
            critical_batch_size=inputs.critical_batch_size or math.nan,
            iteration=inputs.iteration,
        )
        return dataclasses.asdict(change) if self._ask(change, found.reason, context) else None

    def _ask(self, change: RankChange, reason: str, context: CallbackContext) -> bool:
        """Writes the request, the journal and a line. Returns whether the launchers can see it."""
        acts = self._flags.copus_mode == "act"
        if acts and context.run_dir is not None:
            try:
                write_ranks(context.run_dir, change.after)
            except OSError as error:
                logger.warning("ranks cannot be asked for: %s", error)
                return False
            print(f"copus: asks for {change.after} ranks; {reason}", flush=True)
        else:
            self._watched = change.after  # said once
        self._log.note("ranks", applied=acts, reason=reason, **dataclasses.asdict(change))
        return acts


def rank_range(flags: CopusConfig) -> tuple[int, int] | None:
    """The fewest and the most ranks to ask for; None without --copus-ranks.

    Raises:
        UsageError: flags that make no sense.
    """
    text, cost = flags.copus_ranks, flags.copus_cost_of_time
    if text is None:
        if cost is not None:
            raise UsageError("--copus-cost-of-time needs --copus-ranks MIN-MAX; give both")
        return None
    try:
        found = read_range(text)
    except ValueError as error:
        raise UsageError(f"--copus-ranks {text}: {error}") from None
    if cost is None:
        raise UsageError(
            "--copus-ranks needs --copus-cost-of-time, what an hour of waiting is worth in hours "
            "of a rank; the command `plan elastic` works one out"
        )
    if cost < 0 or math.isnan(cost):
        raise UsageError(f"--copus-cost-of-time {cost:g} must be at least 0")
    return found
