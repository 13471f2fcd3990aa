"""One rank of `moe_live_run`: `moved` trains with the controller and notes the settings of every
step; `fixed` takes the same steps without it."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from copus_ext.commands.pretrain import controllers, with_lagged_balance
from copus_ext.controller.flags import CopusConfig
from megatron.training.common.control import PAUSE_FILE
from megatron.training.common.step_settings import Request, StepSettings
from megatron.training.config.arguments import parse_args, resolve
from megatron.training.resilience.env_checks import check_environment, set_process_defaults
from megatron.training.train.callbacks import Callback, CallbackContext
from megatron.training.train.pretrain import pretrain

RANKS = 4
COPUS = {"moved": ["--copus", "--copus-layouts", "all"], "fixed": ["--moe-balance", "lagged"]}


class Notes(Callback):
    """Writes the settings of every step, on the rank that has the run's directory, and holds the
    controller back at first."""

    def __init__(self, path: Path, paused_steps: int) -> None:
        self.path, self.paused_steps = path, paused_steps

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Adds a line."""
        if context.run_dir is not None:
            pause = context.run_dir / PAUSE_FILE
            if context.state.iteration >= self.paused_steps:
                pause.unlink(missing_ok=True)
            else:
                pause.parent.mkdir(exist_ok=True)
                pause.touch()
            line = {"steps": context.state.iteration, **dataclasses.asdict(context.state.settings)}
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")


class Repeats(Callback):
    """Asks for the settings that another run had after as many steps; not for its micro-batches,
    which belong to its layout."""

    def __init__(self, path: Path) -> None:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        self.by_steps = {
            line.pop("steps"): StepSettings(**{**line, "micro_batch_size": 1}) for line in lines
        }

    def on_train_step_end(self, context: CallbackContext) -> Request | None:
        """Of the step that follows."""
        settings = self.by_steps.get(context.state.iteration)
        if settings in (None, context.state.settings):
            return None
        return Request(kind="change", reason="the step of the other run", settings=settings)


def main(kind: str, paused_steps: int, path: Path, flags: list[str]) -> None:
    """Trains."""
    set_process_defaults()
    check_environment()
    args = parse_args([*flags, *COPUS[kind]], {"copus controller": CopusConfig})
    config = resolve(with_lagged_balance(args), RANKS)
    own = Notes(path, paused_steps) if kind == "moved" else Repeats(path)
    pretrain(config, [*controllers(args), own])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
