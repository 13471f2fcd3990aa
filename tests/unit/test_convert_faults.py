"""What an odd, broken or hostile checkpoint does to the offline tools: one line, never a wrong
result."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from copus_ext.commands import convert_checkpoint, inspect_checkpoint
from megatron.training.checkpoint import files
from megatron.training.checkpoint.convert import convert as converting
from megatron.training.checkpoint.convert import huggingface, writing
from megatron.training.checkpoint.convert.archive import Chunk, open_archive
from megatron.training.checkpoint.convert.checks import coverage_problem
from megatron.training.checkpoint.convert.convert import convert
from megatron.training.checkpoint.convert.target import Changes
from megatron.training.checkpoint.convert.writing import Piece
from megatron.training.checkpoint.safe_index import read_index
from megatron.training.common.errors import Refused, UsageError
from megatron.training.distributed.sharding import flat_to_rects
from tests.helpers.checkpoints import (
    ITERATION,
    cut_like_ranks,
    index_of,
    make_checkpoint,
    renamed,
)

NORM = "decoder.final_layernorm.weight"


def run(
    capsys: pytest.CaptureFixture[str], *args: Any, tool: Any = convert_checkpoint
) -> tuple[int, str, str]:
    code = tool.main([str(a) for a in args])
    out, err = capsys.readouterr()
    return code, out, err


def folder_of(root: Path) -> Path:
    return files.folder_of(root, ITERATION)


def unlisted(root: Path) -> None:
    (folder_of(root) / files.MANIFEST).unlink()


# Weights and masters


def untrue_master(pieces: list[Piece]) -> None:
    i = index_of(pieces, f"optimizer.state.param.{NORM}")
    data = pieces[i].make() + 1
    pieces[i] = dataclasses.replace(pieces[i], make=data.clone)


def test_weights_are_not_made_from_masters_that_are_untrue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_checkpoint(tmp_path / "a", change=untrue_master)
    for flags in (
        ("--dtype", "fp32"),
        ("--dtype", "fp32", "--optimizer", "none"),
        ("--dtype", "fp32", "--format", "hf"),
    ):
        code, _, err = run(capsys, source, tmp_path / "b", *flags)
        assert code == 3 and NORM in err and "without --dtype" in err
    for number, flags in enumerate((("--optimizer", "none"), ("--format", "hf"))):
        to = tmp_path / f"kept{number}"
        assert run(capsys, source, to, *flags, "--verify")[0] == 0
    kept = open_archive(tmp_path / "kept0", step=None)
    assert torch.equal(kept.read(NORM), open_archive(source, step=None).read(NORM))
    assert not any(key.startswith("optimizer.") for key in kept.tensors)


def no_moment(pieces: list[Piece]) -> None:
    pieces[:] = [p for p in pieces if p.key != f"optimizer.state.exp_avg.{NORM}"]


def half_moment(pieces: list[Piece]) -> None:
    i = index_of(pieces, f"optimizer.state.exp_avg.{NORM}")
    data = pieces[i].make().half()
    pieces[i] = dataclasses.replace(pieces[i], dtype=torch.float16, make=data.clone)


def moment_with_a_hole(pieces: list[Piece]) -> None:
    del pieces[index_of(pieces, "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight")]


def state_of_nothing(pieces: list[Piece]) -> None:
    i = index_of(pieces, f"optimizer.state.exp_avg.{NORM}")
    pieces.append(renamed(pieces[i], "optimizer.state.exp_avg.decoder.other.weight"))


def state_of_another_optimizer(pieces: list[Piece]) -> None:
    i = index_of(pieces, f"optimizer.state.exp_avg.{NORM}")
    pieces.append(renamed(pieces[i], f"optimizer.state.momentum.{NORM}"))


def without_groups(root: Path) -> None:
    path = folder_of(root) / "common.pt"
    common = torch.load(path, weights_only=False)
    del common["optimizer"]
    torch.save(common, path)
    unlisted(root)


@pytest.mark.parametrize(
    "change",
    [
        no_moment,
        half_moment,
        moment_with_a_hole,
        state_of_nothing,
        state_of_another_optimizer,
        None,
    ],
)
def test_the_way_out_that_a_refusal_names_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any
) -> None:
    source = make_checkpoint(tmp_path / "a", change=change)
    if change is None:
        without_groups(source)
    code, _, err = run(capsys, source, tmp_path / "b")
    assert code == 3 and "; --optimizer none" in err, err
    assert run(capsys, source, tmp_path / "b", "--optimizer", "none", "--verify")[0] == 0
    assert run(capsys, tmp_path / "b", tool=inspect_checkpoint)[0] == 0
    # Nothing is wrong with the masters, so that they can be used.
    wish = ("--optimizer", "none", "--dtype", "fp32")
    assert run(capsys, source, tmp_path / "c", *wish, "--verify")[0] == 0
    master = open_archive(source, step=None).read(f"optimizer.state.param.{NORM}")
    assert torch.equal(open_archive(tmp_path / "c", step=None).read(NORM), master)
    assert run(capsys, source, tmp_path / "hf", "--format", "hf", "--dtype", "fp32")[0] == 0


# Rectangles of ranks


WISHES = (
    Changes(vocab=192),
    Changes(tp=1),
    Changes(optimizer="plain"),
)


@pytest.mark.parametrize(("dtype", "wishes"), [("bf16", WISHES), ("fp32", WISHES[2:])])
def test_rectangles_cut_anywhere_are_put_together(
    tmp_path: Path, dtype: str, wishes: tuple[Changes, ...]
) -> None:
    how: dict[str, Any] = {"dtype": dtype, "num_layers": 2}
    plain = make_checkpoint(tmp_path / "plain", **how)
    source = make_checkpoint(tmp_path / "a", change=cut_like_ranks, file_bytes=10_000, **how)
    whole, cut = (open_archive(root, step=None) for root in (plain, source))
    assert max(len(t.chunks) for t in cut.tensors.values()) > 10
    assert len([n for n in cut.file_names() if n.endswith(".distcp")]) > 3
    assert all(torch.equal(whole.read(key), cut.read(key)) for key in whole.tensors)
    for number, wish in enumerate(wishes):
        results = []
        for root in (plain, source):
            to = tmp_path / f"{root.name}-{number}"
            convert(root, to, wish, verify=root is source)
            results.append(open_archive(to, step=None))
        assert results[0].tensors.keys() == results[1].tensors.keys()
        assert all(torch.equal(results[0].read(k), results[1].read(k)) for k in results[0].tensors)
    huggingface.save(source, tmp_path / "hf", Changes(), verify=True)


def test_many_rectangles_of_many_layers_are_hardly_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, columns, per_layer, compared = 350, 64, 350, 0
    rects = []
    edges = [
        rows * columns * n // per_layer + 7 * (0 < n < per_layer) for n in range(per_layer + 1)
    ]
    for start, stop in itertools.pairwise(edges):
        rects += flat_to_rects((rows, columns), start, stop)
    assert len(rects) > 690
    chunks = [
        Chunk(offset=(layer, *lo), size=(1, *(b - a for a, b in zip(lo, hi))))
        for layer in range(30)
        for lo, hi in rects
    ]
    meets = Chunk.meets

    def counted(self: Chunk, other: Chunk) -> bool:
        nonlocal compared
        compared += 1
        return meets(self, other)

    monkeypatch.setattr(Chunk, "meets", counted)
    shape = (30, rows, columns)
    assert coverage_problem(shape, chunks) is None and compared < len(chunks)
    columns_first = [Chunk(offset=c.offset[::-1], size=c.size[::-1]) for c in chunks]
    assert coverage_problem(shape[::-1], columns_first) is None and compared < len(chunks)
    assert "overlap" in str(coverage_problem(shape, [*chunks, chunks[10_000]]))
    assert "elements" in str(coverage_problem(shape, chunks[1:]))


def test_chunks_that_no_line_divides_are_compared() -> None:
    # Four around one in the middle: no straight cut.
    wheel = [
        ((0, 0), (1, 2)),
        ((0, 2), (2, 1)),
        ((2, 1), (1, 2)),
        ((1, 0), (2, 1)),
        ((1, 1), (1, 1)),
    ]
    chunks = [Chunk(offset=o, size=s) for o, s in wheel]
    assert coverage_problem((3, 3), chunks) is None
    chunks[0] = Chunk(offset=(0, 0), size=(1, 3))
    assert "overlap" in str(coverage_problem((3, 3), chunks))


# What is verified


def test_no_byte_is_called_verified_without_a_manifest_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_checkpoint(tmp_path / "a")
    code, out, _ = run(capsys, source, "--verify", tool=inspect_checkpoint)
    assert code == 0 and "every byte" in out
    path = folder_of(source) / files.MANIFEST
    manifest = json.loads(path.read_text())
    for name in ("__0_0.distcp", "common.pt", ".metadata", "metadata.json"):
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


@pytest.mark.parametrize("name", ["__0_0.distcp", "common.pt", ".metadata"])
def test_a_link_out_of_the_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    source = make_checkpoint(tmp_path / "a")
    path = folder_of(source) / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    code, _, err = run(capsys, source, tmp_path / "b", "--tp", 1)
    assert code == 3 and name in err and "outside" in err


def test_every_file_is_on_the_disk_before_the_result_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(writing, "_sync", synced.append)
    source = make_checkpoint(tmp_path / "a")
    for number, do in enumerate((convert, huggingface.save)):
        synced.clear()
        to = tmp_path / f"to{number}"
        do(source, to, Changes())
        (there,) = {p for p in synced if p.name.startswith(".to")}
        made = {p.relative_to(to) for p in to.rglob("*")}
        assert made == {p.relative_to(there) for p in synced if there in p.parents}


# Places


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
    code, _, err = run(capsys, link, tool=inspect_checkpoint)
    assert code == 3 and "half-written" in err


def test_an_iteration_of_an_iteration_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_checkpoint(tmp_path / "a")
    code, _, err = run(capsys, folder_of(source), tmp_path / "b", "--ckpt-step", ITERATION)
    assert code == 2 and "--ckpt-step" in err


# Malformed contents


def common(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        stored = torch.load(folder / "common.pt", weights_only=False)
        torch.save(change(stored), folder / "common.pt")

    return spoil


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


MALFORMED = {
    "common is a list": common(lambda c: [1]),
    "args is a dictionary": common(lambda c: {**c, "args": {"num_layers": 4}}),
    "args is missing": common(lambda c: {**c, "args": None}),
    "iteration is text": common(lambda c: {**c, "iteration": "five"}),
    "optimizer is a list": common(lambda c: {**c, "optimizer": [1]}),
    "content is text": common(lambda c: {**c, "content_metadata": "x"}),
    "a flag is text": common(flags(num_layers="four")),
    "a flag is negative": common(flags(num_attention_heads=-1)),
    "no places": index(lambda m: setattr(m, "storage_data", None)),
    "places are text": index(lambda m: m.storage_data.update(dict.fromkeys(m.storage_data, "x"))),
    "an entry is text": index(lambda m: cast(Any, m.state_dict_metadata).update(odd="x")),
    "no chunks": index(lambda m: setattr(first_tensor(m), "chunks", None)),
    "a chunk is text": index(lambda m: setattr(first_tensor(m), "chunks", ["x"])),
    "no properties": index(lambda m: setattr(first_tensor(m), "properties", None)),
    "no size": index(lambda m: setattr(first_tensor(m), "size", None)),
    "another object": index(lambda m: {"x": 1}),
}


@pytest.mark.parametrize("spoil", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_checkpoint_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], None]
) -> None:
    source = make_checkpoint(tmp_path / "a")
    spoil(folder_of(source))
    unlisted(source)
    code, _, err = run(capsys, source, tmp_path / "b")
    assert code == 3 and err.count("\n") == 1, err
    code, out, err = run(capsys, source, "--json", tool=inspect_checkpoint)
    assert code == 3 and err.count("\n") == 1 and json.loads(out)["exit_code"] == 3, err


def test_what_nobody_foresaw_is_one_line_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path / "a")

    def odd(*_: Any, **__: Any) -> None:
        raise AttributeError("'list' object\nhas no attribute")

    monkeypatch.setattr(
        "megatron.training.checkpoint.convert.checks.contents.expected_weights", odd
    )
    code, _, err = run(capsys, source, tmp_path / "b")
    assert code == 3 and err.count("\n") == 1 and "AttributeError" in err


def test_inspection_prints_an_object_whatever_happens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    for args, expected in (
        ((tmp_path / "nowhere",), 1),
        ((tmp_path / "empty", "--what"), 2),
        ((tmp_path / "empty",), 3),
    ):
        code, out, _ = run(capsys, *args, "--json", tool=inspect_checkpoint)
        record = json.loads(out)
        assert code == record["exit_code"] == expected and record["problem"]


@pytest.mark.parametrize(
    ("module", "name"),
    [("pathlib", "PosixPath"), ("torch.distributed.checkpoint.metadata", "Metadata")],
)
def test_an_index_changes_no_class(tmp_path: Path, module: str, name: str) -> None:
    path = tmp_path / ".metadata"
    # GLOBAL, then BUILD with (None, {"is_file": None}): sets an attribute of the class.
    path.write_bytes(f"c{module}\n{name}\n".encode() + b"N}Vis_file\nNs\x86b.")
    with pytest.raises(Refused):
        read_index(path)
    assert callable(Path("x").is_file) and not hasattr(Metadata, "is_file")


# Vocabulary


def test_rows_do_not_go_while_nobody_knows_how_many_are_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = {"tokenizer_type": "HuggingFaceTokenizer", "vocab_size": None}
    source = make_checkpoint(tmp_path / "a", **unknown)
    known = make_checkpoint(tmp_path / "known")
    hf = ("--format", "hf")
    code, _, err = run(capsys, source, tmp_path / "b", *hf, "--vocab", 110)
    assert code == 2 and "--true-vocab" in err
    for more in ((), hf):
        flags = ("--vocab", 110, "--true-vocab", 50, *more)
        code, _, err = run(capsys, known, tmp_path / "b", *flags)
        assert code == 3 and "--true-vocab 50" in err
    assert run(capsys, source, tmp_path / "b", *hf, "--vocab", 110, "--true-vocab", 105)[0] == 0
    with pytest.raises(UsageError, match="--true-vocab 500"):
        huggingface.save(source, tmp_path / "c", Changes(true_vocab=500))


# Files of others


def test_the_result_is_written_without_an_accelerator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("the writer would start CUDA")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        "torch.distributed.checkpoint.filesystem._OverlappingCpuLoader.__init__", started
    )
    make_checkpoint(tmp_path / "a")
