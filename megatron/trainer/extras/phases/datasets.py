"""Training data of a run whose samples become longer: every token of the stream is read once.

A data set is one stream of tokens: its shuffled documents, end to end. A phase reads windows of its
own length that follow one another on the stream, in an order shuffled by seed and phase. The next
phase goes on where the last one ended. Each data set of a blend has a cursor of its own, counted in
samples of the first phase, which every length is a multiple of.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch.distributed as dist
from megatron.core.datasets import helpers
from megatron.core.datasets.utils import normalize

from megatron.trainer.common.collectives import broadcast_from_rank0
from megatron.trainer.common.errors import UsageError
from megatron.trainer.config import DataConfig
from megatron.trainer.data.dataloader import SampleSource
from megatron.trainer.data.datasets import Blend, build_datasets, cache_errors, parse_blend
from megatron.trainer.data.tokenizer import Tokenizer
from megatron.trainer.extras.phases.flags import Phase

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
    dataset_index: numpy.ndarray | None
    """[samples] which of them each sample is from; None if there is one."""
    dataset_sample_index: numpy.ndarray | None
    """[samples] which of its windows, counted before they are shuffled; None if there is one."""


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
        phase_blends: number of a phase -> words of the blend that is read from it on.
        phases: of the run, in order.
        run_dir: see `build_datasets`.

    Raises:
        UsageError: as `build_datasets`, or a blend of several data sets has no weights.
    """
    blends = blends_of(data, phase_blends, len(phases))
    orders = plan_phases(blends, phases)
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
    for phase, order, blend in zip(phases, orders, blends, strict=True):
        sets, folder = [], None
        for i, w in enumerate(order.windows):
            if not w.count:
                continue
            stream, at = streams[w.prefix], (seed, phase.number, i)
            folder = stream.config.path_to_cache
            name = [stream.unique_description_hash, w.count, *at]
            shuffle = shared_array(folder, name, lambda w=w, at=at: shuffled(w.count, *at))
            sets.append(windows_of(stream, w, phase, order=shuffle))
        if order.dataset_index is None or order.dataset_sample_index is None:
            found.append(sets[0])
            continue
        own: list[Any] = [*blend, phase.num_samples]
        first, second = order.dataset_index, order.dataset_sample_index
        order = dataclasses.replace(
            order,
            dataset_index=shared_array(folder, ["set", *own], lambda a=first: a),
            dataset_sample_index=shared_array(folder, ["window", *own], lambda a=second: a),
        )
        found.append(_PhaseBlend(sets, order))
    return found


def shared_array(
    folder: str | None, name: Sequence[Any], build: Callable[[], numpy.ndarray]
) -> numpy.ndarray:
    """An array that all ranks of a machine have in memory once: rank 0 writes it beside the other
    index files, and all map the file. Without a process group or a folder, it is built. All ranks.

    Args:
        folder: of the index files, or None.
        name: all that the array depends on, plain JSON types.

    Raises:
        UsageError: on every rank, if the file cannot be written or read.
    """
    if folder is None or not dist.is_initialized():
        return build()
    key = hashlib.md5(json.dumps(list(name)).encode(), usedforsecurity=False).hexdigest()
    path, problem = Path(folder) / f"{key}-phase.npy", None
    if dist.get_rank() == 0 and not path.exists():
        try:
            with cache_errors(folder):
                written = path.with_suffix(".unfinished.npy")
                numpy.save(written, build())
                written.replace(path)
        except UsageError as error:
            problem = str(error)
    if problem := broadcast_from_rank0(problem):
        raise UsageError(problem)
    with cache_errors(folder):
        return numpy.load(path, mmap_mode="r")


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
        phases: of the run, in order.
    """
    cursors: dict[str, int] = {}
    orders = []
    for (prefixes, weights), phase in zip(blends, phases, strict=True):
        dataset_index = dataset_sample_index = None
        counts = [phase.num_samples]
        if len(prefixes) > 1:
            assert weights is not None
            dataset_index = numpy.zeros(phase.num_samples, dtype=numpy.int16)
            dataset_sample_index = numpy.zeros(phase.num_samples, dtype=numpy.int64)
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
    order = numpy.arange(count, dtype=numpy.uint32 if count < 2**32 else numpy.int64)
    numpy.random.RandomState([seed % 2**32, phase, dataset]).shuffle(order)
    return order


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
    name = f"{stream.unique_description_hash}-{phase.number}-{windows.start}-{windows.count}"
    view.unique_description_hash = name  # what it is told by; its files are read already
    # Masks and positions that were kept have the length of the stream's samples.
    view.masks_and_position_ids_are_cached = False
    return view


class _PhaseBlend:
    """The samples of a phase that come from several data sets."""

    def __init__(self, sets: list[Any], order: PhaseOrder) -> None:
        assert order.dataset_index is not None and order.dataset_sample_index is not None
        numbers = [i for i, windows in enumerate(order.windows) if windows.count]
        self._sets = dict(zip(numbers, sets, strict=True))
        self.parts = tuple(sets)
        self._dataset_index = order.dataset_index
        self._dataset_sample_index = order.dataset_sample_index

    def __len__(self) -> int:
        return len(self._dataset_index)

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        dataset = self._sets[int(self._dataset_index[index])]
        return dataset[int(self._dataset_sample_index[index])]


def _only(data: DataConfig, prefix: str) -> DataConfig:
    """The options of a run that trains on one data set alone."""
    if prefix == _MOCK:
        return data
    if data.data_path:
        return dataclasses.replace(data, data_path=(prefix,))
    return dataclasses.replace(
        data, train_data_path=(prefix,), valid_data_path=None, test_data_path=None
    )
