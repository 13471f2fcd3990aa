"""One run on a virtual clock, with the shipped decisions."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from copus_ext.controller import rules
from copus_ext.controller.decision_log import DecisionLog
from copus_ext.extras.simulate.conditions import World
from copus_ext.extras.simulate.contenders import Contender
from copus_ext.extras.simulate.noise_trajectory import NoiseEstimatorModel
from copus_ext.extras.simulate.scenario import Scenario
from copus_ext.gns.observer import CONTROL, NoiseObserver
from copus_ext.goodput import policies
from copus_ext.goodput.config_change import ConfigChange
from copus_ext.goodput.decide import decide
from copus_ext.goodput.inputs import Decision, DecisionInputs, build_inputs
from copus_ext.goodput.state import MIN_TIMED_STEPS, WARM_UP_STEPS, ControllerState, config_key
from megatron.trainer.config.layout import Layout

_TIMED = WARM_UP_STEPS + MIN_TIMED_STEPS


@dataclass(frozen=True, kw_only=True)
class Change:
    """A start or a change: what holds from here on."""

    clock_s: float
    """Seconds since the start, without its own pause."""
    consumed_samples: int
    progress: float
    """Of the training, in the measure of its targets."""
    batch: int
    layout: str


@dataclass(kw_only=True)
class Run:
    name: str
    times_s: dict[str, float | None]
    """Seconds to each target; None where it was not reached."""
    changes: list[Change] = field(default_factory=list)
    """The first is the start."""
    steps: int = 0
    decisions: int = 0
    """Decisions, including those to stay."""
    measured_s: float = 0.0
    """Seconds of the steps that measured the noise scale."""
    paused_s: float = 0.0
    """Seconds of changes of layout."""
    seconds: float = 0.0
    """Of the whole run with a controller, pauses included."""
    last_loss: float | None = None
    """At the end of a run with a controller, nats per token."""

    @property
    def relayouts(self) -> int:
        layouts = [change.layout for change in self.changes]
        return sum(a != b for a, b in itertools.pairwise(layouts))

    @property
    def resizes(self) -> int:
        sizes = [change.batch for change in self.changes]
        return sum(a != b for a, b in itertools.pairwise(sizes))


def static_run(scenario: Scenario, contender: Contender) -> Run:
    """A static batch on its fastest layout, in closed form. On a noisy quadratic it has its best
    learning rate, and for every target the shortest length."""
    batch = contender.batch
    assert batch is not None
    row = scenario.speeds.fastest(batch)
    if scenario.quadratic is None:
        worth = {n: scenario.dynamics.samples(batch, at) for n, at in scenario.targets.items()}
        samples = {n: scenario.schedule.samples(needed) for n, needed in worth.items()}
        samples = {n: x if x <= scenario.total_samples else math.inf for n, x in samples.items()}
    else:
        at = scenario.batches.index(batch)
        samples = {n: tuned[at].samples for n, tuned in scenario.tuned_statics.items()}
    first = Change(
        clock_s=0.0, consumed_samples=0, progress=0.0, batch=batch, layout=str(row.layout)
    )
    return Run(
        name=contender.name,
        times_s={n: x / row.samples_per_s if x < math.inf else None for n, x in samples.items()},
        changes=[first],
    )


def simulate(
    scenario: Scenario, contender: Contender, *, seed: int, journal: DecisionLog | None = None
) -> Run:
    """Runs a contender. The same arguments give the same run, bit for bit. The seed is of the noise
    that its estimates have, and the journal takes its decisions."""
    if contender.batch is not None:
        return static_run(scenario, contender)
    return Runner(scenario, contender, seed, journal).run()


class Runner:
    def __init__(
        self, scenario: Scenario, contender: Contender, seed: int, journal: DecisionLog | None
    ) -> None:
        assert contender.flags is not None
        self.scenario, self.flags, self.journal = scenario, contender.flags, journal
        self.training, self.world = scenario.training(), World(scenario)
        self.speeds = self.world.speeds
        self.step_noise = np.random.default_rng([seed, 0x57E9])
        first = contender.first_batch or scenario.batches[0]
        begin = first if contender.start == "small" else scenario.batches[-1]
        layout = self.speeds.fastest(begin).layout
        self.row = self.speeds.at(layout, first) or self.speeds.fastest(first)
        self.first_batch = first
        self.state = ControllerState()
        self.estimator = NoiseEstimatorModel(seed)
        is_paper = self.flags.copus_policy == "copus"
        self.observer = NoiseObserver(per_step=is_paper, seq_length=scenario.seq_length)
        self.measures = self.flags.copus_policy not in (*policies.SCHEDULED, "static")
        self.used: set[tuple[Layout, int]] = set()
        self.clock_s = 0.0
        self.out = Run(name=contender.name, times_s=dict.fromkeys(scenario.targets))
        self._enter_layout()
        self.lr_factor = self.rates.lr_factor(first)
        self._note()

    def run(self) -> Run:
        """Steps until the last target is reached or the samples are used up."""
        waiting = sorted(self.scenario.targets.items(), key=lambda item: item[1])
        if self.scenario.quadratic is not None:  # Losses, which fall.
            waiting.reverse()
        while waiting and self.consumed < self.scenario.total_samples:
            self._step(waiting)
            self._look_at_conditions()
            self.state.begin_annealing(
                self.rules.anneal_share,
                batch=self.row.global_batch_size,
                consumed_samples=self.consumed,
                total_samples=self.scenario.total_samples,
            )
            if self._is_due():
                self._decide()
        self.out.last_loss = self.training.loss()
        self.out.paused_s = self.state.layout_costs.paused_s
        self.out.seconds = self.clock_s
        return self.out

    def _step(self, waiting: list[tuple[str, float]]) -> None:
        batch, training = self.row.global_batch_size, self.training
        speed = self.speeds.true(self.row).samples_per_s
        phi = training.noise_scale() if self._is_measured(batch) else None
        before = self.consumed
        training.train(batch, lr_factor=self._lr_factor)
        size = self.consumed - before
        while waiting and (share := training.passed(waiting[0][1])) is not None:
            target, _ = waiting.pop(0)
            self.out.times_s[target] = self.clock_s + max(share, 0.0) * size / speed
        seconds = batch / speed
        if self.scenario.step_noise:
            seconds *= math.exp(self.scenario.step_noise * self.step_noise.standard_normal())
        self.clock_s += seconds
        self.out.steps += 1
        if self.measures:
            self._measure(batch, phi)
        self.out.measured_s += seconds * (phi is not None)
        self.state.record_step(
            key=self._key,
            consumed_samples=self.consumed,
            batch=size,
            loss=training.loss(),
            seconds=seconds,
        )
        if self.state.steps_after_change == _TIMED:
            self.used.add((self.row.layout, batch))

    def _look_at_conditions(self) -> None:
        """Lets conditions change, and the controller notice it."""
        if not self.scenario.events:
            return
        self.world.go_on(self.consumed / self.scenario.total_samples)
        if self.world.look(self.row, self.state, self._key):
            self.used = {(self.row.layout, self.row.global_batch_size)}
        self.speeds = self.world.speeds

    @property
    def consumed(self) -> int:
        return self.training.samples

    @property
    def _lr_factor(self) -> float:
        """The learning rate's factor of the next step, as the controller sets it."""
        ramp = self.state.ramp
        return self.lr_factor if ramp is None else ramp.at(self.out.steps)

    def _is_measured(self, batch: int) -> bool:
        interval = self.observer.interval_at(batch)
        return self.measures and (self.out.steps + 1) % interval == 0

    def _measure(self, batch: int, phi: float | None) -> None:
        groups = batch // self.row.micro_batch_size
        self.observer.layout_estimator = "micro" if groups > 1 else None
        estimate = None if phi is None else self.estimator.draw(phi, batch, groups)
        if estimate is None:
            self.observer.skip(self.consumed)
            return
        self.observer.update(
            {CONTROL: estimate},
            estimator="micro",
            global_batch_size=batch,
            consumed_samples=self.consumed,
            tokens=float(batch * self.scenario.seq_length),
        )

    def _scheduled(self) -> int | None:
        return policies.scheduled_size(self.rules, self.consumed, self.scenario.total_samples)

    def _is_due(self) -> bool:
        batch = self.row.global_batch_size
        return self.state.is_due(
            consumed_samples=self.consumed,
            batch=batch,
            scheduled=self._scheduled(),
            every_samples=rules.samples_to_decision(self.flags, self.config, batch, self.state),
        )

    def _inputs(self) -> DecisionInputs:
        s = self.scenario
        batches = rules.batches_to_weigh(self.rules, self.row.global_batch_size)
        layouts = self.speeds.layouts if self.rules.relayout else [self.row.layout]
        rows, where = self.speeds.table(batches, self.used, layouts, self.row)
        in_warmup = self.consumed < s.warmup_samples
        return build_inputs(
            self.rules,
            self.state,
            noise=self.observer.noise(),
            rows=rows,
            current=where[self.row.layout, self.row.global_batch_size],
            iteration=self.out.steps,
            consumed_samples=self.consumed,
            total_samples=s.total_samples,
            in_warmup=in_warmup,
            lr_decay_factor=float(s.schedule.rate(max(self.consumed, s.warmup_samples))),
            paused=False,
            priors_s={layout: s.pause_s(self.row.layout, layout) for layout in layouts},
        )

    def _decide(self) -> None:
        self.state.look(
            self.observer.noise(),
            samples=float(self.consumed),
            half_life=self.observer.half_life_samples,
        )
        inputs = self._inputs()
        decision = decide(inputs)
        self.state.record_decision(consumed_samples=self.consumed, scheduled=self._scheduled())
        self.out.decisions += 1
        if self.journal is not None:
            self.journal.write(
                "decision",
                number=self.state.num_decisions,
                iteration=self.out.steps,
                consumed_samples=self.consumed,
                applied=decision.kind != "stay",
                clock_s=self.clock_s,
                situation=inputs.to_json(),
                decision=decision.to_json(),
            )
        if decision.kind != "stay":
            self._apply(decision)

    def _apply(self, decision: Decision) -> None:
        to, before, ramp = decision.to, self.row, self.state.ramp
        if to.global_batch_size != before.global_batch_size:
            start = self._lr_factor
            batch = self.state.batch_of_rate(to.global_batch_size)
            ramp = self.rates.ramp(batch, iteration=self.out.steps, start=start)
            self.lr_factor = self.rates.lr_factor(batch)
        if decision.kind == "relayout":
            pair = before.layout, to.layout
            cost_s = self.scenario.pause_s(*pair)
            self.clock_s += cost_s
            self.state.elapsed_s += cost_s
            self.state.layout_costs.record_success(seconds=cost_s, prior_s=cost_s)
        self.state.record_outcome(now=True)
        self.state.apply(
            ConfigChange(
                decision=self.state.num_decisions,
                consumed_samples=self.consumed,
                from_batch=before.global_batch_size,
                to_batch=to.global_batch_size,
                from_micro_batch=before.micro_batch_size,
                to_micro_batch=to.micro_batch_size,
                from_layout=str(before.layout),
                to_layout=str(to.layout),
                predicted_samples_per_s=to.samples_per_s,
            ),
            ramp=ramp,
        )
        self.row = to
        if decision.kind == "relayout":
            self._enter_layout()
        self._note()

    def _enter_layout(self) -> None:
        """Rules of decisions and rates under the current layout, as in a real run."""
        s, row = self.scenario, self.row
        self.config: Any = SimpleNamespace(
            batch=SimpleNamespace(
                seq_length=s.seq_length,
                initial_global_batch_size=self.first_batch,
                step_batch_size_schedule=None,
                train_samples=s.total_samples,
            ),
            layout=row.layout,
            optim=SimpleNamespace(adam_beta2=0.95, lr_decay_samples=s.total_samples),
        )
        self.rules = rules.rules_of(self.flags, self.config)
        self.rates = rules.rate_rules_of(self.flags, self.config)
        to_all = [s.pause_s(row.layout, layout) for layout in self.speeds.layouts]
        self.state.layout_costs.prior_s = max(to_all)

    def _note(self) -> None:
        self._key = config_key(
            str(self.row.layout), self.row.micro_batch_size, self.row.global_batch_size
        )
        self.out.changes.append(
            Change(
                clock_s=self.clock_s,
                consumed_samples=self.consumed,
                progress=self.training.progress,
                batch=self.row.global_batch_size,
                layout=str(self.row.layout),
            )
        )
