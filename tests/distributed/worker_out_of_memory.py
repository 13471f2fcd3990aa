"""Trains under the controller where two samples need more memory than there is."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.distributed.worker_controller import BASE, controllers
from tests.helpers.jobs import run

if TYPE_CHECKING:
    from megatron.trainer.train.callbacks import CallbackContext


def main(folder: Path, *more: str) -> Any:
    """Returns what was printed, and whether memory was used up.

    Args:
        folder: of all launches.
        more: flags of this one.
    """
    import torch

    from copus_ext.controller.out_of_memory import OutOfMemoryCallback

    noting, *_ = controllers()

    class Small(noting):
        """A GPU that is full with two samples."""

        def on_grads_ready(self, context: CallbackContext) -> None:
            if (context.micro_batch_size or 0) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            super().on_grads_ready(context)

    saved = str(folder / "saved")
    flags = [*BASE, "--save", saved, "--load", saved, "--save-interval", "5", *more]
    ran_out, out = False, io.StringIO()
    callbacks = [Small(copus_max_global_batch_size=16), OutOfMemoryCallback()]
    try:
        run(flags, folder / "run", callbacks, out=out)
    except torch.OutOfMemoryError:
        ran_out = True
    return {"ran_out": ran_out, "told": out.getvalue().splitlines()}
