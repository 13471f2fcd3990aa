"""`--global-batch-size auto`: the planner chooses the batch of the first launch."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.throughput_table import ThroughputTable, gpu_of
from copus_ext.goodput.first_batch import FirstBatch, doublings, first_batch
from megatron.trainer.common.collectives import all_gather_object
from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.layout_rules import batch_problems
from megatron.trainer.config.training import AUTO
from megatron.trainer.train.callbacks import Callback, CallbackContext

if TYPE_CHECKING:
    from megatron.trainer.config import Config

_FLAG = f"--global-batch-size {AUTO}"


def with_batch(
    args: argparse.Namespace,
    flags: CopusConfig,
    world_size: int,
    *,
    resolved: Callable[[argparse.Namespace], Config],
    stored: Mapping[str, Any] | None,
) -> tuple[argparse.Namespace, str]:
    """The flags with a number in place of `auto`, and a line that says why it is that one.

    A run keeps the batch of its first launch, in which its `--lr` and its lengths are counted. The
    first launch takes that with the least expected time, in the layout and the micro-batches of
    its flags.

    Args:
        args: parsed flags.
        flags: of the controller.
        world_size: number of ranks.
        resolved: the configuration of flags with a number.
        stored: flags of the checkpoint that the run goes on from, None for a new run.

    Raises:
        UsageError: one line: flags that do not go with it, or no batch that fits.
    """
    _check(args, is_new=stored is None)
    if stored is not None:
        known = stored.get("initial_global_batch_size") or stored.get("global_batch_size")
        if not isinstance(known, int):
            raise UsageError(f"{_FLAG}: the checkpoint does not say its batch; give a number")
        return _with(args, known), f"{_FLAG} is {known}, as at the first launch of the run"
    # Any layout of these ranks can cut this batch.
    config = resolved(_with(args, args.micro_batch_size * world_size))
    found = _found(config, flags)
    reference = flags.copus_reference_batch_size
    rate = f"the batch {reference}" if reference else "this batch"
    level = f"{found.critical_batch_size:,.0f} samples at the end of the run"
    why = f"published laws expect a critical batch size of about {level}; --lr is that of {rate}"
    return _with(args, found.batch), f"{_FLAG}: {found}; {why}"


def _check(args: argparse.Namespace, *, is_new: bool) -> None:
    if not args.copus:
        raise UsageError(
            f"{_FLAG} needs --copus, whose planner chooses it; add --copus, or give the number "
            "that `copus plan` names"
        )
    for name in ("rampup_batch_size", "step_batch_size_schedule"):
        if getattr(args, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{_FLAG} does not go with {flag}; drop one of them")
    if is_new and args.train_samples is None:
        raise UsageError(
            f"{_FLAG}: a length in iterations would depend on the batch; give --train-samples"
        )


def _with(args: argparse.Namespace, batch: int) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), "global_batch_size": batch})


def _found(config: Config, flags: CopusConfig) -> FirstBatch:
    batch, layout = config.batch, config.layout
    if config.in_segment.batch.seq_length != batch.seq_length:
        raise UsageError(f"{_FLAG} knows samples of one length; give a number")
    length = {"total_samples": batch.train_samples, "tokens_per_sample": batch.seq_length}
    least = flags.copus_min_global_batch_size or 1
    most = flags.copus_max_global_batch_size or batch.train_samples
    uneven = batch.allow_uneven_micro_batches
    more: dict[str, Any] = {
        "uneven": uneven,
        "group_size": config.parallel.microbatch_group_size_per_vp_stage,
        "arguments": config.flat(),
    }
    unit = batch.micro_batch_size * layout.batch_unit
    sizes = [
        size
        for size in doublings(unit, **length)
        if least <= size <= most
        and not batch_problems(layout, batch.micro_batch_size, size, **more)
    ]
    if not sizes:
        raise UsageError(
            f"{_FLAG}: no power of two times {unit}, which {layout} can cut into micro-batches of "
            f"{batch.micro_batch_size}, is from {least} to {most}; give a number"
        )
    table = ThroughputTable(
        config,
        dataclasses.replace(flags, copus_layouts="current"),
        gpu=gpu_of(config),
        fixed_micro_batch=True,
    )
    rows, _ = table.rows(
        sizes,
        micro_batch_size=batch.micro_batch_size,
        global_batch_size=sizes[0],
        measured=lambda c, **more: None,
    )
    found = first_batch(rows, **length)
    if found is None:
        why = table.note or f"the planner says that {layout} does not fit into memory"
        raise UsageError(f"{_FLAG}: {why}; give a number")
    return found


class SameBatch(Callback):
    """Refuses a run whose ranks have chosen different batches, as unequal machines might."""

    def on_setup_start(self, context: CallbackContext) -> None:
        """Compares the batches. Collective.

        Raises:
            UsageError: they differ.
        """
        chosen = sorted(set(all_gather_object(context.config.batch.global_batch_size)))
        if len(chosen) > 1:
            raise UsageError(
                f"{_FLAG} is {' or '.join(map(str, chosen))} by what ranks see of their machine; "
                "describe it with --copus-cluster, or give a number"
            )
