"""Data of phases: every token is an input exactly once, in one order whatever was resumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.trainer.common.errors import UsageError
from megatron.trainer.data.dataloader import BatchReader
from megatron.trainer.data.tokenizer import build_tokenizer
from megatron.trainer.extras.phases.datasets import (
    Windows,
    blends_of,
    build_phase_datasets,
    plan_phases,
    windows_of,
)
from megatron.trainer.extras.phases.flags import Phase
from tests.helpers.one_rank import world_of_one
from tests.unit.test_data import make_config, write_corpus

MANY = build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=10_000_000)
DOCUMENTS = [20, 90, 400, 1500, 33, 64, 7] * 40
TOTAL = sum(DOCUMENTS)


def make_phases(*parts: tuple[int, int]) -> list[Phase]:
    """Phases of (length, samples of the first length), one after the other."""
    phases, start = [], 0
    for number, (length, samples) in enumerate(parts):
        phases.append(
            Phase(
                number=number,
                seq_length=length,
                start=start,
                end=start + samples,
                ratio=length // parts[0][0],
                rotary_base=10000,
                micro_batch_size=1,
                layout=None,
            )
        )
        start += samples
    return phases


# 96 x 64, 40 x 256 and 9 x 1,024 tokens.
THREE = make_phases((64, 96), (256, 160), (1024, 144))


def build(
    phases: Sequence[Phase] = THREE, *, blends: dict[int, Any] | None = None, **fields: Any
) -> list[Any]:
    return build_phase_datasets(
        make_config(split="1,0,0", **fields), blends or {}, phases, seed=7, tokenizer=MANY
    )


def tokens_of(sets: Sequence[Any]) -> list[int]:
    return [int(t) for dataset in sets for i in range(len(dataset)) for t in dataset[i]["tokens"]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its tokens count up from 1, so that every token of the data set has another value."""
    return write_corpus(tmp_path_factory.mktemp("phases") / "corpus", DOCUMENTS, 1)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("others")
    firsts = 1_000_000, 2_000_000
    return [write_corpus(folder / str(i), DOCUMENTS, first) for i, first in enumerate(firsts)]


def stream_of(dataset: Any, count: int) -> list[int]:
    """The first tokens of the shuffled documents, end to end."""
    flat = numpy.concatenate([dataset.dataset[int(k)] for k in dataset.document_index])
    return flat[:count].tolist()


def test_every_token_is_an_input_exactly_once(corpus: str) -> None:
    sets = build(data_path=(corpus,))
    assert [len(dataset) for dataset in sets] == [96, 40, 9]
    read = tokens_of(sets)
    count = 400 * 64
    assert len(read) == len(set(read)) == count
    assert set(read) == set(stream_of(sets[0], count))


def test_each_phase_reads_its_own_part_of_the_stream(corpus: str) -> None:
    sets = build(data_path=(corpus,))
    stream = stream_of(sets[0], 400 * 64)
    for phase, dataset in zip(THREE, sets, strict=True):
        assert set(tokens_of([dataset])) == set(stream[phase.start * 64 : phase.end * 64])


def test_samples_are_windows_with_the_next_token_as_last_label(corpus: str) -> None:
    sets = build(data_path=(corpus,))
    stream = stream_of(sets[0], 400 * 64 + 1)
    place = {token: at for at, token in enumerate(stream)}
    for phase, dataset in zip(THREE, sets, strict=True):
        for i in range(len(dataset)):
            item = dataset[i]
            at, length = place[int(item["tokens"][0])], phase.seq_length
            assert item["tokens"].tolist() == stream[at : at + length]
            assert item["labels"].tolist() == stream[at + 1 : at + length + 1]
            assert item["position_ids"].tolist() == list(range(length))
            assert item["loss_mask"].tolist() == [1.0] * length


def test_a_phase_is_shuffled_by_itself(corpus: str) -> None:
    firsts = [[int(d[i]["tokens"][0]) for i in range(len(d))] for d in build(data_path=(corpus,))]
    place = {t: i for i, t in enumerate(stream_of(build(data_path=(corpus,))[0], 400 * 64))}
    for order in firsts:
        places = [place[first] for first in order]
        assert places != sorted(places)
    same = make_phases((64, 96), (64, 96))
    orders = [d.shuffle_index.tolist() for d in build(same, data_path=(corpus,))]
    assert orders[0] != orders[1], "the phase is part of the seed"


def test_the_shuffle_of_stock_data_sets_reads_tokens_twice(corpus: str) -> None:
    """Without the definition: each length shuffled by itself, its place counted by tokens."""
    twice: Counter[int] = Counter()
    for phase, dataset in zip(THREE, build(data_path=(corpus,)), strict=True):
        order = numpy.random.RandomState(7).permutation(phase.end // phase.ratio)
        whole = [dataset.dataset, dataset.document_index]
        flat = numpy.concatenate([whole[0][int(k)] for k in whole[1]])
        for k in range(phase.start // phase.ratio, phase.end // phase.ratio):
            at = int(order[k]) * phase.seq_length
            twice.update(flat[at : at + phase.seq_length].tolist())
    assert sum(times > 1 for times in twice.values()) > 1000


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("batches", [1, 2])
def test_a_run_resumed_inside_a_phase_reads_what_is_left(
    corpus: str, number: int, batches: int
) -> None:
    phase, dataset = THREE[number], build(data_path=(corpus,))[number]
    batch = {0: 16, 1: 4, 2: 3}[number]

    def read(reader: BatchReader, consumed: int) -> list[int]:
        found = []
        while consumed < phase.num_samples:
            for micro in reader.read(
                consumed_samples=consumed,
                global_batch_size=batch,
                micro_batch_size=1,
                dp_rank=0,
                dp_size=1,
            ):
                found += micro["tokens"].flatten().tolist()
            consumed += batch
        return found

    whole = read(BatchReader(dataset), 0)
    left = read(BatchReader(build(data_path=(corpus,))[number]), batches * batch)
    assert left == whole[batches * batch * phase.seq_length :]


def test_a_blend_of_three_reads_every_token_once(corpus: str, others: list[str]) -> None:
    words = ("0.5", corpus, "0.3", others[0], "0.2", others[1])
    sets = build(data_path=words)
    assert [len(dataset) for dataset in sets] == [96, 40, 9]
    read = tokens_of(sets)
    assert len(read) == len(set(read)) == 400 * 64
    # Of each data set the beginning of its stream, without a gap.
    for prefix, low in ((corpus, 0), (others[0], 1_000_000), (others[1], 2_000_000)):
        own = {t for t in read if low <= t < low + 1_000_000}
        alone = build(data_path=(prefix,))[0]
        assert own == set(stream_of(alone, len(own)))
    shares = [sum(t < 1_000_000 for t in read), sum(1e6 <= t < 2e6 for t in read)]
    assert shares[0] / len(read) == pytest.approx(0.5, abs=0.05)
    assert shares[1] / len(read) == pytest.approx(0.3, abs=0.05)


def test_a_data_set_goes_on_where_it_stood_and_a_new_one_begins(
    corpus: str, others: list[str]
) -> None:
    sets = build(data_path=(corpus,), blends={1: [others[0]], 2: ["0.5", corpus, "0.5", others[0]]})
    read = [set(tokens_of([dataset])) for dataset in sets]
    first, second = build(data_path=(corpus,))[0], build(data_path=(others[0],))[0]
    assert read[0] == set(stream_of(first, 96 * 64))
    assert read[1] == set(stream_of(second, 160 * 64))
    last = [{t for t in read[2] if t < 1_000_000}, {t for t in read[2] if t > 1_000_000}]
    assert last[0] == set(stream_of(first, 96 * 64 + len(last[0]))[96 * 64 :])
    assert last[1] == set(stream_of(second, 160 * 64 + len(last[1]))[160 * 64 :])


def test_a_run_of_several_epochs_has_one_order_of_documents(corpus: str) -> None:
    """Near the rule of 80 % of the last epoch, where stock data sets of two lengths differ."""
    samples = int(TOTAL * 1.7999) // 1024 * 16
    phases = make_phases((64, samples // 2 // 16 * 16), (1024, samples - samples // 2 // 16 * 16))
    sets = build(phases, data_path=(corpus,))
    assert Counter(tokens_of(sets)) == Counter(stream_of(sets[0], samples * 64))


def test_a_phase_need_not_begin_at_a_multiple_of_its_length(corpus: str) -> None:
    sets = build(make_phases((64, 97), (256, 160)), data_path=(corpus,))
    read = tokens_of(sets)
    assert len(read) == len(set(read)) == 257 * 64
    assert set(read) == set(stream_of(sets[0], 257 * 64))


def test_data_sets_for_training_alone(corpus: str, others: list[str]) -> None:
    def built(**fields: Any) -> list[Any]:
        return build_phase_datasets(
            make_config(**fields), {1: [others[0]]}, THREE, seed=7, tokenizer=MANY
        )

    sets = built(train_data_path=(corpus,), valid_data_path=(others[1],))
    assert set(tokens_of(sets[:1])) == set(stream_of(sets[0], 96 * 64))
    assert all(1_000_000 <= t < 2_000_000 for t in tokens_of(sets[1:]))


def test_mock_data() -> None:
    sets = build(mock_data=True)
    assert [dataset[0]["tokens"].shape for dataset in sets] == [(64,), (256,), (1024,)]


def test_a_blend_without_weights_is_refused(corpus: str, others: list[str]) -> None:
    with pytest.raises(UsageError, match="give weight and prefix in turn"):
        blends_of(make_config(data_path=(corpus, others[0])), {}, 2)


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 60)), min_size=1, max_size=5),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_cursors_never_overlap_and_leave_no_gap(
    parts: list[tuple[int, int]], weights: list[int]
) -> None:
    phases = make_phases((4, 16), *[(4 * ratio, ratio * count) for ratio, count in parts])
    names = [str(i) for i in range(len(weights))]
    blends = [(names, [float(w) for w in weights])] * len(phases)
    position = dict.fromkeys(names, 0)
    for phase, order in zip(phases, plan_phases(blends, phases), strict=True):
        assert sum(w.count for w in order.windows) == phase.num_samples
        for i, windows in enumerate(order.windows):
            assert windows.start == position[windows.prefix]
            position[windows.prefix] += windows.count * phase.ratio
            if order.dataset_index is None or order.dataset_sample_index is None:
                continue
            own = order.dataset_sample_index[order.dataset_index == i]
            assert sorted(own.tolist()) == list(range(windows.count))
    assert sum(position.values()) == phases[-1].end


def test_a_view_leaves_its_stream_alone(corpus: str) -> None:
    stream = build(make_phases((64, 96)), data_path=(corpus,))[0]
    before = stream[5]["tokens"]
    windows = Windows(prefix=corpus, start=0, count=32)
    later = make_phases((64, 0), (128, 64))[1]
    view = windows_of(stream, windows, later, order=numpy.arange(32))
    assert view[0]["tokens"].shape == (128,) and view[0]["position_ids"].shape == (128,)
    assert torch.equal(stream[5]["tokens"], before) and stream[5]["loss_mask"].shape == (64,)


def test_ranks_map_one_file_of_each_order(corpus: str, others: list[str], tmp_path: Path) -> None:
    words = ("0.5", corpus, "0.3", others[0], "0.2", others[1])
    fields = {"data_path": words, "data_cache_path": str(tmp_path / "cache")}
    by_itself = tokens_of(build(**fields))
    with world_of_one():
        assert tokens_of(build(**fields)) == by_itself
        files = sorted((tmp_path / "cache").rglob("*-phase.npy"))
        # In each of three phases: a shuffle for each of three data sets, and two arrays.
        assert len(files) == 3 * (3 + 2)
        assert tokens_of(build(**fields)) == by_itself
        assert sorted((tmp_path / "cache").rglob("*-phase.npy")) == files
        files[0].write_bytes(b"damaged")
        with pytest.raises(UsageError, match="remove that folder"):
            build(**fields)
