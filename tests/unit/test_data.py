"""The data sets of a run and their readers."""

from __future__ import annotations

import os
import signal
import struct
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from torch.utils.data import _utils

from copus_ext.launch.failure import Failure
from megatron.trainer.common.errors import UsageError
from megatron.trainer.config import DataConfig
from megatron.trainer.data.dataloader import BATCH_KEYS, BatchReader
from megatron.trainer.data.datasets import build_datasets, parse_blend
from megatron.trainer.data.tokenizer import build_tokenizer
from tests.helpers.launch import run_in_fork

pytestmark = pytest.mark.unit

SEQ = 8
TOKENIZER = build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=10_000)


def write_corpus(prefix: Path, lengths: list[int], first_token: int = 0) -> str:
    """A data set whose tokens count up from `first_token`, so that a sample tells its place."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.int32)
    for length in lengths:
        tokens = torch.arange(first_token, first_token + length)
        builder.add_document(tokens, [length])
        first_token += length
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture
def corpus(tmp_path) -> str:
    return write_corpus(tmp_path / "corpus", [7, 30, 12, 50, 21] * 8)


def make_config(**fields) -> DataConfig:
    """The options of a run with the defaults of the command line."""
    defaults: dict[str, Any] = {"split": None, "mock_data": False, "mmap_bin_files": True}
    return DataConfig(**{**defaults, **fields})


def build(num_samples=(40, 0, 0), *, seed=3, tokenizer=TOKENIZER, run_dir=None, **fields) -> Any:
    return build_datasets(
        make_config(**fields),
        seq_length=SEQ,
        seed=seed,
        tokenizer=tokenizer,
        num_samples=num_samples,
        run_dir=run_dir,
    )


def starts(dataset: Any, count: int | None = None) -> list[int]:
    return [int(dataset[i]["tokens"][0]) for i in range(count or len(dataset))]


# --- data sets ---


def test_samples_are_packed_and_shifted_by_one(corpus):
    train = build(data_path=(corpus,)).train
    sample = train[0]
    assert sorted(sample) == sorted(BATCH_KEYS)
    assert sample["tokens"].shape == (SEQ,) and sample["tokens"].dtype == torch.int64
    assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
    assert sample["loss_mask"].tolist() == [1.0] * SEQ
    assert sample["position_ids"].tolist() == list(range(SEQ))


def test_one_epoch_reads_every_token_of_the_split_once(corpus):
    train = build(data_path=(corpus,), split="1,0,0").train
    tokens = [token for i in range(len(train)) for token in train[i]["tokens"].tolist()]
    total = 120 * 8
    assert len(tokens) == len(set(tokens)) == (total - 1) // SEQ * SEQ


def test_the_order_is_frozen_by_seed_and_number_of_samples(corpus, tmp_path):
    def order(seed=3, count=40, **fields):
        return starts(build((count, 0, 0), seed=seed, data_path=(corpus,), **fields).train, 40)

    first = order()
    assert order() == first
    assert order(data_cache_path=str(tmp_path / "other")) == first
    assert order(mmap_bin_files=False) == first
    # Fewer samples than an epoch change nothing; several epochs are shuffled together.
    assert order(count=60) == first
    assert order(count=500) != first
    assert order(seed=4) != first
    assert first != sorted(first)


def test_evaluation_does_not_move_the_training_order(corpus):
    alone = build((40, 0, 0), data_path=(corpus,), split="8,1,1")
    both = build((40, 7, 3), data_path=(corpus,), split="8,1,1")
    assert starts(alone.train) == starts(both.train)
    assert alone.valid is None and alone.test is None
    assert both.valid is not None and both.test is not None


def test_splits_share_no_document(corpus):
    built = build((60, 10, 10), data_path=(corpus,), split="80,10,10")
    seen = [set(starts(dataset)) for dataset in (built.train, built.valid, built.test)]
    # Tokens count up over documents; 32 of the 40 are for training and 4 for validation.
    first_valid, first_test = 6 * 120 + 7 + 30, 7 * 120 + 7
    assert max(seen[0]) < first_valid <= min(seen[1])
    assert max(seen[1]) < first_test <= min(seen[2])


def test_separate_paths_per_split(corpus, tmp_path):
    valid = write_corpus(tmp_path / "valid", [100], first_token=5000)
    built = build((40, 5, 5), train_data_path=(corpus,), valid_data_path=(valid,))
    assert min(starts(built.valid)) >= 5000 > max(starts(built.train))
    assert built.test is None
    assert any("--test-data-path" in note for note in built.notes)


def test_a_blend_keeps_its_weights(corpus, tmp_path):
    other = write_corpus(tmp_path / "other", [200], first_token=5000)
    built = build((400, 0, 0), data_path=("3", corpus, "1", other), split="1,0,0")
    share = sum(start >= 5000 for start in starts(built.train, 400)) / 400
    assert share == pytest.approx(0.25, abs=0.01)


def test_an_unweighted_blend_is_one_epoch(corpus, tmp_path):
    other = write_corpus(tmp_path / "other", [200], first_token=5000)
    third = write_corpus(tmp_path / "third", [200], first_token=7000)
    paths = (corpus, other, third)
    assert len(build((100, 0, 0), data_path=paths, split="1,0,0").train) == 100
    with pytest.raises(UsageError, match="give weight and prefix in turn"):
        build((400, 0, 0), data_path=paths, split="1,0,0")


def test_mock_data_fits_the_vocabulary():
    tokenizer = build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=50)
    built, alone = (build((20, n, 0), tokenizer=tokenizer, mock_data=True) for n in (4, 0))
    assert built.valid is not None and built.test is None
    assert all(int(built.train[i]["tokens"].max()) < 51 for i in range(20))
    assert starts(built.train, 20) == starts(alone.train, 20)


def test_the_end_of_document_can_be_left_out_of_the_loss(corpus):
    tokenizer = build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=9999)
    dataset = build(
        (60, 0, 0), data_path=(corpus,), eod_mask_loss=True, tokenizer=tokenizer, split="1,0,0"
    ).train
    assert all(dataset[i]["loss_mask"].all() for i in range(60))
    ends = build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=959)
    dataset = build(
        (100, 0, 0), data_path=(corpus,), eod_mask_loss=True, tokenizer=ends, split="1,0,0"
    ).train
    for i in range(len(dataset)):
        sample = dataset[i]
        assert torch.equal(sample["loss_mask"] == 0, sample["tokens"] == 959)


def test_a_data_set_made_again_does_not_meet_old_indices(tmp_path):
    prefix = write_corpus(tmp_path / "again", [50] * 10)
    build((20, 0, 0), data_path=(prefix,), split="1,0,0")
    write_corpus(tmp_path / "again", [5] * 100)
    train = build((20, 0, 0), data_path=(prefix,), split="1,0,0").train
    assert len({tuple(train[i]["tokens"].tolist()) for i in range(len(train))}) == len(train)
    assert all(set(torch.diff(train[i]["tokens"]).tolist()) != {1} for i in range(len(train)))


def test_an_empty_split_turns_its_evaluation_off_with_a_note(tmp_path):
    prefix = write_corpus(tmp_path / "small", [100] * 3)
    built = build((10, 5, 5), data_path=(prefix,))
    assert built.train is not None and not built.valid is not None and built.test is None
    assert len(built.notes) == 2
    assert "3 documents" in built.notes[0] and "valid" in built.notes[0]


def truncate(path: str, size: int) -> None:
    os.truncate(path, os.path.getsize(path) + size if size < 0 else size)


def overwrite(path: str, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        file.write(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: os.remove(p + ".idx"), r"--data-path .*corpus\.idx"),
        (lambda p: os.remove(p + ".bin"), r"--data-path .*corpus\.bin"),
        (lambda p: truncate(p + ".idx", -1), r"corpus\.idx has \d+ of \d+ bytes"),
        (lambda p: truncate(p + ".idx", 20), r"corpus\.idx is not the index"),
        (lambda p: truncate(p + ".bin", -1), r"corpus\.bin has \d+ of \d+ bytes"),
        (lambda p: Path(p + ".idx").write_bytes(b"x" * 99), "is not the index"),
        (
            lambda p: Path(p + ".idx").write_bytes(
                struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 2, 4, 0, 0)
            ),
            "version 2",
        ),
        (
            lambda p: Path(p + ".idx").write_bytes(
                struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, 0, 1) + bytes(8)
            ),
            "no document",
        ),
        (lambda p: overwrite(p + ".idx", 34, struct.pack("<i", -7)), "negative length"),
        (lambda p: overwrite(p + ".idx", 34, struct.pack("<i", 8)), "offsets do not follow"),
        (lambda p: overwrite(p + ".idx", 34 + 39 * 4, b"\x16"), r"corpus\.bin has \d+ of"),
        (lambda p: overwrite(p + ".idx", -8, struct.pack("<q", 2**40)), "list of documents"),
    ],
)
def test_damaged_data_is_named_in_one_line(corpus, damage, message):
    damage(corpus)
    with pytest.raises(UsageError, match=message) as caught:
        build(data_path=(corpus,))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one source"),
        ({"mock_data": True, "data_path": ("CORPUS",)}, "exactly one source"),
        ({"data_path": ("CORPUS",), "train_data_path": ("CORPUS",)}, "exactly one source"),
        ({"valid_data_path": ("CORPUS",)}, "--train-data-path"),
        ({"train_data_path": ("CORPUS",), "split": "1,1,1"}, "--split"),
        ({"data_path": ("CORPUS.idx",)}, "leave out .idx"),
        ({"data_path": ("CORPUS",), "split": "1,x"}, "--split 1,x"),
        ({"data_path": ("CORPUS",), "split": "0,0,0"}, "--split 0,0,0"),
        ({"data_path": ("CORPUS",), "split": "0,1,0"}, "no training data: --split"),
        ({"data_path": ("0", "CORPUS", "1", "CORPUS")}, "positive weights"),
    ],
)
def test_wrong_flags_are_named(corpus, fields, message):
    filled: dict[str, Any] = {
        key: tuple(word.replace("CORPUS", corpus) for word in value)
        if isinstance(value, tuple)
        else value
        for key, value in fields.items()
    }
    with pytest.raises(UsageError, match=message):
        build(**filled)


def test_a_vocabulary_too_small_is_refused(corpus):
    fits = build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=959)
    build(data_path=(corpus,), tokenizer=fits)
    small = build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=958)
    with pytest.raises(UsageError, match=r"token 959.*--tokenizer-type \(or --vocab-size\)"):
        build(data_path=(corpus,), tokenizer=small)


def test_a_cache_that_cannot_be_written_names_its_flag(corpus, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="--data-cache-path"):
        build(data_path=(corpus,), data_cache_path=str(tmp_path / "file" / "cache"))


def test_read_only_data_keeps_its_indices_with_the_run(corpus, tmp_path):
    (tmp_path / "cache").write_text("in the way")
    build(data_path=(corpus,), run_dir=tmp_path / "run")
    assert list((tmp_path / "run" / "data_cache").rglob("*shuffle_index.npy"))


def test_a_damaged_cache_says_what_to_remove(corpus, tmp_path):
    cache = tmp_path / "indices"
    build(data_path=(corpus,), data_cache_path=str(cache))
    (index,) = cache.rglob("*shuffle_index.npy")
    index.write_bytes(index.read_bytes()[:100])
    with pytest.raises(UsageError, match="remove that folder"):
        build(data_path=(corpus,), data_cache_path=str(cache))


def test_blend_words():
    assert parse_blend(None, "--data-path") is None
    assert parse_blend(["a"], "--data-path") == (["a"], None)
    assert parse_blend(["a", "b"], "--data-path") == (["a", "b"], None)
    assert parse_blend([".3", "a", "7", "b"], "--data-path") == (["a", "b"], [0.3, 7.0])
    for words in (["1", "a", "b", "c"], ["-1", "a"], ["nan", "a"], ["inf", "a"]):
        with pytest.raises(UsageError, match="--data-path"):
            parse_blend(words, "--data-path")


# --- readers ---


class Numbered:
    """Sample n holds n everywhere; counts how often it is asked in this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.asked.append(index)
        tokens = torch.full((SEQ,), index)
        ones = torch.ones(SEQ)
        return {"tokens": tokens, "labels": tokens, "loss_mask": ones, "position_ids": tokens}


def take(reader: BatchReader, consumed: int, gbs: int, mbs: int, rank: int = 0, dp: int = 1):
    """Sample numbers of a batch, taken as a pipeline schedule does: never asked for the end."""
    batches = reader.read(
        consumed_samples=consumed,
        global_batch_size=gbs,
        micro_batch_size=mbs,
        dp_rank=rank,
        dp_size=dp,
    )
    rows = [next(batches)["tokens"][:, 0].tolist() for _ in range(gbs // mbs // dp)]
    assert rows == reader.sample_ids
    return [sample for row in rows for sample in row]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_follow_the_counter_through_every_change(num_workers):
    reader = BatchReader(Numbered(100), num_workers=num_workers)
    consumed = 0
    for gbs, mbs in [(8, 2), (8, 2), (8, 4), (4, 4), (4, 2), (12, 2), (12, 2)]:
        assert take(reader, consumed, gbs, mbs) == list(range(consumed, consumed + gbs))
        consumed += gbs
    assert take(reader, 20, 8, 2) == list(range(20, 28))
    assert take(reader, 28, 8, 2, rank=1, dp=2) == [30, 31, 34, 35]
    assert take(reader, 92, 8, 2) == list(range(92, 100))
    reader.close()
    assert take(reader, 0, 8, 2) == list(range(8))
    reader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_given_up_half_way_is_read_again(num_workers):
    reader = BatchReader(Numbered(40), num_workers=num_workers)
    arguments: Any = {"global_batch_size": 8, "micro_batch_size": 2, "dp_rank": 0, "dp_size": 1}
    batches = reader.read(consumed_samples=0, **arguments)
    next(batches)
    assert take(reader, 8, 8, 2) == list(range(8, 16))
    assert take(reader, 0, 8, 2) == list(range(8))
    with pytest.raises(AssertionError, match="take all of a batch"):
        next(batches)
    reader.close()


def test_batches_that_follow_are_read_without_a_restart():
    dataset = Numbered(100)
    reader = BatchReader(dataset)
    for consumed in range(0, 32, 8):
        take(reader, consumed, 8, 2)
    assert dataset.asked == list(range(32))


def test_workers_read_the_same_batches_of_a_real_data_set(corpus):
    train = build((60, 0, 0), data_path=(corpus,), split="1,0,0").train
    arguments: Any = {"global_batch_size": 12, "micro_batch_size": 3, "dp_rank": 1, "dp_size": 2}
    read = {}
    for num_workers in (0, 2):
        reader = BatchReader(train, num_workers=num_workers)
        read[num_workers] = [
            batch
            for consumed in (0, 12, 24, 36, 12)
            for batch in reader.read(consumed_samples=consumed, **arguments)
        ]
        reader.close()
    assert len(read[0]) == len(read[2]) == 10
    for alone, worker in zip(read[0], read[2]):
        assert list(alone) == list(worker) == list(BATCH_KEYS)
        assert all(torch.equal(alone[key], worker[key]) for key in alone)
        assert alone["tokens"].shape == (3, SEQ) and alone["tokens"].dtype == torch.int64
        assert alone["loss_mask"].dtype == torch.float32


def test_close_stops_the_workers():
    reader = BatchReader(Numbered(40), num_workers=2)
    take(reader, 0, 8, 2)
    iterator: Any = reader._loader._iterator
    workers = iterator._workers
    assert all(worker.is_alive() for worker in workers)
    reader.close()
    for worker in workers:
        worker.join(timeout=10)
    assert not any(worker.is_alive() for worker in workers)


class Stuck(Numbered):
    """Its samples from 4 on never come."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.waits = torch.multiprocessing.get_context("fork").Event()

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= 4:
            self.waits.set()
            time.sleep(1000)
        return super().__getitem__(index)


def test_close_stops_a_worker_that_waits_for_a_sample(monkeypatch):
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    samples = Stuck(40)
    reader = BatchReader(samples, num_workers=1)
    take(reader, 0, 4, 2)
    assert samples.waits.wait(60)
    iterator: Any = reader._loader._iterator
    (worker,) = iterator._workers
    reader.close()
    worker.join(timeout=60)
    assert worker.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("num_workers", [0, 2])
def test_evaluation_counts_each_sample_once_under_every_layout(num_workers):
    reader = BatchReader(Numbered(40), num_workers=num_workers)
    for mbs, dp, multiple in [(1, 1, 1), (4, 1, 1), (3, 2, 2), (2, 4, 1)]:
        counted = []
        for rank in range(dp):
            batches = reader.read_evaluation(
                num_samples=10,
                start=5,
                micro_batch_size=mbs,
                dp_rank=rank,
                dp_size=dp,
                min_multiple=multiple,
            )
            assert len(reader.sample_ids) % multiple == 0
            for batch in batches:
                assert batch["tokens"].shape == (mbs, SEQ)
                mask = batch["loss_mask"]
                assert torch.equal(mask, mask[:, :1].expand_as(mask))
                counted += batch["tokens"][mask[:, 0] == 1, 0].tolist()
        assert sorted(counted) == list(range(5, 15))
    reader.close()


def test_training_goes_on_after_an_evaluation():
    reader = BatchReader(Numbered(40))
    take(reader, 0, 8, 2)
    list(reader.read_evaluation(num_samples=3, start=0, micro_batch_size=2, dp_rank=0, dp_size=1))
    assert take(reader, 8, 8, 2) == list(range(8, 16))


def test_reading_beyond_the_end_is_refused():
    reader = BatchReader(Numbered(20))
    with pytest.raises(UsageError, match="up to 24"):
        take(reader, 16, 8, 2)
    with pytest.raises(UsageError, match="up to 21"):
        reader.read_evaluation(num_samples=1, start=20, micro_batch_size=1, dp_rank=0, dp_size=1)


def _one_that_loses_its_reader() -> str:
    torch_handler = _utils.signal_handling._set_SIGCHLD_handler
    _utils.signal_handling._set_SIGCHLD_handler = lambda: None  # torch's own message comes at times
    try:
        reader = BatchReader(Numbered(1000), num_workers=1)
        take(reader, 0, 8, 2)
        iterator: Any = reader._loader._iterator
        os.kill(iterator._workers[0].pid, signal.SIGKILL)
        try:
            for consumed in range(8, 1000, 8):
                take(reader, consumed, 8, 2)
        except RuntimeError as error:
            return str(error)
        return "none"
    finally:
        _utils.signal_handling._set_SIGCHLD_handler = torch_handler


def test_a_reading_process_that_is_killed_is_named_with_its_signal() -> None:
    said = run_in_fork(_one_that_loses_its_reader)
    assert Failure(rank=0, host="h", code=1, error=said).is_from_outside, said
