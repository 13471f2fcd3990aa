"""Takes a run to the layout that each phase of longer samples asks for (`--layout-schedule`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron.training.common.collectives import broadcast_from_rank0
from megatron.training.common.errors import UsageError
from megatron.training.common.step_settings import Request
from megatron.training.config.layout import Layout
from megatron.training.train.callbacks import Callback, CallbackContext

if TYPE_CHECKING:
    from copus_ext.reshard.inprocess import InProcessResharder
    from megatron.training.train.job import Job


class PhaseLayouts(Callback):
    """Changes the layout in the running processes where a phase begins.

    A change that fails leaves the run in the layout before, where it goes on if that can cut the
    batch.

    Args:
        shared: the resharder of a controller that changes layouts too, or None; asked for at each
            change.
    """

    def __init__(self, shared: Callable[[], InProcessResharder | None] = lambda: None) -> None:
        self._shared = shared
        self._own: InProcessResharder | None = None
        self._run_dir: Path | None = None
        self._note: Callable[..., None] = lambda kind, **fields: None

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
        self._run_dir = broadcast_from_rank0(context.run_dir)

    def on_phase_start(self, context: CallbackContext) -> Request | None:
        """Asks for the layout of the phase."""
        wanted = context.config.phase.layout
        if wanted is None or wanted == str(context.config.layout):
            return None
        reason = f"phase {context.config.phase.number} asks for {wanted}"
        return Request(kind="change", reason=reason, move=self._move)

    def _move(self, job: Job) -> None:
        """Makes the change; the loop calls it once the phase has begun."""
        from megatron.training.train.phases import check_batch

        wanted, before = Layout.from_text(job.config.phase.layout or ""), job.config.layout

        def note(kind: str, **fields: Any) -> None:
            fields.pop("iteration", None)
            state = job.state
            job.tracker.event(kind, state.iteration, state.consumed_samples, **fields)

        self._note = note
        result = self._resharder().move(job, wanted, job.state.settings)
        if dist.get_rank() == 0:
            told = (
                f"the layout is {wanted} after {result.pause_s:.1f} s"
                if result.kind == "moved"
                else f"ALERT: the layout stays {before}, not {wanted}: {result.reason}"
            )
            print(told, flush=True)
        check_batch(job)

    def _resharder(self) -> InProcessResharder:
        shared = self._shared()
        if shared is not None:
            return shared
        if self._own is None:
            from copus_ext.reshard.inprocess import InProcessResharder

            self._own = InProcessResharder(
                run_dir=self._run_dir, note=lambda kind, **fields: self._note(kind, **fields)
            )
        return self._own

    def on_train_end(self, context: CallbackContext) -> None:
        """Destroys its groups."""
        if self._own is not None:
            self._own.close()
            self._own = None
