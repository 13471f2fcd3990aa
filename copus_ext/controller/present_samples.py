"""A run as a controller sees it: as if all of it had samples of the present length.

A trainer counts in samples of `--seq-length`. Batches, noise scale and throughput are of samples of
the present length, and a controller compares them with lengths of the run. So it is given all in
the present samples, and takes a new view where their length changes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from megatron.training.common.extras import defaults_of, extras_with
from megatron.training.config.batch_schedule import parse_steps
from megatron.training.train.callbacks import CallbackContext

if TYPE_CHECKING:
    from copus_ext.controller.flags import CopusConfig
    from megatron.training.config import Config

_OF_STATE = ("consumed_samples", "lr_samples", "skipped_samples")
_OF_CONTEXT = ("config", "state", "step", "checkpoint_samples")
_OF_FLAGS = (
    "copus_min_global_batch_size",
    "copus_max_global_batch_size",
    "copus_reference_batch_size",
)


class _StateView:
    """Counters of a run in present samples. All else is read from the run, and written to it."""

    def __init__(self, state: Any, ratio: int) -> None:
        object.__setattr__(self, "_state", state)
        object.__setattr__(self, "_ratio", ratio)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._state, name)
        return value // self._ratio if name in _OF_STATE else value

    def __setattr__(self, name: str, value: Any) -> None:
        assert name not in _OF_STATE, f"{name} is the trainer's to count"
        setattr(self._state, name, value)


class _ContextView:
    """A context in present samples. It holds no value of its own: all but configuration, counters,
    step and age of the checkpoint is read from the context of the run, and written to it."""

    def __init__(self, context: CallbackContext, present: Callable[[Config], Config]) -> None:
        object.__setattr__(self, "_context", context)
        object.__setattr__(self, "_present", present)

    def __getattr__(self, name: str) -> Any:
        value, ratio = getattr(self._context, name), ratio_of(self._context)
        if name == "config":
            return self._present(value)
        if name == "state":
            return _StateView(value, ratio)
        if name == "checkpoint_samples" and value is not None:
            return value // ratio
        if name == "step" and value is not None:
            samples = value.consumed_samples // ratio
            return dataclasses.replace(value, consumed_samples=samples, length_ratio=1)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        assert name not in _OF_CONTEXT, f"{name} is the trainer's to set"
        setattr(self._context, name, value)


class PresentSamples:
    def __init__(self) -> None:
        self._config: Any = None
        self._seen: Any = None

    def of(self, context: CallbackContext) -> CallbackContext:
        """A context in present samples; the same one where they are those of the run. Whoever keeps
        a view keeps no model: it shows what the context of the run holds when it is read."""
        if ratio_of(context) == 1:
            return context
        return cast(CallbackContext, _ContextView(context, self._config_of))

    def _config_of(self, config: Config) -> Config:
        if config is not self._config:
            self._config, self._seen = config, config_in_present_samples(config)
        return self._seen


def ratio_of(context: CallbackContext) -> int:
    """Samples in which the run counts that a present sample is; 1 for other trainers."""
    return context.config.segment.ratio if hasattr(context.config, "segment") else 1


def ends_segment(context: CallbackContext) -> bool:
    """Whether the step just done is the last of a segment that another one follows."""
    if not hasattr(context.config, "segment"):
        return False
    segment = context.config.segment
    return not segment.is_last and context.state.consumed_samples >= segment.end


def config_in_present_samples(config: Config) -> Config:
    """The configuration of a run whose samples all have the present length."""
    segment, batch, optim = config.segment, config.batch, config.optim
    dividing = [defaults_of(extra) for extra, _ in extras_with("segment")]
    steps, ramp = batch.step_batch_size_schedule, batch.rampup_batch_size
    if steps is not None:
        steps = " ".join(
            f"{start * batch.seq_length}:{max(size // segment.ratio, 1)}"
            for start, size in parse_steps(steps, batch.seq_length)
        )
    if ramp is not None:
        start, increment, samples = (max(number // segment.ratio, 1) for number in ramp)
        # A smaller increment where the way up is not a multiple of it.
        way = max(batch.global_batch_size // segment.ratio, 1) - start
        ramp = start, math.gcd(increment, way), samples
    wsd = optim.lr_wsd_decay_samples
    return config.replace(
        **{name: value for defaults in dividing for name, value in defaults.items()},
        seq_length=segment.seq_length,
        step_batch_size_schedule=steps,
        rampup_batch_size=ramp,
        global_batch_size=max(batch.global_batch_size // segment.ratio, 1),
        initial_global_batch_size=max(batch.initial_global_batch_size // segment.ratio, 1),
        train_samples=batch.train_samples // segment.ratio,
        lr_decay_samples=optim.lr_decay_samples // segment.ratio,
        lr_warmup_samples=optim.lr_warmup_samples // segment.ratio,
        lr_wsd_decay_samples=None if wsd is None else wsd // segment.ratio,
    )


def flags_in_present_samples(flags: CopusConfig, ratio: int) -> CopusConfig:
    """The controller's flags, whose batches are given in samples of `--seq-length`.

    Args:
        flags: as given.
        ratio: samples of `--seq-length` that a present one is.
    """
    values: dict[str, Any] = {}
    for name in _OF_FLAGS:
        value = getattr(flags, name)
        if value is not None:
            values[name] = max(value // ratio, 1)
    if flags.copus_batch_grid is not None and ratio > 1:
        sizes = [int(word) for word in flags.copus_batch_grid.split(",")]
        kept = sorted({size // ratio for size in sizes if size % ratio == 0})
        values["copus_batch_grid"] = ",".join(map(str, kept)) or None
    return dataclasses.replace(flags, **values)
