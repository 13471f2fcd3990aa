"""The data sets of a run.

The order of samples depends on the seed, the sequence length, the split, the blend, the documents
and the number of samples asked for, and on nothing else. A run keeps all of them for its whole
life.
"""

from __future__ import annotations

import contextlib
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset

from megatron.trainer.common.errors import UsageError
from megatron.trainer.config import DataConfig
from megatron.trainer.data.dataloader import SampleSource
from megatron.trainer.data.fingerprint import DataUse
from megatron.trainer.data.indexed import (
    Corpus,
    check_vocabulary,
    check_writable,
    notes_on_documents,
    open_corpus,
)
from megatron.trainer.data.tokenizer import Tokenizer, require_eod

DEFAULT_SPLIT = "969,30,1"
SPLIT_NAMES = ("train", "valid", "test")

Blend = tuple[list[str], list[float] | None]
"""Prefixes of data sets, and their weights or None for a single or an unweighted list."""


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """What a run reads; the same on every rank."""

    train: SampleSource
    """Samples to train on, in the order of the run."""
    valid: SampleSource | None
    """Samples to validate on; None when there are none."""
    test: SampleSource | None
    """Samples to test on; None when there are none."""
    notes: tuple[str, ...] = ()
    """One line per thing the user should know, for rank 0 to print."""


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Blends as megatron-core takes them, and the data sets behind each split."""

    blend: Blend | None = None
    """One blend that `split` divides."""
    blend_per_split: list[Blend | None] | None = None
    """A blend for each of train, valid and test."""
    corpora: tuple[tuple[Corpus, ...], ...] = ((), (), ())
    """Data sets of each of train, valid and test."""


def build_datasets(
    data: DataConfig,
    *,
    seq_length: int,
    seed: int,
    tokenizer: Tokenizer,
    num_samples: tuple[int, int, int],
    run_dir: str | os.PathLike[str] | None = None,
) -> Datasets:
    """Build the train, validation and test data sets.

    With a process group, every rank must call this: rank 0 writes the index files, the others wait
    and read them.

    Args:
        tokenizer: Gives the vocabulary size and the end-of-document token.
        num_samples: Samples for train, valid and test; 0 leaves a split out. Frozen for the life of
            the run, since the order of samples depends on it.
        run_dir: Folder for index files when the folder of the data is read-only and no
            `--data-cache-path` is given.

    Raises:
        UsageError: Data is missing, damaged, too small, or made with another vocabulary; or the
            flags conflict.
    """
    eod_flags = _eod_flags(data)
    if eod_flags:
        require_eod(tokenizer, eod_flags)
    plan = _plan(data, tokenizer.vocab_size)
    options = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=plan.blend,
        blend_per_split=plan.blend_per_split,  # type: ignore[arg-type]
        split=_split(data) if plan.blend else None,
        path_to_cache=_cache_folder(data, plan, run_dir),
        mmap_bin_files=data.mmap_bin_files,
        tokenizer=tokenizer,  # type: ignore[arg-type]
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=False,
        eod_mask_loss=data.eod_mask_loss,
        create_attention_mask=False,
    )
    sizes, notes = _usable_sizes(options, plan, num_samples)
    _leave_out(options, sizes)
    kind = MockGPTDataset if data.mock_data else GPTDataset
    with cache_errors(options.path_to_cache):
        built = BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, options).build()
    for name, dataset, size in zip(SPLIT_NAMES, built, sizes, strict=True):
        _check_length(name, dataset, size)
    train, valid, test = (
        dataset if size else None for dataset, size in zip(built, sizes, strict=True)
    )
    for corpus in {corpus.prefix: corpus for part in plan.corpora for corpus in part}.values():
        notes += tuple(notes_on_documents(corpus, tokenizer, eod_flags=eod_flags))
    return Datasets(train=train, valid=valid, test=test, notes=notes)  # type: ignore[arg-type]


def _eod_flags(data: DataConfig) -> str:
    """The flags that look for ends of documents."""
    asked = {
        "--eod-mask-loss": data.eod_mask_loss,
        "--reset-position-ids": data.reset_position_ids,
        "--mock-data": data.mock_data,
    }
    return " ".join(flag for flag, is_on in asked.items() if is_on)


def prefixes_of(data: DataConfig) -> list[str]:
    """The data sets that the flags name, in their order; none for invented data."""
    flags = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    blends = [parse_blend(words, "--data-path") for words in flags]
    return [prefix for blend in blends if blend is not None for prefix in blend[0]]


def use_of(data: DataConfig, more: Mapping[str, Sequence[str]] = MappingProxyType({})) -> DataUse:
    """What is made of the data sets of the flags; see `fingerprint.DataUse`.

    Args:
        more: further flags in the form of `--data-path`.
    """
    flags = {
        "--data-path": data.data_path,
        "--train-data-path": data.train_data_path,
        "--valid-data-path": data.valid_data_path,
        "--test-data-path": data.test_data_path,
        **more,
    }
    blends: dict[str, list[float] | int] = {}
    for flag, words in flags.items():
        if (blend := parse_blend(words, flag)) is not None:
            prefixes, weights = blend
            blends[flag] = len(prefixes) if weights is None else list(weights)
    split = parse_and_normalize_split(_split(data)) if data.data_path else None
    return DataUse(blends=blends, split=split)


def parse_blend(words: Sequence[str] | None, flag: str) -> Blend | None:
    """Prefixes and weights of a blend: one prefix, several, or weight and prefix in turn.

    Raises:
        UsageError: Weights are mixed with missing ones, or are not positive.
    """
    if not words:
        return None
    weights = [_number(word) for word in words[::2]]
    if len(words) % 2 or all(weight is None for weight in weights):
        return [word.strip() for word in words], None
    for word, weight in zip(words[::2], weights, strict=True):
        if weight is None or not weight > 0 or math.isinf(weight):
            raise UsageError(
                f"{flag}: {word} stands where a weight is expected; "
                "give weight and prefix in turn, with positive weights"
            )
    return [word.strip() for word in words[1::2]], [weight for weight in weights if weight]


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _plan(data: DataConfig, vocab_size: int) -> _Plan:
    per_split = [
        parse_blend(words, f"--{name}-data-path")
        for name, words in zip(
            SPLIT_NAMES,
            (data.train_data_path, data.valid_data_path, data.test_data_path),
            strict=True,
        )
    ]
    blend = parse_blend(data.data_path, "--data-path")
    if data.mock_data + bool(blend) + any(per_split) != 1:
        raise UsageError(
            "give exactly one source of data: --data-path, or --train-data-path with "
            "--valid-data-path and --test-data-path, or --mock-data"
        )
    if blend:
        corpora = _open(blend, "--data-path", vocab_size)
        return _Plan(blend=blend, corpora=(corpora,) * 3)
    if data.mock_data:
        return _Plan()
    if data.split:
        raise UsageError("--split divides --data-path; leave it out with --train-data-path")
    opened = tuple(
        _open(one, f"--{name}-data-path", vocab_size) if one else ()
        for name, one in zip(SPLIT_NAMES, per_split, strict=True)
    )
    return _Plan(blend_per_split=per_split, corpora=opened)


def _open(blend: Blend, flag: str, vocab_size: int) -> tuple[Corpus, ...]:
    try:
        corpora = tuple(open_corpus(prefix, flag) for prefix in blend[0])
        for corpus in corpora:
            check_vocabulary(corpus, vocab_size)
    except OSError as error:
        raise UsageError(f"{flag}: a data set cannot be read ({error}); correct it") from error
    return corpora


def _split(data: DataConfig) -> str:
    text = data.split or DEFAULT_SPLIT
    parts = [_number(part) for part in text.replace("/", ",").split(",")]
    shares = [part for part in parts if part is not None and 0 <= part < math.inf]
    if len(shares) != len(parts) or len(parts) > 3 or not sum(shares):
        raise UsageError(
            f"--split {text} is not three shares such as {DEFAULT_SPLIT}; "
            "give numbers from 0 up, not all 0"
        )
    return ",".join(f"{share:.10f}".rstrip("0").rstrip(".") for share in shares)


def _usable_sizes(
    options: GPTDatasetConfig, plan: _Plan, num_samples: tuple[int, int, int]
) -> tuple[list[int], tuple[str, ...]]:
    """Samples to build of each split, 0 where there is no data, and the notes on those."""
    sizes, notes = list(num_samples), []
    for i, name in enumerate(SPLIT_NAMES):
        if not sizes[i] or options.mock:
            continue
        reason = _why_empty(options, plan, i, name)
        if reason and i == 0:
            raise UsageError(f"no training data: {reason}")
        if reason:
            sizes[i] = 0
            notes.append(f"no {name} data, so that nothing is evaluated on it: {reason}")
    return sizes, tuple(notes)


def _why_empty(options: GPTDatasetConfig, plan: _Plan, i: int, name: str) -> str | None:
    """Why a split has no tokens in some data set, or None if it has in all."""
    if not plan.corpora[i]:
        return f"--{name}-data-path is not given"
    share: tuple[float, float] | None = (0.0, 1.0)
    if options.split_matrix is not None:
        share = options.split_matrix[i]
        if share is None:
            return f"--split {options.split} gives it nothing"
    for corpus in plan.corpora[i]:
        if not corpus.num_tokens(share):
            return (
                f"{corpus.flag} {corpus.prefix} has {corpus.num_documents} documents, too few for "
                f"--split {options.split} to give any to {name}; use more or another split"
            )
    return None


def _leave_out(options: GPTDatasetConfig, sizes: list[int]) -> None:
    """Take splits of no samples out of the configuration; megatron-core might loop over them."""
    for i, size in enumerate(sizes):
        if size:
            continue
        if options.split_matrix is not None:
            options.split_matrix[i] = None  # type: ignore[call-overload]
        if options.blend_per_split is not None:
            options.blend_per_split[i] = None


def _cache_folder(
    data: DataConfig, plan: _Plan, run_dir: str | os.PathLike[str] | None
) -> str | None:
    """Folder for index files, made if missing; None where megatron-core keeps none.

    The last part of the path changes with the documents, since the names megatron-core gives do
    not: a data set made again under the same prefix must not meet the indices of the old one.
    """
    corpora = [corpus for split in plan.corpora for corpus in split]
    if not corpora:
        return None
    blended = any(len(split) > 1 for split in plan.corpora)
    if blended and not torch.distributed.is_initialized():
        # megatron-core's blends ask for a rank as soon as there is a cache.
        return None
    key = zlib.crc32(" ".join(str(corpus.fingerprint()) for corpus in corpora).encode())
    if data.data_cache_path:
        folders = [Path(data.data_cache_path)]
    else:
        folders = [Path(corpora[0].prefix).parent / "cache"]
        folders += [Path(run_dir) / "data_cache"] if run_dir else []
    for folder in folders:
        if check_writable(folder / f"{key:08x}"):
            return str(folder / f"{key:08x}")
    raise UsageError(
        f"cannot write index files of the data set into {' or '.join(map(str, folders))}; "
        "give a writable folder with --data-cache-path"
    )


@contextlib.contextmanager
def cache_errors(folder: str | None) -> Iterator[None]:
    """Turns what goes wrong with index files into one line for the user.

    Raises:
        UsageError: they cannot be written or read.
    """
    try:
        yield
    # megatron-core turns an OSError into a bare Exception; numpy reports damaged files as
    # ValueError or EOFError.
    except Exception as error:
        cause: Any = error if isinstance(error, OSError) else error.__cause__
        if isinstance(cause, OSError):
            raise UsageError(
                f"cannot write index files into {folder} ({cause}); "
                "give a writable folder with enough space with --data-cache-path"
            ) from error
        if isinstance(error, (ValueError, EOFError)):
            raise UsageError(
                f"cannot read the index files in {folder} ({error}); "
                "remove that folder to have them made again"
            ) from error
        raise


def _check_length(name: str, dataset: Any, size: int) -> None:
    if dataset is not None and size and len(dataset) < size:
        raise UsageError(
            f"the {name} data sets hold {len(dataset)} samples in one epoch, {size} are needed; "
            "data sets without weights are not repeated: give weight and prefix in turn"
        )
