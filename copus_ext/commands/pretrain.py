"""Pre-trains a GPT with Megatron-LM's flags.

torchrun --nproc-per-node 4 pretrain_gpt.py --num-layers 8 --hidden-size 256 ... --data-path
my_text_document

One process per GPU (or per CPU rank), started by torchrun, by srun or alone.
"""

import argparse
import contextlib
import functools
import logging
import os
import sys
import time
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron.trainer.common.program import program_name, tell

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from copus_ext.launch.launchers import Start
    from megatron.trainer.checkpoint.load import Stored
    from megatron.trainer.config import Config
    from megatron.trainer.resilience.exit_status import RunOutcome
    from megatron.trainer.train.callbacks import Callback

logger = logging.getLogger(__name__)

_SCRIPT = "pretrain_gpt.py"
_PATIENCE_S = 10


def main(argv: list[str] | None = None) -> int:
    """Parses flags and trains.

    Returns:
        Exit code: 0 done or stopped on request, 1 failed, 2 wrong usage, 85 to be started again.
        The process ends with 130 where Ctrl-C has to end it at once, and with 128 + N where signal
        N comes before the ranks have met.
    """
    started_s = time.monotonic()
    # Heavy imports come after: a rank whose launcher has gone is to end at once.
    from copus_ext.launch.rank_side import adopt_srun, end_with_launcher, leave_error
    from megatron.trainer.common.signals import leave_on_interrupt

    leave_on_interrupt(is_told=os.environ.get("RANK", "0") == "0")
    end_with_launcher()
    from copus_ext.controller.flags import CopusConfig, check_has_copus
    from copus_ext.launch.launchers import runner_of
    from megatron.trainer.common.errors import TrainingFailure, UsageError
    from megatron.trainer.common.gpus import check_torch_build
    from megatron.trainer.config.arguments import parse_args
    from megatron.trainer.resilience.env_checks import check_environment, set_process_defaults

    try:
        runner = runner_of(os.environ)
        if runner is not None:
            args = parse_args(argv, {"copus controller": CopusConfig}, prog=program_name(_SCRIPT))
            check_has_copus(args.explicit_flags, is_on=args.copus)
            set_process_defaults()
            check_environment()
            check_torch_build(args.device)
            from megatron.trainer.resilience.determinism import prepare_early

            prepare_early(args)
            train = functools.partial(_train_from, started_s=started_s)
            return runner(sys.argv[1:] if argv is None else argv, train)
        adopt_srun()
        return _train(argv, started_s=started_s, start_fields={"launched_t": _launched_t()})
    except (UsageError, TrainingFailure) as error:
        return _fail(error, error.exit_code)
    except Exception as error:
        leave_error(error)
        raise


def _train_from(start: "Start", *, started_s: float) -> int:
    return _train(
        start.flags,
        stored=start.stored,
        more=start.callbacks,
        on_exit=start.on_exit,
        start_fields=start.fields,
        started_s=started_s,
    )


def _train(
    argv: "Sequence[str] | None",
    *,
    stored: "Stored | None" = None,
    more: "Sequence[Callback]" = (),
    on_exit: "Callable[[RunOutcome], None] | None" = None,
    start_fields: "Mapping[str, Any]" = MappingProxyType({}),
    started_s: float | None = None,
) -> int:
    """Trains in the world that the environment describes; see `pretrain`. `argv` is None for the
    flags of the process, `stored` where to go on from unless the flags say."""
    from copus_ext.controller.flags import CopusConfig, check_has_copus
    from megatron.trainer.common.gpus import check_torch_build
    from megatron.trainer.config.arguments import parse_args, with_checkpoint_args
    from megatron.trainer.config.training import AUTO
    from megatron.trainer.resilience.env_checks import check_environment, set_process_defaults

    args = parse_args(argv, {"copus controller": CopusConfig}, prog=program_name(_SCRIPT))
    check_has_copus(args.explicit_flags, is_on=args.copus)
    set_process_defaults()
    check_environment()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    check_torch_build(args.device)

    from copus_ext.reshard import relaunch
    from megatron.trainer.common import optional
    from megatron.trainer.train.pretrain import pretrain

    if args.use_checkpoint_args and (stored is not None or args.load):
        args = with_checkpoint_args(args, _stored_arguments(args, stored))
    resolved = functools.partial(resolve_run, world_size=world_size, **optional.abilities())
    if args.global_batch_size == AUTO:
        config, own = _with_first_batch(args, stored, resolved)
        more = [own, *more]
    else:
        config = resolved(args)
    callbacks = [*controllers(args, config), *more]
    outcome = pretrain(
        config,
        callbacks,
        on_exit or relaunch.report_exit,
        stored=stored,
        start_fields=start_fields,
        started_s=started_s,
    )
    code = max([relaunch.exit_code(outcome), *(c.exit_code for c in callbacks)])
    if os.environ.get("RANK", "0") == "0" and args.copus and args.copus_mode == "act":
        tell_time_saved(outcome, code)
    return code


def _launched_t() -> float:
    """When this launch began, seconds since the epoch: with this process, or with torchrun if this
    is its first attempt."""
    import psutil

    own = psutil.Process()
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        with contextlib.suppress(psutil.Error):
            return psutil.Process(os.getppid()).create_time()
    return own.create_time()


def _stored_arguments(args: argparse.Namespace, stored: "Stored | None") -> "Mapping[str, Any]":
    """The flags of the checkpoint that a run goes on from."""
    from megatron.trainer.checkpoint.load import read_arguments

    if stored is not None:
        return stored.arguments
    return read_arguments(
        Path(args.load),
        step=args.ckpt_step,
        fallback=args.ckpt_fallback,
        trust_unverified=args.ckpt_trust_unverified,
    )


def _with_first_batch(
    args: argparse.Namespace,
    stored: "Stored | None",
    resolved: "Callable[[argparse.Namespace], Config]",
) -> "tuple[Config, Callback]":
    """The configuration of a run with `--global-batch-size auto`, and what checks that all ranks
    have the same."""
    from copus_ext.controller.auto_batch import SameBatch, with_batch
    from copus_ext.controller.flags import controller_flags
    from megatron.trainer.checkpoint.load import iterations_to_try

    goes_on = stored is not None
    if not goes_on and args.load:
        step, fallback = args.ckpt_step, args.ckpt_fallback
        goes_on = bool(iterations_to_try(Path(args.load), step=step, fallback=fallback)[0])
    known = _stored_arguments(args, stored) if goes_on and not args.finetune else None
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    flags = controller_flags(args)
    args, why = with_batch(args, flags, world_size, resolved=resolved, stored=known)
    config = resolved(args)
    return config.replace(notes=(*config.runtime.notes, why)), SameBatch()


def resolve_run(args: argparse.Namespace, world_size: int, **have: bool) -> "Config":
    """The configuration of a run. In mode `act`, in which batch and layout may change,
    `--moe-balance lagged` is the default: the loss `aux_loss` then stays the same. Other modes
    change nothing.

    Args:
        args: parsed flags, with those of the controller.
        have: what there is on this machine, for `arguments.resolve`.
    """
    from dataclasses import replace

    from megatron.trainer.config.arguments import resolve

    acts = args.copus and args.copus_mode == "act" and args.num_experts
    if not acts or args.moe_balance or "aux_loss" not in args.moe_router_load_balancing_type:
        return resolve(args, world_size, **have)
    config = resolve(
        argparse.Namespace(**{**vars(args), "moe_balance": "lagged"}), world_size, **have
    )
    if not any(config.moe.moe_aux_loss_coeff):
        return config
    note = (
        "--copus: --moe-balance becomes lagged, so that the balance loss stays the same under "
        "every batch and layout (docs/moe.md)"
    )
    notes = (*config.runtime.notes, note)
    return replace(config, runtime=replace(config.runtime, notes=notes))


def controllers(args: argparse.Namespace, config: "Config") -> list[Any]:
    """The callbacks that `--copus` and extras add; imports them only then."""
    from copus_ext.controller.flags import controller_flags
    from megatron.trainer.common.extras import extras_with

    flags = controller_flags(args)
    found: list[Any] = []
    controller = None
    if flags.copus and flags.copus_mode != "off":
        from copus_ext.controller.callback import Controller
        from copus_ext.controller.peak_memory import PeakMemoryCallback

        controller = Controller(flags)
        found += [controller, PeakMemoryCallback()]
    for _, callbacks in extras_with("callbacks"):
        found += callbacks(config, controller)
    if flags.copus and flags.copus_mode == "act":
        from copus_ext.controller.out_of_memory import OutOfMemoryCallback

        found.append(OutOfMemoryCallback())
    return found


def tell_time_saved(outcome: "RunOutcome", code: int) -> None:
    """Prints what the changes of a run have saved, or why that is not known. An error is only a
    warning: the run is done all the same. A run that goes on elsewhere, or was told to stop, has no
    time for it."""
    from copus_ext.reshard.relaunch import kind_of

    is_urgent = outcome.reason is not None and outcome.reason.is_urgent
    if code != 0 or is_urgent or kind_of(outcome) != "done":
        return
    try:
        from copus_ext.monitor.time_saved import line_at_end

        line = line_at_end(outcome.run_dir)
    except Exception as error:
        logger.warning("what the changes have saved is unknown: %r", error)
        return
    if line:
        print(line, flush=True)


def _fail(error: Exception, code: int) -> int:
    """Prints the error on rank 0. The others give it time to, since a launcher ends all ranks with
    the first that fails; one that is still there then has an error of its own."""
    from copus_ext.launch.rank_side import leave_error

    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(_PATIENCE_S)
    leave_error(error, message_only=True)  # not before: a launcher shows that of every rank
    sys.stdout.flush()
    where = f" on rank {rank}" if rank != "0" else ""
    tell(_SCRIPT, f"error{where}: {error}")
    _leave_world(code)
    return code


def _leave_world(code: int) -> None:
    """Closes what a failed run left open: gloo's threads would end the interpreter with SIGABRT.

    NCCL would wait for ranks that never come: there the process ends at once.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return
    if dist.get_backend() != "gloo":
        sys.stderr.flush()
        os._exit(code)
    dist.destroy_process_group()


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(exit_code)
