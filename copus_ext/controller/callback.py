"""The callback that ties the controller to a run: watches the noise, decides, asks the loop for the
change, and grades what came of it."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from typing import Any

import torch.distributed as dist

from copus_ext.controller import rules
from copus_ext.controller.decision_log import DecisionLog
from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.gns_callback import GradientNoiseCallback
from copus_ext.controller.layout_changes import LayoutChange, LayoutChangeManager
from copus_ext.controller.ledger import CurrentConfiguration, Ledger
from copus_ext.controller.link_timing import time_link
from copus_ext.controller.outlook import Outlook
from copus_ext.goodput import costs, policies
from copus_ext.goodput.decide import decide
from copus_ext.goodput.inputs import ConfigThroughput, Decision, DecisionInputs
from copus_ext.goodput.lr_scaling import Ramp
from copus_ext.goodput.messages import FAILED, UNDECIDED, decision_line, length_line
from copus_ext.goodput.state import History, key_of, new_record
from copus_ext.reshard.phases import ReshardResult as Outcome
from megatron.training.common.collectives import broadcast_from_rank0
from megatron.training.common.errors import Relaunch, UsageError
from megatron.training.common.step_settings import Request, StepSettings
from megatron.training.config.batch_schedule import steps_for
from megatron.training.config.layout import Layout, batch_problems
from megatron.training.train.callbacks import Callback, CallbackContext

logger = logging.getLogger(__name__)

STATE_KEY = "copus_control"


class Controller(Callback):
    """Lets batch, micro-batch and layout follow the noise scale, or records how they would.

    Every rank keeps the same record from the same numbers. Rank 0 alone decides and writes the
    journal; the others obey what it broadcasts. An error of the controller ends its decisions, not
    the run.
    """

    changes_micro_batch = True
    """Whether the trainer can take another micro-batch."""
    changes_layout = True
    """Whether it can take another layout."""

    def __init__(self, flags: CopusConfig) -> None:
        """Checks the flags.

        Raises:
            UsageError: a value that makes no sense, or that is not built.
        """
        rules.check(flags, changes_layout=self.changes_layout)
        self.flags = flags
        self.watch = GradientNoiseCallback(flags)
        self.ledger = Ledger(History(new_record()))
        self.failed = False
        self.outlook: Outlook | None = None
        self.moves: LayoutChangeManager | None = None
        self._news = UNDECIDED
        self.home: Layout | None = None
        self._was_paused = False
        self.keeps_settings = self._acts

    def settings(self) -> dict[str, Any]:
        """The controller's flags."""
        return dataclasses.asdict(self.flags)

    def tensor_parallel_sizes(self, config: Any) -> list[int]:
        """Those of the layouts that may be chosen from."""
        return rules.tensor_parallel_sizes(self.flags, config)

    def on_setup_start(self, context: CallbackContext) -> None:
        """Takes over what the checkpoint knows; rank 0 opens table and journal."""
        config = context.config
        rules.check_run(self.flags, config)
        self.watch.on_setup_start(context)
        self.link = time_link(config.runtime.device)
        self._take_over(context)
        self._enter_layout(context)
        if self._acts:
            self._begin(context)
        problem = None
        if dist.get_rank() == 0:
            try:
                self.outlook = self._look_around(context)
                if context.run_dir is not None:
                    self.ledger.journal = DecisionLog(context.run_dir)
                    self._open_journal(context)
            except (UsageError, OSError) as error:
                problem = str(error)
        if problem := broadcast_from_rank0(problem):
            raise UsageError(problem)
        if self._acts and self.flags.copus_layouts == "all":
            self.moves = LayoutChangeManager(self.flags, self.costs, self.ledger)
            self.moves.open(context)

    def _enter_layout(self, context: CallbackContext) -> None:
        """Rules and names of the present layout."""
        config = context.config
        self.home = self.home or config.layout
        self.rules = rules.rules_of(self.flags, config)
        self.rates = rules.rate_rules_of(self.flags, config)
        self.layout = str(config.layout)
        prior_s = self.flags.copus_switch_cost_s or costs.prior_s(
            config,
            is_relaunch=self.flags.copus_relayout == "relaunch",
            link_bytes_per_s=self.link and self.link.of_a_rank,
        )
        self.costs = costs.Costs(self.ledger.history.record["layouts"], prior_s=prior_s)

    def _look_around(self, context: CallbackContext) -> Outlook:
        """On rank 0."""
        known = {"fixed_micro_batch": not self.changes_micro_batch, "link": self.link}
        return Outlook(context, self.flags, self.rules, home=self.home, **known)

    def on_relayout_start(self, context: CallbackContext) -> None:
        """Takes the hooks out."""
        self.watch.on_relayout_start(context)

    def on_relayout_end(self, context: CallbackContext) -> None:
        """Puts them in, and looks at the world from the new layout."""
        self.watch.on_relayout_end(context)
        self._enter_layout(context)
        if dist.get_rank() == 0:
            try:
                self.outlook = self._look_around(context)
            except UsageError as error:  # decisions end with it, the run does not
                self.outlook = None
                logger.error("nothing is decided any more: %s", error)

    def _take_over(self, context: CallbackContext) -> None:
        stored = context.state.callbacks.get(STATE_KEY)
        try:
            self.ledger.history = History(stored if stored is not None else new_record())
        except ValueError as error:
            self.ledger.history = History(new_record())
            if dist.get_rank() == 0:
                logger.warning("the controller starts afresh: %s", error)
        context.state.callbacks[STATE_KEY] = self.ledger.history.record
        # A new launch may try what failed in another.
        costs.Costs(self.ledger.history.record["layouts"], prior_s=0.0).lift_bars()

    def _begin(self, context: CallbackContext) -> None:
        """Settles the sizes of the first step of this launch: those of the checkpoint, as far as
        the layout can cut them, or of the flags; rates belong to the batch from the start."""
        record, config, state = self.ledger.history.record, context.config, context.state
        known = state.settings.global_batch_size
        batch = known or self.rules.first_batch
        micro = state.settings.micro_batch_size or config.batch.micro_batch_size
        if record["sizes"] is not None and record["sizes"][0] != batch:
            record["ramp"] = None
        uneven = config.batch.allow_uneven_micro_batches
        if known is not None or not batch_problems(config.layout, micro, batch, uneven=uneven):
            record["sizes"] = [batch, micro]
            state.settings = self._wanted(context)

    def _open_journal(self, context: CallbackContext) -> None:
        assert self.ledger.journal is not None and self.outlook is not None
        note = self.outlook.table.note
        if note:
            logger.warning("%s; unmeasured batches are taken to be as fast", note)
        self.ledger.journal.append(
            "start",
            iteration=context.state.iteration,
            consumed_samples=context.state.consumed_samples,
            mode=self.flags.copus_mode,
            flags=self.settings(),
            layout=self.layout,
            note=note,
            link_bytes_per_s=self.link and self.link.bytes_per_s,
            peak_flops=self.outlook.table.peak_flops,
            sizes=self.ledger.history.record["sizes"],
        )

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Opens the tap for a step that is to be measured."""
        self.watch.on_train_step_start(context)

    def on_grads_ready(self, context: CallbackContext) -> None:
        """Reads the reduced gradients."""
        self.watch.on_grads_ready(context)

    def on_train_step_end(self, context: CallbackContext) -> Request | None:
        """Takes the step in, decides if it is time to, and asks for what follows from it."""
        self.watch.on_train_step_end(context)
        step = context.step
        assert step is not None
        self.ledger.history.add(
            key=key_of(self.layout, step.micro_batch_size, step.global_batch_size),
            consumed_samples=step.consumed_samples,
            batch=step.global_batch_size,
            loss=step.loss,
            seconds=step.elapsed_s,
            updated=step.updated,
        )
        self.ledger.guard(
            step,
            half_life_samples=self.watch.observer.half_life_samples,
            total_samples=context.config.batch.train_samples,
        )
        self.ledger.grade()
        reason, move = "learning-rate ramp", None
        if not self.failed and self._is_due(context):
            decision = self._decide(context)
            if decision is not None and self._acts:
                if decision.kind != "stay":
                    self._news = ""  # it is told when it is done
                if decision.kind == "batch":
                    ramp = self._ramp_to(decision.to.global_batch_size, context)
                    self._obey(
                        decision, context, before=CurrentConfiguration.of(context), ramp=ramp
                    )
                    reason = decision.reason
                elif decision.kind == "relayout":
                    move = self._move_of(decision, context)
                if self.moves is not None and move is None:
                    self.moves.get_ready(decision.other_layouts, context)
        context.scalars.update(self.ledger.take_scalars())
        wanted = self._wanted(context)
        now = None if wanted == context.state.settings else wanted
        if move is not None and self.moves is not None:
            return self.moves.request(move, context, now)
        return None if now is None else Request(kind="change", reason=reason, settings=now)

    def _move_of(self, decision: Decision, context: CallbackContext) -> LayoutChange:
        """A change of layout, worked out but not in the record: it may fail."""
        to, state, step = decision.to, context.state, context.step
        assert step is not None
        before = CurrentConfiguration.of(context)
        ramp = self._ramp_to(to.global_batch_size, context)
        factor = (
            self.rates.lr_factor(to.global_batch_size) if ramp is None else ramp.at(state.iteration)
        )
        settings = self._settings(to.global_batch_size, to.micro_batch_size, factor)

        def done(outcome: Outcome) -> None:
            record = self.ledger.history.record
            record["elapsed_s"] += outcome.pause_s
            if outcome.kind == "moved":
                self._obey(decision, context, before=before, ramp=ramp)
                return
            record["answered_batch"] = None
            if dist.get_rank() == 0:
                logger.warning("the layout stays %s: %s", self.layout, outcome.reason)

        return LayoutChange(
            number=self.ledger.history.record["num_decisions"],
            to=to.layout,
            settings=settings,
            reason=decision.reason,
            done=done,
        )

    def _ramp_to(self, batch: int, context: CallbackContext) -> Ramp | None:
        """The learning rate's way to another batch; None where the batch stays."""
        if batch == CurrentConfiguration.of(context).batch:
            now = self.ledger.history.record["ramp"]
            return None if now is None else Ramp(**now)
        state = context.state
        return self.rates.ramp(batch, iteration=state.iteration, start=state.settings.lr_factor)

    @property
    def _acts(self) -> bool:
        return self.flags.copus_mode == "act"

    def _is_due(self, context: CallbackContext) -> bool:
        """Whether to decide after this step."""
        step = context.step
        assert step is not None
        record = self.ledger.history.record
        samples = rules.samples_to_decision(
            self.flags,
            context.config,
            step.global_batch_size,
            is_first=not record["num_decisions"],
        )
        return self.ledger.history.is_due(
            consumed_samples=step.consumed_samples,
            batch=context.state.settings.global_batch_size or step.global_batch_size,
            scheduled=self._scheduled(context),
            every_samples=samples,
        )

    def _scheduled(self, context: CallbackContext) -> int | None:
        """The batch that a policy asks for by the position in the run alone."""
        total = context.config.batch.train_samples
        wanted = policies.scheduled_batch(self.rules, context.state.consumed_samples, total)
        if wanted is None or not self.rules.grid:
            return None
        return policies.snap(wanted, self.rules.grid, policy=self.rules.policy)

    def _decide(self, context: CallbackContext) -> Decision | None:
        """Rank 0's decision on every rank; None when the controller has failed. Collective."""
        record, step = self.ledger.history.record, context.step
        assert step is not None
        number = record["num_decisions"] + 1
        answer: dict[str, Any] | None = None
        if dist.get_rank() == 0:
            try:
                answer = {"decision": self._decide_here(context, number)}
            except Exception as error:
                logger.exception("the controller failed; the run keeps its configuration")
                answer = {"failed": f"{type(error).__name__}: {error}"}
                self.ledger.note("failure", iteration=step.iteration, error=answer["failed"])
        answer = broadcast_from_rank0(answer)
        record["last_decision_samples"] = step.consumed_samples
        record["answered_batch"] = self._scheduled(context)
        if answer is None or "failed" in answer:
            self.failed, self._news = True, FAILED
            return None
        record["num_decisions"] = number
        decision = Decision.from_json(answer["decision"])
        self.ledger.history.decided(decision, consumed_samples=step.consumed_samples)
        self._news = decision_line(decision)
        return decision

    def _decide_here(self, context: CallbackContext, number: int) -> dict[str, Any]:
        """Looks, decides and writes the journal; the decision as plain JSON types."""
        started = time.perf_counter()
        situation = self._situation(context)
        decision = decide(situation)
        self.ledger.decided(
            situation,
            decision,
            number=number,
            obeyed=decision.kind != "stay" and self._acts,
            seconds=time.perf_counter() - started,
        )
        return json.loads(json.dumps(decision.to_json(), allow_nan=False))

    def _situation(self, context: CallbackContext) -> DecisionInputs:
        """Where the run stands; on rank 0."""
        assert self.outlook is not None and context.step is not None
        is_paused = self.outlook.is_paused
        if is_paused != self._was_paused:
            self._was_paused = is_paused
            self.ledger.note("paused" if is_paused else "resumed", iteration=context.step.iteration)
        return self.outlook.situation(
            context, self.ledger.history, self.watch.observer, self.costs, is_paused=is_paused
        )

    def _obey(
        self,
        decision: Decision,
        context: CallbackContext,
        *,
        before: CurrentConfiguration,
        ramp: Ramp | None,
    ) -> None:
        """Takes a change into the record, on every rank."""
        assert context.step is not None
        phi = self.watch.observer.noise().phi_samples
        self.ledger.enter(
            decision,
            context.step,
            before=before,
            layout=str(decision.to.layout),
            ramp=ramp,
            critical_batch_size=phi and self.rules.noise_scale_multiplier * phi,
            length=self._length(context, before, decision.to),
        )

    def _length(
        self, context: CallbackContext, before: CurrentConfiguration, to: ConfigThroughput
    ) -> str:
        """What a change makes of the number of steps, a line; empty if it stays."""
        step, total = context.step, context.config.batch.train_samples
        assert step is not None
        sizes = (
            (before.batch, Layout.from_text(before.layout)),
            (to.global_batch_size, to.layout),
        )
        ends = [
            step.iteration
            + steps_for(
                total - step.consumed_samples,
                batch,
                # A loop that keeps its micro-batch drops a rest that is less than a batch.
                least=layout.batch_unit if self.changes_micro_batch else batch,
            )
            for batch, layout in sizes
        ]
        return "" if ends[0] == ends[1] else length_line(total, before=ends[0], after=ends[1])

    def _wanted(self, context: CallbackContext) -> StepSettings:
        """How the next step is to be taken."""
        record, now = self.ledger.history.record, context.state.settings
        if record["sizes"] is None or not self._acts:
            return now
        batch, micro = record["sizes"]
        if record["ramp"] is None:
            factor = self.rates.lr_factor(batch)
        else:
            factor = Ramp(**record["ramp"]).at(context.state.iteration)
        return self._settings(batch, micro, factor)

    def _settings(self, batch: int, micro: int, factor: float) -> StepSettings:
        """Steps of some sizes, with the rates that go with them."""
        rates = self.rates.at(batch, factor)
        return StepSettings(global_batch_size=batch, micro_batch_size=micro, **rates)

    def on_log(self, context: CallbackContext) -> None:
        """Adds lines below the log line: the noise scale, and once what was decided."""
        self.watch.on_log(context)
        if self._news:
            context.log_fragments.append(self._news)
            self._news = ""

    def on_checkpoint_saved(self, context: CallbackContext) -> None:
        """Notes how old the last checkpoint is."""
        if self.moves is not None:
            self.moves.on_checkpoint_saved(context)

    def on_train_end(self, context: CallbackContext) -> None:
        """Takes the hooks out and sums up."""
        self.watch.on_train_end(context)
        if self.moves is not None:
            self.moves.close(context)
            if self.moves.leaves:
                self.exit_code = Relaunch.exit_code
                return  # new processes go on, and grade what is open
        self.ledger.grade(now=True)
        if dist.get_rank() == 0:
            self.ledger.end(context.state.iteration, mode=self.flags.copus_mode)
