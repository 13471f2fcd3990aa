"""What a run tells its supervisor when it ends."""

from __future__ import annotations

import logging
import os

import torch.distributed as dist

from copus_ext.reshard.relaunch import Kind, Request, is_supervised, write_request
from megatron.training.common.control import LAUNCH_VARIABLE
from megatron.training.common.errors import Relaunch
from megatron.training.resilience.exit_status import RunOutcome

logger = logging.getLogger(__name__)

_MAX_REASON = 2000


def tell(outcome: RunOutcome) -> None:
    """Leaves the request of this launch, if there is a supervisor and something to say: after a
    controller's own request, or where the run should just be started again, there is not. Every
    rank may call it; rank 0 writes."""
    kind = kind_of(outcome)
    if kind is None or not is_supervised() or dist.get_rank() != 0:
        return
    request = Request(
        launch=os.environ[LAUNCH_VARIABLE],
        kind=kind,
        iteration=outcome.state.iteration,
        consumed_samples=outcome.state.consumed_samples,
        reason=reason_of(outcome)[:_MAX_REASON],
        layout=outcome.layout,
        checkpoint=outcome.save,
    )
    try:
        write_request(outcome.run_dir, request)
    except OSError as error:
        # Without it the supervisor goes by the exit code.
        logger.error("the supervisor cannot be told %r: %s", request.line, error)


def exit_code(outcome: RunOutcome) -> int:
    """What every rank leaves with after a run that did not fail."""
    is_left = kind_of(outcome) == "requeue" and is_supervised()
    return Relaunch.exit_code if is_left else 0


def kind_of(outcome: RunOutcome) -> Kind | None:
    """What is asked for; None if nothing is, or a controller has asked."""
    failure, reason = outcome.failure, outcome.reason
    if failure is not None:
        return None if failure.restart_helps else "abort"
    if reason is not None and reason.kind == "relayout":
        return None
    if reason is None or not reason.is_urgent or outcome.save is None:
        return "done"
    return "requeue"


def reason_of(outcome: RunOutcome) -> str:
    """One line for a person."""
    reason = outcome.reason
    if reason is not None and reason.is_urgent and outcome.save is None:
        return f"{outcome.line}; nothing of it is kept without --save"
    return outcome.line
