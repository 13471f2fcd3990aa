"""Saves under each layout, loads under each other one, and writes what was stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.jobs import layout_flags, run

LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 2, 1)]
"""test_relayout.py goes through more."""
PAIRS = [(a, b) for a in LAYOUTS for b in LAYOUTS]
DAILY = [(a, LAYOUTS[(i + k) % len(LAYOUTS)]) for i, a in enumerate(LAYOUTS) for k in (1, 2)]
"""The pairs of every commit, in which every layout saves for two others and loads theirs."""
BEFORE, AFTER = 2, 2
COMMON = ["--use-distributed-optimizer", "--train-iters", str(BEFORE + AFTER)]
COMMON += ["--global-batch-size", "4"]


def main(output: Path, *words: str) -> Any:
    """Returns the losses after each change of layout, and saves again what was loaded."""

    from megatron.trainer.checkpoint.save import Checkpointer
    from megatron.trainer.distributed.stragglers import StepClock
    from megatron.trainer.model.gpt import Model
    from megatron.trainer.train.callbacks import Callback, CallbackContext

    class SaveWhatWasLoaded(Callback):
        def __init__(self, folder: Path) -> None:
            self.folder = folder

        def on_train_start(self, context: CallbackContext) -> None:
            config = context.config.replace(save=str(self.folder))
            checkpointer = Checkpointer(config, context.groups, lambda *_: None)
            core, clock = context.model[0].config, StepClock(is_cuda=False)
            model = Model(chunks=context.model, core_config=core, clock=clock)
            checkpointer.save(model, context.optimizer, context.scheduler, context.state)
            checkpointer.finish()

    result: dict[str, list[float]] = {}
    for layout in LAYOUTS:
        name = "-".join(map(str, layout))
        flags = [*COMMON, *layout_flags(*layout), "--save", str(output / name)]
        run([*flags, "--exit-interval", str(BEFORE)], output / f"run-{name}")
        for _, other in (pair for pair in (PAIRS if words else DAILY) if pair[0] == layout):
            pair = f"{name}_{'-'.join(map(str, other))}"
            load = [*COMMON, *layout_flags(*other), "--load", str(output / name)]
            steps = run(load, output / f"run-{pair}", [SaveWhatWasLoaded(output / f"again-{pair}")])
            result[pair] = [step["losses"]["lm loss"] for step in steps]
    steps = run([*COMMON], output / "whole")
    result["whole"] = [step["losses"]["lm loss"] for step in steps][BEFORE:]
    return result
