"""Phases of a run, each with its own length of samples, layout and micro-batch.

A run counts in samples of `--seq-length` tokens, the length of its first phase, from beginning to
end. A sample of a later phase counts as as many of them as it is times longer. So tokens, learning
rate and all lengths in samples follow one count, whatever the phase.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from megatron.training.config.fields import derived, option


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """Flags of a run whose samples become longer, and what follows from them."""

    seq_length_schedule: str | None = option(None)
    """Tokens per sample over the run, such as "0:4096 90%:16384 2.4B:65536". A position is a number
    of tokens or a percentage of training; the first is 0. Every length is a multiple of the first.
    A position moves to the next step boundary."""
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
class Phase:
    """A part of a run with one length of samples and one layout."""

    number: int
    """From 0."""
    seq_length: int
    """Tokens per sample."""
    start: int
    """Samples consumed where it begins."""
    end: int
    """Samples consumed where it ends."""
    ratio: int
    """Samples of the first phase, in which a run counts, that one sample of this phase is."""
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

    def sample_at(self, consumed_samples: int) -> int:
        """Samples of this phase that come before a position of the run."""
        assert self.start <= consumed_samples <= self.end, (consumed_samples, self)
        return (consumed_samples - self.start) // self.ratio


def phases_of(
    phases: PhaseConfig,
    *,
    seq_length: int,
    train_samples: int,
    rotary_base: int,
    micro_batch_size: int,
) -> tuple[Phase, ...]:
    """The phases of a run in order; a run without a schedule has one.

    Args:
        phases: as derived.
        seq_length: tokens per sample of the first phase.
        train_samples: length of training.
        rotary_base: of a run without a schedule.
        micro_batch_size: of a run without a schedule.
    """
    if not phases.phase_starts:
        return (
            Phase(
                number=0,
                seq_length=seq_length,
                start=0,
                end=train_samples,
                ratio=1,
                rotary_base=rotary_base,
                micro_batch_size=micro_batch_size,
                layout=None,
            ),
        )
    bounds = itertools.pairwise([*phases.phase_starts, train_samples])
    lengths, layouts = phases.phase_seq_lengths, phases.phase_layouts
    return tuple(
        Phase(
            number=number,
            seq_length=lengths[number],
            start=start,
            end=end,
            ratio=lengths[number] // lengths[0],
            rotary_base=phases.phase_rotary_bases[number],
            micro_batch_size=phases.phase_micro_batch_sizes[number],
            layout=layouts[number] if layouts else None,
        )
        for number, (start, end) in enumerate(bounds)
    )


def number_at(starts: tuple[int, ...], consumed_samples: int) -> int:
    """Number of the phase of the next step.

    Args:
        starts: samples consumed where each phase begins; () without a schedule.
        consumed_samples: position of the run.
    """
    return max(sum(start <= consumed_samples for start in starts) - 1, 0)
