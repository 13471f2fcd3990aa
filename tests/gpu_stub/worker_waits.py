"""`pretrain_gpt.py` that counts where the host waits for the GPU in each step; see
`test_waits.py`."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from megatron.trainer.resilience.env_checks import import_core, set_process_defaults

set_process_defaults()
import_core()

import torch  # noqa: E402

from copus_ext.commands.pretrain import controllers  # noqa: E402
from copus_ext.controller.flags import CopusConfig  # noqa: E402
from megatron.trainer.config.arguments import parse_args, resolve  # noqa: E402
from megatron.trainer.train.callbacks import Callback, CallbackContext  # noqa: E402
from megatron.trainer.train.pretrain import pretrain  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
OWN = tuple(str(ROOT / name) for name in ("megatron/", "copus_ext/"))
CORE = "/megatron/core/"


def place() -> tuple[bool, str]:
    """Whether the innermost line that is not torch's is of this repository, and that line."""
    for frame in reversed(traceback.extract_stack()):
        name = frame.filename
        if name.startswith(OWN) or CORE in name:
            line = f"{'/'.join(name.split('/')[-2:])}:{frame.lineno} {frame.name}"
            return name.startswith(OWN), line
    return False, "no Python"


class Waits(Callback):
    """Counts from the start of each step to that of the next one."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._found: Counter[tuple[bool, str]] = Counter()
        self._runtime = ctypes.CDLL("libcudart.so.13")
        self._before = 0
        self._watch()

    def _watch(self) -> None:
        show, synchronize = warnings.showwarning, torch.cuda.synchronize

        def seen(message: Any, *args: Any, **kwargs: Any) -> None:
            if "synchronizing CUDA operation" in str(message):
                self._found[place()] += 1
            else:
                show(message, *args, **kwargs)

        @functools.wraps(synchronize)
        def wait(*args: Any, **kwargs: Any) -> None:
            self._found[place()] += 1
            synchronize(*args, **kwargs)

        for kind in (torch.cuda.Stream, torch.cuda.Event):
            self._watch_kind(kind)
        warnings.simplefilter("always")
        warnings.showwarning, torch.cuda.synchronize = seen, wait
        torch.cuda.set_sync_debug_mode("warn")

    def _watch_kind(self, kind: Any) -> None:
        """Counts waits for a stream or an event, of which torch does not warn."""
        synchronize = kind.synchronize

        def wait(of: Any) -> None:
            self._found[place()] += 1
            synchronize(of)

        kind.synchronize = wait

    def on_train_step_start(self, context: CallbackContext) -> None:
        total = self._runtime.stub_count(0)
        own = {line: n for (is_own, line), n in self._found.items() if is_own}
        core = {line: n for (is_own, line), n in self._found.items() if not is_own}
        self.rows.append({"own": own, "core": core, "counted": total - self._before})
        self._before = total
        self._found.clear()


def main() -> None:
    """One rank. The first row is of what comes before the first step."""
    waits, world_size = Waits(), int(os.environ["WORLD_SIZE"])
    flags = parse_args(sys.argv[1:], {"copus controller": CopusConfig})
    config = resolve(flags, world_size, cuda_available=True)
    pretrain(config, [*controllers(flags, config), waits])
    if os.environ["RANK"] == "0":
        Path(os.environ["STUB_ROWS"]).write_text(json.dumps(waits.rows))


if __name__ == "__main__":
    main()
