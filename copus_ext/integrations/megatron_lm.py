"""The same controller in a user's own Megatron-LM checkout. Not run on a GPU yet.

    from copus_ext.integrations.megatron_lm import CopusCallback, add_copus_args, install

    install()                                  # checkouts without callbacks in pretrain()
    pretrain(..., extra_args_provider=add_copus_args,
             callbacks=[CopusCallback()])      # checkouts with them; leave out before

The batch changes through megatron-core's micro-batch calculator, which that loop reads before every
step: it can only grow there, and the micro-batch stays. That loop saves a checkpoint whenever the
number of micro-batches changes, if `--save` is given. The controller's own state lies beside the
checkpoints in `copus_state.jsonl`, as a checkpoint of that trainer has no place for it.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from copus_ext.integrations.checkout import check, context_of, learning_rate, shared

OURS = Path(__file__).resolve().parents[2] / "megatron" / "training"
STATE_FILE = "copus_state.jsonl"


def _join_packages() -> None:
    """Lets `megatron.training` of the checkout find those of our modules that it lacks."""
    for name, folder in (
        ("megatron.training", OURS),
        ("megatron.training.config", OURS / "config"),
    ):
        try:
            paths: Any = importlib.import_module(name).__path__
        except ModuleNotFoundError:
            continue
        if str(folder) not in [str(Path(p).resolve()) for p in paths]:
            paths.append(str(folder))


def add_copus_args(parser: Any) -> Any:
    """Adds the controller's flags to the checkout's parser: an `extra_args_provider`."""
    _join_packages()
    from copus_ext.config import CopusConfig
    from megatron.training.config.fields import option_specs

    section = parser.add_argument_group("copus controller")
    for spec in option_specs(CopusConfig):
        settings: dict[str, Any] = {"dest": spec.dest, "help": spec.help.replace("%", "%%")}
        if spec.kind is bool:
            settings |= {"action": "store_true"}
        else:
            settings |= {"type": spec.kind, "default": spec.default, "choices": spec.choices}
        section.add_argument(*spec.strings, **settings)
    return parser


class CopusCallback:
    """A callback of Megatron-LM's `pretrain`, or what `install` calls in older checkouts.

    Args:
        args: the checkout's arguments; None reads them when training starts.
    """

    def __init__(self, args: Any = None) -> None:
        self._args = args
        self._controller: Any = None

    def on_train_start(self, context: Any) -> None:
        """Model, optimizer and schedule exist."""
        _join_packages()
        if self._args is None:
            self._args = importlib.import_module("megatron.training.global_vars").get_args()
        args = self._args
        if not args.copus or args.copus_mode == "off":
            return
        check(args)
        from copus_ext.config import CopusConfig
        from copus_ext.controller import Controller

        class _Controller(Controller):
            changes_micro_batch = False

        names = [f.name for f in dataclasses.fields(CopusConfig)]
        self._flags = CopusConfig(**{name: getattr(args, name) for name in names})
        self._first_batch = args.global_batch_size
        self._inner = context_of(context, args, self._first_batch)
        self._load()
        controller = _Controller(self._flags)
        controller.on_setup_start(self._inner)
        self._controller = controller
        self._between_reduction_and_step(context.optimizer)
        self._set_rates()

    def _between_reduction_and_step(self, optimizer: Any) -> None:
        """Reads the reduced gradients when the optimizer is about to use them."""
        step = optimizer.step

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._controller is not None:
                self._controller.on_grads_ready(self._inner)
            return step(*args, **kwargs)

        self._undo: Callable[[], None] = lambda: setattr(optimizer, "step", step)
        optimizer.step = watched

    def on_train_step_start(self, context: Any) -> None:
        """A step is about to start."""
        if self._controller is None:
            return
        from megatron.core import num_microbatches_calculator as calculator

        # Here, as that loop counts a step's samples behind it, by the calculator of then.
        self._set_batch()
        self._started = time.monotonic()
        inner = self._inner
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
        from megatron.training.settings import StepInfo

        inner, args = self._inner, self._args
        loss, seconds = shared(context.loss_dict, time.monotonic() - self._started)
        state, updated = inner.state, not context.skipped_iter
        batch = inner.global_batch_size
        state.iteration += 1
        state.consumed_samples += batch
        state.lr_samples = context.scheduler.num_steps
        inner.grad_norm = context.grad_norm
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
        interval = getattr(args, "save_interval", None)
        if changed or (interval and state.iteration % interval == 0):
            self._save()

    def on_log(self, context: Any) -> None:
        """Adds lines to the log."""
        if self._controller is not None:
            self._inner.log_fragments.clear()
            self._controller.on_log(self._inner)
            if context.log_fragments is not None:
                context.log_fragments.extend(self._inner.log_fragments)

    def on_train_end(self, context: Any) -> None:
        """No step follows."""
        if self._controller is not None:
            self._save()
            self._controller.on_train_end(self._inner)
            self._controller = None
            self._undo()

    def _set_rates(self) -> None:
        """Sets the rates of the next step."""
        from megatron.training.settings import set_rates

        inner = self._inner
        if inner.state.settings.changes_rates:
            beta2 = self._args.adam_beta2
            set_rates(inner.optimizer, inner.scheduler, inner.state.settings, beta2=beta2)

    def _set_batch(self) -> None:
        """Sets the batch of the step that is about to start."""
        from megatron.core import num_microbatches_calculator as calculator

        args, state = self._args, self._inner.state
        wanted = state.settings.global_batch_size
        if wanted is None or wanted == calculator.get_current_global_batch_size():
            return
        calculator.reconfigure_num_microbatches_calculator(
            rank=args.rank,
            rampup_batch_size=None,
            global_batch_size=wanted,
            micro_batch_size=args.micro_batch_size,
            data_parallel_size=args.data_parallel_size,
        )
        args.global_batch_size = wanted
        # That loop counts steps; the run's length is in samples.
        args.train_iters = state.iteration + (args.train_samples - state.consumed_samples) // wanted

    def _save(self) -> None:
        """Appends where the controller stands, on rank 0."""
        inner = self._inner
        if inner.run_dir is None:
            return
        state = inner.state
        record = {
            "iteration": state.iteration,
            "settings": dataclasses.asdict(state.settings),
            "callbacks": state.callbacks,
        }
        with (inner.run_dir / STATE_FILE).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _load(self) -> None:
        """Takes over the last state not beyond the checkpoint, on every rank."""
        from megatron.training.agree import from_rank_zero
        from megatron.training.settings import StepSettings

        found, inner = None, self._inner
        file = inner.run_dir and inner.run_dir / STATE_FILE
        if file and file.exists() and inner.state.iteration:
            for line in file.read_text().splitlines():
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if record["iteration"] <= inner.state.iteration:
                    found = record
        found = from_rank_zero(found)
        if found is not None:
            inner.state.callbacks = found["callbacks"]
            inner.state.settings = StepSettings(**found["settings"])


def install(training: Any = None) -> CopusCallback:
    """Wraps `train`, `train_step` and `training_log` of a checkout whose `pretrain` takes no
    callbacks. That module looks these names up when it calls them.

    Args:
        training: the module `megatron.training.training`; None imports it.

    Returns:
        The callback that the wrappers call.
    """
    module: Any = training or importlib.import_module("megatron.training.training")
    callback = CopusCallback()
    context = SimpleNamespace(loss_dict=None, grad_norm=None, skipped_iter=None, log_fragments=[])
    train, train_step, training_log = module.train, module.train_step, module.training_log

    def watched_train(
        forward_step_func: Any, model: Any, optimizer: Any, scheduler: Any, *more: Any, **named: Any
    ) -> Any:
        context.model, context.optimizer, context.scheduler = model, optimizer, scheduler
        callback.on_train_start(context)
        result = train(forward_step_func, model, optimizer, scheduler, *more, **named)
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
        result = training_log(*args, **named)
        get_args = importlib.import_module("megatron.training.global_vars").get_args
        values = get_args()
        if values.log_interval and values.curr_iteration % values.log_interval == 0:
            context.log_fragments.clear()
            callback.on_log(context)
            if values.rank == 0:
                print(*context.log_fragments, sep="\n", flush=True)
        return result

    module.train, module.train_step, module.training_log = watched_train, watched_step, watched_log
    return callback
