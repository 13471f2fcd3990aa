"""The training loop."""

from __future__ import annotations

from megatron.training.bad_steps import BadSteps
from megatron.training.evaluate import evaluate
from megatron.training.job import Job
from megatron.training.reporting import Reporter
from megatron.training.settings import Request
from megatron.training.signals import StopReason
from megatron.training.step import train_step


def train(job: Job) -> str | None:
    """Trains until the samples are used up or all ranks agree to stop. All ranks take part.

    Returns:
        Why it stopped early, or None when training is complete.
    """
    config, state, reporter, bad_steps = job.config, job.state, Reporter(job), BadSteps()
    job.fire("on_train_start")
    why: str | None = None
    saved, evaluated = state.iteration, -1
    while why is None and job.next_batch_fits:
        batch = job.global_batch_size
        if state.iteration + 1 in config.batch.iterations_to_skip:
            state.pass_over(batch)
            continue
        sizes = {"global_batch_size": batch, "micro_batch_size": job.micro_batch_size}
        job.fire("on_train_step_start", **sizes)
        info, stop = train_step(job)
        request = job.fire(
            "on_train_step_end",
            step=info,
            loss_dict={"lm loss": info.loss},
            grad_norm=info.grad_norm,
            skipped_iter=not info.updated,
        )
        if request is not None and request.settings is not None:
            info = job.adopt(request.settings, info)
        reporter.record(info)
        bad_steps.check(job, info)
        why = _why(stop, request)
        signalled = stop is not None and stop.kind == "signal"
        if not signalled and job.evaluation_due(info):
            _evaluate(job, reporter, "valid")
            evaluated = state.iteration
        if job.checkpointer is not None:
            job.checkpointer.poll()
            asked = request is not None and request.kind != "change"
            interval = config.checkpoint.save_interval
            if asked or (interval and state.iteration % interval == 0):
                moves = request is not None and request.move is not None
                must = why is not None or (asked and moves)
                saved = state.iteration if job.save(must=must) else saved
        if why is None and request is not None and request.move is not None:
            why = request.move(job)
            saved = -1 if why else saved
    if job.checkpointer is not None:
        if saved != state.iteration:
            job.save(must=True)
        job.checkpointer.finish(must=True)
    if why is None:
        if evaluated != state.iteration:
            _evaluate(job, reporter, "valid", where="on validation set")
        _evaluate(job, reporter, "test", where="on test set")
    job.fire("on_train_end")
    return why


def _evaluate(job: Job, reporter: Reporter, split: str, *, where: str = "") -> None:
    """Evaluates and reports; does nothing without data, and reports nothing if a signal came."""
    reader = {"valid": job.valid_data, "test": job.test_data}[split]
    loss = None if reader is None else evaluate(job, reader, split=split)
    if loss is not None:
        reporter.evaluation(loss, split=split, where=where)


def _why(stop: StopReason | None, request: Request | None) -> str | None:
    if stop is not None:
        return str(stop)
    return request.reason if request is not None and request.kind == "stop" else None
