"""The callback that ties the controller to a run: watches the noise, decides, asks the loop for the
change, and grades what came of it."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from copus_ext import rules as flags_to_rules
from copus_ext.config import CopusConfig
from copus_ext.goodput import policies
from copus_ext.goodput.decide import decide
from copus_ext.goodput.history import History, key_of, new_record
from copus_ext.goodput.rates import Ramp
from copus_ext.goodput.situation import Decision, Situation
from copus_ext.goodput.summary import decision_line, summary
from copus_ext.journal import Journal
from copus_ext.planner.configuration import Configuration
from copus_ext.table import Table, gpu_of
from copus_ext.watch import NoiseWatch
from megatron.training.agree import from_rank_zero
from megatron.training.callbacks import Callback, CallbackContext
from megatron.training.errors import UsageError
from megatron.training.layout import batch_problems
from megatron.training.settings import Request, StepSettings

logger = logging.getLogger(__name__)

STATE_KEY = "copus_control"
PAUSE_FILE = Path("control") / "pause"
"""While this file is in the run directory nothing is decided."""
_DECISION_STEPS = 20
"""Steps between decisions if no interval is given."""
_HOLD_HALF_LIVES = 2.0
"""A loss spike after growth stops growth for so long."""


class Controller(Callback):
    """Lets batch and micro-batch follow the noise scale, or records how they would.

    Every rank keeps the same record from the same numbers. Rank 0 alone decides and writes the
    journal; the others obey what it broadcasts. An error of the controller ends its decisions, not
    the run.
    """

    changes_micro_batch = True
    """Whether the trainer can take another micro-batch."""

    def __init__(self, flags: CopusConfig) -> None:
        """Checks the flags.

        Raises:
            UsageError: a value that makes no sense, or that is not built.
        """
        flags_to_rules.check(flags)
        self.flags = flags
        self.watch = NoiseWatch(flags)
        self.history = History(new_record())
        self.failed = False
        self.journal: Journal | None = None
        self.table: Table | None = None
        self._run_dir: Path | None = None
        self._last: Decision | None = None
        self._was_paused = False
        self.keeps_settings = self._acts

    def settings(self) -> dict[str, Any]:
        """The controller's flags."""
        return dataclasses.asdict(self.flags)

    def on_setup_start(self, context: CallbackContext) -> None:
        """Takes over what the checkpoint knows; rank 0 opens table and journal."""
        config = context.config
        flags_to_rules.check_run(self.flags, config)
        self.watch.on_setup_start(context)
        self.rules = flags_to_rules.rules_of(self.flags, config)
        layout = config.layout
        self.layout = str(layout)
        self._sizes = layout.tp, layout.pp, layout.vpp, layout.dp
        self.rates = flags_to_rules.rate_rules_of(self.flags, config)
        self._take_over(context)
        if self._acts:
            self._begin(context)
        problem = None
        if dist.get_rank() == 0:
            self._run_dir = context.run_dir
            try:
                self.table = Table(
                    config,
                    self.flags,
                    gpu=gpu_of(config),
                    fixed_micro_batch=not self.changes_micro_batch,
                )
                if context.run_dir is not None:
                    self.journal = Journal(context.run_dir)
                    self._open_journal(context)
            except (UsageError, OSError) as error:
                problem = str(error)
        if problem := from_rank_zero(problem):
            raise UsageError(problem)

    def _take_over(self, context: CallbackContext) -> None:
        stored = context.state.callbacks.get(STATE_KEY)
        try:
            self.history = History(stored if stored is not None else new_record())
        except ValueError as error:
            self.history = History(new_record())
            if dist.get_rank() == 0:
                logger.warning("the controller starts afresh: %s", error)
        context.state.callbacks[STATE_KEY] = self.history.record

    def _begin(self, context: CallbackContext) -> None:
        """Settles the sizes of the first step of this launch: those of the checkpoint, as far as
        the layout can cut them, or of the flags; rates belong to the batch from the start."""
        record, config, state = self.history.record, context.config, context.state
        known = state.settings.global_batch_size
        batch = known or self.rules.first_batch
        micro = state.settings.micro_batch_size or config.batch.micro_batch_size
        if record["sizes"] is not None and record["sizes"][0] != batch:
            record["ramp"] = None
        if known is not None or not batch_problems(config.layout, micro, batch):
            record["sizes"] = [batch, micro]
            state.settings = self._wanted(context)

    def _open_journal(self, context: CallbackContext) -> None:
        assert self.journal is not None and self.table is not None
        if self.table.note:
            logger.warning("%s; unmeasured batches are taken to be as fast", self.table.note)
        self.journal.append(
            "start",
            iteration=context.state.iteration,
            consumed_samples=context.state.consumed_samples,
            mode=self.flags.copus_mode,
            flags=self.settings(),
            layout=self.layout,
            note=self.table.note,
            sizes=self.history.record["sizes"],
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
        self.history.add(
            key=key_of(self.layout, step.micro_batch_size, step.global_batch_size),
            consumed_samples=step.consumed_samples,
            batch=step.global_batch_size,
            loss=step.loss,
            seconds=step.elapsed_s,
            updated=step.updated,
        )
        self._guard(context)
        self._grade(self.history.close_if_due())
        reason = "learning-rate ramp"
        if not self.failed and self._is_due(context):
            decision = self._decide(context)
            if decision is not None and decision.kind == "batch" and self._acts:
                self._obey(decision, context)
                reason = decision.reason
        wanted = self._wanted(context)
        if wanted == context.state.settings:
            return None
        return Request(kind="change", reason=reason, settings=wanted)

    @property
    def _acts(self) -> bool:
        return self.flags.copus_mode == "act"

    def _is_due(self, context: CallbackContext) -> bool:
        """Whether to decide after this step."""
        record, step = self.history.record, context.step
        assert step is not None
        batch = context.state.settings.global_batch_size or step.global_batch_size
        wanted = self._scheduled(context)
        if wanted not in (None, batch, record["answered_batch"]):
            return True
        samples = _DECISION_STEPS * step.global_batch_size
        if self.flags.copus_interval is not None:
            samples = self.flags.copus_interval / context.config.batch.seq_length
        return step.consumed_samples - record["last_decision_samples"] >= samples

    def _scheduled(self, context: CallbackContext) -> int | None:
        """The batch that a policy asks for by the position in the run alone."""
        total = context.config.batch.train_samples
        wanted = policies.scheduled_batch(self.rules, context.state.consumed_samples, total)
        if wanted is None or not self.rules.grid:
            return None
        return policies.snap(wanted, self.rules.grid, policy=self.rules.policy)

    def _decide(self, context: CallbackContext) -> Decision | None:
        """Rank 0's decision on every rank; None when the controller has failed. Collective."""
        record, step = self.history.record, context.step
        assert step is not None
        number = record["num_decisions"] + 1
        answer: dict[str, Any] | None = None
        if dist.get_rank() == 0:
            try:
                answer = {"decision": self._decide_here(context, number)}
            except Exception as error:
                logger.exception("the controller failed; the run keeps its configuration")
                answer = {"failed": f"{type(error).__name__}: {error}"}
                self._note("failure", iteration=step.iteration, error=answer["failed"])
        answer = from_rank_zero(answer)
        record["last_decision_samples"] = step.consumed_samples
        record["answered_batch"] = self._scheduled(context)
        if answer is None or "failed" in answer:
            self.failed = True
            return None
        record["num_decisions"] = number
        decision = Decision.from_json(answer["decision"])
        if decision.is_small and record["small_since_samples"] is None:
            record["small_since_samples"] = step.consumed_samples
        elif decision.candidates and not decision.is_small:
            record["small_since_samples"] = None
        self._last = decision
        return decision

    def _decide_here(self, context: CallbackContext, number: int) -> dict[str, Any]:
        """Looks, decides and writes the journal; the decision as plain JSON types."""
        started = time.perf_counter()
        situation = self._situation(context)
        decision = decide(situation)
        moves = decision.kind != "stay"
        if self.journal is not None:
            self.journal.append(
                "decision",
                number=number,
                iteration=situation.iteration,
                consumed_samples=situation.consumed_samples,
                obeyed=moves and self._acts,
                seconds=time.perf_counter() - started,
                situation=situation.to_json(),
                decision=decision.to_json(),
            )
        return json.loads(json.dumps(decision.to_json(), allow_nan=False))

    def _situation(self, context: CallbackContext) -> Situation:
        """Where the run stands; on rank 0."""
        config, state, record = context.config, context.state, self.history.record
        step = context.step
        assert self.table is not None and step is not None
        batch = state.settings.global_batch_size or step.global_batch_size
        rows, current = self.table.rows(
            flags_to_rules.batches_to_weigh(self.rules, batch),
            micro_batch_size=state.settings.micro_batch_size or step.micro_batch_size,
            global_batch_size=batch,
            measured=self._measured,
        )
        warming = state.lr_samples < config.optim.lr_warmup_samples
        decayed = step.learning_rate / state.settings.lr_factor / (config.optim.lr or 1.0)
        ramp = record["ramp"]
        return Situation(
            rules=self.rules,
            noise=self.watch.observer.noise(),
            rows=tuple(rows),
            current=current,
            iteration=step.iteration,
            consumed_samples=step.consumed_samples,
            total_samples=config.batch.train_samples,
            half_life_samples=self.watch.observer.half_life_samples,
            elapsed_s=record["elapsed_s"],
            in_warmup=warming,
            in_ramp=ramp is not None and not Ramp(**ramp).is_over(step.iteration),
            lr_decay_factor=1.0 if warming or not decayed else min(decayed, 1.0),
            steps_since_change=self.history.steps_since_change,
            skipped_steps=self.history.skipped_steps,
            last_change_samples=record["last_change_samples"],
            hold_growth_until_samples=record["hold_growth_until_samples"],
            small_since_samples=record["small_since_samples"],
            noise_when_shrunk=record["noise_when_shrunk"],
            paused=self._is_paused(step.iteration),
        )

    def _is_paused(self, iteration: int) -> bool:
        paused = self._run_dir is not None and (self._run_dir / PAUSE_FILE).exists()
        if paused != self._was_paused:
            self._was_paused = paused
            self._note("paused" if paused else "resumed", iteration=iteration)
        return paused

    def _measured(self, c: Configuration) -> tuple[float, float, int] | None:
        if (c.tp, c.pp, c.vpp, c.dp) != self._sizes:
            return None
        return self.history.median_s(key_of(self.layout, c.micro_batch_size, c.global_batch_size))

    def _obey(self, decision: Decision, context: CallbackContext) -> None:
        """Begins the change; the record on every rank."""
        record, step, to = self.history.record, context.step, decision.to
        assert step is not None
        self._grade(self.history.close_if_due(now=True))
        batch = context.state.settings.global_batch_size or step.global_batch_size
        self.history.change(
            number=record["num_decisions"],
            fields={
                "iteration": step.iteration,
                "consumed_samples": step.consumed_samples,
                "from_batch": batch,
                "from_micro_batch": step.micro_batch_size,
                "to_batch": to.global_batch_size,
                "to_micro_batch": to.micro_batch_size,
                "predicted_samples_per_s": to.samples_per_s,
                "gain": decision.gain,
                "reason": decision.reason,
            },
        )
        if to.global_batch_size != batch:
            record["ramp"] = self.rates.ramp(
                to.global_batch_size,
                iteration=step.iteration,
                start=context.state.settings.lr_factor,
            ).to_json()
            record["last_change_samples"] = step.consumed_samples
            record["small_since_samples"] = None
            if to.global_batch_size < batch:
                phi = self.watch.observer.noise().phi_samples
                record["noise_when_shrunk"] = phi and self.rules.calibration * phi
        record["sizes"] = [to.global_batch_size, to.micro_batch_size]
        if dist.get_rank() == 0:
            print(f"copus: {decision.reason}", flush=True)

    def _wanted(self, context: CallbackContext) -> StepSettings:
        """How the next step is to be taken."""
        record, now = self.history.record, context.state.settings
        if record["sizes"] is None or not self._acts:
            return now
        batch, micro = record["sizes"]
        if record["ramp"] is None:
            factor = self.rates.lr_factor(batch)
        else:
            factor = Ramp(**record["ramp"]).at(context.state.iteration)
        return StepSettings(
            global_batch_size=batch, micro_batch_size=micro, **self.rates.at(batch, factor)
        )

    def _guard(self, context: CallbackContext) -> None:
        """Stops growth for a while after a loss spike that followed a growth; twice in a row for
        good."""
        record, step = self.history.record, context.step
        assert step is not None
        if not self.history.is_spike():
            return
        record["open"]["spiked"] = True
        record["spikes_in_a_row"] += 1
        hold = _HOLD_HALF_LIVES * self.watch.observer.half_life_samples
        until = step.consumed_samples + int(hold)
        if record["spikes_in_a_row"] > 1:
            until = context.config.batch.train_samples
        record["hold_growth_until_samples"] = until
        if dist.get_rank() == 0:
            self._note("spike", iteration=step.iteration, hold_growth_until_samples=until)
            logger.warning("the loss rose after the batch grew: no growth until sample %d", until)

    def _grade(self, outcome: dict[str, Any] | None) -> None:
        """Writes what came of a change."""
        if outcome is None:
            return
        if not outcome.get("spiked") and outcome["to_batch"] > outcome["from_batch"]:
            self.history.record["spikes_in_a_row"] = 0
        if dist.get_rank() == 0:
            self._note("outcome", **outcome)

    def _note(self, kind: str, **fields: Any) -> None:
        """A record that nothing depends on."""
        try:
            if self.journal is not None:
                self.journal.append(kind, **fields)
        except (OSError, ValueError) as error:
            logger.warning("the journal cannot be written: %s", error)

    def on_log(self, context: CallbackContext) -> None:
        """Adds lines below the log line."""
        self.watch.on_log(context)
        context.log_fragments.append(
            decision_line(self._last, mode=self.flags.copus_mode, failed=self.failed)
        )

    def on_train_end(self, context: CallbackContext) -> None:
        """Takes the hooks out and sums up."""
        self.watch.on_train_end(context)
        self._grade(self.history.close_if_due(now=True))
        if dist.get_rank() == 0:
            changes = self.history.record["changes"]
            self._note("end", iteration=context.state.iteration, changes=len(changes))
            print(summary(changes, mode=self.flags.copus_mode), flush=True)
