"""Measures the noise scale of a run and records it. Changes nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import Any

import torch.distributed as dist

from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.segments import config_of
from copus_ext.gns.estimators import Estimate, NoiseNotIdentifiable, choose, unavailable
from copus_ext.gns.hooks import (
    CONTROL_SET,
    GROUPS,
    OF_EXPERTS,
    GradientNormHooks,
    StepNorms,
    unavailable_groups,
)
from copus_ext.gns.observer import CONTROL, NoiseObserver, NoiseScale
from megatron.trainer.common.errors import UsageError
from megatron.trainer.data.sampler import micro_batch_sizes
from megatron.trainer.train.callbacks import Callback, CallbackContext

logger = logging.getLogger(__name__)

STATE_KEY = "copus_noise"
_NORM_TOLERANCE = 1e-3
_NEGATIVE_TOLERANCE = 1e-6


class Contradiction(ArithmeticError):
    """Measured numbers that cannot all be true."""


class GradientNoiseCallback(Callback):
    """Measures the noise scale, every `gns_interval` steps, and records it."""

    def __init__(self, flags: CopusConfig) -> None:
        interval, half_life = flags.copus_gns_interval, flags.copus_gns_half_life_tokens
        self.flags = flags
        self._smoothing: dict[str, Any] = {
            "half_life_tokens": half_life,
            "interval": interval,
            "per_step": flags.copus_policy == "copus" and half_life is None,
        }
        self.observer = NoiseObserver(**self._smoothing)
        self.hooks: GradientNormHooks | None = None
        self._handle: Any = None
        self._norms: StepNorms | None = None

    def on_setup_start(self, context: CallbackContext) -> None:
        """Checks that the layout can be measured, restores the averages of the checkpoint and adds
        the gradient hooks."""
        self._check_estimator(context.config, self.flags.copus_gns_estimator)
        self._start_afresh(context)
        is_resumed = context.state.iteration > 0
        self._restore(context.state.callbacks.get(STATE_KEY), is_resumed=is_resumed)
        self._add_hooks(context)

    def _start_afresh(self, context: CallbackContext) -> None:
        """Begins averages of samples of the present length."""
        self._smoothing["seq_length"] = config_of(context).batch.seq_length
        self.observer = NoiseObserver(**self._smoothing)

    def _add_hooks(self, context: CallbackContext) -> None:
        """Adds the hooks to the model of the present layout."""
        config, layout = context.config, context.config.layout
        is_moe = config.moe.num_experts is not None
        self.layout = {
            "dp": config.layout.dp,
            "cp": config.layout.cp,
            "fused_accumulation": config.kernels.gradient_accumulation_fusion,
        }
        left_out = unavailable_groups(
            tp=config.layout.tp,
            cp=config.layout.cp,
            pp=config.layout.pp,
            sequence_parallel=config.parallel.sequence_parallel,
            qk_layernorm=config.model.qk_layernorm,
            shared_embeddings=not config.model.untie_embeddings_and_output_weights
            or bool(config.model.mtp_num_layers),
            expert_ranks=layout.ep * layout.expert_tensor_parallel_size if is_moe else None,
        )
        there = [name for name in GROUPS if is_moe or name not in OF_EXPERTS]
        self.sets: dict[str, tuple[str, ...]] = {
            name: (name,) for name in there if name not in left_out
        }
        self.sets["all"] = tuple(there)
        self.sets[CONTROL] = tuple(n for n in CONTROL_SET if n in there)
        self.sets = {
            name: parts for name, parts in self.sets.items() if not left_out.intersection(parts)
        }
        self.hooks = GradientNormHooks(
            context.model,
            context.groups,
            per_token=config.batch.calculate_per_token_loss,
            device=config.runtime.device,
        )

    def _restore(self, stored: dict[str, Any] | None, *, is_resumed: bool) -> None:
        """Goes on with the averages of a checkpoint, if it has any."""
        if stored is None:
            if is_resumed and dist.get_rank() == 0:
                logger.warning("the checkpoint holds no noise scale: it starts afresh")
            return
        try:
            self.observer = NoiseObserver.from_json(stored, **self._smoothing)
        except (ValueError, KeyError, TypeError) as error:
            if dist.get_rank() == 0:
                logger.warning(
                    "the noise scale in the checkpoint cannot be read: %s; it is measured anew",
                    error if type(error) is ValueError else repr(error),
                )

    def on_segment_start(self, context: CallbackContext) -> None:
        """Starts afresh: the noise scale counts samples, and these have another length now."""
        is_broken = self.observer.is_broken
        self._start_afresh(context)
        self.observer.is_broken = is_broken
        context.state.callbacks[STATE_KEY] = self.observer.to_json()

    def _check_estimator(self, config: Any, wanted: str) -> None:
        if wanted == "auto":
            return
        why = unavailable(
            wanted,  # pyright: ignore[reportArgumentType]
            dp=config.layout.dp,
            cp=config.layout.cp,
            num_microbatches=2,
            fused_accumulation=config.kernels.gradient_accumulation_fusion,
        )
        if why is not None:
            raise UsageError(f"gns_estimator {wanted} cannot measure here: {why}; use auto")

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Prepares the hooks for a step that is to be measured."""
        assert self.hooks is not None and context.global_batch_size is not None
        due = (context.state.iteration + 1) % self.observer.interval_at(
            context.global_batch_size
        ) == 0
        assert context.micro_batch_size is not None
        if context.is_filled_up:
            self.hooks.begin(None, 1)
            return
        own = context.global_batch_size // context.config.layout.dp
        sizes = micro_batch_sizes(own, context.micro_batch_size)
        num_microbatches = len(sizes)
        estimator = choose(
            self.flags.copus_gns_estimator, num_microbatches=num_microbatches, **self.layout
        )
        self.observer.layout_estimator = estimator
        is_open = due and not self.observer.is_broken
        is_even = sizes[0] == sizes[-1]
        shares = None if is_even else [size / own for size in sizes]
        context.needs_exact_step = is_open and estimator is not None
        self.hooks.begin(estimator if is_open else None, num_microbatches, shares)

    def on_grads_ready(self, context: CallbackContext) -> None:
        """Reads the reduced gradients before they are clipped."""
        assert self.hooks is not None
        self._handle = self.hooks.reduce(context.microbatch_tokens)
        if self._handle is not None:
            self._loss_scale = context.optimizer.get_loss_scale()

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Updates the averages, and adds the noise scale to the step's record and scalars."""
        assert self.hooks is not None and context.step is not None
        # The averages count samples of the present length alone.
        consumed = context.step.consumed_samples // context.step.length_ratio
        norms, self._norms = None, None
        if self._handle is not None:
            norms = self.hooks.finish(
                self._handle,
                global_batch_size=context.step.global_batch_size,
                loss_scale=self._loss_scale,
            )
            self._handle = None
        try:
            estimates = self._estimates(norms, context)
        except Contradiction as error:
            self._disable(f"{error}. Please report it")
            estimates = {}
        if norms is not None and estimates:
            self._norms = norms
            self.observer.update(
                estimates,
                estimator=norms.estimator,
                global_batch_size=context.step.global_batch_size,
                consumed_samples=consumed,
                tokens=norms.tokens,
            )
        else:
            self.observer.skip(consumed)
        context.state.callbacks[STATE_KEY] = self.observer.to_json()
        self._record(context)

    def _estimates(self, norms: StepNorms | None, context: CallbackContext) -> dict[str, Estimate]:
        """Estimates of a step by parameter set; empty where it has none.

        Raises:
            Contradiction: the batch's norm is not the one that the optimizer found (a wrong scale
                or count), or small gradients of equal weight have less norm than their mean.
        """
        want = context.grad_norm
        if norms is None or want is None or not context.step or not context.step.updated:
            return {}
        got = norms.all_squares**0.5
        if abs(got - want) > _NORM_TOLERANCE * max(want, got):
            raise Contradiction(f"its gradient norm is {got:.6g} and the optimizer's is {want:.6g}")
        estimates = {}
        for name, names in self.sets.items():
            # Experts may have one small gradient where the rest has several.
            with contextlib.suppress(NoiseNotIdentifiable):
                estimates[name] = norms.estimate(names)
        if CONTROL in estimates:
            v = estimates[CONTROL].grad_variance_trace
            limit = _NEGATIVE_TOLERANCE * norms.all_squares
            if norms.are_small_equal and v < -limit * context.step.global_batch_size:
                raise Contradiction(f"tr(Sigma) is {v:.6g}, which {norms.estimator} cannot give")
        return estimates

    def _disable(self, why: str) -> None:
        """Ends the measurements. Every rank gets here with the same numbers."""
        self.observer.is_broken = True
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.error("the noise scale is no longer measured: %s; training goes on", why)

    def _record(self, context: CallbackContext) -> None:
        noise, latest = self.observer.noise(), self.observer.latest
        context.step_fields["noise"] = {
            **noise.to_json(),
            "measured": bool(latest),
            "step": {name: dataclasses.asdict(e) for name, e in latest.items()},
            "groups": self.observer.ratios(self.sets),
        }
        if self._norms is not None:
            kept = [name for name in GROUPS if name in self.sets]
            context.step_fields["noise"]["squares"] = self._norms.squares(kept)
        context.scalars.update(noise_scalars(noise))

    def on_log(self, context: CallbackContext) -> None:
        """Adds the noise scale to the log line."""
        ended = self.observer.is_broken
        context.log_fields += noise_fields(self.observer.noise(), ended=ended)

    def on_relayout_start(self, context: CallbackContext) -> None:
        self.on_train_end(context)

    def on_relayout_end(self, context: CallbackContext) -> None:
        """Adds the hooks to the new model. The averages go on, as they belong to the parameters and
        the data."""
        self._add_hooks(context)
        try:
            self._check_estimator(context.config, self.flags.copus_gns_estimator)
        except UsageError as error:
            if dist.get_rank() == 0:
                logger.warning("noise scale is stale: not measurable under this layout: %s", error)

    def on_train_end(self, context: CallbackContext) -> None:
        if self.hooks is not None:
            self.hooks.close()
            self.hooks = None


def noise_scalars(noise: NoiseScale) -> dict[str, float]:
    """The noise scale for the sinks, by tag."""
    named = {
        "noise-scale/phi-samples": noise.phi_samples,
        "noise-scale/phi-samples-low": noise.low_samples,
        "noise-scale/phi-samples-high": noise.high_samples,
        "noise-scale/gradient-squared": noise.grad_norm_sq,
        "noise-scale/trace-of-covariance": noise.grad_variance_trace,
    }
    return {tag: value for tag, value in named.items() if value is not None}


def noise_fields(noise: NoiseScale, *, ended: bool = False) -> list[str]:
    """The noise scale as fields of the log line; the record of the step has all of it."""
    if ended:
        return ["noise scale: no longer measured, see the error above"]
    if noise.status == "none":
        why = (
            "not measured yet"
            if noise.estimator != "none"
            else "this layout and batch leave nothing to compare (docs/controller.md)"
        )
        return [f"noise scale: {why}"]
    low = "unknown" if noise.low_samples is None else f"{noise.low_samples:.1f}"
    high = "unbounded" if noise.high_samples is None else f"{noise.high_samples:.1f}"
    phi = "unknown" if noise.phi_samples is None else f"{noise.phi_samples:.1f}"
    return [f"noise scale (samples): {phi}", f"95% interval: {low} to {high}"]
