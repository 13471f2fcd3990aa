"""Training data of a run whose samples become longer: every token of the stream is read once.

A data set is one stream of tokens: its shuffled documents, end to end. A phase reads windows of its
own length that follow one another on the stream, in an order shuffled by seed and phase. The next
phase goes on where the last one ended. Each data set of a blend has a cursor of its own, counted in
samples of the first phase, which every length is a multiple of.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from megatron.core.datasets import helpers
from megatron.core.datasets.utils import normalize

from megatron.training.common.errors import UsageError
from megatron.training.config import DataConfig, Phase
from megatron.training.data.dataloader import SampleSource
from megatron.training.data.datasets import Blend, build_datasets, parse_blend
from megatron.training.data.tokenizer import Tokenizer

_MOCK = ""
"""Stands for the prefix of invented data."""


@dataclass(frozen=True, kw_only=True)
class Windows:
    """What a phase reads of one data set."""

    prefix: str
    """Of the data set."""
    start: int
    """Where it begins on the stream, in samples of the first phase."""
    count: int
    """Windows of the length of the phase."""


@dataclass(frozen=True, kw_only=True)
class PhaseOrder:
    """The samples of one phase before any is read."""

    windows: tuple[Windows, ...]
    """Of each data set of the blend."""
    dataset_index: numpy.ndarray
    """[samples] which of them each sample is from."""
    dataset_sample_index: numpy.ndarray
    """[samples] which of its windows, counted before they are shuffled."""


def build_phase_datasets(
    data: DataConfig,
    phase_blends: Mapping[int, Sequence[str]],
    phases: Sequence[Phase],
    *,
    seed: int,
    tokenizer: Tokenizer,
    run_dir: str | os.PathLike[str] | None = None,
) -> list[SampleSource]:
    """Builds the training samples of each phase. With a process group every rank must call this.

    Args:
        data: paths, split and options of the run.
        phase_blends: number of a phase -> words of the blend that is read from it on.
        phases: of the run, in order.
        seed: of the sample order.
        tokenizer: of the run.
        run_dir: see `build_datasets`.

    Raises:
        UsageError: as `build_datasets`, or a blend of several data sets has no weights.
    """
    orders = plan_phases(blends_of(data, phase_blends, len(phases)), phases)
    needed: dict[str, int] = {}
    for phase, order in zip(phases, orders, strict=True):
        for windows in order.windows:
            end = windows.start + windows.count * phase.ratio
            needed[windows.prefix] = max(needed.get(windows.prefix, 0), end)
    streams: dict[str, Any] = {}
    for prefix, num_samples in needed.items():
        if num_samples:
            streams[prefix] = build_datasets(
                _only(data, prefix),
                seq_length=phases[0].seq_length,
                seed=seed,
                tokenizer=tokenizer,
                num_samples=(num_samples, 0, 0),
                run_dir=run_dir,
            ).train
    found: list[SampleSource] = []
    for phase, order in zip(phases, orders, strict=True):
        sets = [
            windows_of(streams[w.prefix], w, phase, order=shuffled(w.count, seed, phase.number, i))
            for i, w in enumerate(order.windows)
            if w.count
        ]
        found.append(sets[0] if len(order.windows) == 1 else _PhaseBlend(sets, order))
    return found


def blends_of(
    data: DataConfig, phase_blends: Mapping[int, Sequence[str]], count: int
) -> list[Blend]:
    """The blend of each phase, its prefixes as absolute paths.

    Raises:
        UsageError: a blend of several data sets has no weights.
    """
    flag = "--data-path" if data.data_path else "--train-data-path"
    blend = parse_blend(data.data_path or data.train_data_path, flag)
    blends = []
    for number in range(count):
        if number in phase_blends:
            flag = f"--phase-data-path {number}:"
            blend = parse_blend(phase_blends[number], flag)
        prefixes, weights = blend if blend is not None else ([_MOCK], None)
        if len(prefixes) > 1 and weights is None:
            raise UsageError(
                f"{flag} has several data sets without weights, and --seq-length-schedule needs "
                "to know how much of each a phase reads; give weight and prefix in turn"
            )
        blends.append(([prefix and os.path.abspath(prefix) for prefix in prefixes], weights))
    return blends


def plan_phases(blends: Sequence[Blend], phases: Sequence[Phase]) -> list[PhaseOrder]:
    """Says which windows of which data set each phase reads. Reads no data.

    Args:
        blends: of each phase.
        phases: of the run, in order.
    """
    cursors: dict[str, int] = {}
    orders = []
    for (prefixes, weights), phase in zip(blends, phases, strict=True):
        dataset_index = numpy.zeros(phase.num_samples, dtype=numpy.int16)
        dataset_sample_index = numpy.arange(phase.num_samples, dtype=numpy.int64)
        if len(prefixes) > 1:
            assert weights is not None
            helpers.build_blending_indices(  # pyright: ignore[reportAttributeAccessIssue]
                dataset_index,
                dataset_sample_index,
                normalize(weights),
                len(prefixes),
                phase.num_samples,
                False,
            )
        counts = numpy.bincount(dataset_index, minlength=len(prefixes)).tolist()
        windows = []
        for prefix, count in zip(prefixes, counts, strict=True):
            start = cursors.get(prefix, 0)
            windows.append(Windows(prefix=prefix, start=start, count=count))
            cursors[prefix] = start + count * phase.ratio
        orders.append(
            PhaseOrder(
                windows=tuple(windows),
                dataset_index=dataset_index,
                dataset_sample_index=dataset_sample_index,
            )
        )
    return orders


def shuffled(count: int, seed: int, phase: int, dataset: int) -> numpy.ndarray:
    """The order in which a phase reads its windows of one data set of its blend."""
    return numpy.random.RandomState([seed % 2**32, phase, dataset]).permutation(count)


def windows_of(stream: Any, windows: Windows, phase: Phase, *, order: numpy.ndarray) -> Any:
    """A data set of windows of one length on a stream.

    Args:
        stream: megatron-core's `GPTDataset` of samples of the first phase, not changed.
        windows: which part of it.
        phase: whose length the windows have.
        order: [count] the window that each sample is.
    """
    end = windows.start + windows.count * phase.ratio
    view = copy.copy(stream)
    view.config = copy.copy(stream.config)
    view.config.sequence_length = phase.seq_length
    view.num_samples = windows.count
    # A row is the document and the token where a sample begins: every ratio-th begins a window.
    view.sample_index = stream.sample_index[windows.start : end + 1 : phase.ratio]
    view.shuffle_index = order
    # Masks and positions that were kept have the length of the stream's samples.
    view.masks_and_position_ids_are_cached = False
    return view


class _PhaseBlend:
    """The samples of a phase that come from several data sets."""

    def __init__(self, sets: list[Any], order: PhaseOrder) -> None:
        numbers = [i for i, windows in enumerate(order.windows) if windows.count]
        self._sets = dict(zip(numbers, sets, strict=True))
        self._order = order

    def __len__(self) -> int:
        return len(self._order.dataset_index)

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        dataset = self._sets[int(self._order.dataset_index[index])]
        return dataset[int(self._order.dataset_sample_index[index])]


def _only(data: DataConfig, prefix: str) -> DataConfig:
    """The options of a run that trains on one data set alone."""
    if prefix == _MOCK:
        return data
    if data.data_path:
        return dataclasses.replace(data, data_path=(prefix,))
    return dataclasses.replace(
        data, train_data_path=(prefix,), valid_data_path=None, test_data_path=None
    )
