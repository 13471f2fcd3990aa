"""Saves under each layout, loads under each other one, and writes what was stored.

worker_checkpoints.py OUTPUT_DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.helpers.jobs import join, layout_flags, run

LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 2), (4, 1, 1), (1, 4, 1), (2, 2, 1)]
BEFORE, AFTER = 3, 4
COMMON = ["--use-distributed-optimizer", "--train-iters", str(BEFORE + AFTER)]


def main(output: Path) -> None:
    """Writes for each pair the losses after the switch and whether the state came through."""
    import torch.distributed as dist

    from megatron.training.callbacks import Callback, CallbackContext, Request

    class StopAtOnce(Callback):
        """Ends a run after one step whose learning rate is 0, so that what was loaded is saved."""

        def on_train_step_end(self, context: CallbackContext) -> Request:
            return Request(kind="stop", reason="test")

    join()
    result: dict[str, list[float]] = {}
    for layout in LAYOUTS:
        name = "-".join(map(str, layout))
        flags = [*COMMON, *layout_flags(*layout), "--save", str(output / name)]
        run([*flags, "--exit-interval", str(BEFORE)], output / f"run-{name}")
        for other in LAYOUTS:
            pair = f"{name}_{'-'.join(map(str, other))}"
            load = [*COMMON, *layout_flags(*other), "--load", str(output / name)]
            steps = run(load, output / f"run-{pair}")
            result[pair] = [step["losses"]["lm loss"] for step in steps]
            # Samples are passed over, nothing is trained: what is saved is what was loaded.
            skip = [str(i) for i in range(BEFORE + 1, BEFORE + AFTER + 1)]
            again = [*load, "--save", str(output / f"again-{pair}"), "--iterations-to-skip", *skip]
            run(again, output / f"skip-{pair}")
    steps = run([*COMMON], output / "whole")
    result["whole"] = [step["losses"]["lm loss"] for step in steps][BEFORE:]
    if dist.get_rank() == 0:
        (output / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
