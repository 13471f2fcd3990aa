"""All samples of a run by phase, and the readers of the phase that it is in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.training.config import Config, Phase
from megatron.training.config.phase_flags import has_lengths, parse_phase_data
from megatron.training.data.dataloader import BatchReader, SampleSource
from megatron.training.data.datasets import build_datasets, parse_blend, prefixes_of
from megatron.training.data.fingerprint import order_of
from megatron.training.data.phase_datasets import build_phase_datasets
from megatron.training.data.tokenizer import Tokenizer


class Part:
    """Some samples of a data set that follow one another.

    Args:
        dataset: that has them.
        start: number of the first.
        count: how many.
    """

    def __init__(self, dataset: SampleSource, start: int, count: int) -> None:
        self._dataset, self._start, self._count = dataset, start, count
        self.parts = (dataset,)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._dataset[self._start + index]


@dataclass(frozen=True, kw_only=True)
class Readers:
    train: BatchReader
    """Training samples, the first of the phase has number 0."""
    valid: BatchReader | None
    """Validation samples of its length, or None."""
    test: BatchReader | None
    """Test samples of its length, or None."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The samples of a run; the same on every rank."""

    train: Sequence[SampleSource]
    """Of each phase, to train on."""
    valid: Mapping[int, SampleSource | None]
    """By tokens per sample, to validate on."""
    test: Mapping[int, SampleSource | None]
    """By tokens per sample, to test on."""
    num_workers: int
    """Worker processes of each reader."""
    pin_memory: bool
    """See `BatchReader`."""
    notes: tuple[str, ...] = ()
    """One line per thing the user should know."""

    def open(self, phase: Phase) -> Readers:
        length = phase.seq_length
        valid, test = self.valid[length], self.test[length]
        return Readers(
            train=self._reader(self.train[phase.number]),
            valid=None if valid is None else self._reader(valid),
            test=None if test is None else self._reader(test),
        )

    def order(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for source in (*self.train, *self.valid.values(), *self.test.values()):
            found |= order_of(source)
        return found

    def _reader(self, dataset: SampleSource) -> BatchReader:
        return BatchReader(dataset, num_workers=self.num_workers, pin_memory=self.pin_memory)


def evaluation_batch(config: Config, phase: Phase) -> int:
    """Samples of a batch of an evaluation in a phase: as many tokens as in the first, at least one
    sample."""
    return max(config.batch.initial_global_batch_size // phase.ratio, 1)


def build_run_data(config: Config, tokenizer: Tokenizer, *, pin_memory: bool) -> RunData:
    """Builds the data sets of a run. With a process group every rank must call this.

    A run whose samples keep their length has the stock order. In a run of several lengths, the data
    of all phases are built at the start, so that data that cannot be read ends the run then.

    Args:
        config: resolved configuration.
        tokenizer: of the run.
        pin_memory: see `BatchReader`.

    Raises:
        UsageError: see `build_datasets`.
    """
    phases, iters = config.all_phases, config.batch.eval_iters
    common: dict[str, Any] = {
        "seed": config.runtime.seed,
        "tokenizer": tokenizer,
        "run_dir": config.checkpoint.save,
    }
    train: list[SampleSource] = []
    if len(phases) > 1 and has_lengths(config.phases.seq_length_schedule):
        blends = parse_phase_data(config.phases.phase_data_path)
        train = build_phase_datasets(config.data, blends, phases, **common)
    valid: dict[int, SampleSource | None] = {}
    test: dict[int, SampleSource | None] = {}
    notes: tuple[str, ...] = ()
    for phase in phases:
        if phase.seq_length in valid:
            continue
        count = iters * evaluation_batch(config, phase)
        built = build_datasets(
            config.data,
            seq_length=phase.seq_length,
            num_samples=(0 if train else config.batch.train_samples, count, count),
            **common,
        )
        valid[phase.seq_length], test[phase.seq_length] = built.valid, built.test
        notes = notes or built.notes
        if not train and built.train is not None:
            parts: list[SampleSource] = [Part(built.train, p.start, p.num_samples) for p in phases]
            train = parts if len(phases) > 1 else [built.train]
    return RunData(
        train=train,
        valid=valid,
        test=test,
        num_workers=config.data.num_workers,
        pin_memory=pin_memory,
        notes=notes,
    )


def all_prefixes(config: Config) -> list[str]:
    """Every data set that the flags of a run name, in their order."""
    later = parse_phase_data(config.phases.phase_data_path)
    blends = [parse_blend(later[number], "--phase-data-path") for number in sorted(later)]
    own = prefixes_of(config.data)
    return own + [prefix for blend in blends if blend is not None for prefix in blend[0]]
