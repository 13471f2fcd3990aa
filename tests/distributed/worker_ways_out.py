"""Trains like pretrain_gpt.py, and leaves the way that COPUS_TEST_WAY says.

worker_ways_out.py FLAGS

COPUS_TEST_WAY is JSON: `at` the `start`, in the `step` of `iteration`, or at its `end`; `how`, of
`HOW`; `rank` that leaves, all by default; `writers_hang`, whether checkpoints are never written.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any
from unittest import mock

from tests.helpers.jobs import prepare
from tests.helpers.save_processes import stop_writer

SAID = "this way out"
HOW = ("error", "usage", "SIGHUP", "SIGINT", "SIGTERM", "SIGKILL")


def leave(how: str) -> None:
    """Leaves this rank, or has it leave."""
    from megatron.trainer.common.errors import UsageError

    if how.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[how])
    else:
        raise {"error": ValueError, "usage": UsageError}[how](SAID)


def leaving(way: dict[str, Any]) -> Any:
    from megatron.trainer.train.callbacks import Callback, CallbackContext

    class Leave(Callback):
        """Leaves where and how it is told, once: each forward pass of a step comes here, and a
        second Ctrl-C half a second later would have another meaning."""

        has_left = False

        def on_train_start(self, context: CallbackContext) -> None:
            self.leave("start", 1)
            self.iteration = context.state.iteration
            context.model[0].register_forward_pre_hook(self.forward)

        def forward(self, *_: Any) -> None:
            """Within a step."""
            self.leave("step", self.iteration + 1)

        def on_train_step_end(self, context: CallbackContext) -> None:
            self.iteration = context.state.iteration
            self.leave("end", self.iteration)

        def leave(self, at: str, iteration: int) -> None:
            """If it is the place."""
            is_me = way.get("rank", rank()) == rank()
            is_here = (way["at"], way.get("iteration", 1)) == (at, iteration)
            if is_me and is_here and not self.has_left:
                self.has_left = True
                leave(way["how"])

    return Leave()


def rank() -> int:
    return int(os.environ["RANK"])


def hang(real: Any) -> Any:
    """`WriterProcess.send`, to a process that does nothing more."""

    def send(process: Any, files: Any) -> Any:
        stop_writer(process.pid)
        return real(process, files)

    return send


def never_write(*_: Any) -> None:
    """`write_file` on a file system that does not answer."""
    threading.Event().wait()


def main() -> int:
    prepare()
    from copus_ext.commands import pretrain
    from megatron.trainer.checkpoint import file_threads
    from megatron.trainer.checkpoint.writer_process import WriterProcess

    way = json.loads(os.environ["COPUS_TEST_WAY"])
    hangs, send, write = way.get("writers_hang"), WriterProcess.send, file_threads.write_file
    with (
        mock.patch.object(WriterProcess, "send", hang(send) if hangs else send),
        mock.patch.object(file_threads, "write_file", never_write if hangs else write),
        mock.patch.object(pretrain, "controllers", lambda args, config: [leaving(way)]),
    ):
        return pretrain.main()


if __name__ == "__main__":
    sys.exit(main())
