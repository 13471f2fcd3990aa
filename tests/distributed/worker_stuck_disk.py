"""Saves at every step while one call on the files of a save does not come back: each call that a
save was seen to make, on each rank, one after another; writes what came of it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers import stuck_disk
from tests.helpers.jobs import TINY, run

SEEN = 3
"""Save whose calls are held in later ones: by then it also removes an older checkpoint."""
STALL_S = 1.0
"""Two looks far apart count for a quarter of it: the save lasts longer than four looks."""


class Stuck:
    """Holds calls of saves, and notes what became of each save."""

    def __init__(self, root: Path, calls: dict[int, tuple[int, str]], rank: int) -> None:
        self._root, self._calls, self._rank = root, calls, rank
        self.seen: dict[int, list[str]] = {}
        self.was_held: list[int] = []

    def save(self, real: Any) -> Any:
        """`Checkpointer.save` with the call that is due."""
        from megatron.trainer.common.file_limits import refuse_while_stuck

        def save(checkpointer: Any, *args: Any, **kwargs: Any) -> Any:
            iteration = args[3].iteration
            stuck_disk.let_go()
            with contextlib.suppress(TimeoutError):
                refuse_while_stuck(20.0)
            on, call = self._calls.get(iteration, (0, ""))
            stuck_disk.begin(self._root, call if on == self._rank else "")
            try:
                done = real(checkpointer, *args, **kwargs)
                # What training does next is to be held up by nothing of the save.
                checkpointer.finish()
                return done
            finally:
                stuck_disk.end()
                self.seen[iteration] = stuck_disk.seen()
                if stuck_disk.is_held():
                    self.was_held.append(iteration)

        return save

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While the run goes on."""
        from megatron.trainer.checkpoint.save import Checkpointer

        with mock.patch.object(Checkpointer, "save", self.save(Checkpointer.save)):
            yield
        stuck_disk.let_go()


def main(output: Path, mode: str) -> Any:
    """Returns the calls by iteration, as rank and name, and by rank the iterations of those that
    were held."""
    import torch.distributed as dist

    from megatron.trainer.common.collectives import all_gather_object

    base = f"{TINY} --split 1,0,0 --use-distributed-optimizer --num-workers 0 "
    base += "--on-save-failure continue --lr-decay-iters 300"
    saves = ["--save-retain-interval", "2", *["--async-save"] * (mode == "async")]

    def train(name: str, steps: int, calls: dict[int, tuple[int, str]]) -> Stuck:
        root = output / name / "save"
        stuck = Stuck(root, calls, dist.get_rank())
        flags = ["--save", str(root), "--save-interval", "1", *saves] if name != "plain" else []
        with stuck.active():
            run([*flags, "--train-iters", str(steps)], root / "run", base=base)
        return stuck

    seen = all_gather_object(_calls_of(train("seen", SEEN, {})))
    every = [(rank, call) for rank, of in enumerate(seen) for call in of]
    calls = {}
    for i, (rank, call) in enumerate(every):
        iteration = 2 * i + 1
        calls[iteration] = rank, call.replace(f"iter_{SEEN:07d}", f"iter_{iteration:07d}")
    with mock.patch.dict(os.environ, {"COPUS_SAVE_STALL_S": str(STALL_S)}):
        stuck = train("stuck", 2 * len(calls), calls)
    train("plain", 2 * len(calls), {})
    return {"calls": calls, "held": all_gather_object(stuck.was_held)}


def _calls_of(stuck: Stuck) -> list[str]:
    """Calls of the last save, but those on an older checkpoint. One file of data stands for the
    two of a rank."""
    own = f"iter_{SEEN:07d}"
    seen = [call for call in stuck.seen[SEEN] if "iter_" not in call or own in call]
    return [call for call in seen if not call.endswith("_1.distcp")]
