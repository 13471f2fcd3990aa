"""A run whose backward pass fails, in a process that goes on."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.helpers.jobs import run

if TYPE_CHECKING:
    from megatron.trainer.train.callbacks import CallbackContext


def failing() -> Any:
    """A callback that makes the third backward pass fail in its middle."""
    from megatron.trainer.train.callbacks import Callback

    class Failing(Callback):
        model: weakref.ref[Any] | None = None

        def on_train_start(self, context: CallbackContext) -> None:
            self.model = weakref.ref(context.model[0])

        def on_train_step_start(self, context: CallbackContext) -> None:
            if context.state.iteration == 2:
                list(context.model[0].parameters())[3].register_hook(self._fail)

        def _fail(self, grad: Any) -> None:
            raise OSError("a bug in the backward pass")

    return Failing()


def main(output: Path) -> Any:
    """Returns the error and whether the model is alive before and after one collection."""
    callback, told = failing(), ""
    gc.disable()
    try:
        run(["--train-samples", "160"], output / "run", [callback])
    except OSError as error:
        told = str(error)
    before = callback.model() is not None
    gc.collect()
    return {"told": told, "before": before, "after": callback.model() is not None}
