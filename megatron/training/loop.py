"""The training loop."""

from __future__ import annotations

import gc
import logging

import torch

from megatron.training.callbacks import Request
from megatron.training.evaluate import evaluate
from megatron.training.job import Job
from megatron.training.reporting import Reporter
from megatron.training.signals import StopReason
from megatron.training.step import train_step

logger = logging.getLogger(__name__)


def train(job: Job) -> str | None:
    """Trains until the samples are used up or all ranks agree to stop. All ranks take part.

    Returns:
        Why it stopped early, or None when training is complete.
    """
    config, state, reporter = job.config, job.state, Reporter(job)
    job.fire("on_train_start")
    why: str | None = None
    saved = state.iteration
    while why is None and _next_batch_fits(job):
        if state.iteration + 1 in config.batch.iterations_to_skip:
            state.pass_over(job.batch_schedule.at(state.consumed_samples))
            continue
        job.fire("on_train_step_start")
        info, stop_code = train_step(job)
        request = job.fire(
            "on_train_step_end",
            step=info,
            loss_dict={"lm loss": info.loss},
            grad_norm=info.grad_norm,
            skipped_iter=not info.updated,
        )
        reporter.record(info)
        _housekeeping(job)
        reason = StopReason.from_code(stop_code)
        why = _why_stop(reason, request)
        signalled = reason is not None and reason.kind == "signal"
        if not signalled and _due(config.batch.eval_interval, state.iteration):
            validate(job, reporter)
        if job.checkpointer is not None:
            job.checkpointer.poll()
            wanted = request is not None or _due(config.checkpoint.save_interval, state.iteration)
            if wanted:
                job.checkpointer.save(job.model, job.optimizer, job.scheduler, state)
                saved = state.iteration
    if job.checkpointer is not None:
        if saved != state.iteration:
            job.checkpointer.save(job.model, job.optimizer, job.scheduler, state)
        job.checkpointer.finish()
    if why is None and not _due(config.batch.eval_interval, state.iteration):
        validate(job, reporter, where="on validation set")
    if why is None and job.test_data is not None:
        loss = evaluate(job, job.test_data, split="test")
        if loss is not None:
            reporter.evaluation(loss, split="test", where="on test set")
    job.fire("on_train_end")
    return why


def validate(job: Job, reporter: Reporter, *, where: str = "") -> None:
    """Evaluates on the validation samples and reports; does nothing without validation data."""
    if job.valid_data is None:
        return
    if job.config.runtime.manual_gc and job.config.runtime.manual_gc_eval:
        gc.collect()
    loss = evaluate(job, job.valid_data, split="eval")
    if loss is not None:
        reporter.evaluation(loss, split="valid", where=where)


def _next_batch_fits(job: Job) -> bool:
    return job.batch_schedule.at(job.state.consumed_samples) <= job.remaining_samples


def _due(interval: int | None, iteration: int) -> bool:
    return bool(interval) and iteration % interval == 0


def _why_stop(reason: StopReason | None, request: Request | None) -> str | None:
    if reason is not None:
        return str(reason)
    return request.reason if request is not None and request.kind == "stop" else None


def _housekeeping(job: Job) -> None:
    runtime = job.config.runtime
    if job.device.is_cuda and runtime.empty_unused_memory_level >= 1:
        torch.cuda.empty_cache()
    if runtime.manual_gc and _due(runtime.manual_gc_interval, job.state.iteration):
        gc.collect()
