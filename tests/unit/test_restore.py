"""Which checkpoint a run goes on from, and what it must not meet."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from copus_ext.launch import checkpoint_flags
from megatron.trainer.checkpoint import files
from megatron.trainer.checkpoint.load import (
    Stored,
    iterations_to_try,
    may_be_shifted,
    read_arguments,
    read_stored,
    stored_of,
)
from megatron.trainer.checkpoint.resume import check_same_run, kept_sizes, merge_resume_config
from megatron.trainer.common.core_version import since
from megatron.trainer.common.errors import TrainingFailure, UsageError
from megatron.trainer.common.step_settings import StepSettings
from megatron.trainer.common.train_state import TrainState
from megatron.trainer.config import Config, DataConfig
from megatron.trainer.config.arguments import parse_args, resolve, with_checkpoint_args
from megatron.trainer.data.datasets import build_datasets, use_of
from megatron.trainer.data.fingerprint import changes, identity_of, order_of
from megatron.trainer.data.tokenizer import NullTokenizer
from tests.helpers.checkpoints import ITERATION, common_file, edit_common, make_checkpoint
from tests.helpers.examples import SMALL, config_of
from tests.helpers.of_extras import of_extra
from tests.helpers.one_rank import world_of_one


def make(root: Path, iteration: int) -> Path:
    """A checkpoint without contents that was written to the end, and is the latest."""
    folder = files.begin(root, iteration)
    (folder / files.CORE_MARK).write_text("{}")
    files.finish(root, iteration, {})
    return folder


@pytest.fixture
def save(tmp_path: Path) -> Path:
    for iteration in (2, 4, 6):
        make(tmp_path, iteration)
    return tmp_path


def test_the_latest_comes_first_and_older_ones_stand_in_for_it(save: Path) -> None:
    def tries(step: int | None, fallback: bool) -> list[int]:
        return iterations_to_try(save, step=step, fallback=fallback)[0]

    assert tries(None, True) == [6, 4, 2] and tries(None, False) == [6] and tries(4, True) == [4]
    with pytest.raises(TrainingFailure, match=r"missing.*--ckpt-step 6"):
        tries(5, True)
    files.write_atomically(save / files.TRACKER, "4\n")
    assert tries(None, True) == [4, 2], "6 is no history of 4"
    files.write_atomically(save / files.TRACKER, "6\n")
    (files.folder_of(save, 6) / files.CORE_MARK).unlink()
    found, problems = iterations_to_try(save, step=None, fallback=True)
    assert found == [4, 2] and "half-written" in problems[0]
    for step, fallback in ((None, False), (6, True)):
        with pytest.raises(TrainingFailure, match=r"half-written.*--ckpt-step 4"):
            tries(step, fallback)


def test_the_folder_of_one_iteration_is_told_from_an_empty_one(save: Path) -> None:
    """Else a run that names it would start from scratch."""
    folder = files.folder_of(save, 4)
    with pytest.raises(TrainingFailure, match=f"give --load {save} --ckpt-step 4$"):
        iterations_to_try(folder, step=None, fallback=True)


def test_an_older_format_is_named_with_what_converts_it(tmp_path: Path) -> None:
    rank = files.folder_of(tmp_path, 8) / "mp_rank_00"
    rank.mkdir(parents=True)
    (rank / "model_optim_rng.pt").write_bytes(b"")
    (tmp_path / files.TRACKER).write_text("8")
    for fallback in (True, False):
        with pytest.raises(TrainingFailure, match=r"format torch;.*--ckpt-convert-format") as error:
            iterations_to_try(tmp_path, step=None, fallback=fallback)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("tracker", [None, "6O"])
def test_without_a_tracker_the_newest_complete_one_is_the_latest(
    save: Path, tracker: str | None
) -> None:
    (save / files.TRACKER).unlink()
    if tracker is not None:
        (save / files.TRACKER).write_text(tracker)
    tries, problems = iterations_to_try(save, step=None, fallback=True)
    assert tries == [6, 4, 2] and files.TRACKER in problems[0]
    with pytest.raises(TrainingFailure, match="--ckpt-step 6"):
        iterations_to_try(save, step=None, fallback=False)


def test_a_run_starts_from_scratch_only_where_nothing_was_ever_saved(tmp_path: Path) -> None:
    assert iterations_to_try(tmp_path / "nowhere", step=None, fallback=True) == ([], [])
    folder = files.begin(tmp_path, 2)
    (folder / files.CORE_MARK).write_text("{}")
    files.write_manifest(folder, 2, {})
    tries, problems = iterations_to_try(tmp_path, step=None, fallback=True)
    assert tries == [2] and files.TRACKER in problems[0], "a first save, killed just before its end"
    (folder / files.MANIFEST).unlink()
    assert iterations_to_try(tmp_path, step=None, fallback=True) == ([], []), (
        "a first save, cut short"
    )
    files.finish(tmp_path, 2, {})
    (folder / files.CORE_MARK).unlink()
    for tracker in (True, False):
        if not tracker:
            (tmp_path / files.TRACKER).unlink()
        with pytest.raises(TrainingFailure, match="no complete checkpoint"):
            iterations_to_try(tmp_path, step=None, fallback=True)


def data_set(prefix: Path, *, documents: int, text: bytes = b"text") -> str:
    Path(f"{prefix}.idx").write_bytes(b"MMIDIDX" + bytes(documents))
    Path(f"{prefix}.bin").write_bytes(text)
    return str(prefix)


def test_a_changed_data_set_is_named_and_a_moved_one_is_the_same(tmp_path: Path) -> None:
    a, b = data_set(tmp_path / "a", documents=5), data_set(tmp_path / "b", documents=9)
    stored = identity_of([a, b])
    assert changes(stored, identity_of([a, b])) == []
    (tmp_path / "new").mkdir()
    assert changes(stored, identity_of([data_set(tmp_path / "new/a", documents=5), b])) == []
    assert changes(stored, identity_of([b, a])) != []
    assert "1 data sets instead of 2" in changes(stored, identity_of([a]))[0]
    data_set(tmp_path / "b", documents=9, text=b"other text")
    assert changes(stored, identity_of([a, b])) == [f"{b}.bin has 10 bytes instead of 4"]
    data_set(tmp_path / "b", documents=10)
    assert changes(stored, identity_of([a, b])) == [f"{b}.idx has 17 bytes instead of 16"]
    Path(f"{b}.idx").write_bytes(b"MMIDIDX" + bytes(8) + b"1")
    assert changes(stored, identity_of([a, b])) == [f"{b}.idx has other documents"]


def use(words: str, **more: Any) -> dict[str, Any]:
    """As it lies in a checkpoint."""
    given = use_of(DataConfig(data_path=tuple(words.split()) or None, **more))
    return json.loads(json.dumps(dataclasses.asdict(given)))


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (use("a"), use("/elsewhere/b"), None),
        (use("1 a 3 b"), use("0.25 x 0.75 y", split="969,30,1"), None),
        (use("a b"), use("c d"), None),
        (use("a b"), use("0.5 a 0.5 b"), "--data-path names 2 data sets of weights 0.5, 0.5 inst"),
        (use("1 a 3 b"), use("3 a 1 b"), "of weights 3, 1 instead of 2 data sets of weights 1, 3"),
        (use("a", split="90,10,0"), use("a", split="9,1,0"), None),
        (use("a", split="90,10,0"), use("a"), "--split is 96.9,3,0.1 % instead of 90,10,0 %"),
        (use("a"), use("", train_data_path=("a",)), "--data-path names nothing instead of 1 data"),
        (
            use("", train_data_path=("1", "a", "1", "b")),
            use("", train_data_path=("1", "a", "2", "b")),
            "--train-data-path names 2 data sets of weights 1, 2 instead of",
        ),
        (
            use("", train_data_path=("a",), valid_data_path=("b",)),
            use("", train_data_path=("a",), test_data_path=("b",)),
            "--valid-data-path names nothing instead of 1 data set",
        ),
    ],
)
def test_data_is_known_by_its_use_wherever_it_lies(
    before: dict[str, Any], now: dict[str, Any], said: str | None
) -> None:
    found = changes([{"use": before}], [{"use": now}])
    assert not found if said is None else found and said in found[0]
    assert changes([], [{"use": now}]) == [], "a checkpoint that does not tell it"


@pytest.mark.parametrize("flags", ["--data-path b", "--data-path a --split 90,10,0", "--mock-data"])
def test_flags_of_data_are_compared_by_contents_where_those_are_known(flags: str) -> None:
    theirs = {"mock_data": False, "data_path": ["a"], "split": "969,30,1"}
    with pytest.raises(UsageError, match=r"--(data-path|split) is"):
        resumed(flags, theirs)
    resumed(flags, theirs, data=[{"prefix": "a"}])


def test_an_index_larger_than_what_is_read_shows_changes_at_both_ends(tmp_path: Path) -> None:
    name = data_set(tmp_path / "large", documents=6_000_000)
    stored = identity_of([name])
    for at in (10, -10):
        data_set(tmp_path / "large", documents=6_000_000)
        with Path(f"{name}.idx").open("r+b") as file:
            file.seek(at, 0 if at > 0 else 2)
            file.write(b"1")
        assert changes(stored, identity_of([name])) == [f"{name}.idx has other documents"]


def corpus(prefix: Path, seed: int, *, documents: int = 40) -> str:
    """Random tokens: 1.6 MB in documents of 10,000, written by megatron-core."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.int32)
    for number in numpy.random.default_rng(seed).permutation(documents):
        tokens = numpy.random.default_rng(int(number)).integers(0, 50_000, 10_000)
        builder.add_document(torch.from_numpy(tokens.astype(numpy.int32)), [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def test_other_contents_of_the_same_size_are_named(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    name = corpus(tmp_path / "old" / "text", 0)
    stored = json.loads(json.dumps(identity_of([name])))
    bin_, good = Path(f"{name}.bin"), Path(f"{name}.bin").read_bytes()
    told = [f"{name}.bin has other contents of the same size"]
    tokens = numpy.frombuffer(good, numpy.int32)
    others = {
        "another tokenizer": (tokens + 1).tobytes(),
        "still being written": good[: len(good) // 2].ljust(len(good), b"\0"),
        "the end is missing": good[:-4000].ljust(len(good), b"\0"),
        "the beginning": b"\1" + good[1:],
        "another middle": good[:600_000] + good[:20_000] + good[620_000:],
    }
    for what, data in others.items():
        bin_.write_bytes(data)
        assert changes(stored, identity_of([name])) == told, what
    shuffled = corpus(tmp_path / "shuffled", 1)
    assert Path(f"{shuffled}.idx").read_bytes() == Path(f"{name}.idx").read_bytes()
    assert "same size" in changes(stored, identity_of([shuffled]))[0], "documents of equal lengths"
    bin_.write_bytes(good)
    (tmp_path / "new").mkdir()
    for ending in ("bin", "idx"):
        Path(f"{name}.{ending}").rename(tmp_path / "new" / f"text.{ending}")
        Path(f"{name}.{ending}").symlink_to(tmp_path / "new" / f"text.{ending}")
    assert changes(stored, identity_of([name])) == [], "elsewhere, behind links"


@pytest.fixture
def alone() -> Iterator[None]:
    with world_of_one():
        yield


@pytest.mark.parametrize("blended", [False, True])
def test_an_index_file_that_was_changed_in_the_cache_is_named(
    alone: None, tmp_path: Path, blended: bool
) -> None:
    names = [corpus(tmp_path / name, seed) for seed, name in enumerate("ab")]
    words = ("0.5", names[0], "0.5", names[1]) if blended else (names[0],)

    def identity(train: int = 200) -> list[dict[str, Any]]:
        config = DataConfig(
            data_path=words, split="90,10,0", data_cache_path=str(tmp_path / "cache")
        )
        built = build_datasets(
            config,
            seq_length=64,
            seed=1,
            tokenizer=NullTokenizer(50_000),
            num_samples=(train, 9, 0),
        )
        orders = [order_of(source) for source in (built.train, built.valid)]
        return [*identity_of(names), {"order": {**orders[0], **orders[1]}}]

    stored = json.loads(json.dumps(identity()))
    assert changes(stored, identity()) == []
    assert changes(stored, identity(train=300)) == [], "another length has indices of its own"
    assert changes(stored[:-1], identity()) == [], "a checkpoint that does not say"
    files = sorted((tmp_path / "cache").rglob("*.npy"))
    assert len(files) >= 6
    for file in files:
        good = file.read_bytes()
        array = numpy.load(file)
        if "train" not in file.name or len(array) < 3 or (array[::-1] == array).all():
            continue
        numpy.save(file, array[::-1].copy())
        told = changes(stored, identity())
        is_used = file.name.partition("-")[0] in str(stored[-1])
        assert bool(told) == is_used, file.name
        assert all("another order" in line for line in told)
        file.write_bytes(good)


def test_little_of_a_large_file_is_read(tmp_path: Path) -> None:
    name = data_set(tmp_path / "large", documents=9)
    os.truncate(f"{name}.bin", 1 << 40)
    stored = identity_of([name])
    with Path(f"{name}.bin").open("r+b") as file:
        file.seek((1 << 40) - 2)
        file.write(b"1")
    assert changes(stored, identity_of([name])) == [
        f"{name}.bin has other contents of the same size"
    ]


OLDER = ITERATION - 1
OF_THE_FILE = pytest.mark.skipif(
    since("0.19"), reason="about the file common.pt, which megatron-core 0.19 does not write"
)
TRUST = "--ckpt-trust-unverified"


@pytest.fixture(scope="module")
def two_whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `--save` directory of COPUS with two checkpoints."""
    root = make_checkpoint(tmp_path_factory.mktemp("whole") / "save", ours=True)
    shutil.copytree(files.folder_of(root, ITERATION), files.folder_of(root, OLDER))
    return root


@pytest.fixture
def ours(two_whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(two_whole, tmp_path / "ours")


def lose_manifest(root: Path, iteration: int = ITERATION) -> Path:
    folder = files.folder_of(root, iteration)
    (folder / files.MANIFEST).unlink()
    return folder


def flip(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ 1 << bit]))


def latest(root: Path, **how: Any) -> Stored:
    found = read_stored(root, step=None, **{"verify": True, "fallback": True, **how})
    assert found is not None
    return found


@pytest.mark.parametrize("has_manifest", [True, False])
@pytest.mark.parametrize(
    "name",
    ["__0_0.distcp", ".metadata", pytest.param("common.pt", marks=OF_THE_FILE), "metadata.json"],
)
def test_no_damage_of_the_latest_is_trained_on(
    alone: None, two_whole: Path, tmp_path: Path, name: str, has_manifest: bool
) -> None:
    size = (files.folder_of(two_whole, ITERATION) / name).stat().st_size
    for number, place in enumerate((0.0, 0.3, 0.6, 0.99, "cut", "gone")):
        root = shutil.copytree(two_whole, tmp_path / str(number))
        folder = files.folder_of(root, ITERATION)
        if not has_manifest:
            lose_manifest(root)
        if isinstance(place, float):
            flip(folder / name, int(place * size), number)
        elif place == "cut":
            os.truncate(folder / name, size // 2)
        else:
            (folder / name).unlink()
        found = latest(root)
        assert found.folder == files.folder_of(root, OLDER), (name, place)
        assert len(found.skipped) == 1 and str(folder) in found.skipped[0]


@pytest.mark.parametrize("emptied", [False, True])
def test_one_of_ours_without_a_manifest_is_damaged_for_every_reader(
    alone: None, ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], emptied: bool
) -> None:
    found = latest(ours)
    assert found.iteration == ITERATION and not found.skipped
    folder = lose_manifest(ours)
    if emptied:
        files.write_manifest(folder, ITERATION, {})
    found = latest(ours)
    assert found.folder == files.folder_of(ours, OLDER)
    assert files.MANIFEST in found.skipped[0] and TRUST in found.skipped[0]
    with pytest.raises(TrainingFailure, match=rf"{files.MANIFEST}.*{TRUST}.*--ckpt-step {OLDER}"):
        latest(ours, fallback=False)
    assert latest(ours, trust_unverified=True).folder == folder
    inspect_checkpoint = of_extra("megatron.trainer.extras.inspect_checkpoint.command")
    convert_checkpoint = of_extra("megatron.trainer.extras.convert.command")
    assert inspect_checkpoint.main([str(ours)]) == 3
    assert convert_checkpoint.main([str(ours), str(tmp_path / "made")]) == 3
    assert capsys.readouterr().err.count(TRUST) == 2
    assert inspect_checkpoint.main([str(ours), TRUST, "--verify"]) == 0
    out = capsys.readouterr().out
    assert "every byte" not in out and "cannot be verified" in out
    assert convert_checkpoint.main([str(ours), str(tmp_path / "made"), TRUST]) == 0
    assert "cannot be verified" in capsys.readouterr().out


def test_the_flags_are_taken_from_the_checkpoint_that_is_loaded(
    ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def wider(state: dict[str, Any]) -> dict[str, Any]:
        state["args"].hidden_size = 999
        return state

    edit_common(files.folder_of(ours, ITERATION), wider)
    folder = lose_manifest(ours)
    for has_manifest in (False, True):  # without one, and with one that says what was there before
        if has_manifest:
            shutil.copy(files.folder_of(ours, OLDER) / files.MANIFEST, folder)
        assert read_arguments(ours, step=None)["hidden_size"] == 16
        with pytest.raises(TrainingFailure, match=str(folder)):
            read_arguments(ours, step=ITERATION)
    lose_manifest(ours)
    assert (
        checkpoint_flags.main([str(ours), str(ITERATION)]) == 1 and TRUST in capsys.readouterr().err
    )
    for read in (partial(read_arguments, step=None), checkpoint_flags.stored_flags):
        assert read(ours, trust_unverified=True)["hidden_size"] == 999


def test_a_changed_name_does_not_make_one_of_ours_another_trainers(alone: None, ours: Path) -> None:
    common = common_file(lose_manifest(ours))
    flip(common, common.read_bytes().index(files.OUR_KEY.encode()), 1)
    assert latest(ours).folder == files.folder_of(ours, OLDER)
    assert f"{common.name} has changed" in latest(ours).skipped[0]


def test_one_of_megatron_lm_is_loaded_and_called_unverified(
    alone: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_checkpoint(tmp_path / "theirs")
    caplog.set_level(logging.WARNING)
    assert latest(root).iteration == ITERATION and not caplog.messages
    folder = lose_manifest(root)
    assert latest(root).folder == folder and latest(root).lengths is None
    assert read_arguments(root, step=None)["hidden_size"] == 16
    line = caplog.messages[0]
    assert all(word in line for word in ("unverified", str(folder), "Megatron-LM"))


SHAPE = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 2 --train-iters 4 --lr 1e-3
--tokenizer-type NullTokenizer --vocab-size 127"""
LLAMA = """--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 --mock-data"""
BLEND = ["0.5", "a", "0.5", "b"]
OF_MEGATRON_LM: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "group_query_attention": False,
    "num_query_groups": 1,
    "kv_channels": 16,
    "position_embedding_type": "learned_absolute",
    "use_rotary_position_embeddings": False,
    "add_position_embedding": True,
    "normalization": "LayerNorm",
    "swiglu": False,
    "add_bias_linear": True,
    "add_qkv_bias": True,
    "qk_layernorm": False,
    "untie_embeddings_and_output_weights": False,
    "max_position_embeddings": 32,
    "seq_length": 32,
    "seed": 1234,
    "mock_data": True,
    "data_path": None,
    "train_data_path": None,
    "valid_data_path": None,
    "test_data_path": None,
    "split": None,
    "use_distributed_optimizer": False,
    "lr": 0.001,
    "min_lr": 0.0,
    "lr_decay_style": "linear",
    "weight_decay": 0.01,
    "start_weight_decay": 0.01,
    "end_weight_decay": 0.01,
    "weight_decay_incr_style": "constant",
    "padded_vocab_size": 128,
    "vocab_size": 127,
}
"""What core_v0.16.1 of Megatron-LM stores for `SHAPE --mock-data`: its parser's values, checked."""
OF_LLAMA = {
    "ffn_hidden_size": 128,
    "group_query_attention": True,
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "untie_embeddings_and_output_weights": True,
}
OF_BLEND = {"mock_data": False, "data_path": BLEND, "split": "99,1,0"}


def resumed(
    flags: str, stored: dict[str, Any], *, data: list[dict[str, Any]] | None = None
) -> Config:
    """What becomes of the flags of a run that goes on from a checkpoint of Megatron-LM; with `data`
    from one that knows its data."""
    found = Stored(
        folder=Path("iter_0000002"),
        iteration=2,
        state=TrainState(iteration=2),
        lengths=None,
        arguments={**OF_MEGATRON_LM, **stored},
        metadata={},
        data=data,
    )
    config = resolve(parse_args([*SHAPE.split(), *flags.split()]), 1)
    return merge_resume_config(config, found, vocab_size=128)


@pytest.mark.parametrize(
    ("flags", "stored"),
    [
        ("--mock-data", {}),
        ("--mock-data --split 1,0,0", {}),
        (LLAMA, OF_LLAMA),
        (f"{LLAMA} --use-rotary-position-embeddings", OF_LLAMA),
        (f"--data-path {' '.join(BLEND)} --split 990,10,0", OF_BLEND),
        ("--data-path a", {"mock_data": False, "data_path": ["a"], "split": "969, 30, 1"}),
        ("--data-path a", {"mock_data": False, "data_args_path": "paths.txt"}),
        ("--train-data-path a", {"mock_data": False, "train_data_path": ["a"]}),
        # Another release has other defaults of what is off.
        ("--mock-data", {"kv_lora_rank": 512, "mtp_loss_scaling_factor": 0.3}),
        # Other tools than its trainer leave more of them open.
        ("--mock-data", dict.fromkeys(OF_MEGATRON_LM)),
        ("--mock-data", {"kv_channels": None, "ffn_hidden_size": None, "num_query_groups": None}),
        (LLAMA, {**OF_LLAMA, "ffn_hidden_size": None, "min_lr": None, "end_weight_decay": None}),
    ],
)
def test_what_megatron_lm_leaves_open_is_its_default(flags: str, stored: dict[str, Any]) -> None:
    config = resumed(flags, stored)
    assert config.model.padded_vocab_size == 128
    kept = resumed(f"{flags} --use-checkpoint-opt-param-scheduler", stored)
    assert kept.optim == dataclasses.replace(config.optim, use_checkpoint_opt_param_scheduler=True)


@pytest.mark.parametrize(
    ("flags", "stored", "words"),
    [
        ("--mock-data --group-query-attention --num-query-groups 2", {}, "--num-query-groups is 2"),
        ("--mock-data", {"group_query_attention": True}, "--num-query-groups is 4 .* with 1;"),
        ("--mock-data --disable-bias-linear", {}, "--disable-bias-linear is False .* with True"),
        ("--mock-data", {"ffn_hidden_size": None, "swiglu": True}, "--ffn-hidden-size .* with 128"),
        ("--mock-data --kv-channels 32", {"kv_channels": None}, "--kv-channels is 32 .* with 16"),
        ("--data-path a", {}, "--data-path is .* with None; .*--finetune"),
        ("--mock-data", OF_BLEND, "--data-path is None .*'0.5', 'a'"),
        (f"--data-path {' '.join(BLEND)}", OF_BLEND, "--split is '969, 30, 1' .* with '99,1,0'"),
        (f"--data-path {' '.join(BLEND)}", {**OF_BLEND, "data_path": ["a"]}, "--data-path"),
        ("--mock-data --min-lr 1e-4", {"min_lr": None}, "--min-lr is 0.0001 .* with 0.0"),
        ("--mock-data --weight-decay 0.1", {"end_weight_decay": None}, "--start-weight-decay"),
    ],
)
def test_what_differs_from_megatron_lms_checkpoint_is_refused(
    flags: str, stored: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        resumed(flags, stored)


@pytest.mark.parametrize(
    ("micro", "batch", "said"),
    [
        (2, 8, []),  # as the first launch
        (1, 16, []),  # as the controller left it
        (4, 8, ["--micro-batch-size 4 does not count: the run goes on with 1, "]),
        (2, 32, ["--global-batch-size 32 does not count: the run goes on with 16, "]),
        (4, 32, ["--micro-batch-size 4", "--global-batch-size 32"]),
    ],
)
def test_sizes_of_the_flags_that_a_controller_does_not_take_are_told(
    micro: int, batch: int, said: list[str]
) -> None:
    given = f"{SHAPE} --mock-data --micro-batch-size {micro} --global-batch-size {batch}"
    config = resolve(parse_args(given.split()), 1)
    kept = StepSettings(global_batch_size=16, micro_batch_size=1)
    notes = kept_sizes(kept, config, {"micro_batch_size": 2, "global_batch_size": 8})
    assert len(notes) == len(said) and all(map(str.startswith, notes, said)), notes
    assert kept_sizes(StepSettings(), config, {}) == []


def test_the_shape_is_taken_from_a_checkpoint_that_leaves_flags_open() -> None:
    given = SHAPE.replace("--hidden-size 64", "").replace("--num-layers 2", "") + " --mock-data"
    args = parse_args(given.split())
    stored = {**OF_MEGATRON_LM, "num_query_groups": None, "rotary_base": None}
    model = resolve(with_checkpoint_args(args, stored), 1).model
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (2, 64, 256)
    assert (model.num_query_groups, model.rotary_base) == (4, 10000)


SHARED_WIDTH = "moe_shared_expert_intermediate_size"


def stored_by(flags: str, *forgotten: str) -> Stored:
    """What a checkpoint of a run with these flags says, but for some fields."""
    told = {name: value for name, value in config_of(flags).flat().items() if name not in forgotten}
    stored = stored_of({"args": Namespace(**told)}, Path("ckpt"), 10, ())
    check_same_run(config_of(flags), stored)
    return stored


SPLIT = "--use-distributed-optimizer"


def as_stored(flags: str, **values: Any) -> Stored:
    """A checkpoint of a run with these flags, but for some values."""
    stored = stored_by(flags)
    return dataclasses.replace(stored, arguments={**stored.arguments, **values})


@pytest.mark.parametrize("flags", ["", SPLIT])
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("name", ["muon", "dist_muon"])
def test_the_state_of_another_optimizer_is_refused_unless_it_stays_out(
    flags: str, is_split: bool, name: str
) -> None:
    of_muon = as_stored("", optimizer=name, use_distributed_optimizer=is_split)
    with pytest.raises(UsageError, match=r"--optimizer is 'adam' .*--no-load-optim"):
        check_same_run(config_of(flags), of_muon)
    for flag in ("--no-load-optim", "--finetune"):
        check_same_run(config_of(f"{flags} {flag}"), of_muon)


def test_how_state_is_split_counts_where_it_is_loaded() -> None:
    for then, now in ((SPLIT, ""), ("", SPLIT)):
        with pytest.raises(UsageError, match=f"^{SPLIT} is .*--no-load-optim"):
            check_same_run(config_of(now), stored_by(then))
        for flag in ("--no-load-optim", "--finetune"):
            check_same_run(config_of(f"{now} {flag}"), stored_by(then))


def of_groups(flags: str, *groups: dict[str, Any]) -> Stored:
    """A checkpoint of a run with these flags, whose optimizer has these parameter groups."""
    common = {
        "args": Namespace(**config_of(flags).flat()),
        "optimizer": {0: {"param_groups": [*groups]}},
    }
    return stored_of(common, Path("ckpt"), 10, ())


OF_ADAM = {"betas": (0.8, 0.9), "eps": 1e-6, "lr": 1e-3}


def test_what_an_optimizer_keeps_counts_and_the_flags_are_told() -> None:
    """As in Megatron-LM, whose groups come back with the values that they were saved with."""
    stored = of_groups("", OF_ADAM)
    found = merge_resume_config(config_of("--adam-beta1 0.5"), stored, vocab_size=128)
    assert (found.optim.adam_beta1, found.optim.adam_eps) == (0.8, 1e-6)
    assert found.optim.adam_beta2 == 0.999  # set before each step
    first, second = found.runtime.notes[-2:]
    assert first.startswith(
        "--adam-beta1 0.5 does not count: the optimizer goes on with the 0.8 of"
    )
    assert second.startswith("--adam-eps 1e-08 does not count") and "--no-load-optim" in second
    for flags in ("--adam-beta1 0.8 --adam-eps 1e-6", "--no-load-optim", "--finetune"):
        given = config_of(flags)
        found = merge_resume_config(given, stored, vocab_size=128)
        assert found.runtime.notes == given.runtime.notes
        assert found.optim.adam_beta1 == given.optim.adam_beta1


@pytest.mark.parametrize("groups", [(), ({"betas": ()},), ({"betas": "x", "eps": None},)])
def test_an_optimizer_that_does_not_say_has_the_values_of_its_flags(groups: Any) -> None:
    stored = of_groups("--adam-beta1 0.7", *groups)
    found = merge_resume_config(config_of(""), stored, vocab_size=128)
    assert (found.optim.adam_beta1, found.optim.adam_eps) == (0.7, 1e-8)


@pytest.mark.skipif(not since("0.18"), reason="megatron-core before 0.18 has another Muon")
def test_muon_keeps_its_momentum_and_what_adam_keeps() -> None:
    stored = of_groups("--optimizer muon", {"momentum": 0.7}, OF_ADAM)
    given = config_of("--optimizer muon --muon-momentum 0.2 --muon-nesterov")
    found = merge_resume_config(given, stored, vocab_size=128)
    own = found.extras["muon"]
    assert (own.muon_momentum, found.optim.adam_beta1, own.muon_nesterov) == (0.7, 0.8, True)
    assert any(note.startswith("--muon-momentum 0.2 does not") for note in found.runtime.notes)


@pytest.mark.skipif(not since("0.18"), reason="megatron-core before 0.18 has another Muon")
def test_muon_goes_on_from_every_muon() -> None:
    for values in (
        {"optimizer": "muon"},
        {"optimizer": "dist_muon"},
        # Of Megatron-LM, where it shares matrices out among the replicas.
        {"optimizer": "muon", "use_distributed_optimizer": True},
        {"optimizer": "dist_muon", "use_distributed_optimizer": True},
    ):
        for name in ("muon", "dist_muon"):
            check_same_run(config_of(f"--optimizer {name}"), as_stored("", **values))
    for flags in ("", SPLIT):
        with pytest.raises(UsageError, match=r"--optimizer is 'muon' .*--no-load-optim"):
            check_same_run(config_of("--optimizer muon"), stored_by(flags))
        check_same_run(config_of("--optimizer muon --no-load-optim"), stored_by(flags))


@pytest.mark.parametrize(
    ("plain", "flag", "name"),
    [
        ("", "--apply-layernorm-1p", "layernorm_zero_centered_gamma"),
        ("", "--multi-latent-attention", "multi_latent_attention"),
        ("--position-embedding-type rope", "--rotary-interleaved", "rotary_interleaved"),
        ("--position-embedding-type rope", "--mtp-num-layers 1", "mtp_num_layers"),
        ("", "--qk-l2-norm", "qk_l2_norm"),
        ("", "--decoupled-lr 1e-2", "decoupled_lr"),
        ("", "--num-experts 4", "num_experts"),
        ("--num-experts 4", "--moe-shared-expert-intermediate-size 8", SHARED_WIDTH),
        ("--num-experts 4", "--moe-router-pre-softmax", "moe_router_pre_softmax"),
    ],
)
def test_a_checkpoint_that_does_not_tell_a_flag_was_trained_without_it(
    plain: str, flag: str, name: str
) -> None:
    stored = stored_by(plain, name)
    with pytest.raises(UsageError, match=flag.split()[0]):
        check_same_run(config_of(f"{plain} {flag}"), stored)


def test_another_rate_of_the_embedding_is_refused_like_another_rate() -> None:
    stored = stored_by("--decoupled-lr 1e-2")
    for more in ("--decoupled-lr 2e-2", "--decoupled-lr 1e-2 --decoupled-min-lr 1e-3"):
        with pytest.raises(UsageError, match="--override-opt-param-scheduler"):
            check_same_run(config_of(more), stored)
        check_same_run(config_of(f"{more} --override-opt-param-scheduler"), stored)
    with pytest.raises(UsageError, match="--no-load-optim"):
        check_same_run(config_of("--override-opt-param-scheduler"), stored)
    check_same_run(config_of("--override-opt-param-scheduler --no-load-optim"), stored)


EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 32 --moe-router-topk 4 --disable-bias-linear"
SIGMOID = f"{EXPERTS} --moe-router-score-function sigmoid"
SHARED = f"{EXPERTS} --moe-shared-expert-intermediate-size 16"


@pytest.mark.parametrize(
    ("before", "after", "name", "is_weight"),
    [
        (EXPERTS, EXPERTS.replace("8", "4", 1), "--num-experts", True),
        (EXPERTS, "--disable-bias-linear", "--num-experts", True),
        (EXPERTS, f"{EXPERTS} --moe-layer-freq 2", "--moe-layer-freq", True),
        (EXPERTS, EXPERTS.replace("32", "16"), "--moe-ffn-hidden-size", True),
        (EXPERTS, SHARED, "--moe-shared-expert-intermediate-size", True),
        (SHARED, f"{SHARED} --moe-shared-expert-gate", "--moe-shared-expert-gate", True),
        (SIGMOID, f"{SIGMOID} --moe-router-enable-expert-bias", "--moe-router-enable-", True),
        (EXPERTS, EXPERTS.replace("topk 4", "topk 2"), "--moe-router-topk", False),
        (EXPERTS, SIGMOID, "--moe-router-score-function", False),
        (EXPERTS, f"{EXPERTS} --moe-router-pre-softmax", "--moe-router-pre-softmax", False),
        (EXPERTS, f"{EXPERTS} --moe-router-topk-scaling-factor 2", "--moe-router-topk-s", False),
        (
            f"{EXPERTS} --moe-router-num-groups 4 --moe-router-group-topk 2",
            f"{EXPERTS} --moe-router-num-groups 2 --moe-router-group-topk 2",
            "--moe-router-num-groups",
            False,
        ),
        (
            f"{EXPERTS} --moe-router-num-groups 4 --moe-router-group-topk 2",
            f"{EXPERTS} --moe-router-num-groups 4 --moe-router-group-topk 4",
            "--moe-router-group-topk",
            False,
        ),
        (EXPERTS, f"{EXPERTS} --moe-expert-capacity-factor 1", "--moe-expert-capacity", False),
    ],
)
def test_another_mixture_is_refused(before: str, after: str, name: str, is_weight: bool) -> None:
    stored = stored_by(before)
    with pytest.raises(UsageError, match=f"^{name}.*ckpt"):
        check_same_run(config_of(after), stored)
    finetune = config_of(f"{after} --finetune")
    same_weights = pytest.raises(UsageError, match=f"^{name}.* give the same value")
    with same_weights if is_weight else contextlib.nullcontext():
        check_same_run(finetune, stored)


def test_what_changes_no_mixture_may_change() -> None:
    stored = stored_by(f"{EXPERTS} --moe-layer-freq [0]*2+[1]*2")
    same = f"{EXPERTS} --moe-layer-freq [0,0,1,1] --moe-token-dispatcher-type alltoall"
    check_same_run(config_of(f"{same} --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3"), stored)
    # Without experts their flags count for nothing.
    check_same_run(config_of("--moe-layer-freq 2 --moe-router-topk 1"), stored_by(""))


def test_a_mixture_of_megatron_lm_is_read_as_its_flags_say() -> None:
    told = config_of(f"{EXPERTS} --moe-layer-freq [1,0]*2").flat()
    told |= {"moe_layer_freq": [1, 0, 1, 0], "moe_aux_loss_coeff": 0.01}
    told |= {"moe_router_load_balancing_type": "aux_loss"}
    stored = stored_of({"args": Namespace(**told)}, Path("ckpt"), 10, ())
    check_same_run(config_of(f"{EXPERTS} --moe-layer-freq 2"), stored)
    given = parse_args(f"{SMALL} --disable-bias-linear".split())
    moe = resolve(with_checkpoint_args(given, stored.arguments), 1).moe
    assert (moe.num_experts, moe.moe_layers, moe.moe_aux_loss_coeff) == (8, (1, 0, 1, 0), (0.01,))
    assert (moe.moe_router_topk, moe.moe_ffn_hidden_size) == (4, 32)


@pytest.mark.parametrize(
    ("flags", "kind", "may"),
    [
        ({"overlap_grad_reduce": True}, "fully_reshardable", True),
        ({"pipeline_model_parallel_size": 2}, "fully_reshardable", True),
        ({}, "fully_reshardable", False),
        (
            {"pipeline_model_parallel_size": 2, "untie_embeddings_and_output_weights": True},
            "fully_reshardable",
            False,
        ),
        ({"overlap_grad_reduce": True}, "dp_reshardable", False),
        (
            {"overlap_grad_reduce": True, "use_distributed_optimizer": False},
            "fully_reshardable",
            False,
        ),
    ],
)
def test_an_optimizer_that_megatron_lm_may_have_shifted_is_told(
    flags: dict[str, Any], kind: str, may: bool
) -> None:
    """NVIDIA/Megatron-LM #5077: several buckets of a distributed optimizer."""
    args = Namespace(**{"use_distributed_optimizer": True, **flags})
    common = {"args": args, "content_metadata": {"distrib_optim_sharding_type": kind}}
    assert may_be_shifted(common) == may
    assert not may_be_shifted({})
