"""How much time the rest of a run could save by another batch, micro-batch or layout.

A batch of B samples needs 1 + B / Phi samples for each unit of progress, Phi the critical batch
size. Phi grows on the way, so that no single batch is best throughout. Where a step takes a + b B
seconds, a perfect schedule of batches saves

    2 k (1 - m) / (1 + k)^2,   k = sqrt(h E[1 / Phi]),   m = E[Phi^-1/2] / sqrt(E[1 / Phi])

over the best fixed batch, h = a / b, expectations over progress. So nothing is to be gained where
the fixed cost of a step is worth far fewer samples than the critical batch size. This module takes
the throughputs as they are instead, and the course of Phi that is believed. Pauses are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from copus_ext.goodput.belief import (
    EARLIEST,
    Belief,
    amount_words,
    published_critical_batch_size,
)
from copus_ext.goodput.inputs import ConfigThroughput, DecisionInputs
from copus_ext.planner.plan import Plan

WORTH = 0.02
"""Share of the time from which another batch is worth looking for."""
_INTERVALS = 300
_SHOWN = 0.005
"""Share of the time from which a line names it."""
_PRESENT = "can save", "is", "are", "takes"
_PAST = "could have saved", "was", "were", "took"

Source = Literal["measured", "published"]


# The trajectory of the critical batch size.


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """The critical batch size over the rest of a run, in intervals of progress."""

    progress: Any
    """[intervals] of each, in samples of vanishingly small batches."""
    critical_batch_size: Any
    """[intervals] in it, samples."""


def trajectories(belief: Belief, *, start: float, batch: float) -> list[Trajectory]:
    """What is believed of the rest of a run: the likely course first, then those one standard
    deviation below and above it. All hold the same samples of the present batch.

    Args:
        belief: about the critical batch size.
        start: samples consumed.
        batch: present one, samples.

    Raises:
        ValueError: nothing is left of the run.
    """
    if not 0 <= start < belief.end:
        raise ValueError(f"nothing is left of {belief.end:g} samples after {start:g}")
    edges = np.geomspace(max(start, EARLIEST * belief.end), belief.end, _INTERVALS + 1)
    mean, sd = belief.log_critical_batch_size(np.sqrt(edges[1:] * edges[:-1]))
    courses = [np.exp(mean + sds * sd) for sds in (0.0, -1.0, 1.0)]
    return [
        Trajectory(progress=np.diff(edges) / (1.0 + batch / phi), critical_batch_size=phi)
        for phi in courses
    ]


def source_of(belief: Belief) -> Source:
    """What a belief rests on."""
    return "measured" if belief.looks else "published"


# The figures.


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A share of the time that the rest of the run takes as it is."""

    likely: float
    """On the likely trajectory of the critical batch size."""
    low: float
    """Least over the trajectories that are believed."""
    high: float
    """Most over them."""

    @classmethod
    def over(cls, values: Sequence[float]) -> Saving:
        """Of the values on all trajectories, the likely one first."""
        return cls(likely=values[0], low=min(values), high=max(values))

    def __str__(self) -> str:
        """In percent."""
        return f"about {_percent(self.likely)} % ({_percent(self.low)} to {_percent(self.high)})"


@dataclass(frozen=True, kw_only=True)
class Headroom:
    """What is to be gained until the end of a run, as shares of the time that it takes as it is."""

    adapting: Saving
    """The best batch at every moment over the best fixed one."""
    batch: Saving
    """The best batch at every moment over the present one, on the present layout."""
    micro_batch: float
    """The best micro-batch over the present one, at the present batch and layout."""
    layout: float
    """The best layout over the present one, at the present batch."""
    layout_sd: float
    """Standard deviation of that, by what is known of the throughputs."""
    together: Saving
    """The best configuration at every moment over the present one."""
    best_layout: str
    """The fastest at the present batch."""
    present_batch: int = 0
    """Samples; 0 in a record that does not name it."""
    best_batch: int
    """The best fixed batch on the present layout and the likely trajectory, samples."""
    num_layouts: int
    """Layouts that were compared."""
    fixed_cost_samples: float | None
    """h: samples that take as long as the fixed cost of a step; None if unknown."""
    source: Source
    """Where the level of the critical batch size is from."""

    @property
    def batch_is_worth_it(self) -> bool:
        """Whether another batch may save enough. If not, only layout and micro-batch are worth
        changing."""
        return self.batch.high >= WORTH

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "batch_is_worth_it": self.batch_is_worth_it}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Headroom:
        """Inverse of `to_json`.

        Raises:
            KeyError, TypeError: a record of another form.
        """
        values = {name: value for name, value in data.items() if name != "batch_is_worth_it"}
        savings = {name: Saving(**values[name]) for name in ("adapting", "batch", "together")}
        return cls(**{**values, **savings})

    def __str__(self) -> str:
        return self.words()

    def words(self, *, is_over: bool = False) -> str:
        """In a line; of a run that is over what could have been gained after this."""
        can, be, are, takes = _PAST if is_over else _PRESENT
        cost, others = self._cost_words(be), self._other_words(be)
        if not self.batch_is_worth_it:
            most = _percent(self.batch.high)
            why = f"from here on another batch {can} at most {most} %{cost}"
            more = f": {', '.join(others)}" if others else ""
            return f"{why}; only layout and micro-batch {are} worth changing{more}"
        over = f"over the best fixed batch, {self.best_batch}{cost}"
        parts = [f"adapting the batch {can} {self.adapting} {over}"]
        if self.batch.likely - self.adapting.likely >= _SHOWN:
            present = f"batch {self.present_batch}" if self.present_batch else "the present one"
            parts[0] += f", and {self.batch} over staying at {present}"
        if others:
            parts += [*others, f"all together {self.together}"]
        noise = "and the measured noise scale" if self.source == "measured" else "alone"
        known = f"by the published law {noise}"
        return "; ".join([*parts, f"this {takes} the critical batch size {known}"])

    def of_a_plan(self) -> str:
        """The same before a run, over its best fixed configuration."""
        fixed = f"{self.best_batch} on {self.best_layout}{self._cost_words('is')}"
        words = f"adapting the batch can save {self.adapting} over the best fixed one, {fixed}"
        if not self.batch_is_worth_it:
            high = self.batch.high
            most = f"at most {_percent(high)} %" if high >= 5e-4 else "less than 0.1 %"
            words = (
                f"keep one batch of those asked for, {fixed}: changes among them while the run "
                f"goes on would save {most}"
            )
        more = self.num_layouts > 1 and self.together.high - self.adapting.high >= _SHOWN
        return f"{words}; batch and layout {self.together}" if more else words

    def _cost_words(self, be: str) -> str:
        samples = amount_words(self.fixed_cost_samples or 0.0)
        if samples == amount_words(0.0):
            return ""
        return f" (a step's fixed cost {be} the time of {samples} samples)"

    def _other_words(self, be: str) -> list[str]:
        words = []
        if self.layout >= _SHOWN:
            sd = f" +- {_percent(self.layout_sd)}" if self.layout_sd >= _SHOWN else ""
            words.append(f"the layout {_percent(self.layout)}{sd} %")
        elif self.num_layouts > 1:
            words.append(f"no other layout {be} predicted to be faster")
        if self.micro_batch >= _SHOWN:
            words.append(f"the micro-batch {_percent(self.micro_batch)} %")
        return words


def _percent(share: float) -> str:
    value = 100 * max(share, 0.0)
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"


def fixed_cost_samples(batches: Sequence[float], step_s: Sequence[float]) -> float | None:
    """h = a / b of the step times a + b B, by least squares of the relative error, a not negative.

    Args:
        batches: B, samples.
        step_s: seconds of a step of each.

    Returns:
        The samples, or None with fewer than two batches or times that do not grow.
    """
    sizes, times = np.asarray(batches, dtype=float), np.asarray(step_s, dtype=float)
    if len(np.unique(sizes)) < 2:
        return None
    (a, b), *_ = np.linalg.lstsq(np.stack([1 / times, sizes / times], 1), np.ones_like(times))
    return max(float(a / b), 0.0) if b > 0 else None


def estimate(
    rows: Sequence[ConfigThroughput],
    current: int,
    trajectories: Sequence[Trajectory],
    *,
    source: Source,
) -> Headroom:
    """The headroom over some configurations.

    Args:
        rows: configurations and their throughputs, the present one among them.
        current: index of the present one.
        trajectories: of the critical batch size, the likely one first.
        source: where the level of the critical batch size is from.
    """
    now = rows[current]
    batches = sorted({row.global_batch_size for row in rows})
    fastest: dict[str, dict[int, ConfigThroughput]] = {}
    for row in rows:
        of_layout = fastest.setdefault(str(row.layout), {})
        known = of_layout.get(row.global_batch_size)
        if known is None or row.samples_per_s > known.samples_per_s:
            of_layout[row.global_batch_size] = row
    own = fastest[str(now.layout)]
    here = own[now.global_batch_size]
    same = [of[now.global_batch_size] for of in fastest.values() if now.global_batch_size in of]
    best = max(same, key=lambda row: (row.samples_per_s, row.layout == now.layout))
    ratio = here.samples_per_s / best.samples_per_s
    own_speed = _speeds([own], batches)
    any_speed = _speeds(list(fastest.values()), batches)
    at = batches.index(now.global_batch_size)
    adapting, batch, together, best_batch = [], [], [], now.global_batch_size
    for number, trajectory in enumerate(trajectories):
        fixed, adapted = _seconds(trajectory, batches, own_speed)
        _, every = _seconds(trajectory, batches, any_speed)
        if number == 0:
            best_batch = batches[int(np.argmin(fixed))]
        adapting.append(_saved(adapted, float(fixed.min())))
        batch.append(_saved(adapted, float(fixed[at])))
        present = float(fixed[at]) * here.samples_per_s / now.samples_per_s
        together.append(_saved(every, present))
    times = [size / row.samples_per_s for size, row in own.items()]
    return Headroom(
        adapting=Saving.over(adapting),
        batch=Saving.over(batch),
        micro_batch=_saved(now.samples_per_s, here.samples_per_s),
        layout=_saved(here.samples_per_s, best.samples_per_s),
        # The saving is 1 - T_now / T.
        layout_sd=0.0 if best is here else ratio * best.relative_sd,
        together=Saving.over(together),
        best_layout=str(best.layout),
        present_batch=now.global_batch_size,
        best_batch=best_batch,
        num_layouts=len(fastest),
        fixed_cost_samples=fixed_cost_samples(list(own), times),
        source=source,
    )


def _speeds(layouts: Sequence[dict[int, ConfigThroughput]], batches: Sequence[int]) -> Any:
    """[batches] the best throughput of some layouts; 0 where none has the batch."""
    return np.array(
        [max((of[b].samples_per_s for of in layouts if b in of), default=0.0) for b in batches]
    )


def _seconds(trajectory: Trajectory, batches: Sequence[int], speed: Any) -> tuple[Any, float]:
    """[batches] seconds of the rest of the run at each fixed batch, infinite without a throughput;
    and with the best one in every interval."""
    samples = 1.0 + np.asarray(batches, dtype=float) / trajectory.critical_batch_size[:, None]
    with np.errstate(divide="ignore"):
        seconds = samples / speed
    return trajectory.progress @ seconds, float(trajectory.progress @ seconds.min(axis=1))


def _saved(after: float, before: float) -> float:
    return max(1.0 - after / before, 0.0)


def of_rows(
    rows: Sequence[ConfigThroughput], current: int, belief: Belief, *, start: float
) -> Headroom | None:
    """The headroom of a run; None at its end, or where too little is known of throughputs.

    Args:
        rows: configurations to choose from. An assumed throughput says nothing.
        current: index of the present one.
        belief: about the critical batch size.
        start: samples consumed.
    """
    now = rows[current]
    known = [row for row in rows if row.source != "assumed" or row is now]
    if start >= belief.end or len(known) < 2:
        return None
    courses = trajectories(belief, start=start, batch=now.global_batch_size)
    return estimate(known, known.index(now), courses, source=source_of(belief))


def rows_of(plans: Sequence[Plan]) -> list[ConfigThroughput]:
    """The ranked configurations of some plans, with what is predicted of their throughputs."""
    return [
        ConfigThroughput(
            configuration=r.configuration,
            samples_per_s=r.prediction.samples_per_s,
            # What all have in common does not tell one from another.
            relative_sd=r.prediction.step_rel_sd if r.against_rel_sd is None else r.against_rel_sd,
            source=r.prediction.source,
        )
        for plan in plans
        for r in plan.ranked
    ]


def of_plans(
    plans: Sequence[Plan], *, total_samples: float, tokens_per_sample: float
) -> Headroom | None:
    """The headroom of a whole run over its best fixed configuration, which is another on every
    trajectory of the critical batch size; None for fewer than two batches.

    Args:
        plans: of all batches to choose from.
        total_samples: of the run.
        tokens_per_sample: for the published law.
    """
    rows = rows_of(plans)
    if total_samples <= 0 or len({row.global_batch_size for row in rows}) < 2:
        return None
    law = published_critical_batch_size(total_samples, tokens_per_sample)
    belief = Belief(law=law, end=total_samples, multiplier=1.0)
    batches = [row.global_batch_size for row in rows]
    speed = np.array([row.samples_per_s for row in rows])

    def best(trajectory: Trajectory) -> int:
        return int(np.argmin(_seconds(trajectory, batches, speed)[0]))

    # The batch that counts the samples is not known before the best one is.
    at = 0
    for _ in range(3):
        at = best(trajectories(belief, start=0.0, batch=batches[at])[0])
    each = [
        estimate(rows, best(trajectory), [trajectory], source="published")
        for trajectory in trajectories(belief, start=0.0, batch=batches[at])
    ]
    return replace(
        each[0],
        adapting=Saving.over([x.adapting.likely for x in each]),
        batch=Saving.over([x.batch.likely for x in each]),
        together=Saving.over([x.together.likely for x in each]),
    )


def of_inputs(s: DecisionInputs) -> Headroom | None:
    """The headroom from what a decision knows; None where that is too little."""
    return of_rows(s.rows, s.current, s.belief, start=s.trained_samples)
