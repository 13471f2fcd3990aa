"""All samples of a run, and the readers of those of its segment."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.trainer.common.extras import extras_with
from megatron.trainer.config import Config
from megatron.trainer.config.segment import Segment
from megatron.trainer.data.dataloader import BatchReader, SampleSource
from megatron.trainer.data.datasets import build_datasets, prefixes_of, use_of
from megatron.trainer.data.fingerprint import DataUse, order_of
from megatron.trainer.data.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Readers:
    train: BatchReader
    """Training samples, the first of the segment has number 0."""
    valid: BatchReader | None
    """Validation samples of its length, or None."""
    test: BatchReader | None
    """Test samples of its length, or None."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The samples of a run; the same on every rank."""

    train: SampleSource
    """To train on, from the first step on."""
    valid: SampleSource | None
    """To validate on, or None."""
    test: SampleSource | None
    """To test on, or None."""
    prefixes: tuple[str, ...]
    """Every data set that the flags name, in their order."""
    use: DataUse
    """What is made of them."""
    num_workers: int
    """Worker processes of each reader."""
    pin_memory: bool
    """See `BatchReader`."""
    notes: tuple[str, ...] = ()
    """One line per thing the user should know."""

    def open(self, config: Config) -> Readers:
        """Starts to read the samples of a segment.

        Args:
            config: of the run, which is in it.
        """
        return self._readers(self.train, self.valid, self.test)

    def order(self) -> dict[str, int]:
        """See `fingerprint.order_of`."""
        found: dict[str, int] = {}
        for source in (self.train, self.valid, self.test):
            found |= order_of(source)
        return found

    def _readers(
        self, train: SampleSource, valid: SampleSource | None, test: SampleSource | None
    ) -> Readers:
        return Readers(
            train=self._reader(train),
            valid=None if valid is None else self._reader(valid),
            test=None if test is None else self._reader(test),
        )

    def _reader(self, dataset: SampleSource) -> BatchReader:
        return BatchReader(dataset, num_workers=self.num_workers, pin_memory=self.pin_memory)


def evaluation_batch(config: Config, segment: Segment) -> int:
    """Samples of a batch of an evaluation in a segment, at least one. Its tokens are as many as in
    the first batch, or in `--eval-global-batch-size` samples of `--seq-length`."""
    batch = config.batch
    size = batch.eval_global_batch_size or batch.initial_global_batch_size
    return max(size // segment.ratio, 1)


def build_run_data(config: Config, tokenizer: Tokenizer, *, pin_memory: bool) -> RunData:
    """Builds the data sets of a run. With a process group every rank must call this.

    Args:
        config: resolved configuration.
        pin_memory: see `BatchReader`.

    Raises:
        UsageError: see `build_datasets`.
    """
    for _, build in extras_with("run_data"):
        if (found := build(config, tokenizer, pin_memory=pin_memory)) is not None:
            return found
    count = config.batch.eval_iters * evaluation_batch(config, config.segment)
    built = build_datasets(
        config.data,
        seq_length=config.batch.seq_length,
        num_samples=(config.batch.train_samples, count, count),
        seed=config.runtime.seed,
        tokenizer=tokenizer,
        run_dir=config.checkpoint.save,
    )
    return RunData(
        train=built.train,
        valid=built.valid,
        test=built.test,
        prefixes=tuple(prefixes_of(config.data)),
        use=use_of(config.data),
        num_workers=config.data.num_workers,
        pin_memory=pin_memory,
        notes=built.notes,
    )
