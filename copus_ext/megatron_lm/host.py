"""The same controller in a user's own Megatron-LM checkout. Not run on a GPU yet.

`python -m copus_ext.megatron_lm` takes the flags off the command line and calls `install`. Up to
core 0.17 an edit of the script does, too:

    install()
    pretrain(..., extra_args_provider=add_copus_args)

Batch, micro-batch and layout change between two segments of that loop. The controller's own state
goes into that trainer's checkpoints, as one of its arguments.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from copus_ext.megatron_lm.checkout import (
    check,
    config_of,
    context_of,
    keeps_micro_batch,
    ramp_of,
    schedule_of,
    shared,
)
from copus_ext.megatron_lm.flags import add_copus_args as add_copus_args
from copus_ext.megatron_lm.layouts import CheckoutHost
from copus_ext.megatron_lm.record import RunRecord
from copus_ext.megatron_lm.recorded import Recorded
from copus_ext.megatron_lm.segments import train_in_segments
from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.layout_rules import batch_problems

if TYPE_CHECKING:
    from copus_ext.controller.flags import CopusConfig


class CopusCallback:
    """What `install` calls at each event of the loop.

    Args:
        args: the checkout's arguments; None reads them when training starts.
        flags: the controller's; None finds them among the checkout's arguments.
    """

    def __init__(
        self, recorded: Recorded, args: Any = None, flags: CopusConfig | None = None
    ) -> None:
        self._recorded, self._args, self._given = recorded, args, flags
        self._controller: Any = None
        self._host: Any = None
        self._move: Callable[[Any], Any] | None = None
        self._is_cut = self._is_rebuilt = self.is_later = False

    def check_flags(self) -> None:
        """Refuses flags of the checkout and of the controller that do not go together.

        Raises:
            UsageError: naming them.
        """
        args, flags = self._args_and_flags()
        if flags is not None:
            check(args, flags)

    def _args_and_flags(self) -> tuple[Any, CopusConfig | None]:
        if self._args is None:
            self._args = importlib.import_module("megatron.training.global_vars").get_args()
        self._given = self._given or _flags_among(self._args)
        return self._args, self._given

    def on_train_start(self, context: Any) -> None:
        args, flags = self._args_and_flags()
        if flags is None:
            return

        from copus_ext.controller.callback import Controller

        class _Controller(Controller):
            changes_micro_batch = not keeps_micro_batch(args)
            takes_the_rest = False

        schedule = schedule_of(args)
        self._first_batch = schedule.sizes[0]
        # Iterations become samples once.
        self._train_samples = args.train_samples or schedule.samples_after(args.train_iters)
        self._inner = inner = context_of(context, args)
        self._load()

        def configured(args: Any) -> Any:
            lengths = self._first_batch, self._train_samples
            return config_of(args, *lengths, context.scheduler)

        self._host = CheckoutHost(
            self._recorded, args, inner, config_of=configured, events=self._on_layout
        )
        self._layout_of_flags = str(self._host.layout)
        controller = _Controller(flags)
        controller.host_of = lambda job: self._host
        controller.on_setup_start(self._inner)
        self._between_reduction_and_step(context.optimizer)
        self._set_rates()
        self._recorded.state_of = self._state
        self._record = RunRecord(
            inner.run_dir,
            args,
            layout=str(inner.config.layout),
            train_samples=self._train_samples,
            flags=dataclasses.asdict(flags),
        )
        self._recorded.on_saved = self._record.saved
        self._controller = controller  # from here on the record says how the run ends
        self._go_back()
        self._leave_sizes()
        self._set_batch(at_start=True)

    def _go_back(self) -> None:
        """Takes a resumed run to the layout that it had, from that of the flags; or says why it
        stays. Flags that ask for another layout than at its last start are followed."""
        from megatron.trainer.config.layout import Layout

        host, inner = self._host, self._inner
        if self._recorded.loaded_state is None:
            return
        start, before = host.layout, Layout.of_arguments(vars(self._recorded.loaded_arguments))
        if before == start:
            return
        changes = self._controller.layout_changes
        problems = host.problems(before) + host.cut_problems(inner.state.settings, before)
        if changes is None or self._last_layout_of_flags != self._layout_of_flags or problems:
            why = f"as {problems[0]}" if problems else "as the flags say"
            self._say(f"the run was on {before}; it starts on {start}, {why}")
            return
        from copus_ext.controller.layout_changes import LayoutChange

        reason = f"the run was on {before} when it was saved"
        self._say(f"layout {start} -> {before}: {reason}")

        def done(outcome: Any) -> None:
            if outcome.kind != "moved":
                self._say(f"the layout stays {start}: {outcome.reason}")

        change = LayoutChange(
            number=None, to=before, settings=inner.state.settings, reason=reason, done=done
        )
        changes.request(change, inner).move(host)

    def _leave_sizes(self) -> None:
        """Takes sizes that the layout can cut, where it cannot cut those of the checkpoint: smaller
        micro-batches, or the sizes of the flags, which that trainer has checked."""
        args, host = self._args, self._host
        if self._inner.state.settings.global_batch_size is None:
            return
        batch, micro = sizes = self._wanted()
        least = micro if keeps_micro_batch(args) else 1
        near = [(batch, n) for n in range(micro, least - 1, -1)]
        given = args.global_batch_size, args.micro_batch_size
        to = next((x for x in near if not batch_problems(host.layout, x[1], x[0])), given)
        if to != sizes:
            before, now = (f"{b} in micro-batches of {n}" for b, n in (sizes, to))
            self._say(f"batch {now} in place of {before}, which {host.layout} cannot cut")
            self._controller.leave_sizes(*to, self._inner)

    def _say(self, line: str) -> None:
        """Prints a line on one rank."""
        if self.is_first_rank:
            print(f"copus: {line}", flush=True)

    def _on_layout(self, event: str) -> None:
        """The present layout is released, or another one installed."""
        inner = self._inner
        if event == "released":
            self._controller.on_relayout_start(inner)
            self._undo()
            return
        self._is_rebuilt = True
        self._between_reduction_and_step(inner.optimizer)
        self._controller.on_relayout_end(inner)
        self._record.layout(str(inner.config.layout))

    def _between_reduction_and_step(self, optimizer: Any) -> None:
        """Reads the reduced gradients when the optimizer is about to use them."""
        step = optimizer.step
        if getattr(step, "is_watched", False):
            raise UsageError("--copus is attached twice: call install() once")

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._controller is not None:
                self._controller.on_grads_ready(self._inner)
            return step(*args, **kwargs)

        watched.is_watched = True  # type: ignore[attr-defined]
        self._undo: Callable[[], None] = lambda: setattr(optimizer, "step", step)
        optimizer.step = watched

    def on_train_step_start(self, context: Any) -> None:
        if self._controller is None:
            return
        from megatron.core import num_microbatches_calculator as calculator

        inner, args = self._inner, self._args
        # Steps that the loop passes over fire nothing: its own counters hold them.
        inner.state.iteration = getattr(args, "curr_iteration", inner.state.iteration)
        inner.state.consumed_samples = args.consumed_train_samples
        self._started = time.monotonic()
        inner.global_batch_size = calculator.get_current_global_batch_size()
        inner.micro_batch_size = self._args.micro_batch_size
        inner.microbatch_tokens = self._tokens(inner.global_batch_size)
        self._controller.on_train_step_start(inner)

    def _tokens(self, batch: int) -> list[float] | None:
        """Loss tokens of this replica's micro-batches, on its last stage. That trainer tells nobody
        which of them a mask leaves out: all are taken to count."""
        from megatron.core import parallel_state

        args = self._args
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return None
        count = batch // (args.micro_batch_size * args.data_parallel_size)
        return [float(args.micro_batch_size * args.seq_length)] * count

    def on_train_step_end(self, context: Any) -> None:
        """A step is done; that loop counts its samples only afterwards."""
        if self._controller is None:
            return
        from megatron.trainer.common.step_settings import StepInfo, learning_rate

        inner, args = self._inner, self._args
        loss, seconds = shared(context.loss_dict, time.monotonic() - self._started)
        state, updated = inner.state, not context.skipped_iter
        batch = inner.global_batch_size
        state.iteration += 1
        state.consumed_samples += batch
        state.lr_samples = context.scheduler.num_steps
        inner.grad_norm = context.grad_norm
        # That loop's schedule has just set the plain rates.
        self._set_rates()
        inner.step = StepInfo(
            iteration=state.iteration,
            consumed_samples=state.consumed_samples,
            global_batch_size=batch,
            micro_batch_size=args.micro_batch_size,
            num_microbatches=batch // (args.micro_batch_size * args.data_parallel_size),
            loss=loss,
            grad_norm=context.grad_norm,
            num_zeros=None,
            learning_rate=learning_rate(context.optimizer),
            updated=updated,
            elapsed_s=seconds,
        )
        request = self._controller.on_train_step_end(inner)
        self._record.step(
            inner.step,
            iterations=args.train_iters,
            scalars=inner.scalars,
            fields=inner.step_fields,
        )
        inner.step_fields.clear()
        inner.scalars.clear()
        changed = request is not None and request.settings is not None
        if request is not None and request.settings is not None:
            state.settings = request.settings
        self._move = request.move if request is not None else None
        self._set_rates()
        other_sizes = changed and self._wanted() != (batch, args.micro_batch_size)
        if other_sizes or self._move is not None:
            # That loop leaves after what is due behind this step, and is called again.
            args.train_iters, self._is_cut = state.iteration, True

    def on_log(self, context: Any) -> None:
        """Adds lines to the log after a decision, the noise scale first, since the log line of that
        trainer takes no more fields."""
        if self._controller is not None:
            inner = self._inner
            inner.log_fields.clear()
            inner.log_fragments.clear()
            self._controller.on_log(inner)
            if context.log_fragments is not None and inner.log_fragments:
                noise = " " + "".join(f"{field} | " for field in inner.log_fields).rstrip()
                context.log_fragments.extend([noise, *inner.log_fragments])

    @property
    def is_on(self) -> bool:
        return self._controller is not None

    @property
    def args(self) -> Any:
        """The checkout's arguments, once training has started."""
        return self._args

    @property
    def is_log_due(self) -> bool:
        """Whether that trainer logs after this step."""
        interval = self._args and self._args.log_interval
        return bool(self._controller and interval and self._inner.state.iteration % interval == 0)

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank writes."""
        return self._controller is not None and self._inner.run_dir is not None

    def on_train_end(self, context: Any) -> None:
        """No step follows."""
        if self._controller is not None:
            self._controller.on_train_end(self._inner)
            self._controller = None
            self._undo()
            self._record.numbers(self._inner.scalars)
            done = self._inner.state.iteration >= self._args.train_iters
            self._record.end("done" if done else "Megatron-LM has ended it before its last step")

    def on_train_error(self, error: BaseException) -> None:
        """Nothing of the run is touched any more."""
        if self._controller is None:
            return
        if isinstance(error, KeyboardInterrupt):
            self._record.end("SIGINT")
            return
        lines = str(error).splitlines() or ["without a message"]
        self._record.end("", fault=f"{type(error).__name__}: {lines[0]}")

    def goes_on(self, given: dict[str, Any]) -> bool:
        """Whether a segment has ended before the run; if so it brings the layout and the sizes of
        the next one about.

        Args:
            given: arguments of `train` by name; those of the next call afterwards.
        """
        was_cut, self._is_cut = self._is_cut, False
        self.is_later |= was_cut
        if not was_cut:
            return False
        args, state = self._args, self._inner.state
        state.iteration = args.curr_iteration + 1
        state.consumed_samples = args.consumed_train_samples
        move, self._move = self._move, None
        if move is not None:
            move(self._host)
        self._set_batch()
        self.renew(given)
        return args.train_iters > state.iteration

    def renew(self, given: dict[str, Any]) -> None:
        """Gives the next call of `train` the iterators and the configuration that it needs now."""
        from megatron.core.utils import get_model_config

        is_new, self._is_rebuilt = self._is_rebuilt, False
        if not (is_new or self._micro_has_changed):
            return
        iterators = self._recorded.iterators(self._args, is_new_layout=is_new)
        given["train_data_iterator"], given["valid_data_iterator"] = iterators
        given["config"] = get_model_config(given["model"][0])
        self._set_rates()

    def _wanted(self) -> tuple[int, int]:
        """Global batch and micro-batch of the next step."""
        settings, args = self._inner.state.settings, self._args
        batch = settings.global_batch_size or args.global_batch_size
        return batch, settings.micro_batch_size or args.micro_batch_size

    def _set_rates(self) -> None:
        """Sets the rates of the next step. Under a ramp factors return to 1, too."""
        from megatron.trainer.common.step_settings import set_rates

        inner = self._inner
        if self._given is not None and self._given.copus_mode == "act":
            beta2 = self._args.adam_beta2
            set_rates(inner.optimizer, inner.scheduler, inner.state.settings, beta2=beta2)

    def _set_batch(self, *, at_start: bool = False) -> None:
        """Sets the batch of the step that is about to start, and the length of the run with it. A
        ramp of the flags ends when the controller sets the first batch; else it goes on, and so
        does a schedule."""
        from megatron.core import num_microbatches_calculator as calculator

        args, state = self._args, self._inner.state
        now = calculator.get_current_global_batch_size()
        ramp, self._micro_has_changed = ramp_of(args), False
        is_scheduled = ramp or getattr(args, "step_batch_size_schedule", None)
        if state.settings.global_batch_size is None and is_scheduled:
            return
        (wanted, micro), ends_ramp = self._wanted(), at_start and ramp is not None
        self._micro_has_changed = micro != args.micro_batch_size
        if wanted != now or ends_ramp or self._micro_has_changed:
            self._host.set_sizes(wanted, micro)
        # That loop counts steps; the run's length is in samples.
        left = self._train_samples - state.consumed_samples
        args.train_iters = state.iteration + left // wanted

    def _state(self) -> str:
        """Where the controller stands, for a checkpoint."""
        state = self._inner.state
        record = {
            "first_batch": self._first_batch,
            "layout_of_flags": self._layout_of_flags,
            "settings": dataclasses.asdict(state.settings),
            "callbacks": state.callbacks,
        }
        return json.dumps(record, default=dataclasses.asdict)

    def _load(self) -> None:
        """Takes over the state of the checkpoint."""
        from megatron.trainer.common.outside import parse_json
        from megatron.trainer.common.step_settings import StepSettings

        state, saved = self._inner.state, self._recorded.loaded_state
        if saved is None:
            if state.iteration and self._inner.run_dir:
                print("copus: the checkpoint is of a run without --copus: it starts afresh")
            return
        record = parse_json(saved.encode())
        state.callbacks, self._first_batch = record["callbacks"], record["first_batch"]
        self._last_layout_of_flags = record.get("layout_of_flags")
        # Else batch and rates are those of the flags.
        if self._given is not None and self._given.copus_mode == "act":
            state.settings = StepSettings(**record["settings"])


def _flags_among(args: Any) -> CopusConfig | None:
    """The controller's settings among the arguments of a parser that `add_copus_args` has been
    given; None where it is off."""
    from copus_ext.controller.flags import check_has_copus, controller_flags, given_by_value

    check_has_copus(given_by_value(args), is_on=args.copus)
    return controller_flags(args) if args.copus and args.copus_mode != "off" else None


def install(training: Any = None, *, flags: CopusConfig | None = None) -> Callable[[], None]:
    """Wraps `train`, `train_step` and `training_log` of a checkout. That module looks these names
    up when it calls them.

    Args:
        training: the module `megatron.training.training`; None imports it.
        flags: the controller's; None finds them among the checkout's arguments.

    Returns:
        What takes the wrappers off again.
    """
    module: Any = training or importlib.import_module("megatron.training.training")
    # Before any group is there, whose names it keeps empty.
    importlib.import_module("megatron.trainer.distributed.process_groups")
    recorded = Recorded(module)
    callback = CopusCallback(recorded, flags=flags)
    recorded.before_groups = callback.check_flags
    context = SimpleNamespace(loss_dict=None, grad_norm=None, skipped_iter=None, log_fragments=[])
    train, train_step, training_log = module.train, module.train_step, module.training_log

    def watched_train(
        forward_step_func: Any, model: Any, optimizer: Any, scheduler: Any, *more: Any, **named: Any
    ) -> Any:
        context.model, context.optimizer, context.scheduler = model, optimizer, scheduler
        given = forward_step_func, model, optimizer, scheduler, *more
        call = inspect.signature(train).bind(*given, **named)
        recorded.has_own_groups = call.arguments.get("pg_collection") is not None
        try:
            callback.on_train_start(context)
            if callback.is_on:
                result = train_in_segments(train, callback, *given, **named)
            else:
                result = train(*given, **named)
        except SystemExit:  # that loop's own way out where it stops early
            callback.on_train_end(context)
            raise
        except BaseException as error:
            callback.on_train_error(error)
            raise
        callback.on_train_end(context)
        return result

    def watched_step(*args: Any, **named: Any) -> Any:
        callback.on_train_step_start(context)
        result = train_step(*args, **named)
        context.loss_dict, context.skipped_iter = result[0], bool(result[1])
        # (losses, skipped, norm, zeros), later with checkpoint, exit and exit code in between.
        context.grad_norm = result[5] if len(result) >= 7 else result[2]
        callback.on_train_step_end(context)
        return result

    def watched_log(*args: Any, **named: Any) -> Any:
        if callback.is_later and "is_first_iteration" in named:
            named["is_first_iteration"] = False  # it begins a segment, not the run
        result = training_log(*args, **named)
        context.log_fragments.clear()
        if callback.is_log_due:
            callback.on_log(context)
        if context.log_fragments and callback.is_first_rank:
            print(*context.log_fragments, sep="\n", flush=True)
        return result

    def undo() -> None:
        recorded.undo()
        module.train, module.train_step, module.training_log = train, train_step, training_log

    module.train, module.train_step, module.training_log = watched_train, watched_step, watched_log
    return undo
