"""What follows the end of a launch: the next one, or the end. No torch, no processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from copus_ext.reconfigure.relaunch import Request, merged, value_of
from megatron.training import checkpoint_files as files
from megatron.training.errors import TrainingFailure
from megatron.training.layout import Layout, batch_problems

MAX_LAUNCHES = 101
"""The first and a hundred relaunches."""
MAX_CRASHES = 3
"""Crashes without a new checkpoint between them that end the run."""
_RELAUNCH, _WATCHDOG = 85, 86
_NEEDED = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
    "global_batch_size",
    "micro_batch_size",
)


@dataclass(frozen=True, kw_only=True)
class Next:
    """A launch, or the end."""

    flags: list[str]
    """Of the program."""
    ranks: int
    """Processes."""
    leave: int | None = None
    """Exit code, if no launch follows."""
    line: str = ""
    """What to say about it."""


class Judge:
    """Remembers what happened to a run, and says what to do next."""

    def __init__(self, flags: Sequence[str], ranks: int) -> None:
        """Notes what is there before the first launch.

        Args:
            flags: of the program, as the user gave them.
            ranks: to start with, and the most there are.
        """
        self.flags, self.ranks = list(flags), ranks
        save = value_of(flags, "--save")
        self._save = Path(save) if save is not None else None
        self._at_start = self._mark()
        self._launches = 1
        self._relaunched = False
        self._relaunched_from: int | None = None
        self._crashes = 0
        self._crashed_from: int | None = None

    def first(self) -> Next:
        """The launch as the user wants it."""
        return Next(flags=self.flags, ranks=self.ranks)

    def after(self, code: int, request: Request | None) -> Next:
        """What follows a launch. The request decides; the code only where there is none.

        Args:
            code: of the ranks, 128 + N after signal N.
            request: of that launch.
        """
        try:
            if request is None:
                is_crash = code in (_RELAUNCH, _WATCHDOG) or code > 128
                following = self._crashed(code) if is_crash else self._leave(code)
            elif request.kind == "relayout":
                following = self._relayout(request)
            else:
                left = {"done": 0, "requeue": _RELAUNCH, "abort": 1}[request.kind]
                line = "" if left == 0 else f"{request.kind}: {request.line}"
                following = self._leave(left, line)
        except (ValueError, OSError, TrainingFailure) as error:
            return self._leave(code or 1, " ".join(str(error).split()))
        if following.leave is None:
            self._launches += 1
            if self._launches > MAX_LAUNCHES:
                return self._leave(1, f"started {MAX_LAUNCHES} times, that is enough")
        return following

    def _relayout(self, request: Request) -> Next:
        assert request.layout is not None
        latest = self._latest()
        if request.layout.world_size > self.ranks:
            raise ValueError(f"{request.layout} is for more than the {self.ranks} ranks of -n")
        if request.checkpoint is not None and latest is None:
            raise ValueError(f"asked to go on from {request.checkpoint}, which has no checkpoint")
        if self._relaunched and self._relaunched_from == latest:
            where = "before the first" if latest is None else f"since iteration {latest}"
            raise ValueError(f"asked to start again twice, no checkpoint {where}: {request.line}")
        self._relaunched, self._relaunched_from = True, latest
        return self._start(request, latest, request.line)

    def _crashed(self, code: int) -> Next:
        latest = self._latest()
        self._crashes = self._crashes + 1 if latest == self._crashed_from else 1
        self._crashed_from = latest
        why = f"the ranks ended with {code}"
        if self._crashes >= MAX_CRASHES:
            return self._leave(code, f"{why}: {MAX_CRASHES} crashes without a new checkpoint")
        if self._save is None or latest is None or self._mark() == self._at_start:
            line = f"start again as at first: {why}, and nothing was saved yet"
            return Next(flags=self.flags, ranks=self.ranks, line=line)
        return self._start(self._of_checkpoint(self._save, latest, why), latest, why)

    def _start(self, request: Request, latest: int | None, why: str) -> Next:
        assert request.layout is not None
        where = "from the start" if request.checkpoint is None else f"from iteration {latest}"
        return Next(
            flags=merged(self.flags, request),
            ranks=request.layout.world_size,
            line=f"start again under {request.layout} {where}: {why}",
        )

    def _leave(self, code: int, line: str = "") -> Next:
        return Next(flags=[], ranks=0, leave=code, line=line)

    def _of_checkpoint(self, save: Path, latest: int, why: str) -> Request:
        """A request for the layout of the latest checkpoint, with batches that fit it."""
        stored = stored_arguments(save)
        missing = [name for name in _NEEDED if not isinstance(stored.get(name), int)]
        if missing:
            raise ValueError(f"the checkpoint in {save} does not say {missing[0]}: {why}")
        tp, pp, dp, batch, micro = (stored[name] for name in _NEEDED)
        vpp = stored.get("virtual_pipeline_model_parallel_size")
        layout = Layout(tp=tp, pp=pp, vpp=vpp or 1, dp=dp)
        if layout.world_size > self.ranks:
            raise ValueError(
                f"the checkpoint in {save} is of {layout}, for more than the {self.ranks} ranks of "
                f"-n: {why}"
            )
        fitting = [b for b in range(micro, 0, -1) if not batch_problems(layout, b, batch)]
        return Request(
            launch="crashed",
            kind="relayout",
            iteration=latest,
            consumed_samples=0,
            reason=why,
            layout=layout,
            global_batch_size=batch,
            micro_batch_size=fitting[0] if fitting else micro,
            checkpoint=value_of(self.flags, "--save"),
        )

    def _latest(self) -> int | None:
        return None if self._save is None else files.read_latest(self._save)

    def _mark(self) -> tuple[int, ...] | None:
        """Something that any save changes."""
        try:
            found = (self._save or Path()).joinpath(files.TRACKER).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns


def stored_arguments(save: Path) -> dict[str, Any]:
    """The flags of the latest checkpoint. Takes the seconds that torch needs to be imported.

    Raises:
        TrainingFailure: there is none, or it cannot be read.
        ValueError: it was written by another trainer.
    """
    from megatron.training.guard import set_process_defaults

    set_process_defaults()
    from megatron.training.restore import read_arguments

    stored = read_arguments(save, step=None)
    if "data_parallel_size" not in stored:
        raise ValueError(f"the checkpoint in {save} does not say its layout")
    return stored
