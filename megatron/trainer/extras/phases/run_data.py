"""All samples of a run by phase, and the readers of the phase that it is in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.trainer.config import Config
from megatron.trainer.data.dataloader import SampleSource
from megatron.trainer.data.datasets import build_datasets, parse_blend, prefixes_of, use_of
from megatron.trainer.data.fingerprint import order_of
from megatron.trainer.data.run_data import Readers, RunData, evaluation_batch
from megatron.trainer.data.tokenizer import Tokenizer
from megatron.trainer.extras.phases.datasets import build_phase_datasets
from megatron.trainer.extras.phases.flags import flags_of, phase_of, phases_of
from megatron.trainer.extras.phases.schedule import has_lengths, parse_phase_data


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
class PhaseData(RunData):
    """The samples of a run of phases; the same on every rank."""

    train_sets: Sequence[SampleSource]
    """Of each phase, to train on."""
    valid_sets: Mapping[int, SampleSource | None]
    """By tokens per sample, to validate on."""
    test_sets: Mapping[int, SampleSource | None]
    """By tokens per sample, to test on."""

    def open(self, config: Config) -> Readers:
        phase = phase_of(config)
        length = phase.seq_length
        return self._readers(
            self.train_sets[phase.number], self.valid_sets[length], self.test_sets[length]
        )

    def order(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for source in (*self.train_sets, *self.valid_sets.values(), *self.test_sets.values()):
            found |= order_of(source)
        return found


def build_phase_data(config: Config, tokenizer: Tokenizer, *, pin_memory: bool) -> RunData | None:
    """See `Extra.run_data`.

    A run whose samples keep their length has the stock order. In a run of several lengths, the data
    of all phases are built at the start, so that data that cannot be read ends the run then.

    Raises:
        UsageError: see `build_datasets`.
    """
    phases = phases_of(config)
    if not phases:
        return None
    later = parse_phase_data(flags_of(config).phase_data_path)
    common: dict[str, Any] = {
        "seed": config.runtime.seed,
        "tokenizer": tokenizer,
        "run_dir": config.checkpoint.save,
    }
    train: list[SampleSource] = []
    if has_lengths(flags_of(config).seq_length_schedule):
        train = build_phase_datasets(config.data, later, phases, **common)
    valid: dict[int, SampleSource | None] = {}
    test: dict[int, SampleSource | None] = {}
    notes: tuple[str, ...] = ()
    for phase in phases:
        if phase.seq_length in valid:
            continue
        count = config.batch.eval_iters * evaluation_batch(config, phase)
        built = build_datasets(
            config.data,
            seq_length=phase.seq_length,
            num_samples=(0 if train else config.batch.train_samples, count, count),
            **common,
        )
        valid[phase.seq_length], test[phase.seq_length] = built.valid, built.test
        notes = notes or built.notes
        if not train and built.train is not None:
            train = [Part(built.train, p.start, p.num_samples) for p in phases]
    first = phases[0].seq_length
    return PhaseData(
        train=train[0],
        valid=valid[first],
        test=test[first],
        train_sets=train,
        valid_sets=valid,
        test_sets=test,
        prefixes=_prefixes(config, later),
        use=use_of(config.data, {f"--phase-data-path {n}:": later[n] for n in sorted(later)}),
        num_workers=config.data.num_workers,
        pin_memory=pin_memory,
        notes=notes,
    )


def _prefixes(config: Config, later: Mapping[int, tuple[str, ...]]) -> tuple[str, ...]:
    blends = [parse_blend(later[number], "--phase-data-path") for number in sorted(later)]
    own = prefixes_of(config.data)
    return (*own, *(prefix for blend in blends if blend is not None for prefix in blend[0]))
