"""Chrome traces of some steps by torch's own profiler, the phases of a run named: `--profile`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.trainer.common.control import TRACES
from megatron.trainer.common.trace import NO_SPAN, Span, Trace

if TYPE_CHECKING:
    from megatron.trainer.config import LoggingConfig

logger = logging.getLogger(__name__)


class Bystander(Trace):
    """Waits for the ranks that write their traces, which may take long.

    Args:
        end: steps done after which they write.
        busy: entered meanwhile.
        meet: returns when all ranks have called it.
    """

    def __init__(self, *, end: int, busy: Callable[[], Span], meet: Callable[[], object]) -> None:
        self._end, self._busy, self._meet = end, busy, meet
        self._has_met = False

    def step(self, done: int) -> None:
        """Waits, once."""
        if done >= self._end and not self._has_met:
            self._has_met = True
            with self._busy():
                self.write()
                self._meet()

    def write(self) -> None:
        """Does its own part of what all wait for."""


class StepTrace(Bystander):
    """Traces the steps from one to another on this rank, after one step to warm the profiler up.

    Never fails: a profiler or a disk that does costs a line, and the trace.

    Args:
        folder: where the trace goes, as `<name>.steps<first>-<last>.json.gz`; made if missing.
        start: steps done before the first one that is traced.
        end: steps done after the last one.
        is_cuda: trace the GPU's kernels, too.
        busy: entered while traces are written, which may take long.
        meet: returns when all ranks have called it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        start: int,
        end: int,
        is_cuda: bool,
        busy: Callable[[], Span] = contextlib.nullcontext,
        meet: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(end=end, busy=busy, meet=meet)
        self._folder = folder
        self._name, self._start, self._is_cuda = name, start, is_cuda
        self._profiler: Any = None
        self._named: Callable[[str], Span] = lambda name: NO_SPAN
        self._first = self._done = 0
        self._was_open = False

    def span(self, name: str) -> Span:
        """A phase, for as long as it is entered; costs nothing outside the steps of the flags."""
        return NO_SPAN if self._profiler is None else self._named(name)

    def step(self, done: int) -> None:
        """Opens the trace, goes on with it, or writes it."""
        self._done = done
        super().step(done)
        if self._profiler is not None:
            self._try(self._profiler.step)
        elif not self._was_open and self._start - 1 <= done < self._end:
            self._was_open = True
            self._try(self._open)

    def __exit__(self, failure: type[BaseException] | None, *exc: object) -> None:
        """Writes what there is of a trace that the run ended in. A run that failed leaves at once:
        the launcher waits to hear of it, and a broken GPU would not answer."""
        if self._profiler is not None and failure is None:
            self._done += 1
            with self._busy():
                self._try(self._close)
        elif self._profiler is not None:
            logger.warning("--profile: the run failed in the steps traced; the trace is lost")
        elif not self._was_open and failure is None:
            flags = f"--profile-step-start {self._start} --profile-step-end {self._end}"
            logger.warning("nothing was traced: this launch made no step of %s", flags)

    def _open(self) -> None:
        # Not for those who only ask for the flags.
        from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

        warms_up = self._done < self._start
        self._first = self._done + 1 + warms_up
        activities = [ProfilerActivity.CPU]
        if self._is_cuda:
            activities.append(ProfilerActivity.CUDA)

        def schedule(number: int) -> ProfilerAction:
            is_warm = number > 0 or not warms_up
            return ProfilerAction.RECORD if is_warm else ProfilerAction.WARMUP

        profiler = profile(activities=activities, schedule=schedule, acc_events=True)
        profiler.start()
        self._profiler, self._named = profiler, record_function

    def write(self) -> None:
        if self._profiler is not None:
            self._try(self._close)

    def _close(self) -> None:
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        # Steps after the last one may have been passed over.
        last = min(self._done, self._end)
        profiler.stop()
        if last < self._first:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        stem = f"{self._name}.steps{self._first}-{last}.json"
        path = self._folder / f"{stem}.gz"
        unfinished = self._folder / f"{stem}.unfinished.gz"  # torch zips what ends so
        try:
            profiler.export_chrome_trace(str(unfinished))
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        logger.info("traced steps %d to %d: %s", self._first, last, path)

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            logger.warning("--profile: the trace is lost: %r", error)
            profiler, self._profiler = self._profiler, None
            if profiler is not None:
                # Left on it would cost every step that follows.
                with contextlib.suppress(Exception):
                    profiler.stop()


def open_trace(
    flags: LoggingConfig,
    run_dir: Path,
    *,
    launch: str,
    rank: int,
    world_size: int,
    is_cuda: bool,
    busy: Callable[[], Span] = contextlib.nullcontext,
    meet: Callable[[], object] = lambda: None,
) -> Trace:
    """What the flags ask for on a rank.

    Args:
        flags: its `profile*` fields.
        is_cuda: whether it computes on a GPU.
        busy: see `StepTrace`.
        meet: see `StepTrace`.
    """
    if not flags.profile:
        return Trace()
    beyond = sorted(r for r in flags.profile_ranks if r >= world_size)
    if rank == 0 and beyond:
        # No error: a launch on what is left of a machine must not end with it.
        told = " ".join(map(str, beyond))
        logger.warning("--profile-ranks %s: there are %d ranks, from 0 on", told, world_size)
    if rank not in flags.profile_ranks:
        return Bystander(end=flags.profile_step_end, busy=busy, meet=meet)
    return StepTrace(
        run_dir / TRACES,
        name=f"{launch}.rank{rank}",
        start=flags.profile_step_start,
        end=flags.profile_step_end,
        is_cuda=is_cuda,
        busy=busy,
        meet=meet,
    )
