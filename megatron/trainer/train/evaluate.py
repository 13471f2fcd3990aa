"""Loss on held-out samples: the same samples every time and under every layout."""

from __future__ import annotations

import gc
import math

import torch

from megatron.trainer.common.signals import StopReason
from megatron.trainer.data.dataloader import BatchReader
from megatron.trainer.data.run_data import evaluation_batch
from megatron.trainer.data.sampler import evaluation_indices
from megatron.trainer.train.job import Job
from megatron.trainer.train.step import run_schedule, share_numbers


def evaluate(job: Job, reader: BatchReader, *, split: str) -> float | StopReason:
    """Mean loss per token over `eval_iters` batches of `evaluation_batch` samples. All ranks take
    part.

    Always the same samples, so that two losses differ by the weights alone. A batch that does not
    divide over the replicas is filled up with masked samples, which count for nothing.

    Args:
        reader: of the validation or test data set.
        split: `valid` or `test`.

    Returns:
        The loss in nats per token, or why the ranks agreed to break it off and leave.
    """
    config, layout = job.config, job.config.layout
    size, mbs = evaluation_batch(config, config.segment), config.batch.micro_batch_size
    event = "on_eval" if split == "valid" else "on_test"
    job.fire(f"{event}_start")
    if config.runtime.manual_gc and config.runtime.manual_gc_eval:
        gc.collect()
    for chunk in job.model.chunks:
        chunk.eval()
    total = tokens = 0.0
    reason = None
    with torch.no_grad():
        for number in range(config.batch.eval_iters):
            job.fire(f"{event}_step_start")
            where = {
                "num_samples": size,
                "start": number * size,
                "micro_batch_size": mbs,
                "dp_rank": job.groups.dp.rank(),
                "dp_size": layout.dp,
                "min_multiple": layout.pp if layout.vpp > 1 else 1,
            }
            batches = reader.read_evaluation(**where) if job.needs_data else None
            count = len(evaluation_indices(**where))
            losses = run_schedule(job, batches, count, micro_batch_size=mbs, forward_only=True)
            shared = share_numbers(job, losses, iteration=job.state.iteration)
            total, tokens = total + shared.loss, tokens + shared.num_tokens
            job.fire(f"{event}_step_end")
            if shared.stop is not None and shared.stop.is_urgent:
                reason = shared.stop
                break
    for chunk in job.model.chunks:
        chunk.train()
    if reason is not None:
        return reason
    loss = total / tokens if tokens else math.nan
    job.fire(f"{event}_end", loss_dict={"lm loss": loss})
    return loss
