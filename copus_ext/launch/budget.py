"""How often a run may crash before it is given up, and which layouts crash as soon as they are
entered. Pure: no clock, no processes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.config.layout import Layout

ENTERED_STEPS = 20
"""A crash within so many steps of entering a layout is laid at its door."""
MOST_OF_A_LAYOUT = 2
"""Such crashes that bar it."""
_HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Crashes that are gone on from. One that a new checkpoint came before does not count.

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


class Budget:
    """Counts the crashes of a run.

    Args:
        limits: what is allowed.
    """

    def __init__(self, limits: Limits) -> None:
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

    def crash(
        self, *, now_s: float, step: int | None, error: str | None, progressed: bool
    ) -> str | None:
        """Takes a crash in.

        Args:
            now_s: on a monotonic clock.
            step: last step that was done; None if there was none.
            error: what went wrong first; None where it says nothing, as a kill from outside.
            progressed: whether a checkpoint was committed since the last crash, or the start.

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
        if self.num_counted > self.limits.per_run:
            return f"{self.num_counted} crashes without a new checkpoint, {self._allowed}"
        lately = sum(now_s - then_s < _HOUR_S for then_s in self._counted_s)
        if lately > self.limits.per_hour:
            return f"{lately} crashes in an hour without a new checkpoint, {self._allowed}"
        return None

    @property
    def _allowed(self) -> str:
        return f"{self.limits.per_hour} an hour and {self.limits.per_run} a run are allowed"


class Bars:
    """Remembers which layouts a run was in, and bars those that it crashes in at once."""

    def __init__(self) -> None:
        self.barred: list[Layout] = []
        """In the order in which they were barred."""
        self._entered: list[tuple[Layout, int]] = []
        self._crashes: dict[Layout, int] = {}

    def enter(self, layout: Layout, iteration: int) -> None:
        """Takes in that steps after `iteration` are taken under a layout."""
        if not self._entered or self._entered[-1][0] != layout:
            self._entered.append((layout, iteration))

    def fall_back(self, layout: Layout, iteration: int) -> None:
        """The same after a crash: going back to a layout is not entering it anew."""
        while self._entered and self._entered[-1][0] != layout and self._was_in(layout):
            self._entered.pop()
        self.enter(layout, iteration)

    def crash(self, step: int | None) -> Layout | None:
        """Takes in a crash under the layout entered last.

        Args:
            step: last step that was done; None if there was none under it.

        Returns:
            The layout, if this bars it.
        """
        if self._before() is None:
            return None
        layout, since = self._entered[-1]
        if step is not None and step - since > ENTERED_STEPS:
            return None
        self._crashes[layout] = self._crashes.get(layout, 0) + 1
        if self._crashes[layout] < MOST_OF_A_LAYOUT or layout in self.barred:
            return None
        self.barred.append(layout)
        return layout

    def instead_of(self, layout: Layout) -> Layout:
        """The layout to start under where `layout` was asked for: the one before it, if it is
        barred."""
        return (self._before() or layout) if layout in self.barred else layout

    def _was_in(self, layout: Layout) -> bool:
        return any(one == layout for one, _ in self._entered)

    def _before(self) -> Layout | None:
        """The last layout before the present one that is not barred."""
        now = self._entered[-1][0] if self._entered else None
        earlier = [layout for layout, _ in self._entered if layout != now]
        return next((one for one in reversed(earlier) if one not in self.barred), None)
