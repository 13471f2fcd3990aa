"""One run on the virtual clock: steps by course and table, decisions as shipped."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

from copus_ext.controller import rules
from copus_ext.controller.decision_log import DecisionLog
from copus_ext.gns.observer import CONTROL, NoiseObserver
from copus_ext.goodput import policies
from copus_ext.goodput.costs import Costs
from copus_ext.goodput.decide import decide
from copus_ext.goodput.inputs import Decision
from copus_ext.goodput.lr_scaling import Ramp
from copus_ext.goodput.standing import standing
from copus_ext.goodput.state import (
    MIN_TIMED_STEPS,
    WARM_UP_STEPS,
    History,
    key_of,
    new_record,
)
from copus_ext.simulate.contenders import Contender
from copus_ext.simulate.gauge import NoiseEstimatorModel
from copus_ext.simulate.scenario import Scenario
from megatron.training.config.layout import Layout

_TIMED = WARM_UP_STEPS + MIN_TIMED_STEPS


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change that was made."""

    clock_s: float
    """Seconds since the start, its pause not yet in them."""
    consumed_samples: int
    """Samples of the run."""
    progress: float
    """Of the course."""
    batch: int
    """From here on."""
    layout: str
    """From here on."""


@dataclass(kw_only=True)
class Run:
    """What came of it."""

    name: str
    """Of the contender."""
    times_s: dict[str, float | None]
    """Seconds to each target; None where it was not reached."""
    changes: list[Change] = field(default_factory=list)
    """The first is the start."""
    steps: int = 0
    """Optimizer steps."""
    decisions: int = 0
    """Decisions taken, those to stay too."""
    paused_s: float = 0.0
    """Seconds of changes of layout."""

    @property
    def relayouts(self) -> int:
        """Changes of layout."""
        layouts = [change.layout for change in self.changes]
        return sum(a != b for a, b in itertools.pairwise(layouts))

    @property
    def resizes(self) -> int:
        """Changes of the batch."""
        sizes = [change.batch for change in self.changes]
        return sum(a != b for a, b in itertools.pairwise(sizes))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "relayouts": self.relayouts, "resizes": self.resizes}


def static_run(scenario: Scenario, contender: Contender, seed: int) -> Run:
    """A batch that stays, on the layout that is fastest with it: a closed form."""
    assert contender.batch is not None
    row, course = scenario.speeds(seed).fastest(contender.batch), scenario.course
    times: dict[str, float | None] = {}
    for target, progress in scenario.targets.items():
        samples = scenario.schedule.samples(course.samples(contender.batch, progress))
        times[target] = samples / row.samples_per_s
        if samples > scenario.total_samples:
            times[target] = None
    first = Change(
        clock_s=0.0,
        consumed_samples=0,
        progress=0.0,
        batch=contender.batch,
        layout=str(row.layout),
    )
    needed = scenario.schedule.samples(course.samples(contender.batch, scenario.last))
    samples = min(needed, scenario.total_samples)
    steps = math.ceil(samples / contender.batch)
    return Run(name=contender.name, times_s=times, changes=[first], steps=steps)


def simulate(
    scenario: Scenario, contender: Contender, *, seed: int, journal: DecisionLog | None = None
) -> Run:
    """A run of anybody but the oracle. The same arguments give the same run, bit for bit.

    Args:
        scenario: what it is of.
        contender: who runs.
        seed: of the noise that its estimates have.
        journal: takes its decisions.
    """
    if contender.batch is not None:
        return static_run(scenario, contender, seed)
    return _Runner(scenario, contender, seed, journal).run()


class _Runner:
    """State of a run with a controller."""

    def __init__(
        self, scenario: Scenario, contender: Contender, seed: int, journal: DecisionLog | None
    ) -> None:
        assert contender.flags is not None
        self.scenario, self.flags, self.journal = scenario, contender.flags, journal
        self.course, self.speeds = scenario.course, scenario.speeds(seed)
        first = scenario.batches[0]
        begin = first if contender.start == "small" else scenario.batches[-1]
        layout = self.speeds.fastest(begin).layout
        self.row = self.speeds.at(layout, first) or self.speeds.fastest(first)
        self.history = History(new_record())
        self.costs = Costs(self.history.record["layouts"], prior_s=scenario.prior_cost_s)
        self.gauge = NoiseEstimatorModel(seed)
        is_paper = self.flags.copus_policy == "copus"
        self.observer = NoiseObserver(interval=scenario.gns_interval, per_step=is_paper)
        self.measures = policies.needs_noise(self.flags.copus_policy)
        self.measures |= self.flags.copus_policy == "seesaw"
        self.used: set[tuple[Layout, int]] = set()
        self.clock_s = self.progress = 0.0
        self.consumed = 0
        self.out = Run(name=contender.name, times_s=dict.fromkeys(scenario.targets))
        self._enter_layout()
        self.lr_factor = self.rates.lr_factor(first)
        self._note()

    def run(self) -> Run:
        """Steps until the last target is reached or the samples are used up."""
        waiting = sorted(self.scenario.targets.items(), key=lambda item: item[1])
        while waiting and self.consumed < self.scenario.total_samples:
            self._step(waiting)
            if self._is_due():
                self._decide()
        self.out.paused_s = self.costs.record["paused_s"]
        return self.out

    def _step(self, waiting: list[tuple[str, float]]) -> None:
        batch, left = self.row.global_batch_size, self.scenario.total_samples - self.consumed
        size = min(batch, left)
        speed = self.speeds.true(self.row).samples_per_s
        before, schedule = self.progress, self.scenario.schedule
        worth = schedule.worth(self.consumed + size) - schedule.worth(self.consumed)
        self.progress = self.course.advance(batch, before, worth)
        while waiting and waiting[0][1] <= self.progress:
            target, at = waiting.pop(0)
            part = self.course.samples(batch, at) - self.course.samples(batch, before)
            self.out.times_s[target] = self.clock_s + part * (size / worth) / speed
        seconds = batch / speed
        self.clock_s += seconds
        self.consumed += size
        self.out.steps += 1
        if self.measures:
            self._measure(batch, before)
        self.history.add(
            key=self._key,
            consumed_samples=self.consumed,
            batch=size,
            loss=0.0,
            seconds=seconds,
        )
        if self.history.record["since_change"] == _TIMED:
            self.used.add((self.row.layout, batch))

    def _measure(self, batch: int, progress: float) -> None:
        groups = batch // self.row.micro_batch_size
        self.observer.layout_estimator = "micro" if groups > 1 else None
        due = self.out.steps % self.observer.interval_at(batch) == 0
        estimate = self.gauge.read(self.course.phi(progress), batch, groups) if due else None
        if estimate is None:
            self.observer.skip(self.consumed)
            return
        self.observer.take(
            {CONTROL: estimate},
            estimator="micro",
            global_batch_size=batch,
            consumed_samples=self.consumed,
            tokens=float(batch * self.scenario.seq_length),
        )

    def _scheduled(self) -> int | None:
        if self.rules.policy not in policies.SCHEDULED or not self.rules.grid:
            return None
        total = self.scenario.total_samples
        wanted = policies.scheduled_batch(self.rules, self.consumed, total)
        if wanted is None:
            return None
        return policies.snap(wanted, self.rules.grid, policy=self.rules.policy)

    def _is_due(self) -> bool:
        batch = self.row.global_batch_size
        samples = rules.samples_to_decision(
            self.flags, self.config, batch, is_first=not self.history.record["num_decisions"]
        )
        return self.history.is_due(
            consumed_samples=self.consumed,
            batch=batch,
            scheduled=self._scheduled(),
            every_samples=samples,
        )

    def _decide(self) -> None:
        s, record = self.scenario, self.history.record
        batches = rules.batches_to_weigh(self.rules, self.row.global_batch_size)
        layouts = self.speeds.layouts if self.rules.relayout else [self.row.layout]
        rows, where = self.speeds.table(batches, self.used, layouts, self.row)
        done = min(self.consumed / s.total_samples, 1.0)
        situation = standing(
            self.rules,
            rows=rows,
            current=where[self.row.layout, self.row.global_batch_size],
            layout=self.row.layout,
            history=self.history,
            observer=self.observer,
            costs=self.costs,
            iteration=self.out.steps,
            consumed_samples=self.consumed,
            total_samples=s.total_samples,
            in_warmup=self.consumed < s.warmup_samples,
            lr_decay_factor=s.lr_decay + (1 - s.lr_decay) * (1 + math.cos(math.pi * done)) / 2,
            paused=False,
        )
        decision = decide(situation)
        record["num_decisions"] += 1
        record["last_decision_samples"] = self.consumed
        record["answered_batch"] = self._scheduled()
        self.history.decided(decision, consumed_samples=self.consumed)
        self.out.decisions += 1
        if self.journal is not None:
            self.journal.append(
                "decision",
                number=record["num_decisions"],
                iteration=self.out.steps,
                consumed_samples=self.consumed,
                obeyed=decision.kind != "stay",
                clock_s=self.clock_s,
                situation=situation.to_json(),
                decision=decision.to_json(),
            )
        if decision.kind != "stay":
            self._obey(decision)

    def _obey(self, decision: Decision) -> None:
        to, before, record = decision.to, self.row, self.history.record
        ramp = None if record["ramp"] is None else Ramp(**record["ramp"])
        if to.global_batch_size != before.global_batch_size:
            now = self.lr_factor if ramp is None else ramp.at(self.out.steps)
            ramp = self.rates.ramp(to.global_batch_size, iteration=self.out.steps, start=now)
            self.lr_factor = self.rates.lr_factor(to.global_batch_size)
        if decision.kind == "relayout":
            cost_s = self.scenario.switch_cost_s
            self.clock_s += cost_s
            record["elapsed_s"] += cost_s
            self.costs.moved(seconds=cost_s, iteration=self.out.steps)
        self.history.close_if_due(now=True)
        self.history.change(
            number=record["num_decisions"],
            fields={
                "from_batch": before.global_batch_size,
                "to_batch": to.global_batch_size,
                "predicted_samples_per_s": to.samples_per_s,
            },
        )
        phi = self.observer.noise().phi_samples
        self.history.resize(
            to,
            from_batch=before.global_batch_size,
            consumed_samples=self.consumed,
            ramp=ramp,
            critical_batch_size=phi and self.rules.noise_scale_multiplier * phi,
        )
        self.row = to
        if decision.kind == "relayout":
            self._enter_layout()
        self._note()

    def _enter_layout(self) -> None:
        """Rules of decisions and of rates under the present layout, from the flags as in a real
        run."""
        s, row = self.scenario, self.row
        self.config: Any = SimpleNamespace(
            batch=SimpleNamespace(
                seq_length=s.seq_length,
                initial_global_batch_size=s.batches[0],
                step_batch_size_schedule=None,
            ),
            layout=row.layout,
            optim=SimpleNamespace(adam_beta2=s.beta2),
        )
        self.rules = rules.rules_of(self.flags, self.config)
        self.rates = rules.rate_rules_of(self.flags, self.config)

    def _note(self) -> None:
        self._key = key_of(
            str(self.row.layout), self.row.micro_batch_size, self.row.global_batch_size
        )
        self.out.changes.append(
            Change(
                clock_s=self.clock_s,
                consumed_samples=self.consumed,
                progress=self.progress,
                batch=self.row.global_batch_size,
                layout=str(self.row.layout),
            )
        )
