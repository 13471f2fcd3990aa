"""What a plan says of the whole run: its length, the first batch, what adapting the batch can save,
and the timescale of the weight decay."""

from __future__ import annotations

import argparse
from typing import Any

from copus_ext.planner.request import batch_of_flags, is_number, megatron_flag, samples_of_flags
from megatron.trainer.common.program import tell

TOKENS_A_PARAMETER = 20
"""Tokens of a run whose length is not given, for every parameter that a token meets."""
_AT_ONCE = 16
"""Batches searched together: enough to share work, few enough for the memory."""


def headroom_of(
    args: argparse.Namespace, planner: Any, plans: list[Any]
) -> tuple[str, dict[str, Any]] | None:
    """What adapting the batch of a run can save, in a line and as JSON; None for a single batch."""
    from copus_ext.goodput.headroom import of_plans

    tokens, length = run_length(args, planner.model)
    found = of_plans(plans, **length)
    if found is None:
        return None
    line = f"over {tokens:.3g} tokens: {found.of_a_plan()}"
    return line, {"train_tokens": tokens, **found.to_json()}


def run_length_from(args: argparse.Namespace) -> str:
    """What says how long the run is: a flag, or else the tokens of a parameter."""
    if args.train_tokens:
        return "--train-tokens"
    if not samples_of_flags(args):
        return f"{TOKENS_A_PARAMETER} tokens a parameter"
    return "--train-samples" if megatron_flag(args, "train_samples") else "--train-iters"


def length_words(args: argparse.Namespace, model: Any) -> str:
    """The length that advice on the batch is for, what says it, and how to give another one."""
    tokens, length = run_length(args, model)
    samples, source = length["total_samples"], run_length_from(args)
    many = f"{samples:.3g}" if samples >= 1e6 else f"{samples:,.0f}"
    words = f"{many} samples, by {source}"
    if not source.startswith("--"):
        words = f"{many} samples, {source}, as no length was given"
    elif source != "--train-tokens":
        words += f" in {'--megatron-args' if args.launched is None else '--from-command'}"
        if tokens < model.num_active_parameters:
            words += "; shorter than a training, as of a benchmark"
    words += "" if source == "--train-tokens" else "; --train-tokens gives another"
    return f"over {tokens:.3g} tokens ({words})"


def run_length(args: argparse.Namespace, model: Any) -> tuple[float, dict[str, float]]:
    """The tokens of the run; and its samples and the tokens of one, by name."""
    tokens = args.train_tokens or (samples_of_flags(args) or 0.0) * model.seq_length
    tokens = tokens or TOKENS_A_PARAMETER * float(model.num_active_parameters)
    return tokens, {
        "total_samples": tokens / model.seq_length,
        "tokens_per_sample": model.seq_length,
    }


def first_batch_of(args: argparse.Namespace, planner: Any) -> tuple[str, dict[str, Any]] | None:
    """The batch to begin the run with, whatever batches were asked for, in a line and as JSON; None
    where no batch fits."""
    from copus_ext.goodput.first_batch import doublings, first_batch
    from copus_ext.goodput.headroom import rows_of

    tokens, length = run_length(args, planner.model)
    world_size = planner.cluster.world_size
    # Powers of two times what is odd in the number of GPUs, which replicas may share.
    odd = world_size // (world_size & -world_size)
    sizes = sorted({size for unit in (1, odd) for size in doublings(unit, **length)})
    found = first_batch(rows_of(planner.rank(sizes, top=1, reasons=False)), **length)
    if found is None:
        return None
    asked = args.global_batch_size
    own = int(asked) if is_number(asked or "") else batch_of_flags(args)
    yours = f"; {found.of_own(own)}" if own else ""
    return f"{length_words(args, planner.model)}: {found.of_a_plan()}{yours}", {
        "train_tokens": tokens,
        "length_from": run_length_from(args),
        **found.to_json(),
    }


def decay_of(args: argparse.Namespace, model: Any, batch: int) -> dict[str, Any] | None:
    """The batch of the run's flags, or else this one, with the timescale of the weight decay there;
    None where they give no learning rate for Adam."""
    from copus_ext.goodput.lr_scaling import decay_timescale

    lr, decay = megatron_flag(args, "lr"), megatron_flag(args, "weight_decay")
    if not lr or not decay or megatron_flag(args, "optimizer") not in (None, "adam"):
        return None
    batch = batch_of_flags(args) or batch
    samples = run_length(args, model)[1]["total_samples"]
    tau = decay_timescale(batch, lr=lr, weight_decay=decay, samples=samples)
    return {"global_batch_size": batch, "timescale": tau}


def ranked(
    args: argparse.Namespace, planner: Any, wanted: list[int], *, top: int, tries: int
) -> list[Any]:
    """The plans of all batches, a few at a time, or those before an interrupt; so many
    configurations of each, and of those that may not fit."""
    from tqdm import tqdm

    plans: list[Any] = []
    # No thread for one bar: a program that uses this function may mind signals.
    tqdm.monitor_interval = 0
    with tqdm(total=len(wanted), unit="batch", delay=2, leave=False, disable=None) as bar:
        for start in range(0, len(wanted), _AT_ONCE):
            some = wanted[start : start + _AT_ONCE]
            try:
                plans += planner.rank(some, top=top, list_rejected=args.rejected, tries=tries)
            except KeyboardInterrupt:
                if not plans:
                    raise
                tell("plan.py", "interrupted; the batches ranked so far follow")
                break
            bar.update(len(some))
    return plans
