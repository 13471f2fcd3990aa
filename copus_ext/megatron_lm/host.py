"""The same controller in a user's own Megatron-LM checkout. Not run on a GPU yet.

`python -m copus_ext.megatron_lm` takes the flags off the command line and calls `install`. Up to
core 0.17 an edit of the script does, too:

    install()
    pretrain(..., extra_args_provider=add_copus_args)

The batch changes through megatron-core's micro-batch calculator, between two segments of that loop;
the micro-batch and the layout stay. The controller's own state lies beside the checkpoints in
`copus_state.jsonl`, as a checkpoint of that trainer has no place for it.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from copus_ext.megatron_lm.checkout import (
    UnsuitableRun,
    check,
    context_of,
    ramp_of,
    shared,
)
from copus_ext.megatron_lm.segments import train_in_segments

if TYPE_CHECKING:
    from copus_ext.controller.flags import CopusConfig

STATE_FILE = "copus_state.jsonl"


def add_copus_args(parser: Any) -> Any:
    """Adds the controller's flags to the checkout's parser: an `extra_args_provider`."""
    from copus_ext.controller.flags import CopusConfig
    from megatron.trainer.config.fields import option_specs

    section = parser.add_argument_group("copus controller")
    for spec in option_specs(CopusConfig):
        if spec.in_file is not None:
            parser.set_defaults(**{spec.dest: spec.default})
            continue
        settings: dict[str, Any] = {"dest": spec.dest, "help": spec.help.replace("%", "%%")}
        if spec.kind is bool:
            settings |= {"action": "store_true"}
        else:
            settings |= {"type": spec.kind, "default": spec.default, "choices": spec.choices}
        section.add_argument(*spec.strings, **settings)
    return parser


class CopusCallback:
    """What `install` calls at each event of the loop.

    Args:
        args: the checkout's arguments; None reads them when training starts.
        flags: the controller's; None finds them among the checkout's arguments.
    """

    def __init__(self, args: Any = None, flags: CopusConfig | None = None) -> None:
        self._args, self._given = args, flags
        self._controller: Any = None
        self._is_cut = self.is_later = False

    def on_train_start(self, context: Any) -> None:
        if self._args is None:
            self._args = importlib.import_module("megatron.training.global_vars").get_args()
        args = self._args
        self._flags = flags = self._given or _flags_among(args)
        if flags is None:
            return
        self._given = flags

        from copus_ext.controller.callback import Controller

        class _Controller(Controller):
            changes_micro_batch = False
            changes_layout = False

        check(args, flags)
        self._first_batch = args.global_batch_size
        # Iterations become samples once, at the first batch.
        self._train_samples = args.train_samples or args.train_iters * self._first_batch
        self._inner = context_of(context, args, self._first_batch, self._train_samples)
        self._load()
        self._inner.config.batch.initial_global_batch_size = self._first_batch
        controller = _Controller(flags)
        controller.on_setup_start(self._inner)
        self._controller = controller
        self._between_reduction_and_step(context.optimizer)
        self._set_rates()
        self._set_batch(at_start=True)

    def _between_reduction_and_step(self, optimizer: Any) -> None:
        """Reads the reduced gradients when the optimizer is about to use them."""
        step = optimizer.step
        if getattr(step, "is_watched", False):
            raise UnsuitableRun("--copus is attached twice: call install() once")

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

    def _tokens(self, batch: int) -> Any:
        """Loss tokens of this replica's micro-batches, on its last stage. That trainer tells nobody
        which of them a mask leaves out: all are taken to count."""
        import torch
        from megatron.core import parallel_state

        args = self._args
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return None
        count = batch // (args.micro_batch_size * args.data_parallel_size)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.full((count,), float(args.micro_batch_size * args.seq_length), device=device)

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
        inner.step_fields.clear()
        inner.scalars.clear()
        changed = request is not None and request.settings is not None
        if request is not None and request.settings is not None:
            state.settings = request.settings
        self._set_rates()
        if changed and self._wanted() != batch:
            # That loop leaves after what is due behind this step, and is called again.
            args.train_iters, self._is_cut = state.iteration, True
        interval = getattr(args, "save_interval", None)
        if changed or (interval and state.iteration % interval == 0):
            self._save()

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
            self._save()
            self._controller.on_train_end(self._inner)
            self._controller = None
            self._undo()

    def goes_on(self) -> bool:
        """Whether a segment has ended before the run; sets the batch of the next one if so."""
        was_cut, self._is_cut = self._is_cut, False
        self.is_later |= was_cut
        if was_cut:
            self._inner.state.iteration = self._args.curr_iteration + 1
            self._inner.state.consumed_samples = self._args.consumed_train_samples
            self._set_batch()
        return was_cut and self._args.train_iters > self._inner.state.iteration

    def _wanted(self) -> int:
        from megatron.core import num_microbatches_calculator as calculator

        now = calculator.get_current_global_batch_size()
        return self._inner.state.settings.global_batch_size or now

    def _set_rates(self) -> None:
        """Sets the rates of the next step. Under a ramp factors return to 1, too."""
        from megatron.trainer.common.step_settings import set_rates

        inner = self._inner
        if self._flags is not None and self._flags.copus_mode == "act":
            beta2 = self._args.adam_beta2
            set_rates(inner.optimizer, inner.scheduler, inner.state.settings, beta2=beta2)

    def _set_batch(self, *, at_start: bool = False) -> None:
        """Sets the batch of the step that is about to start, and the length of the run with it. A
        ramp of the flags ends when the controller sets the first batch; else it goes on."""
        from megatron.core import num_microbatches_calculator as calculator

        args, state = self._args, self._inner.state
        now = calculator.get_current_global_batch_size()
        wanted, ramp = state.settings.global_batch_size, ramp_of(args)
        if wanted is None and ramp:
            return
        wanted, ends_ramp = wanted or now, at_start and ramp is not None
        if wanted != now or ends_ramp:
            calculator.reconfigure_num_microbatches_calculator(
                rank=args.rank,
                rampup_batch_size=None,
                global_batch_size=wanted,
                micro_batch_size=args.micro_batch_size,
                data_parallel_size=args.data_parallel_size,
            )
        if wanted != now or at_start:
            # That loop counts steps; the run's length is in samples.
            left = self._train_samples - state.consumed_samples
            args.train_iters = state.iteration + left // wanted

    def _save(self) -> None:
        """Appends where the controller stands, on rank 0."""
        inner = self._inner
        if inner.run_dir is None:
            return
        state = inner.state
        record = {
            "iteration": state.iteration,
            "first_batch": self._first_batch,
            "settings": dataclasses.asdict(state.settings),
            "callbacks": state.callbacks,
        }
        with (inner.run_dir / STATE_FILE).open("a") as file:
            file.write(json.dumps(record, default=dataclasses.asdict) + "\n")

    def _load(self) -> None:
        """Takes over the last state not beyond the checkpoint, on every rank."""
        from megatron.trainer.common.collectives import broadcast_from_rank0
        from megatron.trainer.common.outside import parse_json
        from megatron.trainer.common.step_settings import StepSettings

        found, inner, args = None, self._inner, self._args
        folders = [getattr(args, "load", None), inner.run_dir]
        for folder in folders if inner.run_dir and inner.state.iteration else []:
            file = folder and Path(folder) / STATE_FILE
            if found is not None or not file or not file.exists():
                continue
            for line in file.read_bytes().splitlines():
                try:
                    record = parse_json(line)
                    parts = record["callbacks"], StepSettings(**record["settings"])
                    # A later launch may have gone back: what it wrote last counts.
                    if isinstance(parts[0], dict) and record["iteration"] <= inner.state.iteration:
                        found = *parts, record["first_batch"]
                except (ValueError, TypeError, KeyError):  # cut short by a kill, or of others
                    continue
        found = broadcast_from_rank0(found)
        if found is not None:
            inner.state.callbacks, settings, self._first_batch = found
            if (
                self._given is not None and self._given.copus_mode == "act"
            ):  # else batch and rates are those of the flags
                inner.state.settings = settings
        elif inner.run_dir and inner.state.iteration:
            print(f"copus: no {STATE_FILE} beside the checkpoint: it starts afresh", flush=True)


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
    callback = CopusCallback(flags=flags)
    context = SimpleNamespace(loss_dict=None, grad_norm=None, skipped_iter=None, log_fragments=[])
    train, train_step, training_log = module.train, module.train_step, module.training_log

    def watched_train(
        forward_step_func: Any, model: Any, optimizer: Any, scheduler: Any, *more: Any, **named: Any
    ) -> Any:
        context.model, context.optimizer, context.scheduler = model, optimizer, scheduler
        callback.on_train_start(context)
        given = forward_step_func, model, optimizer, scheduler, *more
        try:
            if callback.is_on:
                return train_in_segments(train, callback.args, callback.goes_on, *given, **named)
            return train(*given, **named)
        finally:
            # That loop leaves by an exception of its own where it stops early.
            callback.on_train_end(context)

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
        module.train, module.train_step, module.training_log = train, train_step, training_log

    module.train, module.train_step, module.training_log = watched_train, watched_step, watched_log
    return undo
