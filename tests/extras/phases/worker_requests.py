"""Trains short runs of two phases, whose callback asks for something where the second begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.trainer.common.step_settings import Request, StepSettings
from megatron.trainer.train.callbacks import Callback, CallbackContext
from tests.helpers.jobs import TINY, run

BASE = (
    TINY.replace("--seq-length 32", "").replace("--max-position-embeddings 32", "")
    + " --max-position-embeddings 64 --global-batch-size 16 --train-iters 6 --log-interval 1"
    + " --lr-decay-style constant --lr-warmup-iters 0"
)
LENGTHS = ["--seq-length", "32", "--seq-length-schedule", "0:32 50%:64"]
"""Three steps of each length, of 16 and of 8 samples."""
SKIPPED = ["--iterations-to-skip", "3"]
"""Leaves out the last step of the first phase."""


class Asks(Callback):
    """Asks once, where the second phase begins, and notes whether the move that it gave was made.

    Args:
        kind: of the request.
        settings: how later steps are taken.
    """

    def __init__(self, kind: Any, settings: StepSettings | None = None) -> None:
        self.kind, self.settings_of_steps = kind, settings
        self.moved_at: list[int] = []

    def on_segment_start(self, context: CallbackContext) -> Request:
        """Asks for all of it."""
        return Request(
            kind=self.kind, reason="a test", settings=self.settings_of_steps, move=self.move
        )

    def move(self, job: Any) -> None:
        """Stays, and notes when."""
        self.moved_at.append(job.state.iteration)


CASES = {
    "nothing": ("change", None),
    "settings": ("change", StepSettings(global_batch_size=4, lr_factor=0.5)),
    "save": ("save", StepSettings(lr_factor=0.5)),
    "stop": ("stop", StepSettings(lr_factor=0.5)),
}
"""Name -> kind and settings of the request."""


def main(output: Path) -> dict[str, Any]:
    """Returns for each case its steps, its checkpoints, and when its move was made."""
    found = {}
    for name, (kind, settings) in CASES.items():
        for flags in ([], SKIPPED):
            key = f"{name} skipped" if flags else name
            folder, asks = output / key.replace(" ", "_"), Asks(kind, settings)
            steps = run(
                [*LENGTHS, *flags, "--save", str(folder / "saved")],
                folder,
                [asks],
                base=BASE,
            )
            found[key] = {
                "steps": [
                    (s["iteration"], s["global_batch_size"], s["learning_rate"]) for s in steps
                ],
                "saved": sorted(int(p.name[5:]) for p in (folder / "saved").glob("iter_*")),
                "moved_at": asks.moved_at,
            }
    return found
