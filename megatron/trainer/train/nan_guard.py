"""Steps whose loss or gradient is not finite: each is skipped on every rank; too many end the run.

Such a step changes no weight, its samples stay consumed and the learning rate waits (step.py). A
few are bad luck, many are a fault of data, model or machine that skipping does not mend.
"""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path

from megatron.trainer.checkpoint import files
from megatron.trainer.common.collectives import broadcast_from_rank0
from megatron.trainer.common.errors import TrainingFailure
from megatron.trainer.common.step_settings import StepInfo
from megatron.trainer.config import Config
from megatron.trainer.train.job import Job

MAX_IN_A_ROW = 10
"""Bad steps one after another that end a run."""
WINDOW = 1000
"""Steps that are looked back on."""
MAX_IN_WINDOW = WINDOW // 100
"""Bad steps among the last `WINDOW` that end a run, once there were so many."""


def is_bad(info: StepInfo, *, can_lower_scale: bool) -> bool:
    """Whether a step's numbers were not finite and nothing is about to mend that.

    Args:
        can_lower_scale: whether fp16's loss scale can still fall: until it fits, gradients that
            overflow are what it is found by.
    """
    if not math.isfinite(info.loss):
        return True
    is_overflow = info.grad_norm is None
    return not info.updated and not (is_overflow and can_lower_scale)


class BadSteps:
    """Remembers the steps of a launch; the same on every rank."""

    def __init__(self) -> None:
        self._window: deque[StepInfo | None] = deque(maxlen=WINDOW)
        self._row: list[StepInfo] = []

    @property
    def in_a_row(self) -> int:
        return len(self._row)

    def add(self, info: StepInfo, *, bad: bool) -> list[StepInfo]:
        """Counts one step.

        Returns:
            The bad steps to end the run for, or none.
        """
        self._window.append(info if bad else None)
        self._row = [*self._row, info] if bad else []
        if self.in_a_row >= MAX_IN_A_ROW:
            return self._row
        found = [step for step in self._window if step is not None] if bad else []
        return found if len(self._window) == WINDOW and len(found) >= MAX_IN_WINDOW else []

    def check(self, job: Job, info: StepInfo) -> None:
        """Counts a step of a run and tells of a bad one. All ranks, with the same step.

        Raises:
            TrainingFailure: on every rank, when there were too many.
        """
        bad = is_bad(info, can_lower_scale=not info.updated and _can_lower_scale(job))
        found = self.add(info, bad=bad)
        where = info.iteration, info.consumed_samples
        if bad and self.in_a_row == 1:
            line = "the loss or the gradient is NaN or inf; the step is skipped"
            job.tracker.event("alert", *where, alert="bad step", line=line)
        if not found:
            return
        if job.checkpointer is not None:
            with job.watchdog.phase("saving", patient=True):
                job.checkpointer.finish()
        line = broadcast_from_rank0(explain(found, job.config))
        job.tracker.event("fault", *where, fault="bad steps", line=line, durable=True)
        raise TrainingFailure(line)


def _can_lower_scale(job: Job) -> bool:
    precision = job.config.precision
    is_dynamic = precision.fp16 and precision.loss_scale is None
    return is_dynamic and float(job.optimizer.get_loss_scale().item()) > precision.min_loss_scale


def explain(bad: list[StepInfo], config: Config) -> str:
    """What to tell the user: which steps, what is left, how to go on."""
    first, last = bad[0], bad[-1]
    begin = first.consumed_samples - first.counted_samples
    is_row = last.iteration - first.iteration == len(bad) - 1
    told = (
        f"the loss or the gradient of {len(bad)} steps {'in a row' if is_row else f'of {WINDOW}'} "
        f"was NaN or inf: iterations {first.iteration} to {last.iteration}, samples {begin} to "
        f"{last.consumed_samples - 1}; they changed no weight"
    )
    skip = "--iterations-to-skip " + " ".join(str(step.iteration) for step in bad)
    save = config.checkpoint.save
    good = None if save is None else _last_good(Path(save), before=first.iteration)
    if save is None or good is None:
        return f"{told}; no checkpoint is saved: lower --lr, or leave them out with {skip}"
    step, is_latest = good
    load = f"--load {save}" + ("" if is_latest else f" --ckpt-step {step}")
    return (
        f"{told}; the last good checkpoint is iteration {step}: go on past them with {load} {skip}"
    )


def _last_good(save: Path, *, before: int) -> tuple[int, bool] | None:
    """The newest checkpoint from before an iteration, else the newest, whose weights are the same;
    and whether it is what `--load` takes by itself."""
    try:
        complete, latest = files.complete_iterations(save), files.read_latest(save)
    except (OSError, ValueError):
        return None
    if not complete:
        return None
    older = [i for i in complete if i < before] or complete
    return older[-1], older[-1] == latest
