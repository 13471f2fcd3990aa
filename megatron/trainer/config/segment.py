"""The part of a run that it is in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.trainer.common.extras import extras_with

if TYPE_CHECKING:
    from megatron.trainer.config import Config


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of a run whose samples have one length, and at whose end a step ends.

    A run counts in samples of `--seq-length` tokens from beginning to end. A longer sample counts
    as as many of them as it is times longer. So tokens, learning rate and all lengths in samples
    follow one count.
    """

    seq_length: int
    """Tokens per sample."""
    start: int
    """Samples consumed where it begins."""
    end: int
    """Samples consumed where it ends."""
    ratio: int = 1
    """Samples of `--seq-length` tokens that one of its samples is."""
    is_last: bool = True
    """Whether training ends with it."""

    @property
    def is_whole_run(self) -> bool:
        return self.is_last and self.start == 0

    def sample_at(self, consumed_samples: int) -> int:
        """Samples of this segment that come before a position of the run."""
        assert self.start <= consumed_samples <= self.end, (consumed_samples, self)
        return (consumed_samples - self.start) // self.ratio


def in_segment(config: Config) -> Config:
    """See `Config.in_segment`."""
    segment, batch = config.segment, config.batch
    if segment.ratio == 1:
        return config
    steps, ramp = batch.step_batch_size_schedule, batch.rampup_batch_size
    last = max(batch.global_batch_size // segment.ratio, 1)
    if steps is not None:
        words = (word.rpartition(":") for word in steps.split())
        steps = " ".join(f"{at}:{max(int(n) // segment.ratio, 1)}" for at, _, n in words)
    if ramp is not None:
        start, increment = (max(number // segment.ratio, 1) for number in ramp[:2])
        # A smaller increment where the way up is not a multiple of it.
        ramp = start, math.gcd(increment, last - start), ramp[2]
    return config.replace(
        seq_length=segment.seq_length,
        step_batch_size_schedule=steps,
        rampup_batch_size=ramp,
        global_batch_size=last,
        initial_global_batch_size=max(batch.initial_global_batch_size // segment.ratio, 1),
    )


def segment_of(config: Config) -> Segment:
    """The segment that a run is in: all of it, unless an extra says otherwise."""
    found = (find(config) for _, find in extras_with("segment"))
    whole = Segment(seq_length=config.batch.seq_length, start=0, end=config.batch.train_samples)
    return next((segment for segment in found if segment is not None), whole)
