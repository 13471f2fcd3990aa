"""The newest steps of a run, and what a change of configuration did to them.

Before and after are measured by one clock: the same kinds of steps are left out on both sides.
Evaluations and checkpoints lie between steps, so that no step's time holds them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from copus_ext.goodput.config_change import ConfigChange

WARM_UP_STEPS = 3
"""First steps of a launch, and after a change of configuration, that are not timed."""
MIN_TIMED_STEPS = 5
"""Step times from which a configuration counts as measured."""
WINDOW_STEPS = 50
"""Steps before and after a change over which its outcome is measured."""


@dataclass(kw_only=True)
class StepRecord:
    iteration: int = 0
    """Steps of the run, this one included."""
    key: str = ""
    """Of its configuration, from `config_key`."""
    consumed_samples: int
    """Samples of the run, this step's included."""
    global_batch_size: int
    """Samples of the step."""
    loss: float
    """Nats per token."""
    seconds: float
    """Wall time on the slowest rank."""
    updated: bool
    """Whether the weights changed."""
    is_warm: bool = True
    """Whether it is none of the first steps of its configuration or launch."""
    measures_noise: bool = False
    """Whether the noise scale was measured in it, which takes time."""

    @property
    def is_timed(self) -> bool:
        """Whether its time tells the speed of its configuration."""
        return self.is_warm and self.updated


def of_one_configuration(steps: Sequence[StepRecord], key: str) -> list[StepRecord]:
    """The newest steps, as far as they are all of one configuration."""
    newest = itertools.takewhile(lambda step: step.key == key, reversed(steps))
    return list(newest)[::-1]


def by_one_clock(
    before: Sequence[StepRecord], after: Sequence[StepRecord]
) -> tuple[list[StepRecord], list[StepRecord]]:
    """The steps of both sides whose times compare: timed ones, and without those that measured the
    noise scale if both sides have enough others."""
    timed = [[step for step in side if step.is_timed] for side in (before, after)]
    plain = [[step for step in side if not step.measures_noise] for side in timed]
    first, second = plain if min(map(len, plain)) >= MIN_TIMED_STEPS else timed
    return first, second


def measure_before(
    change: ConfigChange, steps: Sequence[StepRecord], *, num_losses: int
) -> list[StepRecord]:
    """Fills in the losses before a change.

    Args:
        change: without them.
        steps: newest steps, all before it.
        num_losses: of the newest that the mean is taken over.

    Returns:
        The steps of that mean whose loss was finite.
    """
    # Losses of other batches scatter by another deviation.
    own = [s for s in steps[-num_losses:] if s.global_batch_size == change.from_batch]
    own = [s for s in own if math.isfinite(s.loss)]
    losses = [s.loss for s in own]
    change.loss_before = statistics.fmean(losses) if losses else None
    change.loss_sd_before = statistics.stdev(losses) if len(losses) > 1 else None
    return own


def measure_outcome(change: ConfigChange, steps: Sequence[StepRecord]) -> None:
    """Fills in the outcome of a change.

    Args:
        change: without its outcome.
        steps: newest steps of the run, before and after it.
    """
    earlier = [s for s in steps if s.consumed_samples <= change.consumed_samples]
    since = steps[len(earlier) :]
    before = of_one_configuration(earlier, change.from_key)[-WINDOW_STEPS:]
    after = [s for s in since if s.key == change.to_key]
    sides = by_one_clock(before, after)
    # Fewer steps are no measurement, as for a decision.
    timed_before, timed = (side if len(side) >= MIN_TIMED_STEPS else [] for side in sides)
    change.steps = len(after)
    change.samples_per_s_before, change.samples_per_s = _speed(timed_before), _speed(timed)
    change.timed_before, change.timed_after = _range(timed_before), _range(timed)
    change.slope_before, change.loss_slope = slope(before), slope(after)
    change.speed_over_predicted = None
    if change.samples_per_s and change.predicted_samples_per_s:
        change.speed_over_predicted = change.samples_per_s / change.predicted_samples_per_s
    losses = [s.loss for s in after[:WINDOW_STEPS] if math.isfinite(s.loss)]
    if losses and change.loss_before is not None:
        change.loss_rise = max(losses) - change.loss_before
    if sides[1]:
        median = statistics.median(step.seconds for step in sides[1])
        change.pause_s = max(after[0].seconds - median, 0.0) if median else None


def slope(steps: Sequence[StepRecord]) -> float | None:
    """Loss per thousand samples, by least squares."""
    finite = [step for step in steps if math.isfinite(step.loss)]
    if len(finite) < 3:
        return None
    x = [step.consumed_samples / 1000.0 for step in finite]
    return statistics.linear_regression(x, [step.loss for step in finite]).slope


def _speed(steps: Sequence[StepRecord]) -> float | None:
    """Samples per second of the median step."""
    speeds = [step.global_batch_size / max(step.seconds, 1e-9) for step in steps]
    return statistics.median(speeds) if speeds else None


def usual_step_s(seconds: Sequence[float], period: int) -> float:
    """Seconds of a usual step, of which some in a period may take longer: the median over whole
    periods of their means, or over all steps while there is no whole one.

    Args:
        seconds: of steps in order, at least one.
        period: steps after which the work repeats; see `Extra.step_period`.
    """
    begins = range(0, len(seconds) - period + 1, period)
    means = [statistics.fmean(seconds[i : i + period]) for i in begins]
    return statistics.median(means or seconds)


def _range(steps: Sequence[StepRecord]) -> list[int]:
    """First and last step, and how many there are; empty for none."""
    return [steps[0].iteration, steps[-1].iteration, len(steps)] if steps else []
