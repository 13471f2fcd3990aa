"""What a launch begins with: the controller's state, the batch and the micro-batch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from copus_ext.controller import rules
from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.out_of_memory import micro_batch_that_fits
from copus_ext.controller.segments import config_of
from copus_ext.goodput.inputs import Rules
from copus_ext.goodput.lr_scaling import Ramp
from copus_ext.goodput.state import ControllerState
from megatron.trainer.config.layout_rules import batch_problems
from megatron.trainer.config.lengths import lengths_given
from megatron.trainer.train.callbacks import CallbackContext

if TYPE_CHECKING:
    from megatron.trainer.config import Config


logger = logging.getLogger(__name__)

STATE_KEY = "copus_control"
"""Name of the controller's state in a checkpoint."""


def restored_state(context: CallbackContext) -> ControllerState:
    """The controller's state of the checkpoint, or an empty one. One that cannot be read does not
    end the run: rank 0 says in one line what is lost with it.

    Args:
        context: of the start.
    """
    stored = context.state.callbacks.get(STATE_KEY)
    if stored is None:
        return ControllerState()
    try:
        return ControllerState.from_json(stored)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if dist.get_rank() == 0:
            logger.warning(
                "the controller's state in the checkpoint of iteration %d cannot be read: %s; "
                "weights, data position and batch go on as saved, and the controller measures anew",
                context.state.iteration,
                error if type(error) is ValueError else repr(error),
            )
    return ControllerState()


def first_sizes(
    context: CallbackContext, flags: CopusConfig, known: Rules, *, fixed_micro_batch: bool
) -> tuple[int, int]:
    """The sizes of the checkpoint, or else of the flags at this place of the run, as far as the
    bounds of this launch and its memory allow them. Says on rank 0 what is not as the checkpoint
    has it. Collective.

    Args:
        context: of the start.
        flags: of the controller, in samples of the present length.
        known: the rules of the launch.
        fixed_micro_batch: the trainer cannot take another micro-batch.

    Returns:
        Global batch size and micro-batch size, samples.
    """
    settings, config = context.state.settings, config_of(context)
    micro = settings.micro_batch_size or config.batch.micro_batch_size
    before = settings.global_batch_size
    if before is None and not known.schedule:
        before = rules.batch_of_ramp(config, context.state.consumed_samples)
    if before is None:
        batch = known.first_batch
    else:
        sizes = {"batch": before, "micro": micro, "fixed_micro_batch": fixed_micro_batch}
        batch, micro = within_bounds(context, flags, known, **sizes)
        if batch != before and dist.get_rank() == 0:
            least, most = rules.bounds_at_start(flags, known, config)
            side, bound = ("max", most) if batch < before else ("min", least)
            print(
                f"copus: batch {batch} in place of {before}, as --copus-{side}-global-batch-size "
                f"is {bound}",
                flush=True,
            )
    return batch, micro if fixed_micro_batch else micro_batch_that_fits(context, micro, batch)


def tell_lengths(config: Any, flags: CopusConfig) -> None:
    """Says on rank 0 once a launch what lengths in iterations, whose number will change with the
    batch, have become; and where the batch of a ramp begins.

    Args:
        config: of the run, its lengths in the samples of its flags; of another trainer, anything.
        flags: of the controller.
    """
    if dist.get_rank() != 0:
        return
    lines, stays = [], flags.copus_policy == "static"
    told = _lengths_of(config) if hasattr(config, "explicit") and not stays else ""
    if told:
        lines.append(
            f"lengths stay in samples when the batch changes: {told}; other intervals count steps"
        )
    if (ramp := rules.ramp_of(config)) is not None:
        lines.append(
            f"the first batch is {ramp[0]}, where --rampup-batch-size begins; "
            + ("it stays" if stays else "the controller chooses all later ones")
        )
    for line in lines:
        print(f"copus: {line}", flush=True)


def _lengths_of(config: Config) -> str:
    """What the lengths given in iterations have become; empty where none is given so."""
    batch = config.batch
    parts = [lengths_given(config.explicit, config.flat())]
    if interval := batch.eval_interval:
        is_constant = batch.rampup_batch_size is None and batch.step_batch_size_schedule is None
        samples = f"is {interval * batch.initial_global_batch_size} samples"
        what = samples if is_constant else "counts the steps that the flags would take"
        parts.append(f"--eval-interval {interval} {what}")
    return ", ".join(filter(None, parts))


def leave_batch(state: ControllerState, *, ramp: Ramp, context: CallbackContext) -> None:
    """Goes on with another batch than the checkpoint's, as the bounds of a launch ask. The rates
    follow as in a change of the batch. Nobody has decided this one, so that it has no outcome.

    Args:
        state: of the controller; the outcome of its last change is recorded.
        ramp: the learning rate's way to the new batch.
        context: of the start.
    """
    state.loss_watch, state.steps_after_change = None, 0
    state.ramp = ramp


def within_bounds(
    context: CallbackContext,
    flags: CopusConfig,
    known: Rules,
    *,
    batch: int,
    micro: int,
    fixed_micro_batch: bool,
) -> tuple[int, int]:
    """The sizes to go on with from those of a checkpoint. An earlier launch may have had wider
    bounds: its batch then goes to the nearest one of the grid, in micro-batches of the same size
    or the largest smaller one. A schedule knows its own batches, and the batch stays where the
    layout can cut none of the grid."""
    least, most = rules.bounds_at_start(flags, known, config_of(context))
    if known.schedule or least <= batch <= most:
        return batch, micro
    layout, uneven = context.config.layout, context.config.batch.allow_uneven_micro_batches
    smaller = [micro] if fixed_micro_batch else range(micro, 0, -1)
    for size in sorted(known.grid, key=lambda size: abs(size - batch)):
        for n in smaller:
            if not batch_problems(layout, n, size, uneven=uneven):
                return size, n
    return batch, micro
