"""The schedules of a run that starts again under another layout. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from copus_ext.reshard.relaunch import Request, ScheduleFlags, number_of, value_of, without_flags
from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.layout import Layout
from megatron.trainer.extras.phases.schedule import Position, parse_positions, planned_starts

_LENGTHS = "--seq-length-schedule"
_MICROS, _LAYOUTS = "--micro-batch-size-schedule", "--layout-schedule"


class PhaseSchedule:
    """See `copus_ext.reshard.relaunch.RelaunchSchedule`."""

    def layout(self, stored: Mapping[str, Any]) -> Layout | None:
        """The layout of the phase that begins just where a checkpoint stands."""
        starts, layouts = stored.get("phase_starts") or (), stored.get("phase_layouts") or ()
        by_start: dict[int, str] = dict(zip(starts, layouts))
        begins = by_start.get(stored.get("consumed_train_samples") or 0)
        return None if begins is None else Layout.from_text(begins)

    def follow(
        self,
        argv: Sequence[str],
        request: Request,
        stored: Mapping[str, Any],
        blocked: Collection[Layout],
    ) -> ScheduleFlags:
        """The layout holds for the phase in which the run goes on. Later phases take theirs from
        the schedule, unless it is blocked or for another number of ranks. Where phases of the
        schedule have begun on as many ranks, the flags of the first phase stay, and the layout
        takes its place in the schedule. The schedule of micro-batches goes where the first
        micro-batch changes. One that cannot be read stays, for the trainer to say."""
        return _Entries(argv, request, stored, blocked).flags()


@dataclass(frozen=True)
class _Entries:
    """The entries of the schedules of a run, as they are when it starts again."""

    argv: Sequence[str]
    request: Request
    stored: Mapping[str, Any]
    blocked: Collection[Layout]

    def flags(self) -> ScheduleFlags:
        place, lost = self._place(), self._lost()
        own: list[str] = []
        if self.request.micro_batch_size in (None, number_of(self.argv, "--micro-batch-size")):
            micros = _entries(self.argv, _MICROS)
            # The first entry says what the flag says.
            own += _schedule(_MICROS, [w for p, w in micros if p is None or p.amount > 0])
        before, later = [], []
        for position, word in _entries(self.argv, _LAYOUTS):
            samples = self._samples_before(position)
            if not self._has_begun(position):
                later += [] if word in lost else [word]
            elif place is not None and samples is not None and samples < place[0]:
                before.append(word)
        now = [] if place is None else [f"{place[1]}:{self.request.layout}"]
        return ScheduleFlags(
            others=without_flags(self.argv, {_MICROS, _LAYOUTS}, ()),
            own=own + _schedule(_LAYOUTS, [*before, *now, *later]),
            has_layout=place is not None,
            lost=f"{_LAYOUTS} loses {' '.join(lost)}, where the layout stays" if lost else "",
        )

    def _place(self) -> tuple[int, str] | None:
        """Where the phase begins in which the run goes on, in samples and as the flags say it, if
        the schedule of layouts is for as many ranks, so that the flags of the first phase can stay.
        None for the first phase."""
        assert self.request.layout is not None
        layouts = _entries(self.argv, _LAYOUTS)
        if self.request.layout.world_size not in {_ranks_of(word) for _, word in layouts}:
            return None
        begun: list[tuple[int, str]] = []
        for flag in (_LENGTHS, _MICROS, _LAYOUTS):
            for position, word in _entries(self.argv, flag):
                samples = self._samples_before(position)
                if samples is not None and 0 < samples <= self.request.consumed_samples:
                    begun.append((samples, word.partition(":")[0]))
        return max(begun, default=None)

    def _lost(self) -> list[str]:
        """Entries of `--layout-schedule` whose phases come later, and whose layouts are blocked or
        for another number of ranks."""
        assert self.request.layout is not None
        lost = []
        for position, word in _entries(self.argv, _LAYOUTS):
            with contextlib.suppress(ValueError):
                layout = Layout.from_text(word.partition(":")[2])
                has_ranks = layout.world_size == self.request.layout.world_size
                fits = has_ranks and layout not in self.blocked
                if not fits and not self._has_begun(position):
                    lost.append(word)
        return lost

    def _has_begun(self, position: Position | None) -> bool:
        """Whether the run has reached the phase that begins at a position, if that is known."""
        samples = self._samples_before(position)
        return samples is not None and samples <= self.request.consumed_samples

    def _samples_before(self, position: Position | None) -> int | None:
        """Samples before the phase that begins at a position: as planned, or as asked for where the
        run has not planned the phase. None where the position or the run's length is unknown."""
        if position is None or position.amount == 0:
            return None if position is None else 0
        length, total = self.stored.get("seq_length"), self.stored.get("train_samples")
        if length is None or total is None:
            return None
        asked = position.samples(seq_length=length, train_samples=total)
        return planned_starts(self.stored).get(asked, asked)


def _schedule(flag: str, words: Sequence[str]) -> list[str]:
    return [flag, " ".join(words)] if words else []


def _ranks_of(word: str) -> int | None:
    """Ranks of the layout of an entry; None if it names none."""
    with contextlib.suppress(ValueError):
        return Layout.from_text(word.partition(":")[2]).world_size
    return None


def _entries(argv: Sequence[str], flag: str) -> list[tuple[Position | None, str]]:
    """The words of a schedule with their positions; None where they cannot be read."""
    words = (value_of(argv, flag) or "").split()
    try:
        positions = [position for position, _ in parse_positions(" ".join(words), flag)]
    except UsageError:
        return [(None, word) for word in words]
    return list(zip(positions, words, strict=True))
