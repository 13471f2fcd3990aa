"""Segments of a run with samples of different lengths.

A run counts its position and its lengths in samples of `--seq-length`, and so does all that the
controller remembers of positions. Batches, noise scale and throughput are of samples of the present
length, in which a configuration and the flags of the controller give their batches here.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from megatron.trainer.train.callbacks import CallbackContext

if TYPE_CHECKING:
    from copus_ext.controller.flags import CopusConfig

_BATCHES = (
    "copus_min_global_batch_size",
    "copus_max_global_batch_size",
    "copus_reference_batch_size",
)


def config_of(context: CallbackContext) -> Any:
    """The configuration of a run in samples of the present length; see `Config.in_segment`. That of
    another trainer has one length."""
    return getattr(context.config, "in_segment", context.config)


def length_ratio(config: Any) -> int:
    """Samples in which the run counts that one of the present length is."""
    return config.segment.ratio if hasattr(config, "segment") else 1


def ends_segment(context: CallbackContext) -> bool:
    """Whether the step just done is the last of a segment that another one follows."""
    if not hasattr(context.config, "segment"):
        return False
    segment = context.config.segment
    return not segment.is_last and context.state.consumed_samples >= segment.end


def flags_in_segment(flags: CopusConfig, ratio: int) -> CopusConfig:
    """The controller's flags with batches in samples of the present length.

    Args:
        flags: as given, in samples of `--seq-length`.
        ratio: of lengths.
    """
    values: dict[str, Any] = {}
    for name in _BATCHES:
        value = getattr(flags, name)
        if value is not None:
            values[name] = max(value // ratio, 1)
    if flags.copus_batch_grid is not None and ratio > 1:
        sizes = [int(word) for word in flags.copus_batch_grid.split(",")]
        kept = sorted({size // ratio for size in sizes if size % ratio == 0})
        values["copus_batch_grid"] = ",".join(map(str, kept)) or None
    return dataclasses.replace(flags, **values)
