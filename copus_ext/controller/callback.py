"""The callback that ties the controller to a run.

After every step `Controller.on_train_step_end` goes one way: measure, build the inputs, decide,
apply, record.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from copus_ext.controller import rules
from copus_ext.controller.conditions_check import have_conditions_changed
from copus_ext.controller.current_configuration import CurrentConfiguration
from copus_ext.controller.decision_log import DecisionLog
from copus_ext.controller.first_step import (
    STATE_KEY,
    first_sizes,
    leave_batch,
    restored_state,
    tell_lengths,
)
from copus_ext.controller.flags import CopusConfig, naming_the_file
from copus_ext.controller.gns_callback import GradientNoiseCallback
from copus_ext.controller.headroom_notice import HeadroomNotice
from copus_ext.controller.layout_changes import LayoutChange, LayoutChangeManager, own_host
from copus_ext.controller.link_timing import link_of, time_machine
from copus_ext.controller.out_of_memory import memory_history
from copus_ext.controller.pause_prior import PausePrior, machine_of
from copus_ext.controller.segments import (
    config_of,
    ends_segment,
    flags_in_segment,
    length_ratio,
)
from copus_ext.controller.throughput_table import ThroughputTable, gpu_of
from copus_ext.goodput import policies
from copus_ext.goodput.config_change import ConfigChange
from copus_ext.goodput.decide import decide
from copus_ext.goodput.inputs import Decision, DecisionInputs, build_inputs
from copus_ext.goodput.lr_scaling import Ramp, RateRules
from copus_ext.goodput.messages import FAILED, UNDECIDED, decision_line, summary
from copus_ext.goodput.state import ControllerState, config_key
from copus_ext.reshard.phases import ReshardResult
from megatron.trainer.common.collectives import broadcast_from_rank0, on_rank0
from megatron.trainer.common.errors import Relaunch, UsageError
from megatron.trainer.common.program import print_line
from megatron.trainer.common.step_settings import Request, StepSettings
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.layout_rules import batch_problems
from megatron.trainer.train.callbacks import Callback, CallbackContext

if TYPE_CHECKING:
    from copus_ext.reshard.host import LayoutHost

logger = logging.getLogger(__name__)


class Controller(Callback):
    """Lets batch, micro-batch and layout follow the noise scale, or records how they would.

    Every rank keeps the same state from the same numbers. Rank 0 alone decides and writes the
    journal, and broadcasts its decision to the others. An error of the controller ends its
    decisions, not the run.
    """

    changes_micro_batch = True
    """Whether the trainer can take another micro-batch."""
    takes_the_rest = True
    """Whether its last step may be smaller; else it drops a rest that is less than a batch."""

    def __init__(self, flags: CopusConfig) -> None:
        """Checks the flags.

        Raises:
            UsageError: a value that makes no sense, or that is not built.
        """
        with naming_the_file(flags):
            rules.check(flags)
        self.flags = self._given = flags
        self.gns = GradientNoiseCallback(flags)
        self.state = ControllerState()
        self.log = DecisionLog(None)
        self.headroom_notice = HeadroomNotice()
        self.table: ThroughputTable | None = None
        self.layout_changes: LayoutChangeManager | None = None
        self.host_of: Callable[[Any], LayoutHost] = own_host
        """Makes of the trainer's job what a change of layout sees."""
        self.failed, self.keeps_settings = False, self._acts
        self._flag_layout: Layout | None = None
        self._ratio = 1
        self._key, self._num_before = "", 0
        self._unlogged: Decision | str | None = UNDECIDED

    @property
    def _acts(self) -> bool:
        return self.flags.copus_mode == "act"

    def settings(self) -> dict[str, Any]:
        return dataclasses.asdict(self._given)

    def tensor_parallel_sizes(self, config: Any) -> list[int]:
        """Those of the layouts that may be chosen."""
        return rules.tensor_parallel_sizes(self.flags, config)

    # Setup, once a launch.

    def on_setup_start(self, context: CallbackContext) -> None:
        """Restores the state of the checkpoint; rank 0 opens throughput table and journal."""
        self._begin_segment(context)
        config = config_of(context)
        with naming_the_file(self._given):
            rules.check_run(self.flags, config)
        if (note := rules.observe_note(self.flags, config)) and dist.get_rank() == 0:
            print(f"note: {note}", flush=True)
        self.gns.on_setup_start(context)
        timings = time_machine(config.runtime.device)
        self.link = link_of(timings, config)
        self._restore(context)
        self._num_before = self.state.num_changes_before
        self.state.begin_launch(timings)
        # Sinks of a new launch know of none before it.
        self.log.count(decisions=self.state.num_decisions, changes=self.state.num_changes)
        self._flag_layout = config.layout
        self.machine = on_rank0("setting up the controller", lambda: self._find_machine(context))
        self._on_layout(context)
        self.log.open(context.run_dir)
        if self._acts:
            self._set_first_step(context)
        on_rank0("starting the journal", lambda: self._record_start(context))
        if self._acts:
            tell_lengths(context.config, self.flags)
        if self._acts and self.flags.copus_layouts == "all":
            self.layout_changes = LayoutChangeManager(
                self.flags,
                self.state,
                self.log,
                prior_s=lambda to: self.pauses.to_s(to),
                host_of=self.host_of,
            )
            self.layout_changes.open(context)

    def _begin_segment(self, context: CallbackContext) -> None:
        """Counts batches in samples of the present length."""
        self.config = config_of(context)
        self._ratio = length_ratio(context.config)
        self.flags = flags_in_segment(self._given, self._ratio)

    def _restore(self, context: CallbackContext) -> None:
        """Takes the state from the checkpoint. From here on the next checkpoint holds it."""
        self.state = restored_state(context)
        context.state.callbacks[STATE_KEY] = self.state
        self.state.layout_costs.forget_failures()

    def _on_layout(self, context: CallbackContext) -> None:
        """Sets what goes with the present layout: rules, rates and the cost of leaving it."""
        self.config = config = config_of(context)
        self.state.begin_visit()  # also where a change of the layout has failed
        self.rules = rules.rules_of(self.flags, config)
        self.rates = rules.rate_rules_of(self.flags, config)
        self.pauses = PausePrior(config, self.flags, self.machine)
        self.state.layout_costs.prior_s = self.pauses.any_s

    def _find_machine(self, context: CallbackContext) -> Any:
        """Opens the table on rank 0, and returns the machine as it knows that."""
        self.table = self._open_table(context)
        return machine_of(config_of(context), self.table.cluster, self.link)

    def _open_table(self, context: CallbackContext) -> ThroughputTable:
        config = config_of(context)
        return ThroughputTable(
            config,
            self.flags,
            gpu=gpu_of(config),
            fixed_micro_batch=not self.changes_micro_batch,
            link=self.link,
            flag_layout=self._flag_layout,
            factors=self.state.conditions.factors,
            memory=memory_history(context.run_dir, config),
        )

    def _renew_table(self, new: Callable[[], ThroughputTable | None]) -> None:
        """Takes the table of another layout, or of other conditions, on rank 0."""
        if dist.get_rank() == 0:
            try:
                self.table = new()
            except Exception as error:  # ends the decisions, not the run
                self.table = None
                is_plain = isinstance(error, UsageError)
                logger.error("controller disabled: %s", error, exc_info=not is_plain)

    def _set_first_step(self, context: CallbackContext) -> None:
        """Sets the batch sizes of the first step of this launch: those of the checkpoint where the
        layout allows them, else those of the flags. Rates go with the batch from the start."""
        state, config, settings = self.state, config_of(context), context.state.settings
        batch, micro = first_sizes(
            context, self.flags, self.rules, fixed_micro_batch=not self.changes_micro_batch
        )
        self._record_outcome(now=state.has_left(config_key(str(config.layout), micro, batch)))
        if settings.global_batch_size not in (None, batch):
            leave_batch(state, ramp=self._new_ramp(batch, context), context=context)
        elif state.global_batch_size not in (None, batch):
            state.ramp = None
        uneven = config.batch.allow_uneven_micro_batches
        is_given = settings.global_batch_size is not None
        if is_given or not batch_problems(config.layout, micro, batch, uneven=uneven):
            state.global_batch_size, state.micro_batch_size = batch, micro
            context.state.settings = self._wanted_settings(context)

    def leave_sizes(self, batch: int, micro: int, context: CallbackContext) -> None:
        """Goes on with other sizes than the checkpoint's, which the layout cannot cut."""
        self._record_outcome(now=True)
        if self.state.global_batch_size not in (None, batch):
            leave_batch(self.state, ramp=self._new_ramp(batch, context), context=context)
        self.state.global_batch_size, self.state.micro_batch_size = batch, micro
        context.state.settings = self._wanted_settings(context)

    def _record_start(self, context: CallbackContext) -> None:
        assert self.table is not None
        if self.table.note:
            logger.warning(
                "%s; without a prediction, unmeasured batch sizes are assumed to run at the "
                "current speed",
                self.table.note,
            )
        headroom = self.headroom_notice.at_start(context, self.table, self.rules, self.state)
        self.log.write(
            "start",
            iteration=context.state.iteration,
            consumed_samples=context.state.consumed_samples,
            mode=self.flags.copus_mode,
            flags=self.settings(),
            layout=str(context.config.layout),
            rampup_batch_size=rules.ramp_of(config_of(context)),
            note=self.table.note,
            link_bytes_per_s=self.link and self.link.bytes_per_s,
            global_batch_size=self.state.global_batch_size,
            micro_batch_size=self.state.micro_batch_size,
            headroom=headroom and headroom.to_json(),
        )

    def on_relayout_start(self, context: CallbackContext) -> None:
        self.gns.on_relayout_start(context)

    def on_relayout_end(self, context: CallbackContext) -> None:
        """Adds the hooks to the new model, and sets what goes with the new layout."""
        self.gns.on_relayout_end(context)
        self._on_layout(context)
        self._renew_table(lambda: self._open_table(context))

    def on_segment_start(self, context: CallbackContext) -> None:
        """Goes on in samples of another length. The noise scale starts afresh, nothing that was
        timed counts any more, and the batch is the one that the trainer goes on with. Where the
        length stays, so does all that was measured."""
        before, config, settings = self._ratio, config_of(context), context.state.settings
        if before != length_ratio(config):
            self._record_outcome(now=True)
        self._begin_segment(context)
        self.state.enter_segment(
            before=before,
            after=self._ratio,
            global_batch_size=settings.global_batch_size,
            micro_batch_size=settings.micro_batch_size or config.batch.micro_batch_size,
        )
        if before != self._ratio:
            self.gns.on_segment_start(context)
            self._on_layout(context)
            self._renew_table(lambda: self._open_table(context))
        self.log.note(
            "segment",
            iteration=context.state.iteration,
            consumed_samples=context.state.consumed_samples,
            seq_length=config.batch.seq_length,
            global_batch_size=settings.global_batch_size,
            micro_batch_size=settings.micro_batch_size,
        )

    # A step.

    def on_train_step_start(self, context: CallbackContext) -> None:
        self.gns.on_train_step_start(context)

    def on_grads_ready(self, context: CallbackContext) -> None:
        self.gns.on_grads_ready(context)

    def on_train_step_end(self, context: CallbackContext) -> Request | None:
        """Measures the step, decides if a decision is due, applies it, and records. The last step
        of a segment decides nothing, as the next one may be of other samples."""
        self._measure(context)
        self._look_at_conditions(context)
        scheduled = self._scheduled_batch(context)
        is_due = not (self.failed or ends_segment(context)) and self._is_due(context, scheduled)
        decision = self._decide(context, scheduled) if is_due else None
        request = self._apply(decision, context)
        context.scalars.update(self.log.take_scalars())
        return request

    def _measure(self, context: CallbackContext) -> None:
        """Adds the step's noise scale, time and loss to the state, and grades the last change."""
        self.gns.on_train_step_end(context)
        step, state = context.step, self.state
        assert step is not None
        layout = str(context.config.layout)
        self._key = config_key(layout, step.micro_batch_size, step.global_batch_size)
        state.record_step(
            key=self._key,
            consumed_samples=step.consumed_samples,
            batch=step.global_batch_size,
            loss=step.loss,
            seconds=step.elapsed_s,
            end_s=step.end_s,
            updated=step.updated,
            iteration=step.iteration,
            measures_noise=bool(self.gns.observer.latest),
            length_ratio=step.length_ratio,
        )
        state.begin_annealing(
            self.rules.anneal_share,
            batch=CurrentConfiguration.of(context).global_batch_size,
            consumed_samples=step.consumed_samples,
            total_samples=context.config.batch.train_samples,
        )
        spiked = state.hold_batch_after_spike(
            consumed_samples=step.consumed_samples,
            half_life_samples=self.gns.observer.half_life_samples * step.length_ratio,
            total_samples=context.config.batch.train_samples,
        )
        if spiked is not None:
            word, name = ("grew", "growth") if spiked.grew else ("shrank", "shrinking")
            until = getattr(state, f"hold_{name}_until_samples")
            until_samples = {f"hold_{name}_until_samples": until}
            self.log.note("spike", iteration=step.iteration, **until_samples)
            if dist.get_rank() == 0:
                logger.warning(
                    "the loss rose after the batch %s: no %s until %d", word, name, until
                )
        self._record_outcome()

    def _look_at_conditions(self, context: CallbackContext) -> None:
        """Times links again after a lasting change of the step time. Collective then."""
        step, device = context.step, context.config.runtime.device
        assert step is not None
        where = {"key": self._key, "iteration": step.iteration, "device": device}
        if not self.failed and have_conditions_changed(self.state, self.table, self.log, **where):
            factors = self.state.conditions.factors
            self._renew_table(lambda: self.table and self.table.under(factors))

    def _record_outcome(self, *, now: bool = False) -> None:
        """Records the outcome of the last change once it is known, or with `now` as it is."""
        if (change := self.state.record_outcome(now=now)) is not None:
            self.log.record_outcome(change, num_changes=self.state.num_changes)

    def _is_due(self, context: CallbackContext, scheduled: int | None) -> bool:
        """Whether to decide after this step; `scheduled` as by `_scheduled_batch`."""
        step = context.step
        assert step is not None
        samples = rules.samples_to_decision(
            self.flags, self.config, step.global_batch_size, self.state
        )
        return self.state.is_due(
            consumed_samples=step.consumed_samples,
            batch=CurrentConfiguration.of(context).global_batch_size,
            scheduled=scheduled,
            every_samples=samples,
        )

    def _scheduled_batch(self, context: CallbackContext) -> int | None:
        """The batch that a schedule asks for at this position of the run; None without one."""
        total = context.config.batch.train_samples
        return policies.scheduled_size(self.rules, context.state.consumed_samples, total)

    def _decide(self, context: CallbackContext, scheduled: int | None) -> Decision | None:
        """Rank 0's decision on every rank; None when the controller has failed. Collective."""
        state, step = self.state, context.step
        assert step is not None
        decision: Decision | None = None
        observer, ratio = self.gns.observer, self.rules.length_ratio
        state.look(
            observer.noise(),
            samples=step.consumed_samples / ratio,
            half_life=observer.half_life_samples,
        )
        if dist.get_rank() == 0:
            try:
                decision = self._decide_on_rank_0(context)
            except Exception as error:
                logger.exception("controller disabled: the run keeps its configuration")
                told = f"{type(error).__name__}: {error}"
                self.log.note("failure", iteration=step.iteration, error=told)
        decision = broadcast_from_rank0(decision)
        position: Any = {"consumed_samples": step.consumed_samples, "scheduled": scheduled}
        if decision is None:
            self.failed, self._unlogged = True, FAILED
            state.postpone(**position)
            return None
        state.record_decision(**position)
        # A change that is made is reported when it is done.
        self._unlogged = None if self._acts and decision.kind != "stay" else decision
        return decision

    def _decide_on_rank_0(self, context: CallbackContext) -> Decision:
        """Decides and records."""
        started = time.perf_counter()
        inputs = self._inputs(context)
        decision = decide(inputs)
        self.log.record_decision(
            inputs,
            decision,
            headroom=self.headroom_notice.at_decision(inputs),
            number=self.state.num_decisions + 1,
            applied=decision.kind != "stay" and self._acts,
            seconds=time.perf_counter() - started,
        )
        return decision

    def _inputs(self, context: CallbackContext) -> DecisionInputs:
        """The inputs of a decision, on rank 0."""
        config, state, step = context.config, context.state, context.step
        assert self.table is not None and step is not None
        now = CurrentConfiguration.of(context)
        rows, current = self.table.rows(
            rules.batches_to_weigh(self.rules, now.global_batch_size),
            micro_batch_size=now.micro_batch_size,
            global_batch_size=now.global_batch_size,
            measured=self.state.measured_step_time,
            end_share=self.state.end_share,
            visited=self.state.timed_layouts,
            earlier_s=self.state.conditions.earlier_s,
        )
        in_warmup = state.lr_samples < config.optim.lr_warmup_samples
        decayed = context.scheduler.get_lr({}) / (config.optim.lr or 1.0)
        return build_inputs(
            self.rules,
            self.state,
            noise=self.gns.observer.noise(),
            rows=rows,
            current=current,
            iteration=step.iteration,
            consumed_samples=step.consumed_samples,
            total_samples=config.batch.train_samples,
            in_warmup=in_warmup,
            lr_decay_factor=1.0 if in_warmup or not decayed else min(decayed, 1.0),
            paused=self.log.look_for_pause(context.run_dir, iteration=step.iteration),
            priors_s=self.pauses.of_layouts(row.layout for row in rows),
        )

    # Applying a decision.

    def _apply(self, decision: Decision | None, context: CallbackContext) -> Request | None:
        """The request for what was decided, and for the rates of the next step."""
        reason, change = "learning-rate ramp", None
        if decision is not None and self._acts:
            if decision.kind != "stay":
                ramp = self._ramp_to(decision.to.global_batch_size, context)
                change = self._change(decision, ramp, context)
                reason = decision.reason
            if self.layout_changes is not None and change is None:
                self.layout_changes.prepare(decision.other_layouts, context)
        wanted = self._wanted_settings(context)
        changes = wanted != context.state.settings
        if change is not None and self.layout_changes is not None:
            return self.layout_changes.request(change, context, wanted if changes else None)
        return Request(kind="change", reason=reason, settings=wanted) if changes else None

    def _change(
        self, decision: Decision, ramp: Ramp | None, context: CallbackContext
    ) -> LayoutChange | None:
        """Changes the state to another batch; or returns a change of layout, and the state changes
        when that has come about, as it may fail."""
        to, before = decision.to, CurrentConfiguration.of(context)
        if decision.kind == "batch":
            self._on_config_changed(decision, context, before=before, ramp=ramp)
            return None

        def done(outcome: ReshardResult) -> None:
            if outcome.kind == "moved":
                self._on_config_changed(decision, context, before=before, ramp=ramp)
                return
            self.state.answered_batch = None
            if dist.get_rank() == 0:
                logger.warning("the layout stays %s: %s", before.layout, outcome.reason)

        return LayoutChange(
            number=self.state.num_decisions,
            to=to.layout,
            settings=self._settings(to.global_batch_size, to.micro_batch_size, ramp, context),
            reason=decision.reason,
            done=done,
        )

    def _on_config_changed(
        self,
        decision: Decision,
        context: CallbackContext,
        *,
        before: CurrentConfiguration,
        ramp: Ramp | None,
    ) -> None:
        """Brings the state to a new configuration, on every rank."""
        step, to = context.step, decision.to
        assert step is not None
        self._record_outcome(now=True)
        self.state.apply(
            ConfigChange(
                decision=self.state.num_decisions,
                iteration=step.iteration,
                consumed_samples=step.consumed_samples,
                from_batch=before.global_batch_size,
                from_micro_batch=step.micro_batch_size,
                from_layout=str(before.layout),
                to_batch=to.global_batch_size,
                to_micro_batch=to.micro_batch_size,
                to_layout=str(to.layout),
                predicted_samples_per_s=to.samples_per_s if decision.is_scaled else None,
                predicted_sd=to.relative_sd,
                gain=decision.gain,
                gain_sd=decision.gain_sd,
                reason=decision.reason,
            ),
            ramp=ramp,
        )
        self.log.count(changes=self.state.num_changes)
        if dist.get_rank() == 0:
            ends = before.text_of_length(context, to, takes_the_rest=self.takes_the_rest)
            print_line("\n".join(filter(None, [f"copus: {decision.reason}", ends])))

    def _ramp_to(self, batch: int, context: CallbackContext) -> Ramp | None:
        """The learning rate's way to a batch; the one that it is on if the batch stays."""
        if batch == CurrentConfiguration.of(context).global_batch_size:
            return self.state.ramp
        return self._new_ramp(batch, context)

    def _new_ramp(self, batch: int, context: CallbackContext) -> Ramp:
        """The learning rate's way to another batch. It starts at the present rate."""
        now, first = self._rates(context), self.rates.reference_batch
        start = context.state.settings.lr_factor / now.lr_factor(first)
        batch = self.state.batch_of_rate(batch)
        return self.rates.ramp(batch, iteration=context.state.iteration, start=start)

    def _rates(self, context: CallbackContext) -> RateRules:
        """How the rates go with the batch in the next step."""
        position = context.state.consumed_samples
        return rules.rates_at(self.rates, self.flags, self.config, position)

    def _wanted_settings(self, context: CallbackContext) -> StepSettings:
        batch, micro = self.state.global_batch_size, self.state.micro_batch_size
        if batch is None or micro is None or not self._acts:
            return context.state.settings
        return self._settings(batch, micro, self.state.ramp, context)

    def _settings(
        self, batch: int, micro: int, ramp: Ramp | None, context: CallbackContext
    ) -> StepSettings:
        """Settings of some batch sizes, with the rates that go with them."""
        iteration, now = context.state.iteration, self._rates(context)
        of = self.state.batch_of_rate(batch)
        factor = self.rates.lr_factor(of)
        if ramp is not None and not ramp.is_over(iteration):
            factor = ramp.at(iteration)
        rates = now.at(batch, factor * now.lr_factor(self.rates.reference_batch))
        return StepSettings(global_batch_size=batch, micro_batch_size=micro, **rates)

    # Reporting.

    def on_log(self, context: CallbackContext) -> None:
        """Adds lines below the log line: the noise scale, and each decision once."""
        self.gns.on_log(context)
        if self._unlogged is not None:
            told = self._unlogged
            context.log_fragments.append(told if isinstance(told, str) else decision_line(told))
            self._unlogged = None

    def on_checkpoint_saved(self, context: CallbackContext) -> None:
        if self.layout_changes is not None:
            self.layout_changes.on_checkpoint_saved(context)

    def on_train_end(self, context: CallbackContext) -> None:
        """Removes the hooks and prints the summary; new processes that go on list what is open."""
        self.gns.on_train_end(context)
        if self.layout_changes is not None:
            self.layout_changes.close(context)
            if self.layout_changes.exits_for_relaunch:
                self.exit_code = Relaunch.exit_code
        goes_on = self.exit_code == Relaunch.exit_code
        if not goes_on:
            self._record_outcome(now=True)
        context.scalars.update(self.log.take_scalars())
        if dist.get_rank() == 0:
            changes, mode = self.state.changes, self.flags.copus_mode
            total = self.state.num_changes - (self.state.open_change is not None)
            if not goes_on:
                self.log.note("end", iteration=context.state.iteration, changes=len(changes))
            told = summary(changes, mode=mode, num_before=self._num_before, total=total)
            print_line(told)
