"""What a controller may see of a run and what it may ask for.

The events carry the names of Megatron-LM's callback class, so that one callback serves both
trainers; `on_grads_ready`, `on_checkpoint_saved`, `on_train_error` and those of a relayout and of a
phase are ours. All events but `on_train_error` fire on every rank, in the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.trainer.common.step_settings import Request, StepInfo

logger = logging.getLogger(__name__)

_STRENGTH = {"change": 0, "save": 1, "stop": 2}


@dataclass(kw_only=True)
class CallbackContext:
    """What an event is given. Values of an event stay until the next one of its kind replaces them;
    before the first they are None."""

    model: list[Any]
    """Wrapped chunks of this rank."""
    optimizer: Any
    """megatron-core's optimizer."""
    scheduler: Any
    """Learning-rate schedule."""
    groups: Any
    """Process groups of the layout."""
    config: Any
    """Resolved configuration."""
    state: Any
    """Counters of the run."""
    run_dir: Path | None = None
    """Directory of the run, on rank 0 alone."""
    data_identity: list[dict[str, Any]] = field(default_factory=list)
    """The data sets of the run, as checkpoints and copies of its state remember them; empty until
    they are built, and for invented data."""
    user_state: dict[str, Any] = field(default_factory=dict)
    """Belongs to the callbacks."""
    loss_dict: dict[str, float] | None = None
    """Loss of the step or evaluation by name."""
    grad_norm: float | None = None
    """Gradient norm of the step."""
    skipped_iter: bool | None = None
    """Whether the step left the weights unchanged."""
    step: StepInfo | None = None
    """The finished step."""
    global_batch_size: int | None = None
    """Samples of the step about to start."""
    micro_batch_size: int | None = None
    """Samples of its micro-batches."""
    is_filled_up: bool = False
    """Whether masked samples fill up the step; its gradient tells nothing of noise."""
    needs_exact_step: bool = False
    """Whether the step about to start must have its exact gradient, whatever shortens messages;
    set by `on_train_step_start`, alike on all ranks."""
    microbatch_tokens: list[float] | None = None
    """Loss tokens of each micro-batch of this replica, on ranks of the last stage."""
    scalars: dict[str, float] = field(default_factory=dict)
    """Values by tag for the record, TensorBoard and its like; filled by `on_train_step_end`, by
    `after_step` of extras, and by `on_train_end` for what is known only then."""
    step_fields: dict[str, Any] = field(default_factory=dict)
    """Fields for the step's record; filled by `on_train_step_end`."""
    log_fields: list[str] = field(default_factory=list)
    """What the log line ends with; filled by `on_log`."""
    log_fragments: list[str] = field(default_factory=list)
    """Lines to print after the log line, not one for every step; filled by `on_log`."""
    checkpoint_iteration: int | None = None
    """Iteration of the checkpoint just committed."""
    checkpoint_samples: int | None = None
    """Samples consumed when it was begun."""


class Callback:
    """Does nothing at every event. Subclass and override what you need.

    Events that return a `Request` are obeyed at the step boundary; with several, a `stop` wins over
    a `save`, and the last settings and the last move count.
    """

    keeps_settings: bool = False
    """Whether it goes on with the step settings of a checkpoint; without such a callback a run goes
    back to its flags."""

    exit_code: int = 0
    """What the process leaves with after a run that ended well; 85 asks for a new launch."""

    def settings(self) -> dict[str, Any]:
        """Flags of its own, printed and saved with the resolved configuration. Plain JSON types."""
        return {}

    def tensor_parallel_sizes(self, config: Any) -> Iterable[int]:
        """Tensor parallel sizes besides that of the flags that it may take the run to. The rows of
        the embedding must divide by each.

        Args:
            config: resolved configuration, its padded vocabulary not known yet.
        """
        return ()

    def on_setup_start(self, context: CallbackContext) -> None:
        """Groups, model and optimizer exist; weights are initial or loaded."""

    def on_data_init_start(self, context: CallbackContext) -> None:
        """The data sets are about to be built."""

    def on_train_start(self, context: CallbackContext) -> None:
        """The first step is about to start."""

    def on_train_step_start(self, context: CallbackContext) -> None:
        """A step is about to start; `state.consumed_samples` is where it reads."""

    def on_grads_ready(self, context: CallbackContext) -> None:
        """The gradients are reduced; the optimizer has not used them yet."""

    def on_train_step_end(self, context: CallbackContext) -> Request | None:
        """A step is done and counted; `context.step` describes it."""

    def on_log(self, context: CallbackContext) -> None:
        """The log line is about to be printed; append to `context.log_fields` and
        `context.log_fragments`."""

    def on_relayout_start(self, context: CallbackContext) -> None:
        """The model, optimizer and groups are about to go for those of another layout: let go of
        every reference to them."""

    def on_relayout_end(self, context: CallbackContext) -> None:
        """Those of the new layout are there, or after a failure those of the old one again."""

    def on_segment_start(self, context: CallbackContext) -> Request | None:
        """The next step is the first of another segment of the run, `context.config.segment`, whose
        samples may have another length. Not fired where a launch begins. A request is obeyed before
        that step. Its settings are in samples of the new length, and hold for the layout as it is
        before the move."""

    def on_train_error(self, context: CallbackContext, error: BaseException) -> None:
        """This rank has raised an error and leaves. The others do not know, so that nothing
        collective may follow."""

    def on_checkpoint_saved(self, context: CallbackContext) -> None:
        """A checkpoint is committed."""

    def on_train_end(self, context: CallbackContext) -> None:
        """No step follows."""

    def on_eval_start(self, context: CallbackContext) -> None:
        """A validation is about to start."""

    def on_eval_step_start(self, context: CallbackContext) -> None:
        """One batch of a validation is about to start."""

    def on_eval_step_end(self, context: CallbackContext) -> None:
        """One batch of a validation is done."""

    def on_eval_end(self, context: CallbackContext) -> None:
        """A validation is done; `context.loss_dict` holds its loss."""

    def on_test_start(self, context: CallbackContext) -> None:
        """The test after training is about to start."""

    def on_test_step_start(self, context: CallbackContext) -> None:
        """One batch of the test is about to start."""

    def on_test_step_end(self, context: CallbackContext) -> None:
        """One batch of the test is done."""

    def on_test_end(self, context: CallbackContext) -> None:
        """The test is done; `context.loss_dict` holds its loss."""


class Callbacks:
    """The callbacks of a run, fired in the order given."""

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self._callbacks = tuple(callbacks)

    def settings(self) -> dict[str, Any]:
        return {name: value for c in self._callbacks for name, value in c.settings().items()}

    def tensor_parallel_sizes(self, config: Any) -> set[int]:
        """The sizes that any of them may take the run to."""
        return {size for c in self._callbacks for size in c.tensor_parallel_sizes(config)}

    def fire(self, event: str, context: CallbackContext) -> Request | None:
        """Fires one event.

        Args:
            event: a method name of `Callback`.

        Returns:
            What is asked for: a `stop` before a `save` before a `change` before nothing, with the
            last settings and the last move that any callback gave.
        """
        return join_requests(*[getattr(callback, event)(context) for callback in self._callbacks])

    def tell_error(self, context: CallbackContext, error: BaseException) -> None:
        """Fires `on_train_error`; an error of a callback is only a warning."""
        for callback in self._callbacks:
            try:
                callback.on_train_error(context, error)
            except Exception as another:
                logger.warning("%s: %r", type(callback).__name__, another)

    @property
    def keep_settings(self) -> bool:
        """Whether any goes on with the step settings of a checkpoint."""
        return any(callback.keeps_settings for callback in self._callbacks)


def join_requests(*found: Request | None) -> Request | None:
    """What several requests ask for together: a `stop` before a `save` before a `change` before
    nothing, with the last settings and the last move that any gave."""
    requests = [r for r in found if r is not None]
    if not requests:
        return None
    strongest = max(requests, key=lambda r: _STRENGTH[r.kind])
    settings = [r.settings for r in requests if r.settings is not None]
    moves = [r for r in requests if r.move is not None]
    return replace(
        strongest,
        settings=settings[-1] if settings else None,
        move=moves[-1].move if moves else None,
        leaves=bool(moves) and moves[-1].leaves,
    )
