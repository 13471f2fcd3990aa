"""Trains while a callback changes batch, micro-batch and rates as a script says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.helpers.jobs import layout_flags, run, steps_of

SAMPLES = 96
CHANGES: dict[int, dict[str, Any]] = {
    # After so many samples: how to go on.
    16: {"global_batch_size": 16, "micro_batch_size": 2, "lr_factor": 2**0.5},
    48: {"global_batch_size": 8, "micro_batch_size": 1, "lr_factor": 1.0},
    56: {"global_batch_size": 24, "micro_batch_size": 4, "beta2": 0.9, "weight_decay_factor": 2.0},
}
"""24 samples from 80 on leave 16: the last step takes those."""


def changing(seen: list[Any]) -> Any:
    """A callback that follows `CHANGES` and notes which samples a rank reads and its rates."""
    from megatron.trainer.common.step_settings import Request, StepSettings
    from megatron.trainer.train.callbacks import Callback, CallbackContext

    class Change(Callback):
        keeps_settings = True

        def on_train_step_end(self, context: CallbackContext) -> Request | None:
            group = context.optimizer.param_groups[0]
            seen.append(
                {
                    "samples": context.step.consumed_samples if context.step else 0,
                    "lr": group["lr"],
                    "weight_decay": group["weight_decay"],
                    "beta2": group["betas"][1],
                }
            )
            change = CHANGES.get(context.state.consumed_samples)
            if change is None:
                return None
            return Request(kind="change", reason="script", settings=StepSettings(**change))

    return Change()


def main(output: Path) -> Any:
    import torch.distributed as dist

    world = dist.get_world_size()
    record: dict[str, Any] = {}
    base = ["--train-samples", str(SAMPLES), "--weight-decay", "0.1", "--eval-iters", "0"]
    base += ["--lr-decay-style", "constant", "--lr-warmup-samples", "0"]
    save = ["--save", str(output / "saved"), "--save-interval", "3"]
    for name, tp, pp, vpp, more in [
        ("dp", 1, 1, 1, save),
        ("tp", world, 1, 1, []),
        ("pp", 1, 2, 1, []),
        ("vpp", 1, 2, 2, []),
        ("resumed", 1, 1, 1, ["--load", str(output / "saved"), "--ckpt-step", "3"]),
        ("resumed late", 1, 1, 1, ["--load", str(output / "saved"), "--ckpt-step", "6"]),
        ("resumed as pp", 1, 2, 1, ["--load", str(output / "saved"), "--ckpt-step", "3"]),
        ("let go", 1, 1, 1, ["--load", str(output / "saved"), "--ckpt-step", "6"]),
    ]:
        seen: list[Any] = []
        flags = [*layout_flags(tp, pp, vpp), *base, *more]
        callback = changing(seen)
        callback.keeps_settings = name != "let go"
        run(flags, output / name, [callback])
        plain = [
            {k: s[k] for k in ("iteration", "consumed_samples", "global_batch_size")}
            | {"loss": s["losses"]["lm loss"], "micro_batch_size": s["micro_batch_size"]}
            for s in (steps_of(output / name) if dist.get_rank() == 0 else [])
        ]
        record[name] = {"steps": plain, "seen": seen, "compiler": "torch._dynamo" in sys.modules}
    return record
