"""The controller's memory of a run: its configuration, recent steps, and each change it made.

Every rank keeps the same state, and every checkpoint holds it as plain JSON types.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from copus_ext.cost_model.conditions import Timings, is_small
from copus_ext.cost_model.constants import USUAL, PartFactors
from copus_ext.gns.observer import NoiseScale
from copus_ext.goodput.belief import Look, take_look
from copus_ext.goodput.conditions import Conditions
from copus_ext.goodput.config_change import ConfigChange, config_key
from copus_ext.goodput.costs import LayoutChangeCosts
from copus_ext.goodput.loss_watch import LossWatch
from copus_ext.goodput.lr_scaling import Ramp
from copus_ext.goodput.step_records import (
    MIN_TIMED_STEPS,
    WARM_UP_STEPS,
    WINDOW_STEPS,
    StepRecord,
    measure_before,
    measure_outcome,
    usual_step_s,
)
from copus_ext.goodput.step_time_watch import FIRST_STEPS, StepTimeShift, StepTimeWatch
from copus_ext.planner.configuration import Configuration
from megatron.trainer.config.layout import Layout

VERSION = 4
"""Of the JSON form. No other version is read."""
TIMED_STEPS = 20
"""Newest step times that are kept of a configuration."""
_COLD = 1.5
"""A first step that takes so many times what the newest ones do was not warm yet."""
TRIED_STEPS = 10
"""Steps after a change of the layout or the micro-batch alone that tell its speed."""
_CHANGES_KEPT = 100
_HOLD_HALF_LIVES = 2.0
"""A loss spike after a change of the batch stops such changes for so many half-lives of the noise
scale's average."""


def key_of(c: Configuration) -> str:
    """Key of a configuration in `ControllerState.step_times`."""
    return config_key(str(c.layout), c.micro_batch_size, c.global_batch_size)


@dataclass(kw_only=True)
class ControllerState:
    """What the controller remembers of a run. Methods change it in place."""

    version: int = VERSION
    """Of the JSON form."""
    elapsed_s: float = 0.0
    """Seconds of training, pauses for changes of the layout included."""
    num_decisions: int = 0
    """Decisions so far."""
    last_decision_samples: int = 0
    """Samples trained at the last decision."""
    skipped_samples: int = 0
    """Samples of steps since then that left the weights unchanged."""
    answered_batch: int | None = None
    """Scheduled batch that the last decision answered; a schedule asks once for each."""
    global_batch_size: int | None = None
    """Global batch size that the controller has set; None while it has set none."""
    micro_batch_size: int | None = None
    """Micro-batch size that goes with it."""
    ramp: Ramp | None = None
    """The learning rate's way to the present batch; None before the first change of the batch."""
    num_changes: int = 0
    """Changes of configuration so far."""
    steps_after_change: int = 0
    """Steps since the last of them, or since the start of the run."""
    loss_watch: LossWatch | None = None
    """Watches the loss after the last change of the batch; None once that has passed."""
    hold_growth_until_samples: int = 0
    """The batch does not grow before, because of a loss spike."""
    hold_shrinking_until_samples: int = 0
    """The batch does not shrink before, because of a loss spike."""
    consecutive_spikes: int = 0
    """Growths in a row that a loss spike followed."""
    looks: list[Look] = field(default_factory=list)
    """At the noise scale, which the belief about the critical batch size rests on."""
    annealing_from: int | None = None
    """Batch, samples, at which the run began to anneal by batch; None before."""
    step_times: dict[str, list[float]] = field(default_factory=dict)
    """Newest step times, seconds, by `config_key`."""
    end_shares: dict[str, list[float]] = field(default_factory=dict)
    """Shares of the newest step times that follow the last backward pass, in the same way."""
    steps: list[StepRecord] = field(default_factory=list)
    """Newest steps."""
    open_change: ConfigChange | None = None
    """The last change while its outcome is being measured."""
    changes: list[ConfigChange] = field(default_factory=list)
    """Newest changes whose outcome was measured."""
    layout_costs: LayoutChangeCosts = field(default_factory=LayoutChangeCosts)
    """Costs and failures of changes of the layout."""
    watch: StepTimeWatch = field(default_factory=StepTimeWatch)
    """Notices lasting changes of the present step time."""
    conditions: Conditions = field(default_factory=Conditions)
    """What has become slower than usual."""

    def __post_init__(self) -> None:
        self._shift: StepTimeShift | None = None
        self.begin_visit()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types. `asdict` on an object that holds a state gives the same."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ControllerState:
        """Inverse of `to_json`.

        Raises:
            ValueError: a state of another version.
            KeyError, TypeError: a state of another form.
        """
        if data.get("version") != VERSION:
            raise ValueError(
                f"it has version {data.get('version')}, and this copus reads {VERSION}"
            )
        ramp, change = data["ramp"], data["open_change"]
        parts = {
            "ramp": None if ramp is None else Ramp(**ramp),
            "steps": [StepRecord(**step) for step in data["steps"]],
            "open_change": None if change is None else ConfigChange.from_json(change),
            "changes": [ConfigChange.from_json(c) for c in data["changes"]],
            "layout_costs": LayoutChangeCosts.from_json(data["layout_costs"]),
            "conditions": Conditions.from_json(data["conditions"]),
            "watch": StepTimeWatch.from_json(data["watch"]),
        }
        parts["looks"] = [Look(**look) for look in data["looks"]]
        if data["loss_watch"] is not None:
            parts["loss_watch"] = LossWatch(**data["loss_watch"])
        return cls(**{**data, **parts})

    def record_step(
        self,
        *,
        key: str,
        consumed_samples: int,
        batch: int,
        loss: float,
        seconds: float,
        end_s: float | None = None,
        updated: bool = True,
        iteration: int = 0,
        measures_noise: bool = False,
        length_ratio: int = 1,
    ) -> None:
        """Adds a finished step. One that left the weights unchanged tells nothing: it has no time,
        and counts neither towards the next decision nor as a step after the last change.

        Args:
            key: of the configuration, from `config_key`.
            consumed_samples: samples of the run, this step's included.
            batch: its samples.
            loss: in nats per token.
            seconds: wall time on the slowest rank.
            end_s: of it, what follows the last backward pass; None: not measured.
            updated: whether the weights changed.
            iteration: steps of the run, this one included.
            measures_noise: whether the noise scale was measured in it.
            length_ratio: samples of `consumed_samples` that one of its samples is.
        """
        if key != self._visited:
            self.begin_visit(key)
        self._visit_steps += 1
        self.elapsed_s += seconds
        self.steps_after_change += updated
        self.skipped_samples += 0 if updated else batch * length_ratio
        self.steps.append(
            StepRecord(
                iteration=iteration,
                key=key,
                consumed_samples=consumed_samples,
                global_batch_size=batch,
                loss=loss,
                seconds=seconds,
                updated=updated,
                is_warm=self._visit_steps > WARM_UP_STEPS,
                measures_noise=measures_noise,
            )
        )
        del self.steps[: -2 * WINDOW_STEPS]
        if self.loss_watch is not None:
            self.loss_watch.add(loss)
        self.conditions.add_step(seconds)
        if self.steps[-1].is_timed:
            self._time(self.steps[-1])
            if end_s is not None and 0.0 < end_s < seconds:
                shares = self.end_shares.setdefault(key, [])
                shares.append(end_s / seconds)
                del shares[:-TIMED_STEPS]

    def begin_visit(self, key: str = "") -> None:
        """The next steps are the first ones in a configuration, or after something that may slow
        them down, such as a change of the layout that failed. They are not timed."""
        self._visited, self._visit_steps = key, 0
        self._visit: list[StepRecord] = []

    def _time(self, step: StepRecord) -> None:
        """Takes the time of a step. If the newest ones show that the first of this visit were not
        warm yet, these no longer count."""
        visit, times = self._visit, self.step_times.setdefault(step.key, [])
        times.append(step.seconds)
        self._shift = self.watch.add(step.key, step.seconds)
        if self._visit_steps <= FIRST_STEPS:
            visit.append(step)
        newest = statistics.median(s.seconds for s in visit[-MIN_TIMED_STEPS:] or [step])
        while len(visit) > MIN_TIMED_STEPS and visit[0].seconds > _COLD * newest:
            del times[-len(visit) :]
            visit.pop(0).is_warm = False
            times += [s.seconds for s in visit]
            self.watch = StepTimeWatch()
            for s in visit:
                self.watch.add(s.key, s.seconds)
        if self._visit_steps >= FIRST_STEPS:
            visit.clear()
        del times[:-TIMED_STEPS]

    def begin_launch(self, usual: Timings) -> None:
        """Starts a launch under conditions that count as usual, as they were timed. Times of a
        launch that became slower, or of a machine of another speed, tell nothing of it."""
        if self.conditions.factors != USUAL or not usual.is_like(self.conditions.usual):
            self.step_times, self.end_shares = {}, {}
        self.conditions, self.watch, self._shift = Conditions(usual=usual), StepTimeWatch(), None
        self.begin_visit()

    def enter_segment(
        self, *, before: int, after: int, global_batch_size: int | None, micro_batch_size: int
    ) -> None:
        """Goes on with the batch of another segment. If its samples have another length, times,
        losses and noise scales of the old length tell nothing of the new one.

        Args:
            before: tokens per sample until now, in any unit.
            after: tokens per sample from now on, in the same unit.
            global_batch_size: of the next step, if the controller sets it, in the new samples.
            micro_batch_size: of the next step, in the new samples.
        """
        if self.global_batch_size is not None and global_batch_size is not None:
            self.global_batch_size = global_batch_size
            self.micro_batch_size = micro_batch_size
        if before == after:
            return

        if self.answered_batch is not None:
            self.answered_batch = self.answered_batch * before // after
        if self.annealing_from is not None:
            self.annealing_from = max(self.annealing_from * before // after, 1)
        self.looks, self.end_shares = [], {}
        self.steps, self.step_times, self.open_change, self.loss_watch = [], {}, None, None
        self.steps_after_change = 0
        self.conditions.earlier_s, self.watch, self._shift = {}, StepTimeWatch(), None
        self.begin_visit()

    def take_shift(self) -> StepTimeShift | None:
        """A lasting change of the step time that became certain with the last step."""
        shift, self._shift = self._shift, None
        return shift

    def set_conditions(
        self,
        factors: PartFactors,
        earlier_s: dict[str, float],
        *,
        present: str,
        shift: StepTimeShift | None,
    ) -> bool:
        """Goes on under some conditions. If they are others, times from before no longer count as
        measured. If not, all of them take longer or shorter by the factor of a small shift.

        Args:
            factors: of the parts of a step.
            earlier_s: what is expected of configurations that were timed before.
            present: key of the present configuration.
            shift: of its step time; None: its steps take what they took.

        Returns:
            Whether they are others.
        """
        kept = self.step_times.get(present, [])
        if shift is not None:
            newest = self.steps[-min(shift.steps, TIMED_STEPS) :]
            kept = [step.seconds for step in newest if step.is_timed]
        self._visit = []
        if factors == self.conditions.factors and (shift is None or is_small(shift.ratio)):
            factor, earlier_s = shift.ratio if shift else 1.0, self.conditions.earlier_s
            times = {key: [factor * x for x in some] for key, some in self.step_times.items()}
            self.step_times = {**times, present: kept} if kept else times
            self.conditions.earlier_s = {key: factor * x for key, x in earlier_s.items()}
            return False
        self.step_times, self.end_shares = {present: kept} if kept else {}, {}
        self.conditions.factors, self.conditions.earlier_s = factors, earlier_s
        self.conditions.num_changes += 1
        if shift is None:
            self.watch = StepTimeWatch()  # its usual steps are of the conditions before
        return True

    def measured_step_time(
        self, c: Configuration, period: int = 1
    ) -> tuple[float, float, int] | None:
        """Usual seconds of a configuration's steps, as `usual_step_s`; their median absolute
        deviation, and their number. None before enough were timed."""
        times = self.step_times.get(key_of(c), [])
        if len(times) < MIN_TIMED_STEPS:
            return None
        median = statistics.median(times)
        spread = statistics.median(abs(t - median) for t in times)
        return usual_step_s(times, period), spread, len(times)

    def end_share(self, c: Configuration) -> float | None:
        """Median share of a configuration's steps that follows the last backward pass; None where
        it was not measured."""
        shares = self.end_shares.get(key_of(c), [])
        return statistics.median(shares) if len(shares) >= MIN_TIMED_STEPS else None

    @property
    def timed_layouts(self) -> list[Layout]:
        """Layouts under which steps were timed, under whatever conditions."""
        keys = (*self.step_times, *self.conditions.earlier_s)
        return [Layout.from_text(text) for text in sorted({key.split()[0] for key in keys})]

    @property
    def skipped_steps(self) -> int:
        """Steps of the newest 100 that left the weights unchanged."""
        return sum(not step.updated for step in self.steps)

    @property
    def num_changes_before(self) -> int:
        """Changes that earlier launches made, asked as one begins. A change that this one was
        started for is not among them."""
        change, pending = self.open_change, self.layout_costs.pending_relaunch
        is_ours = change is not None and pending is not None and change.decision == pending.number
        return self.num_changes - is_ours

    def begin_annealing(
        self, share: float, *, batch: int, consumed_samples: int, total_samples: int
    ) -> None:
        """Notes the batch from which the run anneals by batch, once that begins.

        Args:
            share: of the run, at its end, that does; 0 for none.
            batch: the present one, samples.
            consumed_samples: samples of the run.
            total_samples: of the run.
        """
        is_there = total_samples - consumed_samples <= share * total_samples
        if share and is_there and self.annealing_from is None:
            self.annealing_from = batch

    def batch_of_rate(self, batch: int) -> int:
        """The batch whose learning rate goes with a batch: while the run anneals by batch, the rate
        stays where it was."""
        return batch if self.annealing_from is None else min(batch, self.annealing_from)

    def is_in_ramp(self, iteration: int) -> bool:
        """Whether the learning rate still follows the last change of the batch."""
        return self.ramp is not None and not self.ramp.is_over(iteration)

    @property
    def changed_speed_alone(self) -> bool:
        """Whether the last change was one of the layout or the micro-batch alone, and its outcome
        is not known yet."""
        change = self.open_change
        return change is not None and change.from_batch == change.to_batch

    def is_due(
        self, *, consumed_samples: int, batch: int, scheduled: int | None, every_samples: float
    ) -> bool:
        """Whether to decide after a step. While step times may just be changing, and after a step
        that left the weights unchanged, nothing is decided but what a schedule asks for.

        Args:
            consumed_samples: samples of the run, this step's included.
            batch: of the next step.
            scheduled: batch that a schedule asks for here; None without one.
            every_samples: samples between two decisions.
        """
        if scheduled not in (None, batch, self.answered_batch):
            return True
        if self.watch.is_unsure or (self.steps and not self.steps[-1].updated):
            return False
        since = consumed_samples - self.last_decision_samples - self.skipped_samples
        return since >= every_samples

    def record_decision(self, *, consumed_samples: int, scheduled: int | None) -> None:
        """Counts a decision, also one to stay.

        Args:
            consumed_samples: samples of the run.
            scheduled: batch that a schedule asks for here; None without one.
        """
        self.num_decisions += 1
        self.postpone(consumed_samples=consumed_samples, scheduled=scheduled)

    def postpone(self, *, consumed_samples: int, scheduled: int | None) -> None:
        """Waits a full interval from here to the next decision."""
        self.last_decision_samples, self.answered_batch = consumed_samples, scheduled
        self.skipped_samples = 0

    def look(self, noise: NoiseScale, *, samples: float, half_life: float) -> None:
        """Takes a look at the noise scale before a decision, if it tells anything new.

        Args:
            noise: as measured.
            samples: trained, in those of the present length.
            half_life: of its average, samples.
        """
        known = {"samples": samples, "half_life": half_life}
        if (look := take_look(self.looks, noise, **known)) is not None:
            self.looks.append(look)

    def apply(self, change: ConfigChange, *, ramp: Ramp | None) -> None:
        """Makes the configuration of a change the present one, and starts to measure its outcome.

        Args:
            change: without its outcome; the figures before the change are filled in here.
            ramp: the learning rate's way to the new batch.
        """
        before = measure_before(change, self.steps, num_losses=TIMED_STEPS)
        self.open_change = change
        self.steps_after_change = 0
        self.num_changes += 1
        if change.to_batch != change.from_batch:
            self._watch_loss_after(change, len(before))
            self.ramp = ramp
        self.global_batch_size, self.micro_batch_size = change.to_batch, change.to_micro_batch

    def _watch_loss_after(self, change: ConfigChange, num_losses_before: int) -> None:
        if self.loss_watch is not None:
            self._count_calm_growth(self.loss_watch)
        self.loss_watch = LossWatch(
            decision=change.decision,
            from_batch=change.from_batch,
            to_batch=change.to_batch,
            loss_before=change.loss_before,
            loss_sd_before=change.loss_sd_before,
            num_losses_before=num_losses_before,
        )

    def _count_calm_growth(self, watch: LossWatch) -> None:
        if watch.grew and watch.is_calm:
            self.consecutive_spikes = 0

    def hold_batch_after_spike(
        self, *, consumed_samples: int, half_life_samples: float, total_samples: int
    ) -> LossWatch | None:
        """Stops growth for a while after a growth that a loss spike followed, and for the rest of
        the run after the second one in a row. After a shrink it stops shrinking for a while.

        Args:
            consumed_samples: samples of the run.
            half_life_samples: of the noise scale's average.
            total_samples: of the run.

        Returns:
            The change that a new spike followed; None without one.
        """
        watch = self.loss_watch
        if watch is None or not (watch.has_spiked or watch.is_over):
            return None
        self.loss_watch = None
        if not watch.has_spiked:
            self._count_calm_growth(watch)
            return None
        for change in filter(None, (*self.changes, self.open_change)):
            change.spiked |= change.decision == watch.decision
        until = consumed_samples + int(_HOLD_HALF_LIVES * half_life_samples)
        if watch.grew:
            self.consecutive_spikes += 1
            until = total_samples if self.consecutive_spikes > 1 else until
            self.hold_growth_until_samples = until
        else:
            self.hold_shrinking_until_samples = until
        return watch

    def has_left(self, key: str) -> bool:
        """Whether a launch in a configuration does not go on with the last change, so that its
        steps tell nothing of that."""
        return self.open_change is not None and self.open_change.to_key != key

    def record_outcome(self, *, now: bool = False) -> ConfigChange | None:
        """Measures the outcome of the last change, once enough steps have followed it.

        Args:
            now: the run ends or changes again, so that the steps so far must do.

        Returns:
            The change with its outcome, or None while it is too early.
        """
        change, since = self.open_change, self.steps_after_change
        if change is None or (since < WINDOW_STEPS and not now):
            return None
        measure_outcome(change, self.steps)
        self.open_change = None
        self.changes.append(change)
        del self.changes[:-_CHANGES_KEPT]
        return change
