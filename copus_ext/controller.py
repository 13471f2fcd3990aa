"""The callback that ties the controller to a run. So far it observes: it changes nothing."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from copus_ext.config import CopusConfig
from copus_ext.noise.estimators import NoSplit
from copus_ext.noise.observer import NoiseObserver
from copus_ext.noise.parameters import CONTROL_SET, GROUPS, unavailable_groups
from copus_ext.noise.tap import GradientTap, StepNorms, choose, unavailable
from copus_ext.types import NoiseScale
from megatron.training.callbacks import Callback, CallbackContext
from megatron.training.errors import UsageError

logger = logging.getLogger(__name__)

STATE_KEY = "copus_noise"
_NORM_TOLERANCE = 1e-3
_NEGATIVE_TOLERANCE = 1e-6


class Controller(Callback):
    """Measures the noise scale every `--copus-gns-interval` steps and records it."""

    def __init__(self, flags: CopusConfig) -> None:
        """Checks the flags.

        Raises:
            UsageError: a value that makes no sense, or a mode that is not built.
        """
        if flags.copus_mode == "act":
            raise UsageError("--copus-mode act is not built yet; use --copus-mode observe")
        if flags.copus_gns_interval < 1:
            raise UsageError(f"--copus-gns-interval {flags.copus_gns_interval} must be at least 1")
        half_life = flags.copus_gns_half_life_tokens
        if half_life is not None and half_life <= 0:
            raise UsageError(f"--copus-gns-half-life-tokens {half_life:g} must be positive")
        self.flags = flags
        self.observer = NoiseObserver(half_life_tokens=half_life)
        self.tap: GradientTap | None = None
        self._handle: Any = None
        self._norms: StepNorms | None = None
        self._broken = False

    def settings(self) -> dict[str, Any]:
        """The controller's flags."""
        return dataclasses.asdict(self.flags)

    def on_setup_start(self, context: CallbackContext) -> None:
        """Checks that the layout can be measured, hooks into the gradients and takes over what the
        checkpoint knows."""
        config = context.config
        wanted = self.flags.copus_gns_estimator
        self._check_estimator(config, wanted)
        self.layout = {
            "dp": config.layout.dp,
            "fused_accumulation": config.kernels.gradient_accumulation_fusion,
        }
        left_out = unavailable_groups(
            tp=config.layout.tp,
            pp=config.layout.pp,
            sequence_parallel=config.parallel.sequence_parallel,
            qk_layernorm=config.model.qk_layernorm,
            tied_embeddings=not config.model.untie_embeddings_and_output_weights,
        )
        self.sets: dict[str, tuple[str, ...]] = {
            name: (name,) for name in GROUPS if name not in left_out
        }
        self.sets["layers"] = CONTROL_SET
        if not left_out:
            self.sets["all"] = GROUPS
        self._take_over(context.state.callbacks.get(STATE_KEY))
        self.tap = GradientTap(
            context.model,
            context.groups,
            per_token=config.batch.calculate_per_token_loss,
            device=config.runtime.device,
        )

    def _take_over(self, stored: dict[str, Any] | None) -> None:
        """Goes on with the averages of a checkpoint, or starts empty."""
        if stored is None:
            return
        half_life = self.flags.copus_gns_half_life_tokens
        try:
            self.observer = NoiseObserver.from_json(stored, half_life_tokens=half_life)
        except (ValueError, KeyError, TypeError) as error:
            logger.warning(
                "the noise scale starts afresh, the checkpoint's is unreadable: %r", error
            )

    def _check_estimator(self, config: Any, wanted: str) -> None:
        if wanted == "auto":
            return
        why = unavailable(
            wanted,  # pyright: ignore[reportArgumentType]
            dp=config.layout.dp,
            num_microbatches=2,
            fused_accumulation=config.kernels.gradient_accumulation_fusion,
        )
        if why is not None:
            raise UsageError(f"--copus-gns-estimator {wanted} cannot measure here: {why}; use auto")

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Opens the tap for a step that is to be measured."""
        assert self.tap is not None and context.global_batch_size is not None
        due = (context.state.iteration + 1) % self.flags.copus_gns_interval == 0
        replicas = context.config.layout.dp * context.config.batch.micro_batch_size
        num_microbatches = context.global_batch_size // replicas
        estimator = choose(
            self.flags.copus_gns_estimator, num_microbatches=num_microbatches, **self.layout
        )
        self.observer.layout_estimator = estimator
        self.tap.begin(estimator if due and not self._broken else None, num_microbatches)

    def on_grads_ready(self, context: CallbackContext) -> None:
        """Reads the reduced gradients before they are clipped."""
        assert self.tap is not None
        self._handle = self.tap.reduce(context.microbatch_tokens)
        if self._handle is not None:
            self._loss_scale = context.optimizer.get_loss_scale()

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Takes the measurement in and hands the noise scale to the record."""
        assert self.tap is not None and context.step is not None
        self._norms = None
        if self._handle is not None:
            self._norms = self.tap.finish(
                self._handle,
                global_batch_size=context.step.global_batch_size,
                loss_scale=float(self._loss_scale),
            )
            self._handle = None
        if not (self._norms and context.step.updated and self._is_sound(self._norms, context)):
            self._norms = None
        if self._norms is not None:
            self._take(self._norms, context)
        else:
            self.observer.skip(context.step.global_batch_size)
        context.state.callbacks[STATE_KEY] = self.observer.to_json()
        self._record(context)

    def _take(self, norms: StepNorms, context: CallbackContext) -> None:
        assert context.step is not None
        try:
            estimates = {name: norms.estimate(names) for name, names in self.sets.items()}
        except NoSplit:
            self.observer.skip(context.step.global_batch_size)
            return
        self.observer.take(
            estimates,
            estimator=norms.estimator,
            global_batch_size=context.step.global_batch_size,
            consumed_samples=context.step.consumed_samples,
            tokens=norms.tokens,
        )

    def _is_sound(self, norms: StepNorms, context: CallbackContext) -> bool:
        """Compares with the optimizer's own norm, which finds a wrong group, scale or count."""
        want = context.grad_norm
        if want is None:
            return False
        got = norms.all_squares**0.5
        problem = None
        if abs(got - want) > _NORM_TOLERANCE * max(want, got):
            problem = f"its gradient norm is {got:.6g} and the optimizer's is {want:.6g}"
        elif norms.estimator != "half":
            v, limit = norms.estimate(CONTROL_SET).v, _NEGATIVE_TOLERANCE * norms.all_squares
            if v < -limit * context.step.global_batch_size:  # pyright: ignore[reportOptionalMemberAccess]
                problem = f"tr(Sigma) is {v:.6g}, which {norms.estimator} cannot give"
        if problem:
            self._broken = True
            logger.error(
                "the noise scale is no longer measured: %s; training goes on. Please report it",
                problem,
            )
        return problem is None

    def _record(self, context: CallbackContext) -> None:
        noise, latest = self.observer.noise(), self.observer.latest
        context.step_fields["noise"] = {
            **noise.to_json(),
            "measured": bool(latest),
            "step": {name: dataclasses.asdict(e) for name, e in latest.items()},
            "groups": self.observer.ratios(),
        }
        if self._norms is not None:
            kept = [name for name in GROUPS if name in self.sets]
            context.step_fields["noise"]["squares"] = self._norms.squares(kept)
        named = {
            "noise-scale/phi-samples": noise.phi_samples,
            "noise-scale/phi-samples-low": noise.low_samples,
            "noise-scale/phi-samples-high": noise.high_samples,
            "noise-scale/gradient-squared": noise.g2,
            "noise-scale/trace-of-covariance": noise.v,
        }
        context.scalars.update({k: v for k, v in named.items() if v is not None})

    def on_log(self, context: CallbackContext) -> None:
        """Adds a line below the log line."""
        context.log_fragments.append(noise_line(self.observer.noise()))

    def on_train_end(self, context: CallbackContext) -> None:
        """Takes the hooks out."""
        if self.tap is not None:
            self.tap.close()
            self.tap = None


def noise_line(noise: NoiseScale) -> str:
    """The line that a log shows of the noise scale."""
    if noise.status == "none":
        why = (
            "not measured yet"
            if noise.estimator != "none"
            else "not measurable with one micro-batch on one replica"
        )
        return f" noise scale: {why} |"
    low, high = (
        "unknown" if x is None else f"{x:.1f}" for x in (noise.low_samples, noise.high_samples)
    )
    phi = "unknown" if noise.phi_samples is None else f"{noise.phi_samples:.1f}"
    return (
        f" noise scale (samples): {phi} | 95% interval: {low} to {high} | "
        f"|G|^2: {noise.g2:.6E} | tr(Sigma): {noise.v:.6E} | "
        f"estimator: {noise.estimator} | age (tokens): {noise.age_tokens:.0f} |"
    )
