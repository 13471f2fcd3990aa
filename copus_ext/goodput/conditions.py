"""The conditions that a run trains under: what has become slower than usual, and what was measured
before that."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from copus_ext.cost_model.conditions import Timings
from copus_ext.cost_model.constants import USUAL, PartFactors

CHECK_STEPS = 100
"""While conditions are not usual, links are timed again after so many steps: the layout that the
run has changed to may not feel them."""
_MAX_OF_TIME = 0.01
"""Part of the time that this may take."""


@dataclass(kw_only=True)
class Conditions:
    """Part of the controller's state; the same on every rank."""

    factors: PartFactors = USUAL
    """Seconds of the parts of a step over the usual ones."""
    usual: Timings = field(default_factory=Timings)
    """What was timed by itself when this launch began."""
    num_changes: int = 0
    """How often conditions have changed."""
    steps_since_timed: int = 0
    """Steps since links were last timed."""
    seconds_since_timed: float = 0.0
    """Seconds that those steps took."""
    timing_s: float = 0.0
    """Seconds that timing links took, the last time that this run did it."""
    earlier_s: dict[str, float] = field(default_factory=dict)
    """Seconds of steps of configurations that were timed before the last change of conditions, by
    key, as they are expected since."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Conditions:
        """Reads what `dataclasses.asdict` gives."""
        parts = {"factors": PartFactors(**data["factors"]), "usual": Timings(**data["usual"])}
        return cls(**{**data, **parts})

    def add_step(self, seconds: float) -> None:
        self.steps_since_timed += 1
        self.seconds_since_timed += seconds

    def timed(self, seconds: float) -> None:
        """Links were timed, which took so long; the same on every rank."""
        self.timing_s, self.steps_since_timed, self.seconds_since_timed = seconds, 0, 0.0

    @property
    def is_check_due(self) -> bool:
        """Whether links should be timed although steps take what they took."""
        if self.factors == USUAL or self.steps_since_timed < CHECK_STEPS:
            return False
        return self.seconds_since_timed >= self.timing_s / _MAX_OF_TIME


def earlier_times(
    step_times: Mapping[str, list[float]],
    earlier_s: Mapping[str, float],
    *,
    present: str,
    ratio: Callable[[str], float | None],
) -> dict[str, float]:
    """What is expected of configurations that were timed under other conditions.

    Args:
        step_times: seconds by key, of the conditions before.
        earlier_s: what was expected of others under these.
        present: key of the present configuration, which is timed anew.
        ratio: predicted seconds of a configuration now over before; None: unknown, so that it is
            left out.
    """
    before = {**earlier_s, **{key: statistics.median(x) for key, x in step_times.items() if x}}
    found = {}
    for key, seconds in before.items():
        factor = None if key == present else ratio(key)
        if factor is not None:
            found[key] = factor * seconds
    return found
