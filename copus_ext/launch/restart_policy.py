"""What follows the end of a launch: the next one, or the end. No torch, no processes, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from copus_ext.launch.failure import Failure
from copus_ext.launch.layout_fit import LayoutFit, NoFit, Stored
from copus_ext.reshard.relaunch import Request, lost_flags, merged, value_of
from megatron.trainer.checkpoint import files
from megatron.trainer.config.layout import Layout
from megatron.trainer.logging.metrics import GENERATION_MARK, METRICS_FILE
from megatron.trainer.logging.tail_reader import Tail

MAX_LAUNCHES = 1001
"""The first and a thousand more."""
DONE, FAILED, USAGE, AGAIN = 0, 1, 2, 85
"""Exit codes of a supervisor that have a meaning."""
_SIGNALLED = 128
_INVITING = (AGAIN, _SIGNALLED + 10, _SIGNALLED + 15)
"""Exit codes on which a batch script starts the job again: AGAIN, and those after USR1 and TERM."""
ENTERED_STEPS = 20
"""A layout is to blame for a crash within so many steps of entering it."""
MAX_CRASHES_OF_LAYOUT = 2
"""Such crashes that block it."""
_HOUR_S = 3600.0
_MAX_RECORD_BYTES = 1 << 19
"""Read from the end of the record: thousands of steps, far more than `ENTERED_STEPS`."""


@dataclass(frozen=True, kw_only=True)
class CrashLimits:
    """Crashes after which a run goes on. A crash after a new checkpoint does not count.

    Raises:
        ValueError: one of them makes no sense.
    """

    per_hour: int = 3
    """Within any hour."""
    per_run: int = 10
    """Of one supervisor."""
    waits_s: tuple[float, ...] = (5.0, 15.0, 45.0)
    """Seconds before starting again: after the first crash since a checkpoint, the second ..."""

    def __post_init__(self) -> None:
        if self.per_hour < 0 or self.per_run < 0:
            raise ValueError("--max-crashes and --max-crashes-per-hour must be at least 0")
        if not self.waits_s or not all(0 <= wait <= _HOUR_S for wait in self.waits_s):
            raise ValueError("--restart-wait must be seconds between 0 and 3600")


class CrashBudget:
    """Counts the crashes of a run.

    Args:
        limits: crashes that are allowed.
    """

    def __init__(self, limits: CrashLimits) -> None:
        self.limits = limits
        self.num_crashes = 0
        """All, also those that do not count."""
        self.wait_s = 0.0
        """Seconds to wait before starting again, after the last crash."""
        self._counted_s: list[float] = []
        self._in_a_row = 0
        self._last: tuple[int | None, str] | None = None

    @property
    def num_counted(self) -> int:
        """Crashes without a new checkpoint before them."""
        return len(self._counted_s)

    def add(
        self, *, now_s: float, step: int | None, error: str | None, progressed: bool
    ) -> str | None:
        """Counts a crash.

        Args:
            now_s: on a monotonic clock.
            step: last step that was done; None if there was none.
            error: signature of the first error; None if it is unknown, or a signal from outside.
            progressed: a checkpoint was committed since the last crash, or the start.

        Returns:
            Why to give up, or None.
        """
        self.num_crashes += 1
        self._in_a_row = 1 if progressed else self._in_a_row + 1
        waits = self.limits.waits_s
        self.wait_s = waits[min(self._in_a_row, len(waits)) - 1]
        last, self._last = self._last, None if error is None else (step, error)
        if progressed:
            return None
        self._counted_s.append(now_s)
        if last is not None and last == self._last:
            where = "before the first step" if step is None else f"at step {step}"
            return f"two crashes {where} with the same error"
        allowed = f"{self.limits.per_hour} an hour and {self.limits.per_run} a run are allowed"
        if self.num_counted > self.limits.per_run:
            return f"{self.num_counted} crashes without a new checkpoint, {allowed}"
        lately = sum(now_s - then_s < _HOUR_S for then_s in self._counted_s)
        if lately > self.limits.per_hour:
            return f"{lately} crashes in an hour without a new checkpoint, {allowed}"
        return None


class LayoutHistory:
    """The layouts that a run was in. Blocks a layout in which it crashes as soon as it enters."""

    def __init__(self) -> None:
        self.blocked: list[Layout] = []
        """In the order in which they were blocked."""
        self._entered: list[tuple[Layout, int]] = []
        self._crashes: dict[Layout, int] = {}

    def enter(self, layout: Layout, iteration: int) -> None:
        """Notes that steps after `iteration` are taken under a layout."""
        if not self._entered or self._entered[-1][0] != layout:
            self._entered.append((layout, iteration))

    def fall_back(self, layout: Layout, iteration: int) -> None:
        """The same after a crash; going back to an earlier layout is not entering it anew."""
        if any(one == layout for one, _ in self._entered):
            while self._entered[-1][0] != layout:
                self._entered.pop()
        self.enter(layout, iteration)

    def crash(self, step: int | None) -> Layout | None:
        """Notes a crash under the layout entered last.

        Args:
            step: last step that was done; None if there was none under it.

        Returns:
            The layout, if this crash blocks it.
        """
        if self._before() is None:
            return None
        layout, since = self._entered[-1]
        if step is not None and step - since > ENTERED_STEPS:
            return None
        self._crashes[layout] = self._crashes.get(layout, 0) + 1
        if self._crashes[layout] < MAX_CRASHES_OF_LAYOUT or layout in self.blocked:
            return None
        self.blocked.append(layout)
        return layout

    def instead_of(self, layout: Layout) -> Layout:
        """The layout to start under: the wanted one, or the one before it if that is blocked."""
        return (self._before() or layout) if layout in self.blocked else layout

    def _before(self) -> Layout | None:
        """The last layout before the present one that is not blocked."""
        now = self._entered[-1][0] if self._entered else None
        earlier = [layout for layout, _ in self._entered if layout != now]
        return next((one for one in reversed(earlier) if one not in self.blocked), None)


@dataclass(frozen=True, kw_only=True)
class Progress:
    step: int | None = None
    """Last step that was done; None if there was none."""
    entered: list[tuple[Layout, int]] = field(default_factory=list)
    """Layouts that it entered lately, each with the steps done before."""


def progress_of(run_dir: Path, launch: str) -> Progress:
    """What the end of the run's record says of a launch; nothing, if it cannot be read."""
    step: int | None = None
    entered: list[tuple[Layout, int]] = []
    for record in Tail(run_dir / METRICS_FILE, max_bytes=_MAX_RECORD_BYTES).records():
        iteration = record.get("iteration")
        name = str(record.get("launch"))
        is_of_launch = name == launch or name.startswith(f"{launch}{GENERATION_MARK}")
        if not is_of_launch or not isinstance(iteration, int):
            continue
        if record.get("kind") == "step":
            step = iteration
        elif record.get("kind") in ("run.start", "layout"):
            try:
                entered.append((Layout.from_text(str(record.get("layout"))), iteration))
            except ValueError:
                continue
    return Progress(step=step, entered=entered)


@dataclass(frozen=True, kw_only=True)
class LaunchEnd:
    """How a launch ended, over all its nodes."""

    code: int
    """Exit code of the rank that failed first, 128 + N after signal N; 0 if none failed."""
    request: Request | None = None
    """What the run asked for."""
    failure: Failure | None = None
    """The first, if there was one."""
    progress: Progress = field(default_factory=Progress)
    """How far it came."""
    stopped_by: int | None = None
    """Signal that asked the supervisor to stop; 0 for a stop file without one."""

    @property
    def why(self) -> str:
        if self.failure is not None:
            return self.failure.line
        return f"the ranks ended with {self.code}"


@dataclass(frozen=True, kw_only=True)
class NextLaunch:
    flags: list[str] = field(default_factory=list)
    num_ranks: int = 0
    """To start."""
    exit_code: int | None = None
    """What the supervisor leaves with, if no launch follows."""
    line: str = ""
    wait_s: float = 0.0
    """Seconds before it starts."""
    blocked_layouts: tuple[Layout, ...] = ()
    """Layouts that it must not choose."""
    gives_up: bool = False
    """The run ends though it is not done, and a person has to look."""


def _end(code: int, line: str = "", *, gives_up: bool = False) -> NextLaunch:
    if gives_up and code in _INVITING:
        code = FAILED
    return NextLaunch(exit_code=code, line=line, gives_up=gives_up)


class RestartPolicy:
    """Remembers what happened to a run and decides what comes next.

    Args:
        flags: of the program, as the user gave them.
        stored: reads the flags of the latest checkpoint in a folder.
        limits: crashes after which it goes on.
    """

    def __init__(
        self,
        flags: Sequence[str],
        *,
        stored: Stored,
        limits: CrashLimits | None = None,
        has_gpu: bool = False,
    ) -> None:
        self.flags = list(flags)
        self.budget, self.layouts = CrashBudget(limits or CrashLimits()), LayoutHistory()
        self._fit = LayoutFit(flags, stored=stored, has_gpu=has_gpu)
        self._stored = stored
        save = value_of(flags, "--save")
        self.save = Path(save) if save is not None else None
        self._save_at_start = self._save_at_crash = self._save_mark()
        self._launches = 1
        self._relaunched = False
        self._relaunched_from: int | None = None
        self._planned: tuple[Layout, int] | None = None
        self._after_crash = False

    def first(self, num_ranks: int) -> NextLaunch:
        """The launch that the user wants, or one that fits the ranks there are."""
        try:
            flags, line = self._fit.first_flags(num_ranks)
        except NoFit as error:
            return _end(USAGE, str(error))
        return NextLaunch(flags=flags, num_ranks=num_ranks, line=line)

    def after(self, end: LaunchEnd, *, num_ranks: int, now_s: float) -> NextLaunch:
        """Decides what follows a launch. The request of the run decides, else the exit code.

        Args:
            now_s: on a monotonic clock.
        """
        self._note_layouts(end.progress)
        request = end.request
        try:
            if request is not None and request.kind != "relayout":
                code = {"done": DONE, "requeue": AGAIN, "abort": FAILED}[request.kind]
                line = "" if code == DONE else f"{request.kind}: {request.line}"
                return _end(code, line, gives_up=code == FAILED)
            if end.stopped_by is not None:
                return self._stopped(end)
            if request is not None:
                following = self._relayout(request, num_ranks)
            elif end.code in (DONE, USAGE):
                return _end(end.code)
            else:
                following = self._crashed(end, num_ranks, now_s)
        except (ValueError, OSError) as error:
            problem = " ".join(str(error).split())
            return _end(end.code or FAILED, problem, gives_up=True)
        self._launches += following.exit_code is None
        if self._launches > MAX_LAUNCHES:
            return _end(FAILED, f"started {MAX_LAUNCHES} times, that is enough", gives_up=True)
        return following

    def latest(self) -> int | None:
        """Iteration of the latest checkpoint.

        Raises:
            ValueError: the file that names it is damaged.
        """
        return None if self.save is None else files.read_latest(self.save)

    def _note_layouts(self, progress: Progress) -> None:
        """Notes the layouts of the launch; one that did no step still counts as in its own."""
        planned = [] if self._planned is None else [self._planned]
        note = self.layouts.fall_back if self._after_crash else self.layouts.enter
        for layout, iteration in progress.entered or planned:
            note(layout, iteration)
            note = self.layouts.enter
        self._planned, self._after_crash = None, False

    def _stopped(self, end: LaunchEnd) -> NextLaunch:
        """Somebody wants the run to end, and it does not say that it is done."""
        if end.request is not None:
            return _end(AGAIN, f"stopped, to go on as {end.request.layout}")
        if end.stopped_by:
            return _end(_SIGNALLED + end.stopped_by)
        if end.code in (DONE, USAGE):
            return _end(end.code)
        return _end(AGAIN, f"not started again, as it has to stop: {end.why}")

    def _relayout(self, request: Request, num_ranks: int) -> NextLaunch:
        assert request.layout is not None
        latest = self.latest()
        if request.layout.world_size > num_ranks:
            raise ValueError(f"{request.layout} is for more than the {num_ranks} ranks there are")
        if request.checkpoint is not None and latest is None:
            raise ValueError(f"asked to go on from {request.checkpoint}, which has no checkpoint")
        if self._relaunched and self._relaunched_from == latest:
            where = "before the first" if latest is None else f"since iteration {latest}"
            raise ValueError(f"asked to start again twice, no checkpoint {where}: {request.line}")
        self._relaunched, self._relaunched_from = True, latest
        return self._start(request, latest, request.line)

    def _crashed(self, end: LaunchEnd, num_ranks: int, now_s: float) -> NextLaunch:
        why, step, failure = end.why, end.progress.step, end.failure
        mark, before = self._save_mark(), self._save_at_crash
        self._save_at_crash, self._after_crash = mark, True
        # Before the first step no signal tells its reason: many things end a start.
        is_unknown = (
            failure is None or failure.is_from_outside or (failure.code < 0 and step is None)
        )
        enough = self.budget.add(
            now_s=now_s,
            step=step,
            error=None if is_unknown or failure is None else failure.signature,
            progressed=mark != before,
        )
        blocked = self.layouts.crash(step)
        if enough is not None:
            return _end(end.code, f"{enough}; the last: {why}", gives_up=True)
        latest = self.latest()
        if self.save is None or latest is None or mark == self._save_at_start:
            flags, fitted = self._fit.first_flags(num_ranks)
            return NextLaunch(
                flags=flags,
                num_ranks=num_ranks,
                line=fitted or f"start again as at first: {why}, and nothing was saved yet",
                wait_s=self.budget.wait_s,
                blocked_layouts=tuple(self.layouts.blocked),
            )
        stored = self._stored(self.save)
        go_on = partial(self._fit.resume_request, num_ranks, stored, why=why)
        request = go_on(layout=None, blocked=self.layouts.blocked)
        assert request.layout is not None
        instead = self.layouts.instead_of(request.layout)
        if instead != request.layout and instead.world_size <= num_ranks:
            request = go_on(layout=instead, blocked=self.layouts.blocked)
        if blocked is not None:
            why = f"{blocked} is not taken again, it crashed twice as soon as it was entered; {why}"
        return self._start(request, latest, why, stored=stored, wait_s=self.budget.wait_s)

    def _start(
        self,
        request: Request,
        latest: int | None,
        why: str,
        *,
        stored: Mapping[str, Any] = MappingProxyType({}),
        wait_s: float = 0.0,
    ) -> NextLaunch:
        assert request.layout is not None
        where = "from the start" if request.checkpoint is None else f"from iteration {latest}"
        where_to: Any = {"stored": stored, "blocked": self.layouts.blocked}
        if lost := lost_flags(self.flags, request, **where_to):
            why += f"; {lost}"
        self._planned = request.layout, latest or 0
        return NextLaunch(
            flags=merged(self.flags, request, **where_to),
            num_ranks=request.layout.world_size,
            line=f"start again under {request.layout} {where}: {why}",
            wait_s=wait_s,
            blocked_layouts=tuple(self.layouts.blocked),
        )

    def _save_mark(self) -> tuple[int, ...] | None:
        try:
            found = (self.save or Path()).joinpath(files.TRACKER).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns
