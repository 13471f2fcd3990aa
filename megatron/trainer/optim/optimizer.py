"""Megatron-core's optimizers, the learning-rate schedule in samples, and skipping of bad
steps."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.trainer.common.extras import extras
from megatron.trainer.common.optional import have_nvidia_apex, have_transformer_engine
from megatron.trainer.config import Config
from megatron.trainer.model.gpt import Model, parameter_dtype, same_fields
from megatron.trainer.model.shards import parts_of
from megatron.trainer.optim.fused_adam import FusedAdam


class NonFiniteGradient(ArithmeticError):
    """The norm of the reduced gradient is NaN or inf; raised on every rank, before any weight
    changes."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimizer step did; the same on every rank."""

    updated: bool
    """False if the step was skipped (fp16 overflow or a gradient that is not finite)."""
    grad_norm: float | None
    """L2 norm of the gradient before clipping; None after an fp16 overflow."""
    num_zeros: int | None
    """Zeros in the gradient, with `--log-num-zeros-in-grad`."""


def use_fused_adam() -> None:
    """Gives megatron-core our Adam where neither Transformer Engine nor apex is there.
    Idempotent."""
    if have_transformer_engine() or have_nvidia_apex():
        return
    optimizer: Any = importlib.import_module("megatron.core.optimizer")
    distributed: Any = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    optimizer.Adam = distributed.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed.HAVE_APEX_OR_TE = True
    # Not apex itself: it selects the code path for a step count in the parameter group.
    distributed.USING_APEX_OPTIMIZER = True


def use_clipping_on_device() -> None:
    """Gives megatron-core a norm that is computed where the gradients are, and a product in place,
    where neither Transformer Engine nor apex is there. With its own norm the host waits for each
    tensor, and its own product needs room for the largest gradient once more. Idempotent."""
    if have_transformer_engine() or have_nvidia_apex():
        return
    clip_grads: Any = importlib.import_module("megatron.core.optimizer.clip_grads")
    clip_grads.l2_norm_impl = _l2_norm
    clip_grads.multi_tensor_scale_impl = _scale


def _l2_norm(
    chunk_size: int, overflow: torch.Tensor, tensor_lists: list[list[torch.Tensor]], *_: bool
) -> tuple[torch.Tensor, None]:
    """As apex's `multi_tensor_l2norm`: the norm of all tensors together, [1] in fp32."""
    norms = torch._foreach_norm(tensor_lists[0], 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


def _scale(
    chunk_size: int, overflow: torch.Tensor, tensor_lists: list[list[torch.Tensor]], scale: float
) -> None:
    """As apex's `multi_tensor_scale`: the second list becomes the first one times a number."""
    read, written = tensor_lists
    if read is not written:
        torch._foreach_copy_(written, read)
    torch._foreach_mul_(written, scale)


def optimizer_config(config: Config) -> OptimizerConfig:
    """megatron-core's configuration of the optimizer."""
    own_groups = config.optim, config.precision, config.parallel, config.logging
    chosen = [e.name for e in extras() if config.optim.optimizer in e.optimizers]
    groups = *own_groups, *(config.extras[name] for name in chosen)
    own = {
        "params_dtype": parameter_dtype(config),
        "fp8_recipe": config.precision.fp8_recipe if config.precision.fp8 else None,
    }
    return OptimizerConfig(**{**same_fields(OptimizerConfig, *groups), **own})


def build_optimizer(
    config: Config, model: Model, groups: ProcessGroupCollection
) -> MegatronOptimizer:
    """Builds the optimizer over the chunks' gradient buffers. All ranks of the world take part.

    Returns:
        A chained optimizer whose moments exist, so that it can be saved and loaded before its first
        step.
    """
    use_fused_adam()
    use_clipping_on_device()
    core = optimizer_config(config)
    optimizer = get_megatron_optimizer(
        core,
        model.chunks,  # pyright: ignore[reportArgumentType]
        use_gloo_process_groups=config.parallel.enable_gloo_process_groups,
        pg_collection=None if config.parallel.enable_gloo_process_groups else groups,
    )
    mark_decoupled(optimizer.param_groups)
    for part in parts_of(optimizer):
        if part.optimizer is not None:
            part.init_state_fn(part.optimizer, core)
    model.core_config.grad_scale_func = optimizer.scale_loss
    _refuse_bad_gradients(optimizer)
    return optimizer


def mark_decoupled(groups: Iterable[dict[str, Any]]) -> None:
    """Gives the parameter groups of `--decoupled-lr` a name of their own.

    megatron-core finds groups in a checkpoint by some of their fields, among them
    `is_decoupled_lr`. It leaves that False, so that the group of the embedding and that of the
    other matrices would be taken for one.
    """
    for group in groups:
        if "default_config" in group:
            group["is_decoupled_lr"] = not group["default_config"]


def _refuse_bad_gradients(optimizer: Any) -> None:
    """Makes `step` raise before it clips or updates when the gradient norm is not finite.

    The norm is reduced over all ranks that share a gradient, so that every rank raises or none
    does.
    """
    norm_of = optimizer.get_grad_norm

    @functools.wraps(norm_of)
    def checked() -> float:
        norm = float(norm_of())
        if not math.isfinite(norm):
            raise NonFiniteGradient(f"gradient norm {norm}")
        return norm

    optimizer.get_grad_norm = checked


def optimizer_step(optimizer: Any) -> StepResult:
    """Clips and updates, or skips the update when the gradient is not finite."""
    try:
        updated, grad_norm, num_zeros = optimizer.step()
    except NonFiniteGradient:
        return StepResult(updated=False, grad_norm=math.nan, num_zeros=None)
    return StepResult(updated=bool(updated), grad_norm=grad_norm, num_zeros=num_zeros)


def build_scheduler(
    config: Config, optimizer: MegatronOptimizer, *, lr_samples: int
) -> OptimizerParamScheduler:
    """The learning-rate and weight-decay schedule, in samples, placed where the run is.

    A schedule is always built afresh and moved to its place. Loading one would add the stored
    count, and the learning rates of loaded parameter groups would win.

    Args:
        optimizer: whose groups it drives; their rates are overwritten.
        lr_samples: samples of the successful steps so far.
    """
    o = config.optim
    apart = o.decoupled_lr, o.min_lr if o.decoupled_min_lr is None else o.decoupled_min_lr
    for group in optimizer.param_groups:
        is_apart = group.get("is_decoupled_lr", False)
        group["max_lr"], group["min_lr"] = apart if is_apart else (o.lr, o.min_lr)
    warmup: float = o.lr_warmup_samples
    if o.lr_warmup_fraction is not None:
        # Megatron-LM hands on the product as it is; the length in samples is rounded down.
        share = o.lr_warmup_fraction * o.lr_decay_samples
        warmup = share if int(share) == warmup else warmup
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=o.lr_warmup_init,
        max_lr=o.lr,
        min_lr=o.min_lr,
        lr_warmup_steps=warmup,  # pyright: ignore[reportArgumentType]
        lr_decay_steps=o.lr_decay_samples,
        lr_decay_style=o.lr_decay_style,
        start_wd=o.start_weight_decay,
        end_wd=o.end_weight_decay,
        wd_incr_steps=config.batch.train_samples,
        wd_incr_style=o.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=False,
        wsd_decay_steps=o.lr_wsd_decay_samples,
        lr_wsd_decay_style=o.lr_wsd_decay_style,
    )
    scheduler.step(increment=lr_samples)
    return scheduler
