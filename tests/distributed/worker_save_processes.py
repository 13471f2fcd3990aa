"""Trains like pretrain_gpt.py, and harms the processes that write its asynchronous saves.

worker_save_processes.py FLAGS

COPUS_TEST_HARM is JSON: by iteration and rank of a save, as "20:1", what becomes of its process
while it writes: `kill`, `stop`, or `rank`, where the rank is killed as well. Each happens once.
With COPUS_TEST_LONG_STEP the step that follows the harm goes on until the rank has said that the
process is lost and has written itself, or for so many seconds.
`COPUS_TEST_FOLDER` gets a file for each, and at the end what every rank still has.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.helpers.jobs import prepare
from tests.helpers.save_processes import left_of_saves, stop_writer

HARM: dict[str, str] = json.loads(os.environ["COPUS_TEST_HARM"])
FOLDER = Path(os.environ["COPUS_TEST_FOLDER"])
LONG_STEP_S = float(os.environ.get("COPUS_TEST_LONG_STEP", "0"))


def due(iteration: int) -> str | None:
    """What is to become of the process of a save; the first to ask is told."""
    import torch.distributed as dist

    key = f"{iteration}:{dist.get_rank()}"
    try:
        (FOLDER / key).touch(exist_ok=False)
    except FileExistsError:
        return None
    return HARM.get(key)


def harm() -> None:
    """Has the harm happen in this process."""
    from megatron.trainer.checkpoint.save import Checkpointer
    from megatron.trainer.checkpoint.writer_process import WriterProcess

    send: Any = WriterProcess.send
    poll: Any = Checkpointer.poll
    finish: Any = Checkpointer.finish
    dies: list[bool] = []
    harmed: list[tuple[str, list[Path]]] = []

    def harmed_send(process: WriterProcess, files: Any) -> Any:
        iteration = int(re.findall(r"iter_(\d+)", str(files[0][0]))[0])
        what = due(iteration)
        if what is not None:
            stop_writer(process.pid)  # it does not write before the harm is done
        copies = send(process, files)
        if what == "kill":
            os.kill(process.pid, signal.SIGKILL)
        dies.extend([True] * (what == "rank"))
        if what is not None and LONG_STEP_S:
            harmed.append((what, [Path(path) for path, _ in files]))
        return copies

    def harmed_poll(checkpointer: Checkpointer) -> None:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        while harmed:
            long_step(*harmed.pop())
        poll(checkpointer)

    def last_finish(checkpointer: Checkpointer, *, must: bool = False) -> bool:
        done = finish(checkpointer, must=must)
        (FOLDER / f"left-{os.environ['RANK']}.json").write_text(json.dumps(left_of_saves()))
        return done

    WriterProcess.send = harmed_send  # type: ignore[method-assign]
    Checkpointer.poll = harmed_poll  # type: ignore[method-assign]
    Checkpointer.finish = last_finish  # type: ignore[method-assign]


class Said(logging.Handler):
    """Lines of this rank about its saves."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("megatron.trainer.checkpoint.save_write").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps one."""
        self.lines.append(record.getMessage())


SAID = Said()


def long_step(what: str, paths: list[Path]) -> None:
    """A step that does not end before its rank has seen what became of its process."""
    began = time.monotonic()
    seen_s = written_s = None
    while written_s is None and (now := time.monotonic() - began) < LONG_STEP_S:
        time.sleep(0.05)
        if seen_s is None and SAID.lines:
            seen_s = now
        if seen_s is not None and all(path.exists() and path.stat().st_size for path in paths):
            written_s = now
    told = {"what": what, "seen_s": seen_s, "written_s": written_s, "lines": SAID.lines}
    (FOLDER / f"long-{what}.json").write_text(json.dumps(told))


def main() -> int:
    prepare()
    from copus_ext.commands import pretrain

    harm()
    return pretrain.main()


if __name__ == "__main__":
    sys.exit(main())
