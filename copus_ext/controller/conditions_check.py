"""Lets the controller notice that steps have become slower or faster for good, and learn why."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict

import torch.distributed as dist

from copus_ext.controller.decision_log import DecisionLog
from copus_ext.controller.link_timing import time_machine
from copus_ext.controller.throughput_table import ThroughputTable
from copus_ext.cost_model.conditions import Timings, factors_after
from copus_ext.cost_model.constants import PartFactors
from copus_ext.goodput.conditions import earlier_times
from copus_ext.goodput.messages import conditions_line
from copus_ext.goodput.state import ControllerState
from copus_ext.goodput.step_time_watch import StepTimeShift
from megatron.trainer.common.collectives import broadcast_from_rank0

logger = logging.getLogger(__name__)


def have_conditions_changed(
    state: ControllerState,
    table: ThroughputTable | None,
    log: DecisionLog,
    *,
    key: str,
    iteration: int,
    device: str,
) -> bool:
    """Whether the run goes on under other conditions than before this step; `state` then holds
    them. All ranks, after every step; collective where links are timed.

    Args:
        state: of the controller, the same on every rank.
        table: on rank 0, of the conditions before; None where nothing can be predicted.
        log: the journal.
        key: of the configuration of the step.
        iteration: of the step.
        device: `cpu` or `cuda`.
    """
    shift, conditions = state.take_shift(), state.conditions
    # A change that is just under way is judged once it is certain, and then only once.
    if shift is None and (not conditions.is_check_due or state.watch.is_unsure):
        return False
    began = time.monotonic()
    timings = time_machine(device)
    answer: tuple[PartFactors, dict[str, float], float] | None = None
    if dist.get_rank() == 0:
        took_s = time.monotonic() - began
        try:
            answer = *_judge(state, table, timings, key=key, shift=shift), took_s
        except Exception as error:  # predictions stay what they are
            logger.warning("what has changed is unknown: %r", error)
            answer = conditions.factors, {}, took_s
    factors, earlier_s, took_s = broadcast_from_rank0(answer)
    conditions.timed(took_s)
    state.elapsed_s += took_s
    have_changed = state.set_conditions(factors, earlier_s, present=key, shift=shift)
    if shift is None and not have_changed:
        return False
    if dist.get_rank() == 0:
        fields = {
            "before_s": shift and shift.before_s,
            "after_s": shift and shift.after_s,
            "factors": asdict(factors),
        }
        log.note("conditions", iteration=iteration, timings=asdict(timings), **fields)
        print(f"copus: {conditions_line(**fields)}", flush=True)
    return have_changed


def _judge(
    state: ControllerState,
    table: ThroughputTable | None,
    timings: Timings,
    *,
    key: str,
    shift: StepTimeShift | None,
) -> tuple[PartFactors, dict[str, float]]:
    """The parts of a step now, and what is expected of configurations that were timed before."""
    now = state.conditions.factors
    if table is None or table.planner is None:
        return now, {}
    present = table.configuration_of(key)
    factors = factors_after(
        lambda f: table.raw_step_s(present, f),
        ratio=shift and shift.ratio,
        now=now,
        timings=timings,
        usual=state.conditions.usual,
    )

    def ratio(other: str) -> float | None:
        try:
            c = table.configuration_of(other)
            return table.raw_step_s(c, factors) / table.raw_step_s(c, now)
        except ValueError:  # of a layout that these ranks cannot have any more
            return None

    earlier_s = earlier_times(
        state.step_times, state.conditions.earlier_s, present=key, ratio=ratio
    )
    return factors, earlier_s
