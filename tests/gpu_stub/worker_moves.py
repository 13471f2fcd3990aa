"""`pretrain_gpt.py` that moves along `STUB_LAYOUTS` after its second step, and notes what each move
leaves behind; see `test_moves.py`."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from megatron.trainer.resilience.env_checks import import_core, set_process_defaults

set_process_defaults()
import_core()

import torch  # noqa: E402

from copus_ext.reshard.inprocess import InProcessResharder  # noqa: E402
from copus_ext.reshard.trainer_host import TrainerHost  # noqa: E402
from megatron.trainer.common.step_settings import Request  # noqa: E402
from megatron.trainer.config.arguments import parse_args, resolve  # noqa: E402
from megatron.trainer.config.layout import Layout  # noqa: E402
from megatron.trainer.train.callbacks import Callback, CallbackContext  # noqa: E402
from megatron.trainer.train.pretrain import pretrain  # noqa: E402

FILE = "moves-{rank}.json"
MOVED_AT = 2


def left() -> dict[str, int]:
    """What this process holds now."""
    gc.collect()
    return {
        "communicators": ctypes.CDLL("libnccl.so.2").stub_nccl_live(),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "bytes": torch.cuda.memory_allocated(),
    }


class Walk(Callback):
    """Makes all moves at one boundary."""

    def __init__(self, layouts: list[str]) -> None:
        self.layouts = layouts
        self.rows: list[dict[str, Any]] = []

    def on_setup_start(self, context: CallbackContext) -> None:
        self._mover = InProcessResharder(prebuild=0)

    def on_train_step_end(self, context: CallbackContext) -> Request | None:
        if context.state.iteration != MOVED_AT:
            return None
        return Request(kind="change", reason="a walk", move=self._move)

    def on_train_end(self, context: CallbackContext) -> None:
        self._mover.close()

    def _move(self, job: Any) -> None:
        for text in self.layouts:
            host = TrainerHost(job)
            result = self._mover.move(host, Layout.from_text(text), job.state.settings)
            own = {"to": str(job.config.layout), "kind": result.kind, "reason": result.reason}
            self.rows.append({**own, **left()})


def main() -> None:
    walk = Walk(os.environ["STUB_LAYOUTS"].split(","))
    flags = parse_args(sys.argv[1:])
    config = resolve(flags, int(os.environ["WORLD_SIZE"]), cuda_available=True)
    pretrain(config, [walk])
    file = Path(os.environ["STUB_ROWS"]) / FILE.format(rank=os.environ["RANK"])
    file.write_text(json.dumps(walk.rows))


if __name__ == "__main__":
    main()
