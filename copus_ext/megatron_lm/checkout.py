"""A Megatron-LM checkout as the controller wants to see it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from copus_ext.megatron_lm.layouts import blocks_layouts
from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.batch_schedule import BatchSchedule, make_schedule, parse_steps

if TYPE_CHECKING:
    from copus_ext.controller.flags import CopusConfig


_OPTIMIZERS = ("adam", "muon", "dist_muon")


def check(args: Any, flags: CopusConfig) -> None:
    """Checks the checkout's flags and the controller's.

    Raises:
        UsageError: one does not go with the controller.
    """
    wrong = [
        (
            getattr(args, "dataloader_type", "single") not in (None, "single"),
            "use --dataloader-type single",
        ),
        (getattr(args, "context_parallel_size", 1) != 1, "use --context-parallel-size 1"),
        (
            getattr(args, "use_megatron_fsdp", False) or getattr(args, "use_torch_fsdp2", False),
            "do without FSDP",
        ),
        (
            getattr(args, "num_distributed_optimizer_instances", 1) != 1,
            "use --num-distributed-optimizer-instances 1",
        ),
        (flags.copus_policy == "step_schedule", "use another --copus-policy"),
        (getattr(args, "optimizer", "adam") not in _OPTIMIZERS, "use --optimizer adam or muon"),
        (
            getattr(args, "decrease_batch_size_if_needed", False),
            "drop --decrease-batch-size-if-needed",
        ),
    ]
    if flags.copus_mode == "act":
        schedule = getattr(args, "step_batch_size_schedule", None)
        fix = "drop --step-batch-size-schedule, as both set the batch, or use --copus-mode observe"
        wrong.append((schedule is not None, fix))
    if flags.copus_layouts == "all" and flags.copus_mode == "act":
        wrong += [
            (flags.copus_relayout != "inprocess", "use --copus-relayout inprocess"),
            (
                flags.copus_relayout_checkpoint_tokens is not None,
                "drop --copus-relayout-checkpoint-tokens, as --save-interval says when to save",
            ),
            *((True, f"use --copus-layouts current, because of {x}") for x in blocks_layouts(args)),
            *((True, fix) for fix in _unreadable(args)),
        ]
    fixes = [fix for is_wrong, fix in wrong if is_wrong]
    if fixes:
        raise UsageError("--copus in Megatron-LM: " + "; ".join(fixes))


def _unreadable(args: Any) -> list[str]:
    """Lists flags for checkpoints that every layout can read: a restart loads what another layout
    has saved under that of its flags."""
    if not getattr(args, "save", None):
        return []
    is_split = getattr(args, "use_distributed_optimizer", False)
    found = []
    if is_split and not getattr(args, "dist_ckpt_optim_fully_reshardable", True):
        found.append("add --dist-ckpt-optim-fully-reshardable, so that every layout can load")
    if getattr(args, "ckpt_format", "torch_dist") != "torch_dist":
        found.append("use --ckpt-format torch_dist, so that every layout can load")
    return found


def keeps_micro_batch(args: Any) -> bool:
    """Whether micro-batches must keep their size. The loss depends on it where the load of experts
    is balanced; the mean over all of them is the same under every batch and layout else. Up to 0.17
    evaluations take it, too, and a larger one could leave them without any micro-batch."""
    kinds = getattr(args, "moe_router_load_balancing_type", None)
    is_balanced = "aux_loss" in (kinds if isinstance(kinds, (list, tuple)) else [kinds])
    has_experts = bool(getattr(args, "num_experts", None))
    return (has_experts and is_balanced) or not hasattr(args, "eval_micro_batch_size")


def shared(loss_dict: Any, seconds: float) -> tuple[float, float]:
    """Loss and seconds on every rank: that trainer's loss is on the last stage alone."""
    import torch
    import torch.distributed as dist

    loss = (loss_dict or {}).get("lm loss")
    own = [float("-inf") if loss is None else float(loss), seconds]
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    numbers = torch.tensor(own, dtype=torch.float64, device=device)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    most, slowest = numbers.tolist()
    return most, slowest


def ramp_of(args: Any) -> tuple[int, ...] | None:
    """`--rampup-batch-size` in numbers, which that trainer's parser leaves as words."""
    ramp = getattr(args, "rampup_batch_size", None)
    return tuple(int(number) for number in ramp) if ramp else None


def schedule_of(args: Any) -> BatchSchedule:
    """The batch that the flags ask for, by samples; of a ramp its end."""
    text = getattr(args, "step_batch_size_schedule", None)
    if text is None:
        return make_schedule(global_batch_size=args.global_batch_size)
    # That trainer's own size is that of one micro-batch then, and it takes commas, too.
    return BatchSchedule(steps=parse_steps(text.replace(",", " "), args.seq_length))


def config_of(args: Any, first_batch: int, train_samples: int, scheduler: Any) -> Any:
    """That trainer's arguments in the groups of ours."""
    import torch

    from megatron.trainer.config.layout import Layout

    layout = Layout.of_arguments(vars(args))
    batch = {
        "initial_global_batch_size": first_batch,
        "train_samples": train_samples,
        "step_batch_size_schedule": None,
        "rampup_batch_size": ramp_of(args),
        # Of the schedule: the arguments may lack them, or have a fraction.
        "lr_warmup_samples": scheduler.lr_warmup_steps,
        "lr_decay_samples": scheduler.lr_decay_steps,
        "allow_uneven_micro_batches": False,
    }
    grads = ("overlap_grad_reduce", "accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16")
    batch |= {name: getattr(args, name, False) for name in grads}
    later = ("quick_geglu", "mtp_num_layers", "microbatch_group_size_per_vp_stage", "num_experts")
    model = {name: getattr(args, name, None) for name in later}
    model["gated_linear_unit"] = bool(args.swiglu or model["quick_geglu"])
    groups = SimpleNamespace(**{**vars(args), **batch, **model})
    attention = getattr(args, "attention_backend", "auto")
    flat = {
        **vars(args),
        "attention_backend": getattr(attention, "name", attention),
        "normalization": getattr(args, "normalization", "LayerNorm"),
        **{name: getattr(args, name, False) for name in grads},
        "train_samples": train_samples,
        "moe_balance": "micro_batch",  # see `keeps_micro_batch`
    }
    return SimpleNamespace(
        layout=layout,
        checkpoint=SimpleNamespace(save=getattr(args, "save", None)),
        batch=groups,
        optim=groups,
        model=groups,
        moe=groups,
        kernels=groups,
        parallel=groups,
        recompute=groups,
        precision=SimpleNamespace(
            bf16=getattr(args, "bf16", False),
            fp16=getattr(args, "fp16", False),
            fp8=getattr(args, "fp8", None),
        ),
        runtime=SimpleNamespace(device="cuda" if torch.cuda.is_available() else "cpu"),
        flat=lambda: dict(flat),
    )


def context_of(context: Any, args: Any) -> Any:
    """What our controller is given, made of that trainer's objects and arguments."""
    import torch.distributed as dist
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron.trainer.common.step_settings import StepSettings

    state = SimpleNamespace(
        iteration=args.iteration,
        consumed_samples=args.consumed_train_samples,
        lr_samples=context.scheduler.num_steps,
        settings=StepSettings(),
        callbacks={},
    )
    run_dir = None
    if dist.get_rank() == 0:
        run_dir = Path(args.save or getattr(args, "tensorboard_dir", None) or "runs/copus")
        run_dir.mkdir(parents=True, exist_ok=True)
    return SimpleNamespace(
        model=context.model,
        optimizer=context.optimizer,
        scheduler=context.scheduler,
        groups=ProcessGroupCollection.use_mpu_process_groups(),
        config=None,
        state=state,
        run_dir=run_dir,
        step=None,
        grad_norm=None,
        microbatch_tokens=None,
        is_filled_up=False,
        global_batch_size=None,
        micro_batch_size=None,
        scalars={},
        step_fields={},
        log_fields=[],
        log_fragments=[],
    )
