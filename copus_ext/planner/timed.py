"""What was predicted of a run that the user timed, what it took, and what its row becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from copus_ext.planner.configuration import Configuration
from copus_ext.planner.profile import Timing
from copus_ext.planner.search import Planner

_FAR_OFF = 5.0
"""Factor between prediction and time from which on the time is doubted."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A run beside its prediction."""

    configuration: Configuration
    predicted_s: float
    """Seconds of a step by the constants alone."""
    measured_s: float
    """Seconds that it took."""
    factor: float
    """What all that is known of times multiplies the prediction by."""
    of_parts: float
    """The share of `factor` that the factors of the parts of a step have in it."""

    @property
    def is_far_off(self) -> bool:
        """Whether the time is too far off to be taken without a question."""
        ratio = self.measured_s / self.predicted_s
        return max(ratio, 1.0 / ratio) > _FAR_OFF

    def __str__(self) -> str:
        times = f"predicted {self.predicted_s:.3g} s, measured {self.measured_s:.4g} s"
        return f"{self.configuration}: {times} (x {self.measured_s / self.predicted_s:.2f})"

    def shares(self) -> str:
        """Where the difference goes, in words."""
        other = self.factor / self.of_parts
        return (
            f"counted as x {self.factor:.2f}: x {self.of_parts:.2f} by the parts of a step, "
            f"x {other:.2f} by a factor of all rows, some of it only of rows like this one"
        )


def timed(planner: Planner, ran: Sequence[Timing]) -> list[Timed]:
    """Some runs that correct a planner, beside their predictions."""
    found = []
    for timing in ran:
        predicted_s, factor, of_parts = planner.correction_of(timing.configuration)
        found.append(
            Timed(
                configuration=timing.configuration,
                predicted_s=predicted_s,
                measured_s=timing.step_s,
                factor=factor,
                of_parts=of_parts,
            )
        )
    return found
