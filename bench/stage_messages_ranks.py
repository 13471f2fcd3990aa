"""What runs on every rank of `bench.stage_messages`: a training run whose messages between stages
are short in every second step."""

from __future__ import annotations

import sys

from megatron.training.config.arguments import parse_args, resolve
from megatron.training.resilience.env_checks import check_environment, set_process_defaults
from megatron.training.train.callbacks import Callback, CallbackContext
from megatron.training.train.pretrain import pretrain


class EverySecondStep(Callback):
    """Sends whole messages in steps of even number, the first being 0."""

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Chooses."""
        context.needs_exact_step = context.state.iteration % 2 == 0


def main(world_size: int, flags: list[str]) -> None:
    """Trains."""
    set_process_defaults()
    check_environment()
    pretrain(resolve(parse_args(flags), world_size), [EverySecondStep()])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
