"""Notices that the steps of the present configuration have become slower or faster for good.

Two sums (CUSUM, E. S. Page 1954) add up how far the logarithms of step times lie above and below
their usual value, in units of their scatter, less an allowance. Single outliers count little, as
their distance is cut off. A change counts when a sum is large, has grown for a while, and the
median since then lies elsewhere.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

FIRST_STEPS = 30
"""Steps of a configuration before anything is compared with them."""
_REFERENCE_STEPS = 100
_MAX_NEWEST = 200
_ALLOWANCE, _CUT, _LIMIT = 0.75, 3.0, 12.0
MIN_STEPS = 15
"""Steps that a change has to last."""
UNSURE_STEPS = 60
"""Steps after which a sum that grows is no reason to wait any more."""
_DRIFT_STEPS = 2 * UNSURE_STEPS
"""Steps that all lie on one side of the usual ones; after so many they count as usual."""
_SURE_STEPS, _MAX = 10, 0.6
MIN_SHIFT = 0.04
"""Least change, as a logarithm, that counts."""
_MIN_SCATTER = 0.01
_TO_SD = 1.4826
"""From the median absolute deviation to the standard deviation of a Gaussian."""


@dataclass(frozen=True, kw_only=True)
class StepTimeShift:
    """A lasting change of the step time of one configuration."""

    key: str
    """Of the configuration."""
    before_s: float
    """Median seconds before."""
    after_s: float
    """Median seconds since."""
    steps: int
    """Newest steps, all of them after the change."""

    @property
    def ratio(self) -> float:
        """Seconds since over seconds before."""
        return self.after_s / self.before_s


@dataclass(kw_only=True)
class StepTimeWatch:
    """Step times of the present configuration; plain JSON types, a part of the controller's
    state."""

    key: str = ""
    """Of the configuration."""
    reference: list[float] = field(default_factory=list)
    """ln(seconds) of its usual steps."""
    newest: list[float] = field(default_factory=list)
    """ln(seconds) of the newest steps."""
    above: float = 0.0
    """How far the steps lie above the usual ones, added up."""
    above_steps: int = 0
    """Steps since that began to grow."""
    below: float = 0.0
    """How far they lie below."""
    below_steps: int = 0
    """Steps since that began to grow."""
    anchor: float | None = None
    """ln(seconds) of the usual steps before the first of some small drifts."""

    def __post_init__(self) -> None:
        self._usual: tuple[float, float] | None = None

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StepTimeWatch:
        """Reads what `dataclasses.asdict` gives."""
        return cls(**data)

    @property
    def is_unsure(self) -> bool:
        """Whether a change may just be under way, so that the newest step times mislead."""
        arms = (self.above, self.above_steps), (self.below, self.below_steps)
        return any(total > _LIMIT / 2 and steps < UNSURE_STEPS for total, steps in arms)

    def add(self, key: str, seconds: float) -> StepTimeShift | None:
        """Takes a step after the warm-up of its configuration.

        Args:
            key: of the configuration; another one starts anew.
            seconds: wall time.

        Returns:
            A change that has become certain with this step; the watch then starts anew.
        """
        if key != self.key:
            self._start(key)
        value = math.log(max(seconds, 1e-9))
        self.newest.append(value)
        del self.newest[:-_MAX_NEWEST]
        if len(self.reference) < FIRST_STEPS:
            self._learn(value)
            return None
        usual, scatter = self._measure()
        z = min(max((value - usual) / scatter, -_CUT), _CUT)
        self.above = max(self.above + z - _ALLOWANCE, 0.0)
        self.above_steps = self.above_steps + 1 if self.above else 0
        self.below = max(self.below - z - _ALLOWANCE, 0.0)
        self.below_steps = self.below_steps + 1 if self.below else 0
        found = self._shift(self.above, self.above_steps) or self._shift(
            self.below, self.below_steps
        )
        if found is not None:
            self._start(key, self.newest[-found.steps :])
        elif max(self.above, self.below) < _LIMIT / 2 and len(self.reference) < _REFERENCE_STEPS:
            self._learn(value)
        elif max(self.above_steps, self.below_steps) >= _DRIFT_STEPS:
            return self._drifted(usual)
        return found

    def _drifted(self, usual: float) -> StepTimeShift | None:
        """Takes the newest steps for the usual ones, as a drift too small for a change would blur
        the next one. Several drifts together may be a change."""
        before = usual if self.anchor is None else self.anchor
        self._start(self.key, self.newest[-UNSURE_STEPS:])
        after = statistics.median(self.reference)
        if abs(after - before) < MIN_SHIFT:
            self.anchor = before
            return None
        return StepTimeShift(
            key=self.key,
            before_s=math.exp(before),
            after_s=math.exp(after),
            steps=len(self.reference),
        )

    def _start(self, key: str, reference: list[float] | None = None) -> None:
        self.key = key
        self.reference = list(reference or [])[-_REFERENCE_STEPS:]
        self.newest = list(self.reference)
        self.above = self.below = 0.0
        self.above_steps = self.below_steps = 0
        self.anchor = self._usual = None

    def _learn(self, value: float) -> None:
        self.reference.append(value)
        self._usual = None

    def _measure(self) -> tuple[float, float]:
        """The usual value and the scatter around it."""
        if self._usual is None:
            usual = statistics.median(self.reference)
            away = statistics.median(abs(x - usual) for x in self.reference)
            self._usual = usual, max(_TO_SD * away, _MIN_SCATTER)
        return self._usual

    def _shift(self, total: float, steps: int) -> StepTimeShift | None:
        if total < _LIMIT or steps < MIN_STEPS:
            return None
        usual, scatter = self._measure()
        # The first of them were before the change, if the sum was not quite 0.
        steps = min(max(2 * steps // 3, _SURE_STEPS), len(self.newest))
        after = statistics.median(self.newest[-steps:])
        least = max(MIN_SHIFT, 3.0 * 1.25 * scatter / math.sqrt(steps))
        if abs(after - usual) < least:
            return None
        newest = self.newest[-MIN_STEPS:]
        if sum((x - usual) / (after - usual) > 0.5 for x in newest) < _MAX * len(newest):
            return None
        return StepTimeShift(
            key=self.key, before_s=math.exp(usual), after_s=math.exp(after), steps=steps
        )
