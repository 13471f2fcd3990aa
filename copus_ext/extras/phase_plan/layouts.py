"""Changes the layout of a run where the next phase of `--layout-schedule` asks for another."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from copus_ext.controller.decision_log import DecisionLog
from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.layout_changes import LayoutChange, LayoutChangeManager
from copus_ext.controller.pause_prior import PausePrior, machine_of
from copus_ext.goodput.state import ControllerState
from copus_ext.reshard.phases import ReshardResult
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.step_settings import Request
from megatron.trainer.config.layout import Layout
from megatron.trainer.extras.phases.flags import flags_of, phase_of
from megatron.trainer.train.callbacks import Callback, CallbackContext

if TYPE_CHECKING:
    from copus_ext.controller.callback import Controller
    from megatron.trainer.config import Config
    from megatron.trainer.train.job import Job


class _EventLog(DecisionLog):
    """Writes to the record of the run what a controller writes to its journal."""

    def __init__(self) -> None:
        super().__init__(None)
        self.job: Job | None = None

    def write(self, kind: str, **fields: Any) -> None:
        """Adds an event at the present position of the run, while there is a job."""
        if self.job is None:
            return
        state = self.job.state
        known = ("iteration", "consumed_samples")
        fields = {name: value for name, value in fields.items() if name not in known}
        self.job.tracker.event(kind, state.iteration, state.consumed_samples, **fields)


class PhaseLayouts(Callback):
    """Changes the layout in the running processes where a phase begins.

    The run saves before the change if it has a `--save`. A change that fails leaves the run in the
    layout before. The run then goes on there, or ends if that layout cannot cut the batch.

    Args:
        controller: of the run, if it has one. A controller that changes layouts makes these changes
            as it makes its own: they count among its costs, and its journal holds them.
    """

    def __init__(self, controller: Controller | None = None) -> None:
        self._controller = controller
        self._events = _EventLog()
        self._pauses: PausePrior | None = None
        self._flags = CopusConfig(copus_relayout="inprocess", copus_prebuild=0)
        self.own = LayoutChangeManager(
            self._flags, ControllerState(), self._events, prior_s=self._prior_s
        )
        """Makes the changes where no controller does."""

    @property
    def _changes(self) -> LayoutChangeManager:
        theirs = None if self._controller is None else self._controller.layout_changes
        return self.own if theirs is None else theirs

    def tensor_parallel_sizes(self, config: Config) -> list[int]:
        """Those of the layouts of all phases."""
        return sorted({Layout.from_text(text).tp for text in flags_of(config).phase_layouts})

    def on_setup_start(self, context: CallbackContext) -> None:
        """Checks that the run can change its layout.

        Raises:
            UsageError: it cannot.
        """
        if context.config.precision.fp8 is not None:
            raise UsageError(
                "--layout-schedule does not go with --fp8-format: Transformer Engine's scales "
                "cannot follow a change of layout; drop one of the two"
            )
        if self._changes is self.own:
            self.own.open(context)

    def on_segment_start(self, context: CallbackContext) -> Request | None:
        """Asks for the layout of the phase, unless the run has it."""
        config, phase = context.config, phase_of(context.config)
        if phase.layout is None or phase.layout == str(config.layout):
            return None
        self._pauses = PausePrior(config, self._flags, machine_of(config, None, None))
        change = LayoutChange(
            number=None,
            to=Layout.from_text(phase.layout),
            settings=context.state.settings,
            reason=f"phase {phase.number} asks for {phase.layout}",
            done=lambda outcome: self._report(outcome, context),
        )
        saves = config.checkpoint.save is not None
        request = self._changes.request(change, context, saves=saves)
        return replace(request, move=lambda job: self._move(job, request))

    def _prior_s(self, layout: Layout) -> float:
        assert self._pauses is not None
        return self._pauses.to_s(layout)

    def _move(self, job: Job, request: Request) -> None:
        """Makes the change. The loop calls it once the phase has begun and a checkpoint is there.

        Raises:
            TrainingFailure: on every rank, if it failed and the old layout cannot cut the batch.
        """
        from megatron.trainer.extras.phases.feature import check_batch

        assert request.move is not None
        self._events.job = job
        try:
            request.move(job)
        finally:
            self._events.job = None
        check_batch(job)

    def _report(self, outcome: ReshardResult, context: CallbackContext) -> None:
        """Prints what became of a change; `context` is of the layout after it."""
        if dist.get_rank() != 0:
            return
        wanted, layout = phase_of(context.config).layout, context.config.layout
        if outcome.kind == "moved":
            why = "as --layout-schedule says"
            print(f"the layout is {layout}, {why}, after {outcome.pause_s:.1f} s", flush=True)
        else:
            told = f"the layout stays {layout}, not {wanted}: {outcome.reason}"
            print(f"ALERT: {told}", flush=True)

    def on_train_end(self, context: CallbackContext) -> None:
        """Destroys the groups that were made for changes of layout."""
        if self._changes is self.own:
            self.own.close(context)
