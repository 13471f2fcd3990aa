"""Serves a data set batch by batch; which rank reads which sample is in `sampling`."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import time
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from megatron.trainer.common.child_processes import end_with_parent
from megatron.trainer.common.errors import TrainingFailure, UsageError
from megatron.trainer.common.signals import STOP_SIGNALS
from megatron.trainer.data.sampler import PADDING, evaluation_indices, micro_batch_indices

BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids")


class SampleSource(Sized, Protocol):
    def __getitem__(self, index: int, /) -> dict[str, Any]:
        """One sample; at least the tensors of `BATCH_KEYS`, each [seq_length]."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Position:
    """What the next training batch must be for the loader to just go on."""

    consumed_samples: int
    global_batch_size: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int
    uneven: bool = False
    block: int | None = None

    def rows(self) -> list[list[int]]:
        return micro_batch_indices(**vars(self))


class BatchReader:
    """Reads micro-batches of one data set.

    Training batches are read ahead on the assumption that the next batch follows the last one in
    the same sizes. When it does not (the batch or the layout changed, or another run position was
    loaded), the loader starts again at the new place; its worker processes live on. What is read
    depends on the arguments of the call alone.

    Attributes:
        sample_ids: Sample numbers of the last `read` or `read_evaluation` of this rank, a list per
            micro-batch.
    """

    def __init__(
        self, dataset: SampleSource, *, num_workers: int = 0, pin_memory: bool = False
    ) -> None:
        """Starts no worker yet.

        Args:
            num_workers: Worker processes; 0 reads in this process when asked.
            pin_memory: Whether batches lie in page-locked memory (CUDA only).
        """
        self.sample_ids: list[list[int]] = []
        self._dataset = dataset
        self._num_samples = len(dataset)
        self._plan = _Plan()
        self._loader = DataLoader(
            _Padded(dataset),  # type: ignore[arg-type]
            batch_sampler=self._plan,  # type: ignore[arg-type]
            collate_fn=_collate,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
            worker_init_fn=functools.partial(_start_worker, os.getpid()),
            # An iterator draws a seed when it is made; the model's stream must not move by that.
            generator=torch.Generator(),
        )
        self._batches: Iterator[dict[str, torch.Tensor]] | None = None
        self._next: _Position | None = None
        self._num_reads = 0

    @property
    def num_samples(self) -> int:
        return self._num_samples

    def read(
        self,
        *,
        consumed_samples: int,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        uneven: bool = False,
        block: int | None = None,
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Micro-batches of this rank for one global batch, in order.

        The iterator is good until the next call of a read method. With `uneven` the last
        micro-batch may be smaller. With `block` this rank reads so many samples in a row before it
        is the turn of the next rank; else one micro-batch.

        Returns:
            An iterator of dicts: `tokens`, `labels` and `position_ids` int64, `loss_mask` float32,
            each [micro_batch_size, seq_length].

        Raises:
            UsageError: The batch does not divide, or reaches beyond the data set.
        """
        here = _Position(
            consumed_samples=consumed_samples,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            uneven=uneven,
            block=block,
        )
        rows = here.rows()
        self._check_end(consumed_samples + global_batch_size)
        if here != self._next or self._batches is None:
            self._start(_run_ahead(here, self._num_samples))
        return self._serve(
            rows, replace(here, consumed_samples=consumed_samples + global_batch_size)
        )

    def read_evaluation(
        self,
        *,
        num_samples: int,
        start: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        min_multiple: int = 1,
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Micro-batches of this rank that together with the other ranks hold each sample once.

        Places beyond `num_samples` hold a copy of sample 0 with an all-zero loss mask. After the
        call, `len(sample_ids)` is the number of micro-batches, the same on every rank.

        Raises:
            UsageError: The samples reach beyond the data set.
        """
        rows = evaluation_indices(
            num_samples, start, micro_batch_size, dp_rank, dp_size, min_multiple
        )
        self._check_end(start + num_samples)
        self._start(rows)
        return self._serve(rows, None)

    def close(self) -> None:
        """Stop the worker processes. The next read starts them again."""
        self._batches = None
        self._next = None
        # torch offers no call for this: workers end when nobody holds their iterator any more, but
        # a batch that was taken to its end still does.
        iterator: Any = self._loader._iterator
        if iterator is not None:
            iterator._shutdown_workers()
            for worker in iterator._workers:  # one that still reads has ignored SIGTERM
                worker.kill()
        self._loader._iterator = None
        atexit.unregister(self.close)

    def _check_end(self, end: int) -> None:
        if end > self._num_samples:
            raise UsageError(
                f"samples up to {end} were asked for, but the data set holds {self._num_samples}; "
                "it is built for --train-samples and --eval-iters; keep their first values"
            )

    def _start(self, rows: Iterable[list[int]]) -> None:
        self._plan.rows = rows
        self._batches = iter(self._loader)
        if self._loader._iterator is not None:
            # Before multiprocessing's own, which would wait for them where the run has failed.
            atexit.unregister(self.close)
            atexit.register(self.close)

    def _serve(
        self, rows: list[list[int]], following: _Position | None
    ) -> Iterator[dict[str, torch.Tensor]]:
        # Until all of it is taken, the loader does not stand at the start of a batch.
        self._next = None
        self._num_reads += 1
        self.sample_ids = rows
        batches = self._batches
        assert batches is not None
        return self._take(batches, len(rows), following, self._num_reads)

    def _take(
        self,
        batches: Iterator[dict[str, torch.Tensor]],
        count: int,
        following: _Position | None,
        read: int,
    ) -> Iterator[dict[str, torch.Tensor]]:
        for step in range(count):
            assert read == self._num_reads, "take all of a batch before reading the next one"
            try:
                batch = next(batches)
            except (OSError, EOFError, RuntimeError) as error:
                if lost := self._lost_worker():
                    raise TrainingFailure(lost, restart_helps=True) from error
                raise
            # Before the last yield: a schedule takes exactly `count` and never asks for the end.
            if step == count - 1:
                self._next = following
            yield batch

    def _lost_worker(self) -> str | None:
        """Names a worker that a signal has ended, in torch's words, which torch does not find each
        time. Its socket may be gone a moment before it counts as ended."""
        workers: Any = getattr(self._loader._iterator, "_workers", ())
        for _ in range(20):
            for worker in workers:
                if (worker.exitcode or 0) < 0:
                    word = signal.strsignal(-worker.exitcode)
                    return f"DataLoader worker (pid {worker.pid}) is killed by signal: {word}"
            time.sleep(0.05 if workers else 0)
        return None


class _Plan:
    """A batch sampler whose rows are set anew before each start of the loader."""

    def __init__(self) -> None:
        self.rows: Iterable[list[int]] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.rows)


def _run_ahead(position: _Position, num_samples: int) -> Iterator[list[int]]:
    consumed = position.consumed_samples
    while consumed + position.global_batch_size <= num_samples:
        yield from replace(position, consumed_samples=consumed).rows()
        consumed += position.global_batch_size


class _Padded:
    """A data set in which number `PADDING` is a sample that counts nothing."""

    def __init__(self, dataset: SampleSource) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index != PADDING:
            return self._dataset[index]
        sample = self._dataset[0]
        return {**sample, "loss_mask": torch.zeros_like(sample["loss_mask"])}


def _collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([sample[key] for sample in samples]) for key in BATCH_KEYS}


def _start_worker(parent: int, worker: int) -> None:
    end_with_parent(parent)
    # A stop signal reaches the whole process group; the trainer finishes its step first and still
    # needs the data. Workers end when the loader is closed.
    for number in (*map(signal.Signals.__getitem__, STOP_SIGNALS), signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
