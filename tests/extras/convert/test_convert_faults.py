"""What an odd, broken or hostile checkpoint does to the offline tools: one line, never a wrong
result."""

from __future__ import annotations

import dataclasses
import json
import pickle
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron.trainer.checkpoint import files
from megatron.trainer.common.core_version import since
from megatron.trainer.extras.convert import command as convert_checkpoint
from megatron.trainer.extras.convert import convert as converting
from megatron.trainer.extras.convert.writing import Piece
from megatron.trainer.extras.inspect_checkpoint import command as inspect_checkpoint
from megatron.trainer.extras.inspect_checkpoint.archive import Archive, Chunk, open_archive
from tests.helpers.checkpoints import (
    ITERATION,
    command,
    edit_common,
    index_of,
    make_checkpoint,
    renamed,
)

NORM = "decoder.final_layernorm.weight"
SHARDING = "distrib_optim_sharding_type"
WAY_OUT = ("--optimizer", "none")
OF_THE_FILE = pytest.mark.skipif(
    since("0.19"), reason="about the file common.pt, which megatron-core 0.19 does not write"
)
Spoil = Callable[[list[Piece]], None]


def run(
    capsys: pytest.CaptureFixture[str], *args: Any, tool: Any = convert_checkpoint
) -> tuple[int, str, str]:
    return command(capsys, tool, *args)


def folder_of(root: Path) -> Path:
    return files.folder_of(root, ITERATION)


def unlisted(root: Path) -> None:
    (folder_of(root) / files.MANIFEST).unlink()


# Tensors


def changed(key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    def spoil(pieces: list[Piece]) -> None:
        i = index_of(pieces, key)
        data = change(pieces[i].make())
        pieces[i] = dataclasses.replace(pieces[i], dtype=data.dtype, make=data.clone)

    return spoil


def gone(key: str, number: int | None = None) -> Spoil:
    def spoil(pieces: list[Piece]) -> None:
        found = [piece for piece in pieces if piece.key == key]
        for piece in found if number is None else [found[number]]:
            pieces.remove(piece)

    return spoil


def added(key: str, like: str) -> Spoil:
    return lambda pieces: pieces.append(renamed(pieces[index_of(pieces, like)], key))


def overlapping(pieces: list[Piece]) -> None:
    piece = pieces[index_of(pieces, "linear_fc2.weight") + 1]
    one = tuple(max(0, o - 1) for o in piece.part.offset)
    moved = Chunk(offset=one, size=piece.part.size)
    pieces[pieces.index(piece)] = dataclasses.replace(piece, part=moved)


def per_layer_key(pieces: list[Piece]) -> None:
    for i, piece in enumerate(pieces):
        if piece.key == "decoder.layers.mlp.linear_fc2.weight":
            pieces[i] = renamed(piece, "decoder.layers.0.mlp.linear_fc2.weight")


def one_element(data: torch.Tensor) -> torch.Tensor:
    data[2, 3, 1] *= 1.01
    return data


LAYER, MOMENT = "decoder.layers.mlp.linear_fc2.weight", f"optimizer.state.exp_avg.{NORM}"
BROKEN_WEIGHTS = {
    "overlapping": (overlapping, ("linear_fc2.weight", "overlap")),
    "chunk gone": (gone("decoder.layers.self_attention.linear_proj.weight", 0), ("of 1024 elem",)),
    "unknown": (added("decoder.surprise.weight", NORM), ("decoder.surprise.weight", "unknown")),
    "key of one layer": (per_layer_key, ("linear_fc2.weight",)),
    "weight gone": (gone("output_layer.weight"), ("lacks output_layer.weight",)),
}
BROKEN_STATES = {
    "moment gone": (gone(MOMENT), (MOMENT,)),
    "moment in fp16": (changed(MOMENT, torch.Tensor.half), (MOMENT, "not fp32")),
    "moment with a hole": (gone(f"optimizer.state.exp_avg.{LAYER}", 0), ("exp_avg", "elements")),
    "state of nothing": (added("optimizer.state.exp_avg.decoder.other", MOMENT), ("no weight",)),
    "another optimizer": (
        added(f"optimizer.state.momentum.{NORM}", MOMENT),
        ("no state of a known",),
    ),
    "untrue weight": (changed("linear_fc1.weight", one_element), ("linear_fc1", "in 1 elements")),
    "groups gone": (None, ("common", "parameter groups")),
}


@pytest.mark.parametrize("name", [*BROKEN_WEIGHTS, *BROKEN_STATES])
def test_an_incomplete_checkpoint_is_refused_by_key_and_the_way_out_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    change, words = {**BROKEN_WEIGHTS, **BROKEN_STATES}[name]
    source = make_checkpoint(tmp_path / "a", change=change)
    if change is None:
        common(lambda c: {k: v for k, v in c.items() if k != "optimizer"})(folder_of(source))
        unlisted(source)
    code, _, err = run(capsys, source, tmp_path / "b", "--verify")
    assert code == 3 and err.count("\n") == 1 and all(word in err for word in words), err
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    is_untrue = name == "untrue weight"
    code, _, err = run(capsys, source, "--verify", tool=inspect_checkpoint)
    assert code == (4 if is_untrue else 3) and words[0] in err
    if name in BROKEN_WEIGHTS:
        assert "--optimizer none" not in err
        return
    # The other command is named, as this one has no such flag.
    assert "convert_checkpoint.py --optimizer none" in err
    assert ("without --dtype" in err) == is_untrue
    assert run(capsys, source, tmp_path / "b", *WAY_OUT, "--verify")[0] == 0
    assert run(capsys, tmp_path / "b", tool=inspect_checkpoint)[0] == 0
    if is_untrue:
        return
    # Nothing is wrong with the masters, so that they can be used.
    assert run(capsys, source, tmp_path / "c", *WAY_OUT, "--dtype", "fp32", "--verify")[0] == 0
    master = open_archive(source, step=None).read(f"optimizer.state.param.{NORM}")
    assert torch.equal(open_archive(tmp_path / "c", step=None).read(NORM), master)


def test_weights_are_not_made_from_masters_that_are_untrue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change = changed(f"optimizer.state.param.{NORM}", lambda data: data + 1)
    source = make_checkpoint(tmp_path / "a", change=change)
    for flags in ((), WAY_OUT):
        code, _, err = run(capsys, source, tmp_path / "b", "--dtype", "fp32", *flags)
        assert code == 3 and NORM in err and "without --dtype" in err
    assert run(capsys, source, tmp_path / "kept", *WAY_OUT, "--verify")[0] == 0
    before, kept = open_archive(source, step=None), open_archive(tmp_path / "kept", step=None)
    assert {k for k in before.tensors if not k.startswith("optimizer.")} == kept.tensors.keys()
    assert all(torch.equal(kept.read(key), before.read(key)) for key in kept.tensors)
    assert "optimizer" not in kept.common


# What is verified


def test_every_byte_is_compared_with_the_manifest_and_none_is_called_verified_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_checkpoint(tmp_path / "a")
    code, out, _ = run(capsys, source, "--verify", tool=inspect_checkpoint)
    assert code == 0 and "every byte" in out
    tensors, path = folder_of(source) / "__0_0.distcp", folder_of(source) / files.MANIFEST
    whole = tensors.read_bytes()
    middle = len(whole) // 2
    tensors.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    code, _, err = run(capsys, source, tmp_path / "b")
    assert code == 3 and "__0_0.distcp" in err and not (tmp_path / "b").exists()
    assert run(capsys, source, tool=inspect_checkpoint)[0] == 0
    assert run(capsys, source, "--verify", tool=inspect_checkpoint)[0] == 4
    tensors.unlink()
    assert "is missing" in run(capsys, source, tmp_path / "b")[2]
    tensors.write_bytes(whole)
    manifest = json.loads(path.read_text())
    for name in files.data_files(folder_of(source)):
        less = {k: v for k, v in manifest["files"].items() if k != name}
        path.write_text(json.dumps({**manifest, "files": less}))
        code, out, err = run(capsys, source, "--verify", "--json", tool=inspect_checkpoint)
        assert code in (3, 4) and name in err and not json.loads(out)["verified"]
        assert run(capsys, source, tmp_path / "b")[0] == 3
    path.unlink()
    code, out, _ = run(capsys, source, "--verify", tool=inspect_checkpoint)
    assert code == 0 and "every byte" not in out and "cannot be verified" in out
    code, out, _ = run(capsys, source, "--verify", "--json", tool=inspect_checkpoint)
    assert code == 0 and json.loads(out)["verified"] is False
    tensors.write_bytes(whole[:-400])
    code, _, err = run(capsys, source, tmp_path / "c")
    assert code == 3 and "is cut" in err and not (tmp_path / "c").exists()


def test_only_what_belongs_to_it_is_copied_and_as_it_was_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path / "a")
    (folder_of(source) / "notes.txt").write_text("mine")
    assert run(capsys, source, tmp_path / "b", "--tp", 1)[0] == 0
    assert "notes.txt" not in [p.name for p in folder_of(tmp_path / "b").iterdir()]

    def flipped(origin: Path, destination: Path) -> None:
        data = bytearray(origin.read_bytes())
        data[len(data) // 2] ^= 1
        destination.write_bytes(data)

    monkeypatch.setattr(converting, "copyfile", flipped)
    code, _, err = run(capsys, source, tmp_path / "c", "--tp", 1)
    assert code == 3 and "has changed" in err and not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    "name", ["__0_0.distcp", pytest.param("common.pt", marks=OF_THE_FILE), ".metadata"]
)
def test_a_link_out_of_the_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    source = make_checkpoint(tmp_path / "a")
    path = folder_of(source) / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    code, _, err = run(capsys, source, tmp_path / "b", "--tp", 1)
    assert code == 3 and name in err and "outside" in err


def test_a_failure_on_the_way_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path / "a")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron.trainer.extras.convert.convert.write_common", full)
    code, _, err = run(capsys, source, tmp_path / "b", "--tp", 1)
    assert code == 1 and "No space left" in err
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_result_that_differs_fails_verification(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path / "a")
    read = Archive.read

    def wrong(self: Archive, key: str, *how: Any) -> torch.Tensor:
        data = read(self, key, *how)
        is_result = "unfinished" in str(self.folder)
        return data + 1 if is_result and key == "output_layer.weight" else data

    monkeypatch.setattr(Archive, "read", wrong)
    code, _, err = run(capsys, source, tmp_path / "b", "--vocab", 192, "--verify")
    assert code == 4 and "output_layer.weight" in err
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


# Wishes and places


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--tp", 3), 3, ("--num-attention-heads 4 is not divisible by 3", "--tp")),
        (("--pp", 3), 3, ("--num-layers 4",)),
        (("--dp", 3), 3, ("--global-batch-size 8", "data parallel size 3")),
        (("--vocab", 129), 3, ("129 rows",)),
        (("--tp", 0), 2, ("--tp 0 must be at least 1",)),
        (("--vocab", 0), 2, ("--vocab 0 must be at least 1",)),
        (("--vpp", 2), 2, ("--vpp 2", "--pp")),
        (("--dtype", "int8"), 2, ("--dtype",)),
        (("--format", "onnx"), 2, ("--format", "torch_dist")),
        (("--ckpt-step", 7), 3, ("iter_0000007", "complete are: 5", "--ckpt-step")),
    ],
)
def test_what_cannot_be_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[Any, ...],
    code: int,
    words: tuple[str, ...],
) -> None:
    source = make_checkpoint(tmp_path / "a", dtype="fp32", optimizer="none")
    got, _, err = run(capsys, source, tmp_path / "b", *flags)
    assert got == code and err.count("\n") == 1
    assert all(word in err for word in words), err
    assert not (tmp_path / "b").exists()


def test_places_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_checkpoint(tmp_path / "a")
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").write_text("keep")
    for destination, word in (
        (tmp_path / "b", "exists"),
        (source, "overlap"),
        (source / "inside", "overlap"),
        (tmp_path, "overlap"),
    ):
        code, _, err = run(capsys, source, destination)
        assert code == 2 and word in err
    code, _, err = run(capsys, tmp_path / "nowhere", tmp_path / "c", "--json")
    assert code == 1 and "nowhere" in err
    code, _, err = run(capsys, folder_of(source), tmp_path / "c", "--ckpt-step", ITERATION)
    assert code == 2 and "--ckpt-step" in err
    (tmp_path / "file").write_text("")
    assert run(capsys, source, tmp_path / "file" / "c")[0] == 1
    (tmp_path / "empty").mkdir()
    assert run(capsys, source, tmp_path / "empty")[0] == 0
    (tmp_path / "empty").rename(tmp_path / "taken")
    (tmp_path / "empty").mkdir()
    assert run(capsys, tmp_path / "empty", tmp_path / "c")[0] == 3
    assert {path: path.read_bytes() for path in before} == before
    assert (tmp_path / "b" / "mine").read_text() == "keep"


def test_a_relative_folder_and_a_link_are_the_folder_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path / "a")
    for number, place in enumerate((source, folder_of(source))):
        monkeypatch.chdir(place)
        assert run(capsys, ".", tool=inspect_checkpoint)[0] == 0
        assert run(capsys, ".", tmp_path / f"b{number}", "--tp", 1)[0] == 0
    link = tmp_path / "link"
    link.symlink_to(folder_of(source))
    assert run(capsys, link, tool=inspect_checkpoint)[0] == 0
    (source / f"{folder_of(source).name}.unfinished").touch()
    assert run(capsys, link, tool=inspect_checkpoint)[0] == 0, "its manifest was written last"
    (folder_of(source) / files.MANIFEST).unlink()
    code, _, err = run(capsys, link, tool=inspect_checkpoint)
    assert code == 3 and "half-written" in err and ".unfinished lies beside it" in err


# Malformed contents


def common(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda folder: edit_common(folder, change)


def index(change: Callable[[Metadata], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        made = change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata if made is None else made))

    return spoil


def flags(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda c: {**c, "args": Namespace(**{**vars(c["args"]), **changes})}


def first_tensor(metadata: Metadata) -> TensorStorageMetadata:
    values = metadata.state_dict_metadata.values()
    return next(v for v in values if isinstance(v, TensorStorageMetadata))


MALFORMED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "common is a list": (common(lambda c: [1]), ""),
    "args is a dictionary": (common(lambda c: {**c, "args": {"num_layers": 4}}), ""),
    "args is missing": (common(lambda c: {**c, "args": None}), ""),
    "iteration is text": (common(lambda c: {**c, "iteration": "five"}), ""),
    "optimizer is a list": (common(lambda c: {**c, "optimizer": [1]}), ""),
    "content is text": (common(lambda c: {**c, "content_metadata": "x"}), ""),
    "a flag is text": (common(flags(num_layers="four")), ""),
    "a flag is negative": (common(flags(num_attention_heads=-1)), ""),
    "no places": (index(lambda m: setattr(m, "storage_data", None)), ""),
    "places are text": (
        index(lambda m: m.storage_data.update(dict.fromkeys(m.storage_data, "x"))),
        "",
    ),
    "an entry is text": (index(lambda m: cast(Any, m.state_dict_metadata).update(odd="x")), ""),
    "no chunks": (index(lambda m: setattr(first_tensor(m), "chunks", None)), ""),
    "a chunk is text": (index(lambda m: setattr(first_tensor(m), "chunks", ["x"])), ""),
    "no properties": (index(lambda m: setattr(first_tensor(m), "properties", None)), ""),
    "no size": (index(lambda m: setattr(first_tensor(m), "size", None)), ""),
    "another object": (index(lambda m: {"x": 1}), ""),
    "no mark": (lambda f: (f / "metadata.json").unlink(), "half-written"),
    "another format": (
        lambda f: (f / "metadata.json").write_text('{"sharded_backend": "fsdp_dtensor"}'),
        "fsdp_dtensor",
    ),
    "one file a rank": (
        lambda f: ((f / "metadata.json").unlink(), (f / "mp_rank_00").mkdir()),
        "legacy",
    ),
    "index is no pickle": (
        lambda f: (f / ".metadata").write_bytes(b"nonsense"),
        ".metadata cannot be read",
    ),
    "common is no archive": (
        lambda f: (f / "common.pt").write_bytes(b"nonsense"),
        "common.pt cannot be read",
    ),
    **{
        kind: (
            common(lambda c, k=kind: {**c, "content_metadata": {SHARDING: k}}),
            "--dist-ckpt-optim-fully-reshardable",
        )
        for kind in ("dp_reshardable", "dp_zero_gather_scatter")
    },
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_checkpoint_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    spoil, words = MALFORMED[name]
    source = make_checkpoint(tmp_path / "a")
    spoil(folder_of(source))
    unlisted(source)
    code, _, err = run(capsys, source, tmp_path / "b")
    assert code == 3 and err.count("\n") == 1 and words in err, err
    assert not (tmp_path / "b").exists()
    code, out, err = run(capsys, source, "--json", tool=inspect_checkpoint)
    assert code == 3 and err.count("\n") == 1 and json.loads(out)["exit_code"] == 3, err


def test_what_nobody_foresaw_is_one_line_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path / "a")

    def odd(*_: Any, **__: Any) -> None:
        raise AttributeError("'list' object\nhas no attribute")

    monkeypatch.setattr("megatron.trainer.extras.inspect_checkpoint.contents.expected_weights", odd)
    code, _, err = run(capsys, source, tmp_path / "b")
    assert code == 3 and err.count("\n") == 1 and "AttributeError" in err
