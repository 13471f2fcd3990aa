"""The global batch size as a function of the samples consumed so far."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.layout_rules import batch_problems

if TYPE_CHECKING:
    from megatron.trainer.config import Config
    from megatron.trainer.config.segment import Segment

SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
"""Suffix of a number of tokens -> its factor."""
_STEP = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?):(\d+)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """Steps of the global batch size.

    Raises:
        ValueError: steps that do not start at 0, do not ascend, or hold a size below 1.
    """

    steps: tuple[tuple[int, int], ...]
    """(samples consumed from which it holds, global batch size) in ascending order; the first
    starts at 0."""

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.steps]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError(f"batch steps must start at 0 samples and ascend, got {starts}")
        if any(size < 1 for _, size in self.steps):
            raise ValueError(f"batch sizes must be at least 1, got {self.sizes}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every global batch size of the run in order."""
        return tuple(size for _, size in self.steps)

    def at(self, consumed_samples: int) -> int:
        """Returns the global batch size of the next step, in samples."""
        size = self.steps[0][1]
        for start, later in self.steps:
            if start > consumed_samples:
                break
            size = later
        return size

    def iterations_left(self, consumed_samples: int, train_samples: int) -> int:
        """Counts the steps that still fit into `train_samples`.

        A last batch that does not fit is not taken.
        """
        if consumed_samples >= train_samples:
            return 0
        count = 0
        ends = [start for start, _ in self.steps[1:]] + [train_samples]
        for (_, size), end in zip(self.steps, ends):
            if consumed_samples >= end:
                continue
            # A step that begins before `end` keeps its size even if it reaches beyond.
            until_end = -(-(min(end, train_samples) - consumed_samples) // size)
            that_fit = (train_samples - consumed_samples) // size
            if that_fit < until_end:
                return count + that_fit
            count += until_end
            consumed_samples += until_end * size
        return count

    def samples_after(self, iterations: int) -> int:
        """Returns the samples of the first steps of a run that takes every step in full; below 0
        those of as many steps of the first size before it."""
        consumed = 0
        for (_, size), (end, _) in itertools.pairwise(self.steps):
            count = min(iterations, max(-(-(end - consumed) // size), 0))
            consumed, iterations = consumed + count * size, iterations - count
        return consumed + iterations * self.steps[-1 if iterations > 0 else 0][1]

    def boundary(self, asked: int) -> int:
        """Returns where the first step at or after a position begins, of a run that takes every
        step in full."""
        consumed = 0
        ends = [start for start, _ in self.steps[1:]] + [asked]
        for (_, size), end in zip(self.steps, ends):
            left = min(end, asked) - consumed
            consumed += max(-(-left // size), 0) * size
        return consumed

    def sizes_between(self, start: int, end: int) -> tuple[int, ...]:
        """Returns the sizes of the steps that begin from `start` on and before `end`, a position
        after it."""
        later = [size for begin, size in self.steps if start < begin < end]
        return tuple(dict.fromkeys([self.at(start), *later]))

    def sizes_in(self, segment: Segment) -> tuple[int, ...]:
        """Returns the sizes of the steps of a segment, in samples of its own length."""
        sizes = self.sizes_between(segment.start, segment.end)
        return tuple(dict.fromkeys(size // segment.ratio for size in sizes))

    def problems(
        self,
        layout: Layout,
        micro_batch_size: int,
        *,
        segment: Segment | None = None,
        **rules: Any,
    ) -> list[str]:
        """Lists which sizes cannot be cut into micro-batches on this layout, one sentence each.

        Args:
            micro_batch_size: samples of one forward pass on one data-parallel rank.
            segment: whose sizes count; None: all of them.
            rules: see `batch_problems`.
        """
        found, sizes = [], self.sizes if segment is None else self.sizes_in(segment)
        for size in dict.fromkeys(sizes):
            found += batch_problems(layout, micro_batch_size, size, **rules)
        return found

    @classmethod
    def of(cls, config: Config) -> BatchSchedule:
        """Builds the schedule of a configuration, in samples of `--seq-length` tokens.

        Raises:
            UsageError: flags that contradict each other, or sizes the layout cannot cut into
            micro-batches; those of the present segment count.
        """
        batch = config.batch
        schedule = make_schedule(
            global_batch_size=batch.global_batch_size,
            rampup_batch_size=batch.rampup_batch_size,
            step_batch_size_schedule=batch.step_batch_size_schedule,
            seq_length=batch.seq_length,
        )
        problems = schedule.problems(
            config.layout, batch.micro_batch_size, segment=config.segment, **config.batch_rules
        )
        if problems:
            raise UsageError("\n".join(problems))
        return schedule


def steps_for(samples: int, batch: int, *, least: int) -> int:
    """Counts the steps of one batch size that some samples are enough for.

    Args:
        samples: that are left.
        least: of the last step, which takes what is left.
    """
    return samples // batch + (samples % batch >= least)


def make_schedule(
    *,
    global_batch_size: int,
    rampup_batch_size: tuple[int, ...] | None = None,
    step_batch_size_schedule: str | None = None,
    seq_length: int = 1,
) -> BatchSchedule:
    """Builds a constant, ramped or stepped schedule.

    Args:
        global_batch_size: samples per step, after the ramp if there is one.
        rampup_batch_size: start size, increment, and samples over which the increments are spread
            evenly.
        step_batch_size_schedule: for instance `0:768 250B:1536`, thresholds in tokens.

    Raises:
        UsageError: values that contradict each other.
    """
    if rampup_batch_size is not None and step_batch_size_schedule is not None:
        raise UsageError(
            "--rampup-batch-size and --step-batch-size-schedule exclude each other; drop one"
        )
    if rampup_batch_size is not None:
        return _ramp(global_batch_size, *rampup_batch_size)
    if step_batch_size_schedule is not None:
        schedule = BatchSchedule(steps=parse_steps(step_batch_size_schedule, seq_length))
        if schedule.sizes[-1] != global_batch_size:
            raise UsageError(
                f"--step-batch-size-schedule ends at {schedule.sizes[-1]} and --global-batch-size "
                f"is {global_batch_size}; make them equal or drop --global-batch-size"
            )
        return schedule
    return BatchSchedule(steps=((0, global_batch_size),))


def _ramp(target: int, start: int, increment: int, samples: int) -> BatchSchedule:
    given = f"--rampup-batch-size {start} {increment} {samples}"
    if start < 1 or increment < 1 or samples < 0:
        raise UsageError(
            f"{given} needs a start and an increment of at least 1 and samples of at least 0"
        )
    if start > target or (target - start) % increment != 0:
        raise UsageError(
            f"{given} cannot reach --global-batch-size {target}; the way from {start} up to "
            f"{target} must be a multiple of the increment"
        )
    increments = (target - start) // increment
    # The later step wins where two begin at the same sample.
    steps = {0: start}
    for i in range(1, increments + 1):
        steps[-(-i * samples // increments)] = start + i * increment
    return BatchSchedule(steps=tuple(steps.items()))


def parse_steps(text: str, seq_length: int) -> tuple[tuple[int, int], ...]:
    """Reads `0:768 250B:1536` into (samples, batch size) pairs; thresholds in tokens are rounded
    down to samples.

    Raises:
        UsageError: text of another form.
    """
    flag = f'--step-batch-size-schedule "{text}"'
    example = 'write it like "0:768 250B:1536": tokens, colon, batch size'
    steps = []
    for word in text.split():
        match = _STEP.fullmatch(word)
        if match is None:
            raise UsageError(f"{flag} has the part {word!r}; {example}")
        tokens = int(float(match[1]) * SUFFIXES[match[2].upper()])
        steps.append((tokens // seq_length, int(match[3])))
    starts = [start for start, _ in steps]
    if not starts or starts[0] != 0 or starts != sorted(set(starts)):
        raise UsageError(
            f"{flag} must begin at 0 tokens and ascend by at least one sample; {example}"
        )
    if any(size < 1 for _, size in steps):
        raise UsageError(f"{flag} has a batch size below 1; {example}")
    return tuple(steps)
