"""The training loop."""

from __future__ import annotations

from dataclasses import replace

from megatron.trainer.common.signals import StopReason
from megatron.trainer.common.step_settings import Request, learning_rate
from megatron.trainer.train.callbacks import join_requests
from megatron.trainer.train.evaluate import evaluate
from megatron.trainer.train.job import Job
from megatron.trainer.train.nan_guard import BadSteps
from megatron.trainer.train.reporting import Reporter
from megatron.trainer.train.step import train_step


def train(job: Job) -> StopReason | None:
    """Trains until the samples are used up or all ranks agree to stop. All ranks take part.

    Returns:
        Why it stopped early, or None when training is complete.
    """
    config, state, reporter, bad_steps = job.config, job.state, Reporter(job), BadSteps()
    job.fire("on_train_start")
    stop_reason = job.services.urgent_stop(state.iteration)
    saved, evaluated = state.iteration, -1
    while stop_reason is None and job.next_batch_fits:
        batch = job.global_batch_size
        if state.iteration + 1 in config.batch.iterations_to_skip:
            state.skip_samples(job.counted_samples)
            request = _between_steps(job)
            stop_reason, is_saved = _apply_request(job, request, StopReason.of(request))
            saved = state.iteration if is_saved else saved
            continue
        sizes = {"global_batch_size": batch, "micro_batch_size": job.micro_batch_size}
        job.trace.step(state.iteration)
        job.context.needs_exact_step = False
        job.fire("on_train_step_start", **sizes, is_filled_up=job.is_filled_up)
        info, shared = train_step(job)
        request = job.fire(
            "on_train_step_end",
            step=info,
            loss_dict=info.losses,
            grad_norm=info.grad_norm,
            skipped_iter=not info.updated,
        )
        if request is not None and request.settings is not None:
            job.adopt(request.settings)
            info = replace(info, learning_rate=learning_rate(job.optimizer))
        reporter.record(info)
        bad_steps.check(job, info)
        stop_reason = shared.stop or StopReason.of(request)
        if not (stop_reason is not None and stop_reason.is_urgent) and job.evaluation_due(info):
            interrupted = _evaluate(job, reporter, "valid")
            stop_reason, evaluated = stop_reason or interrupted, state.iteration
        # Before the save: its position and its settings are those of the next segment.
        between = _between_steps(job)
        request = join_requests(request, between)
        stop_reason = stop_reason or StopReason.of(between)
        stop_reason, is_saved = _apply_request(
            job, request, stop_reason, is_due=shared.save or job.save_is_due, by_file=shared.save
        )
        saved = state.iteration if is_saved else saved
    reporter.leaving(stop_reason)
    if saved != state.iteration:
        job.save(must=True)
    job.finish_saving()
    if stop_reason is None and evaluated != state.iteration:
        stop_reason = _evaluate(job, reporter, "valid", where="on validation set")
    stop_reason = stop_reason or _evaluate(job, reporter, "test", where="on test set")
    job.fire("on_train_end")
    reporter.finish()
    return stop_reason


def _between_steps(job: Job) -> Request | None:
    return join_requests(*(feature.between_steps(job) for feature in job.features))


def _apply_request(
    job: Job,
    request: Request | None,
    stop_reason: StopReason | None,
    *,
    is_due: bool = False,
    by_file: bool = False,
) -> tuple[StopReason | None, bool]:
    """Saves and moves as callbacks ask between two steps. Their settings hold already.

    Args:
        stop_reason: why the run leaves, or None.
        is_due: whether a checkpoint follows whatever callbacks ask for.
        by_file: whether it was asked for by a file.

    Returns:
        Why the run leaves, and whether there is a checkpoint of this step.
    """
    job.poll()
    move = None if request is None or stop_reason is not None else request.move
    is_asked = request is not None and request.kind != "change"
    leaves = request is not None and request.leaves and move is not None
    is_saved = False
    # Before a move, which may break. A run that leaves is saved after it, as it goes on, and only
    # once: a second save of a step removes the first.
    if (is_asked or is_due) and not leaves:
        must = stop_reason is not None or (is_asked and move is not None)
        is_saved = job.save(must=must, by_file=by_file)
    return (stop_reason if move is None else job.move(move)), is_saved


def _evaluate(job: Job, reporter: Reporter, split: str, *, where: str = "") -> StopReason | None:
    """Evaluates and reports, if there is data; why it was broken off, or None."""
    if (reader := {"valid": job.valid_data, "test": job.test_data}[split]) is None:
        return None
    with job.phase("evaluating"):
        result = evaluate(job, reader, split=split)
    if isinstance(result, StopReason):
        return result
    reporter.evaluation(result, split=split, where=where)
    return None
