"""What a run is held against: what a user without a controller could have done, in seconds.

All are to the target of a scenario, or on a noisy quadratic to a loss. Static batches have their
best learning rate and length there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench.time_to_loss.unprofiled import Machine
from copus_ext.extras.simulate.compare import optimum
from copus_ext.extras.simulate.scenario import Scenario
from copus_ext.goodput.belief import published_critical_batch_size

_LAW_EXPONENT, _MIDDLE, _EARLIEST = 0.46, 0.55, 0.01
"""Of the published law along a run; its value at about a third of a run over that at the end; and
the share of a run that counts as trained from the start on."""
_STAGE = 0.01
"""Of a run, after which a schedule by the law looks again."""


@dataclass(frozen=True, kw_only=True)
class Yardsticks:
    """Seconds to one target."""

    static_s: dict[int, float]
    """By batch, in its fastest configuration, which is known afterwards."""
    planned_s: dict[int, float]
    """By batch, in the configuration that the planner puts first."""
    law_batch: int
    """Of common sense: the static batch that is best by the published law."""
    law_schedule: float
    """Of a schedule of the batch by the published law, fixed in advance, over the best static."""
    oracle_s: float | None
    """With full knowledge; None on a noisy quadratic, where nobody knows it."""

    @property
    def best_static_s(self) -> float:
        return min(self.static_s.values())

    @property
    def common_sense_s(self) -> float:
        return self.planned_s[self.law_batch]


def yardsticks(s: Scenario, machine: Machine, loss: float | None = None) -> Yardsticks:
    """Of a scenario on a machine.

    Args:
        s: the scenario.
        machine: its true and its predicted speeds.
        loss: on a noisy quadratic, to which; None: to the scenario's target.
    """
    own, still = machine.unprofiled().speeds, machine.known_afterwards().speeds
    needed = samples_needed(s, loss)
    fastest = {b: still.fastest(b).samples_per_s for b in needed}
    planned = {b: machine.true(own.fastest(b).configuration) for b in needed}
    predicted = {b: own.fastest(b).samples_per_s for b in needed}
    end = published_critical_batch_size(s.total_samples, s.seq_length)
    is_quadratic = s.quadratic is not None
    return Yardsticks(
        static_s={b: n / fastest[b] for b, n in needed.items()},
        planned_s={b: n / planned[b] for b, n in needed.items()},
        law_batch=_pick(predicted, _MIDDLE * end),
        law_schedule=_law_schedule(s, machine, end),
        oracle_s=None if is_quadratic else optimum(s, still, s.last),
    )


def samples_needed(s: Scenario, loss: float | None = None) -> dict[int, float]:
    """Samples that every static batch needs to the target, or on a noisy quadratic to a loss."""
    batches = [b for b in s.batches if b in s.speeds.batches]
    if s.quadratic is None:
        return {b: s.dynamics.samples(b, s.last) for b in batches}
    goal = s if loss is None else s.change(targets={"end": loss})
    tuned = next(iter(goal.tuned_statics.values()))
    return {one.batch: one.samples for one in tuned if one.batch in batches}


def _pick(speed: dict[int, float], critical_batch_size: float) -> int:
    """The batch of most goodput."""
    return max(speed, key=lambda b: speed[b] / (b + critical_batch_size))


def _law_schedule(s: Scenario, machine: Machine, end: float) -> float:
    """Seconds over those of the best static batch to the same target or loss. The batch grows with
    the law, each in the configuration that was planned for it."""
    own = machine.unprofiled().speeds
    rows = {b: own.fastest(b) for b in s.batches if b in own.batches}
    speed = {b: row.samples_per_s for b, row in rows.items()}
    run, total, clock_s, now, layout = s.training(), s.total_samples, 0.0, 0, None
    while True:
        share = max(run.samples / total, _EARLIEST)
        now = max(now, _pick(speed, end * share**_LAW_EXPONENT))
        row, before = rows[now], run.samples
        if layout is not None and row.layout != layout:
            clock_s += s.pause_s(layout, row.layout)
        layout, true = row.layout, machine.true(row.configuration)
        factor = math.sqrt(now / s.batches[0])
        run.train(now, max(1, round(_STAGE * total / now)), lr_factor=factor)
        size = run.samples - before
        if s.quadratic is None and (done := run.passed(s.last)) is not None:
            clock_s += max(done, 0.0) * size / true
            break
        clock_s += size / true
        if run.samples >= total:
            if s.quadratic is None:
                clock_s += seconds_beyond(s, now, run.progress, true)
            break
    still = machine.known_afterwards().speeds
    needed = samples_needed(s, None if s.quadratic is None else run.loss())
    return clock_s / min(n / still.fastest(b).samples_per_s for b, n in needed.items())


def seconds_beyond(s: Scenario, batch: int, progress: float, samples_per_s: float) -> float:
    """Seconds that a run takes from some progress on to the target if it goes on as it is, because
    its samples did not suffice."""
    needed = s.dynamics.samples(batch, s.last) - s.dynamics.samples(batch, progress)
    return max(needed, 0.0) / samples_per_s
