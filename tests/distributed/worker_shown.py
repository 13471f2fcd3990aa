"""Trains short runs whose figures are checked: resumed, moved, slow at first, overflowed."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any
from unittest import mock

from tests.distributed.worker_controller_layouts import write_profile
from tests.helpers.examples import with_values
from tests.helpers.jobs import TINY, layout_flags, run

SLOW_S, SLOW_STEPS = 0.15, 6
"""Seconds that the first steps of a launch or a layout take longer, and how many they are."""
BYTES = {"--tokenizer-type": "ByteLevelTokenizer", "--vocab-size": None}
BASE = ["--lr-decay-style", "constant", "--lr-warmup-samples", "8", "--use-distributed-optimizer"]
BASE += ["--log-interval", "1", "--train-samples", "2000", "--global-batch-size", "8"]
PIPED = layout_flags(1, 2, 1)
NUM_FURTHER = 2


def further_losses(output: Path, base: str) -> Any:
    """Mean losses of further tokens as logged, and as a direct sum over all tokens of the step."""
    import torch
    import torch.distributed as dist
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron.trainer.train.callbacks import Callback, CallbackContext

    rows: list[list[Any]] = []
    masks: list[Any] = []
    compute, forward = GPTModel.compute_language_model_loss, GPTModel.forward
    direct: list[list[float]] = []

    def noting_forward(self: Any, *given: Any, **named: Any) -> Any:
        masks[:] = [named["loss_mask"].clone()]
        return forward(self, *given, **named)

    def noting(self: Any, labels: Any, logits: Any) -> Any:
        losses = compute(self, labels, logits)
        if self.training:
            rows.append([losses.detach().double(), masks[0].double()])
        return losses

    class Sums(Callback):
        """Adds up what every rank has seen in a step."""

        def on_train_step_end(self, context: CallbackContext) -> None:
            sums = torch.zeros(NUM_FURTHER, 2, dtype=torch.float64)
            # Of each micro-batch first the further tokens, then the next one.
            for i, (losses, mask) in enumerate(rows):
                at = i % (1 + NUM_FURTHER)
                if at < NUM_FURTHER:
                    moved = torch.zeros_like(mask)
                    moved[:, : -1 - at] = mask[:, 1 + at :]
                    sums[at] += torch.stack([(losses * moved).sum(), moved.sum()])
            dist.all_reduce(sums)
            direct.append((sums[:, 0] / sums[:, 1]).tolist())
            rows.clear()

    flags = ["--mtp-num-layers", str(NUM_FURTHER), "--eod-mask-loss", "--train-iters", "3"]
    with (
        mock.patch.object(GPTModel, "compute_language_model_loss", noting),
        mock.patch.object(GPTModel, "forward", noting_forward),
    ):
        steps = run(flags, output / "further", [Sums()], base=f"{base} --init-method-std 0.2")
    logged = [[s["losses"][f"mtp_{i + 1} loss"] for i in range(NUM_FURTHER)] for s in steps]
    return {"logged": logged, "direct": direct}


def main(output: Path) -> Any:
    """Returns what the runs printed, and the losses of further tokens."""
    import torch.distributed as dist

    from copus_ext.controller.callback import Controller
    from copus_ext.controller.flags import CopusConfig
    from megatron.trainer.train.callbacks import Callback, CallbackContext

    class Slow(Callback):
        """Makes the first steps of a launch and of a layout slow."""

        def __init__(self) -> None:
            self.steps = 0

        def on_relayout_end(self, context: CallbackContext) -> None:
            self.steps = 0

        def on_grads_ready(self, context: CallbackContext) -> None:
            self.steps += 1
            time.sleep(SLOW_S if self.steps <= SLOW_STEPS else 0.0)

    own = {"--data-path": str(output / "text_text_document"), "--global-batch-size": None}
    base = " ".join([*with_values(TINY, {**BYTES, **own}), "--split 100,0,0"])
    told: dict[str, list[str]] = {}

    def go(name: str, until: int, *more: str, slow: bool = False, **given: Any) -> None:
        """Trains until a step, or goes on where the run has a checkpoint."""
        where = output / name
        flags = {"copus_layouts": "all", "copus_profile": None, **given}
        controller = Controller(CopusConfig(copus=True, **flags))
        out = io.StringIO()
        saved = ["--save", str(where / "saved"), "--exit-interval", str(until)]
        load = ["--load", str(where / "saved")] if (where / "saved").exists() else []
        dist.barrier()
        callbacks = [*([Slow()] if slow else []), controller]
        run([*BASE, *saved, *load, *more], where, callbacks, base=base, out=out)
        told.setdefault(name, []).append(out.getvalue())

    profile = output / "profile.jsonl"
    if dist.get_rank() == 0:
        write_profile(profile, dist.get_world_size())
    dist.barrier()
    eager: dict[str, Any] = {"copus_max_global_batch_size": 16}
    go("plain", 60, "--save-interval", "30", **eager)
    go("plain", 90, **eager)
    go("plain", 120, *PIPED, **eager)
    go("plain", 110, "--ckpt-step", "30", **eager)
    go("slow", 55, slow=True, **eager)
    go("slow", 100, *PIPED, slow=True, **eager)
    go("moved", 60, copus_profile=str(profile), copus_policy="static", slow=True)
    go("moved", 100, copus_profile=str(profile), copus_policy="static")
    go("fp16", 60, "--fp16", "--initial-loss-scale", str(2.0**60), **eager)
    go("doubled", 70, copus_policy="doubling", copus_doubling_first_tokens=5120.0, slow=True)
    return {"told": told, "further": further_losses(output, f"{base} --global-batch-size 8")}
