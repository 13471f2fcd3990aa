"""Trains like pretrain_gpt.py; asks for another layout or loses a rank as COPUS_TEST_ASK says.

worker_local_cpu.py FLAGS

COPUS_TEST_ASK is JSON: iteration -> {"layout": {...}, "micro_batch_size": ...} or {"kill": rank}.
Each is done once in a run directory.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.helpers.jobs import prepare


def asking(wishes: dict[str, Any]) -> Any:
    """A callback that follows the wishes, with `asked`: whether to leave with 85."""
    import torch.distributed as dist

    from copus_ext.reshard import relaunch
    from megatron.trainer.common.step_settings import Request
    from megatron.trainer.config.layout import Layout
    from megatron.trainer.train.callbacks import Callback, CallbackContext

    class Ask(Callback):
        """Asks as a controller would: all ranks stop, rank 0 writes what is saved by then."""

        wish: dict[str, Any] | None = None

        def on_train_step_end(self, context: CallbackContext) -> Request | None:
            wish = wishes.get(str(context.state.iteration))
            if wish is None:
                return None
            done = Path(context.config.runtime.run_dir) / f"wish-{context.state.iteration}"
            is_new = not done.exists()
            dist.barrier()
            if not is_new:
                return None
            done.touch()
            if wish.get("kill") == dist.get_rank():
                os.kill(os.getpid(), signal.SIGKILL)
            if "layout" not in wish:
                return None
            self.wish = wish
            return Request(kind="stop", reason="another layout")

        def on_train_end(self, context: CallbackContext) -> None:
            if self.wish is None or dist.get_rank() != 0:
                return
            assert context.run_dir is not None and relaunch.is_supervised()
            request = relaunch.Request(
                launch=os.environ[relaunch.LAUNCH_VARIABLE],
                kind="relayout",
                iteration=context.state.iteration,
                consumed_samples=context.state.consumed_samples,
                reason="the test asks for it",
                layout=Layout.from_json(self.wish["layout"]),
                micro_batch_size=self.wish.get("micro_batch_size"),
                checkpoint=context.config.checkpoint.save,
            )
            relaunch.write_request(context.run_dir, request)

    return Ask()


def main() -> int:
    """Trains; 85 to be started again."""
    prepare()
    from megatron.trainer.common.errors import UsageError
    from megatron.trainer.config.arguments import parse_args, resolve
    from megatron.trainer.train.pretrain import pretrain

    try:
        config = resolve(parse_args(), int(os.environ["WORLD_SIZE"]))
        ask = asking(json.loads(os.environ["COPUS_TEST_ASK"]))
        pretrain(config, [ask])
    except UsageError as error:
        print(f"worker_local_cpu.py: error: {error}", file=sys.stderr)
        return 2
    return 85 if ask.wish else 0


if __name__ == "__main__":
    sys.exit(main())
