"""Runs whose steps go wrong or change size on purpose."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers.jobs import layout_flags, run

SHARDED = ["--use-distributed-optimizer"]
SPOILT = 3


def main(output: Path) -> Any:
    """Returns the step records of every run, and what its watcher saw."""
    import torch.distributed as dist

    from megatron.trainer.common.collectives import all_gather_object
    from megatron.trainer.common.errors import TrainingFailure
    from megatron.trainer.distributed import stragglers
    from megatron.trainer.distributed.process_groups import destroy_groups
    from megatron.trainer.train import step
    from megatron.trainer.train.callbacks import Callback, CallbackContext

    class Watcher(Callback):
        """Sums the weights after every step; spoils gradients or losses of rank 1."""

        def __init__(self, spoil: str = "", *, since: int = SPOILT, until: int = SPOILT) -> None:
            self.sums, self.lr_samples = [], []
            self.spoil, self.spoilt, self.now = spoil, range(since, until + 1), 0

        def on_train_step_start(self, context: CallbackContext) -> None:
            self.now = context.state.iteration + 1

        def spoils(self, what: str) -> bool:
            """Whether this rank's numbers of this step go wrong."""
            return what == self.spoil and self.now in self.spoilt and dist.get_rank() == 1

        def on_grads_ready(self, context: CallbackContext) -> None:
            if self.spoils("gradient"):
                for chunk in context.model:
                    chunk.buffers[0].grad_data.fill_(math.nan)

        def loss(self, mask: Any, output: Any, **more: Any) -> Any:
            """An infinite loss, with the gradient of the finite one; or a late one."""
            if self.spoils("time"):
                time.sleep(0.1)
            output = output + math.inf if self.spoils("loss") else output
            return language_model_loss(mask, output, **more)

        def on_train_step_end(self, context: CallbackContext) -> None:
            weights = [p for chunk in context.model for p in chunk.parameters()]
            self.sums.append(sum(p.double().abs().sum().item() for p in weights))
            self.lr_samples.append(context.state.lr_samples)

    result: dict[str, Any] = {}
    language_model_loss = step.language_model_loss

    def record(name: str, flags: list[str], **spoil: Any) -> None:
        watcher = Watcher(**spoil)
        with mock.patch.object(step, "language_model_loss", watcher.loss):
            steps = run(flags, output / name, [watcher])
        if dist.get_rank() == 0:
            seen = {"sums": watcher.sums, "lr_samples": watcher.lr_samples}
            result[name] = {"steps": steps, **seen}

    six = ["--train-iters", "6"]
    record("dp2", [*SHARDED, *six], spoil="gradient")
    record("tp2", [*layout_flags(2, 1, 1), *six], spoil="gradient")
    record("pp2", [*layout_flags(1, 2, 1), *SHARDED, *six, "--bf16"], spoil="gradient")
    record("loss-dp2", six, spoil="loss")
    record("loss-pp2", [*layout_flags(1, 2, 1), *SHARDED, *six], spoil="loss")
    record("fp16", ["--fp16", "--initial-loss-scale", str(2.0**40), "--train-iters", "30"])
    record("ramp", ["--rampup-batch-size", "2", "2", "24", "--train-samples", "56"])
    record("skip", ["--iterations-to-skip", "2", "4", *six])
    record("plain", six)
    with mock.patch.object(stragglers, "WINDOW", 3):
        record("slow", six, spoil="time", since=4, until=6)
    error = None
    save = str(output / "save")
    try:
        flags = [*SHARDED, "--train-iters", "30", "--save", save, "--save-interval", "2"]
        record("abort", flags, spoil="gradient", since=3, until=30)
    except TrainingFailure as failure:
        error = str(failure)
        destroy_groups()
    errors = all_gather_object(error)
    if dist.get_rank() == 0:
        (output / "abort.json").write_text(json.dumps(errors))
    return result
