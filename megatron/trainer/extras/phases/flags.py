"""Phases of a run, each with its own length of samples, layout and micro-batch: their flags, and
what follows from them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.trainer.config.fields import derived, option
from megatron.trainer.config.segment import Segment

if TYPE_CHECKING:
    from megatron.trainer.config import Config


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """Flags of the extra, and what follows from them."""

    seq_length_schedule: str | None = option(None)
    """Tokens per sample over the run, such as "0:4096 90%:16384 2.4B:65536". A position is a number
    of tokens or a percentage of training; the first is 0, with --seq-length. Every length is a
    multiple of the first. A position moves to the next step boundary."""
    rotary_base_schedule: str | None = option(None)
    """Rotary base over the run, such as "90%:500000 97%:8000000". Its positions are positions of
    --seq-length-schedule. A phase that is not named keeps the base before it. Default:
    --rotary-base."""
    micro_batch_size_schedule: str | None = option(None)
    """Micro-batch size over the run, such as "90%:2". Positions are as in
    --layout-schedule. Default: as many tokens as
    --micro-batch-size of the first phase, at least 1 sample."""
    layout_schedule: str | None = option(None)
    """Layout over the run, such as "90%:tp1.cp2.pp1.dp2". Phases begin with --seq-length-schedule
    where that has several lengths, and positions must be among its own. Otherwise each position
    begins a phase. A phase without a layout keeps the one before it."""
    phase_data_path: tuple[str, ...] | None = option(None, nargs="+")
    """Training data from a phase on: the number of the phase and a colon, then as in --data-path,
    such as "1: long_text 2: 0.7 books 0.3 code". The first phase has number 0 and uses --data-path.
    """
    phase_starts: tuple[int, ...] = derived(())
    """Samples consumed where each phase begins, frozen at the first launch that has the phase; ()
    without a schedule."""
    phase_seq_lengths: tuple[int, ...] = derived(())
    """Tokens per sample of each phase."""
    phase_rotary_bases: tuple[int, ...] = derived(())
    """Rotary base of each phase."""
    phase_micro_batch_sizes: tuple[int, ...] = derived(())
    """Micro-batch size of each phase."""
    phase_layouts: tuple[str, ...] = derived(())
    """Layout of each phase; () if no phase names one."""
    present_phase: int = derived(0)
    """Number of the phase that the run is in."""


@dataclass(frozen=True, kw_only=True)
class Phase(Segment):
    """A segment with one layout. The first one has ratio 1."""

    number: int
    """From 0."""
    rotary_base: int
    """Base of the rotary positions."""
    micro_batch_size: int
    """Samples of a micro-batch, unless a controller sets it."""
    layout: str | None
    """Text of the layout that it asks for; None leaves the layout."""

    @property
    def num_samples(self) -> int:
        """Samples of its own length."""
        return (self.end - self.start) // self.ratio


def flags_of(config: Config) -> PhaseConfig:
    return config.extras["phases"]


def phases_of(config: Config) -> tuple[Phase, ...]:
    """The phases of a run in order; () without a schedule of lengths, layouts or micro-batches."""
    flags = flags_of(config)
    bounds = itertools.pairwise([*flags.phase_starts, config.batch.train_samples])
    lengths, layouts = flags.phase_seq_lengths, flags.phase_layouts
    return tuple(
        Phase(
            number=number,
            seq_length=lengths[number],
            start=start,
            end=end,
            ratio=lengths[number] // lengths[0],
            is_last=number + 1 == len(lengths),
            rotary_base=flags.phase_rotary_bases[number],
            micro_batch_size=flags.phase_micro_batch_sizes[number],
            layout=layouts[number] if layouts else None,
        )
        for number, (start, end) in enumerate(bounds)
    )


def segment_of(config: Config) -> Phase | None:
    """See `Extra.segment`."""
    phases = phases_of(config)
    return phases[flags_of(config).present_phase] if phases else None


def phase_of(config: Config) -> Phase:
    """The phase that a run with several is in."""
    segment = config.segment
    assert isinstance(segment, Phase), "a run without phases"
    return segment


def in_phase(config: Config, number: int) -> Config:
    """The configuration of the run in a phase: with its rotary base and micro-batch size.
    `batch.seq_length` stays the first length, the unit in which samples are counted."""
    if number == flags_of(config).present_phase:
        return config
    phase = phases_of(config)[number]
    return config.replace(
        present_phase=number,
        rotary_base=phase.rotary_base,
        micro_batch_size=phase.micro_batch_size,
    )


def number_at(starts: tuple[int, ...], consumed_samples: int) -> int:
    """Number of the phase of the next step.

    Args:
        starts: samples consumed where each phase begins; () without a schedule.
    """
    return max(sum(start <= consumed_samples for start in starts) - 1, 0)
