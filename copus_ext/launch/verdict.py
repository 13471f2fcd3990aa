"""What follows the end of a launch: the next one, or the end. No torch, no processes, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from copus_ext.launch.budget import Bars, Budget, Limits
from copus_ext.launch.cause import Failure
from copus_ext.launch.fit import Fit, NoFit, Stored
from copus_ext.launch.progress import Progress
from copus_ext.launch.stored import stored_arguments
from copus_ext.reshard.relaunch import Request, merged, value_of
from megatron.training.checkpoint import files
from megatron.training.config.layout import Layout

MAX_LAUNCHES = 1001
"""The first and a thousand more."""
DONE, FAILED, USAGE, AGAIN = 0, 1, 2, 85
"""Exit codes that a supervisor gives a meaning."""
_SIGNALLED = 128
_INVITING = (AGAIN, _SIGNALLED + 10, _SIGNALLED + 15)
"""Codes on which others start the job again: after AGAIN, USR1 and TERM."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a launch ended, seen from all nodes."""

    code: int
    """Of the rank that failed first, 128 + N after signal N; 0 if none failed."""
    request: Request | None = None
    """What the launch asked for."""
    failure: Failure | None = None
    """The first, if there was one."""
    progress: Progress = field(default_factory=Progress)
    """How far it came."""
    stopped_by: int | None = None
    """Signal that asked the supervisor to stop; 0 if the stop file was there without one."""


@dataclass(frozen=True, kw_only=True)
class Next:
    """A launch, or the end."""

    flags: list[str] = field(default_factory=list)
    """Of the program."""
    ranks: int = 0
    """Processes."""
    leave: int | None = None
    """Exit code, if no launch follows."""
    line: str = ""
    """What to say about it."""
    wait_s: float = 0.0
    """Seconds before it starts."""
    barred: tuple[Layout, ...] = ()
    """Layouts that it must not choose."""
    gives_up: bool = False
    """Whether the run ends though it is not done, so that a person has to look."""


class RestartPolicy:
    """Remembers what happened to a run, and says what to do next.

    Args:
        flags: of the program, as the user gave them.
        limits: crashes that are gone on from.
        stored: reads the flags of the latest checkpoint in a folder.
        has_gpu: whether ranks have a GPU.
    """

    def __init__(
        self,
        flags: Sequence[str],
        *,
        limits: Limits | None = None,
        stored: Stored = stored_arguments,
        has_gpu: bool = False,
    ) -> None:
        self.flags = list(flags)
        self.budget, self.bars = Budget(limits or Limits()), Bars()
        self._fit = Fit(flags, stored=stored, has_gpu=has_gpu)
        self._stored = stored
        save = value_of(flags, "--save")
        self.save = Path(save) if save is not None else None
        self._at_start = self._at_crash = self._mark()
        self._launches = 1
        self._relaunched = False
        self._relaunched_from: int | None = None
        self._set_out: tuple[Layout, int] | None = None
        self._falls_back = False

    def first(self, ranks: int) -> Next:
        """The launch as the user wants it, or as it fits the ranks there are."""
        try:
            flags, line = self._fit.start(ranks)
        except NoFit as error:
            return _leave(USAGE, str(error))
        return Next(flags=flags, ranks=ranks, line=line)

    def after(self, ending: Ending, *, ranks: int, now_s: float) -> Next:
        """What follows a launch. The request decides; the code only where there is none.

        Args:
            ending: of that launch.
            ranks: that can be started now.
            now_s: on a monotonic clock.
        """
        self._take_in(ending.progress)
        request = ending.request
        try:
            if request is not None and request.kind != "relayout":
                left = {"done": DONE, "requeue": AGAIN, "abort": FAILED}[request.kind]
                line = "" if left == DONE else f"{request.kind}: {request.line}"
                return _leave(left, line, gives_up=left == FAILED)
            if ending.stopped_by is not None:
                return self._stopped(ending)
            if request is not None:
                following = self._relayout(request, ranks)
            elif ending.code in (DONE, USAGE):
                return _leave(ending.code)
            else:
                following = self._crashed(ending, ranks, now_s)
        except (ValueError, OSError) as error:
            problem = " ".join(str(error).split())
            return _leave(ending.code or FAILED, problem, gives_up=True)
        self._launches += following.leave is None
        if self._launches > MAX_LAUNCHES:
            return _leave(FAILED, f"started {MAX_LAUNCHES} times, that is enough", gives_up=True)
        return following

    def _take_in(self, progress: Progress) -> None:
        """Layouts that the launch was in; one that came nowhere was still meant for one."""
        set_out = [] if self._set_out is None else [self._set_out]
        take = self.bars.fall_back if self._falls_back else self.bars.enter
        for layout, iteration in progress.entered or set_out:
            take(layout, iteration)
            take = self.bars.enter
        self._set_out, self._falls_back = None, False

    def latest(self) -> int | None:
        """Iteration of the latest checkpoint.

        Raises:
            ValueError: the file that names it is damaged.
        """
        return None if self.save is None else files.read_latest(self.save)

    def _stopped(self, ending: Ending) -> Next:
        """Somebody wants the run to end, and it does not say that it is done."""
        if ending.request is not None:
            return _leave(AGAIN, f"stopped, to go on as {ending.request.layout}")
        if ending.stopped_by:
            return _leave(_SIGNALLED + ending.stopped_by)
        if ending.code in (DONE, USAGE):
            return _leave(ending.code)
        return _leave(AGAIN, f"not started again, as it has to stop: {_why(ending)}")

    def _relayout(self, request: Request, ranks: int) -> Next:
        assert request.layout is not None
        latest = self.latest()
        if request.layout.world_size > ranks:
            raise ValueError(f"{request.layout} is for more than the {ranks} ranks there are")
        if request.checkpoint is not None and latest is None:
            raise ValueError(f"asked to go on from {request.checkpoint}, which has no checkpoint")
        if self._relaunched and self._relaunched_from == latest:
            where = "before the first" if latest is None else f"since iteration {latest}"
            raise ValueError(f"asked to start again twice, no checkpoint {where}: {request.line}")
        self._relaunched, self._relaunched_from = True, latest
        return self._start(request, latest, request.line)

    def _crashed(self, ending: Ending, ranks: int, now_s: float) -> Next:
        why, step, failure = _why(ending), ending.progress.step, ending.failure
        mark, before = self._mark(), self._at_crash
        self._at_crash, self._falls_back = mark, True
        # A kill before the first step says nothing of why.
        blind = failure is None or (failure.code < 0 and step is None)
        enough = self.budget.crash(
            now_s=now_s,
            step=step,
            error=None if blind or failure is None else failure.signature,
            progressed=mark != before,
        )
        barred = self.bars.crash(step)
        if enough is not None:
            return _leave(ending.code, f"{enough}; the last: {why}", gives_up=True)
        latest = self.latest()
        if self.save is None or latest is None or mark == self._at_start:
            flags, fitted = self._fit.start(ranks)
            return Next(
                flags=flags,
                ranks=ranks,
                line=fitted or f"start again as at first: {why}, and nothing was saved yet",
                wait_s=self.budget.wait_s,
                barred=tuple(self.bars.barred),
            )
        stored = self._stored(self.save)
        request = self._fit.going_on(ranks, stored, layout=None, why=why)
        assert request.layout is not None
        instead = self.bars.instead_of(request.layout)
        if instead != request.layout and instead.world_size <= ranks:
            request = self._fit.going_on(ranks, stored, layout=instead, why=why)
        if barred is not None:
            why = f"{barred} is not taken again, it crashed twice as soon as it was entered; {why}"
        return self._start(request, latest, why, wait_s=self.budget.wait_s)

    def _start(
        self, request: Request, latest: int | None, why: str, *, wait_s: float = 0.0
    ) -> Next:
        assert request.layout is not None
        where = "from the start" if request.checkpoint is None else f"from iteration {latest}"
        self._set_out = request.layout, latest or 0
        return Next(
            flags=merged(self.flags, request),
            ranks=request.layout.world_size,
            line=f"start again under {request.layout} {where}: {why}",
            wait_s=wait_s,
            barred=tuple(self.bars.barred),
        )

    def _mark(self) -> tuple[int, ...] | None:
        """Something that any save changes."""
        try:
            found = (self.save or Path()).joinpath(files.TRACKER).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns


def _why(ending: Ending) -> str:
    if ending.failure is not None:
        return ending.failure.line
    return f"the ranks ended with {ending.code}"


def _leave(code: int, line: str = "", gives_up: bool = False) -> Next:
    if gives_up and code in _INVITING:
        code = FAILED
    return Next(leave=code, line=line, gives_up=gives_up)
