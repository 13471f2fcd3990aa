"""Runs whose steps go wrong or change size on purpose.

worker_steps.py OUTPUT_DIR
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from tests.helpers.jobs import join, layout_flags, run

SHARDED = ["--use-distributed-optimizer"]
SPOILT = 3


def main(output: Path) -> None:
    """Writes the step records of every run, and what its watcher saw."""
    import torch.distributed as dist

    from megatron.training.callbacks import Callback, CallbackContext

    class Watcher(Callback):
        """Sums the weights after every step; spoils one gradient on one rank."""

        def __init__(self, spoil: bool) -> None:
            self.spoil, self.sums, self.lr_samples = spoil, [], []

        def on_grads_ready(self, context: CallbackContext) -> None:
            if self.spoil and context.state.iteration + 1 == SPOILT and dist.get_rank() == 1:
                for chunk in context.model:
                    chunk.buffers[0].grad_data.fill_(math.nan)

        def on_train_step_end(self, context: CallbackContext) -> None:
            weights = [p for chunk in context.model for p in chunk.parameters()]
            self.sums.append(sum(p.double().abs().sum().item() for p in weights))
            self.lr_samples.append(context.state.lr_samples)

    join()
    result: dict[str, Any] = {}

    def record(name: str, flags: list[str], *, spoil: bool = False) -> None:
        watcher = Watcher(spoil)
        steps = run(flags, output / name, [watcher])
        if dist.get_rank() == 0:
            seen = {"sums": watcher.sums, "lr_samples": watcher.lr_samples}
            result[name] = {"steps": steps, **seen}
            (output / "result.json").write_text(json.dumps(result))

    six = ["--train-iters", "6"]
    record("dp2", [*SHARDED, *six], spoil=True)
    record("tp2", [*layout_flags(2, 1, 1), *six], spoil=True)
    record("pp2", [*layout_flags(1, 2, 1), *SHARDED, *six, "--bf16"], spoil=True)
    record("fp16", ["--fp16", "--initial-loss-scale", str(2.0**40), "--train-iters", "30"])
    record("ramp", ["--rampup-batch-size", "2", "2", "24", "--train-samples", "56"])
    record("skip", ["--iterations-to-skip", "2", "4", *six])
    record("plain", six)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
