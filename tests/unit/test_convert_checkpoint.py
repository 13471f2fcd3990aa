"""Offline conversion: what it keeps, what it changes, what it refuses with which exit code."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from copus_ext.commands import convert_checkpoint, inspect_checkpoint
from megatron.training.checkpoint import files
from megatron.training.checkpoint.convert import archive as archives
from megatron.training.checkpoint.convert.archive import Archive, Chunk, open_archive
from megatron.training.checkpoint.convert.checks import coverage_problem
from megatron.training.checkpoint.convert.convert import convert
from megatron.training.checkpoint.convert.target import Changes
from megatron.training.checkpoint.convert.writing import Piece
from megatron.training.common.errors import Refused
from tests.helpers.checkpoints import ITERATION, index_of, make_checkpoint, renamed


def run(
    capsys: pytest.CaptureFixture[str], *args: Any, tool: Any = convert_checkpoint
) -> tuple[int, str, str]:
    code = tool.main([str(a) for a in args])
    out, err = capsys.readouterr()
    return code, out, err


def tensors(root: Path) -> dict[str, torch.Tensor]:
    archive = open_archive(root, step=None)
    return {key: archive.read(key) for key in archive.tensors}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype
        assert torch.equal(a[key], b[key]), key


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    found = sorted(p for p in root.rglob("*") if p.is_file())
    return {str(p.relative_to(root)): (p.read_bytes(), p.stat().st_mtime_ns) for p in found}


# Coverage


def cut(shape: tuple[int, ...], cuts: list[list[int]], base: tuple[int, ...] = ()) -> list[Chunk]:
    """A grid of chunks."""
    chunks = [Chunk(offset=(), size=())]
    for length, places in zip(shape, cuts):
        edges = sorted({0, length, *(p for p in places if p < length)})
        pairs = list(itertools.pairwise(edges))
        chunks = [
            Chunk(offset=(*c.offset, a), size=(*c.size, b - a)) for c in chunks for a, b in pairs
        ]
    return chunks


GRIDS = st.lists(st.integers(1, 6), min_size=1, max_size=3).flatmap(
    lambda shape: st.tuples(
        st.just(tuple(shape)),
        st.tuples(*(st.lists(st.integers(1, 6), max_size=3) for _ in shape)).map(list),
        st.randoms(use_true_random=False),
    )
)


@given(GRIDS)
def test_a_grid_covers_and_loses_it_with_any_chunk_gone_or_doubled(grid: Any) -> None:
    shape, cuts, random = grid
    chunks = cut(shape, cuts)
    random.shuffle(chunks)
    assert coverage_problem(shape, chunks) is None
    problem = coverage_problem(shape, chunks[1:])
    assert problem is not None and "elements" in problem
    problem = coverage_problem(shape, [*chunks, chunks[0]])
    assert problem is not None and "overlap" in problem


def test_overlap_that_adds_up_to_the_volume_is_found() -> None:
    chunks = [Chunk(offset=(0, 0), size=(2, 3)), Chunk(offset=(1, 1), size=(2, 3))]
    assert "overlap" in str(coverage_problem((3, 4), chunks))
    assert "leaves" in str(coverage_problem((2, 2), [Chunk(offset=(1, 0), size=(2, 2))]))
    assert "axes" in str(coverage_problem((2, 2), [Chunk(offset=(0,), size=(4,))]))


# What is kept and what is changed


def test_another_layout_copies_the_tensors_and_rewrites_the_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_checkpoint(tmp_path / "a")
    before = snapshot(source)
    flags = ("--tp", 1, "--pp", 2, "--vpp", 2, "--dp", 4, "--verify", "--json")
    code, out, _ = run(capsys, source, tmp_path / "b", *flags)
    record = json.loads(out)
    assert (code, record["num_rewritten"], record["layout"]) == (0, 0, "tp1.pp2.vpp2.dp4")
    assert record["num_compared"] == record["num_tensors"] == 36
    assert snapshot(source) == before
    same(tensors(source), tensors(tmp_path / "b"))
    folder = files.folder_of(tmp_path / "b", ITERATION)
    assert files.read_latest(tmp_path / "b") == ITERATION
    assert files.damage(folder) == [] and files.read_manifest(folder)
    arguments = Archive(folder).arguments
    assert arguments["virtual_pipeline_model_parallel_size"] == 2
    assert (arguments["world_size"], arguments["data_parallel_size"]) == (8, 4)
    assert arguments["consumed_train_samples"] == 40
    assert [p.name for p in tmp_path.iterdir() if "unfinished" in p.name] == []


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_plain_to_distributed_and_back_keeps_every_bit(tmp_path: Path, dtype: str) -> None:
    source = make_checkpoint(tmp_path / "a", dtype=dtype, optimizer="plain")
    convert(source, tmp_path / "b", Changes(optimizer="distributed"), verify=True)
    there = tensors(tmp_path / "b")
    masters = [key for key in there if key.startswith("optimizer.state.param.")]
    assert len(masters) == 9 and not any("fp32_param" in key for key in there)
    weight = there["decoder.layers.mlp.linear_fc1.weight"]
    master = there["optimizer.state.param.decoder.layers.mlp.linear_fc1.weight"]
    assert master.dtype == torch.float32 and torch.equal(weight, master.to(weight.dtype))
    convert(tmp_path / "b", tmp_path / "c", Changes(optimizer="plain"), verify=True)
    same(tensors(source), tensors(tmp_path / "c"))
    states = [open_archive(tmp_path / n, step=None).common["optimizer"] for n in "abc"]
    assert states[0] == states[2] and states[1].keys() == {"optimizer", "param_state_sharding_type"}


def test_more_padding_and_back_keeps_every_bit(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "a")
    outcome = convert(source, tmp_path / "b", Changes(vocab=192), verify=True)
    assert "zeros" in outcome.notes[0]
    for key, tensor in tensors(tmp_path / "b").items():
        if key.endswith(("word_embeddings.weight", "output_layer.weight")):
            assert tensor.shape[0] == 192 and not tensor[128:].any() and tensor[:128].any()
    convert(tmp_path / "b", tmp_path / "c", Changes(vocab=128), verify=True)
    same(tensors(source), tensors(tmp_path / "c"))


def test_padding_can_go_but_no_token(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "a", tensor_model_parallel_size=1)
    convert(source, tmp_path / "b", Changes(vocab=101), verify=True)  # 100 and the end of document
    key = "optimizer.state.exp_avg.embedding.word_embeddings.weight"
    assert torch.equal(tensors(tmp_path / "b")[key], tensors(source)[key][:101])
    with pytest.raises(Refused, match="101"):
        convert(source, tmp_path / "c", Changes(vocab=100))
    unknown = make_checkpoint(
        tmp_path / "d", tokenizer_type="HuggingFaceTokenizer", vocab_size=None
    )
    with pytest.raises(ValueError, match="--true-vocab"):
        convert(unknown, tmp_path / "e", Changes(vocab=110))
    convert(unknown, tmp_path / "e", Changes(vocab=110, true_vocab=110))


def test_another_number_format_is_made_from_the_masters(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "a")
    convert(source, tmp_path / "b", Changes(dtype="fp32"), verify=True)
    there = tensors(tmp_path / "b")
    key = "decoder.final_layernorm.weight"
    assert torch.equal(there[key], tensors(source)[f"optimizer.state.param.{key}"])
    convert(tmp_path / "b", tmp_path / "c", Changes(dtype="bf16"), verify=True)
    same(tensors(source), tensors(tmp_path / "c"))
    convert(source, tmp_path / "d", Changes(dtype="fp16"))
    state = open_archive(tmp_path / "d", step=None).common["optimizer"]
    assert state["grad_scaler"]["scale"].numel() == 1


def test_without_optimizer_only_weights_are_left(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "a")
    convert(source, tmp_path / "b", Changes(optimizer="none"), verify=True)
    kept = {k: v for k, v in tensors(source).items() if not k.startswith("optimizer.")}
    same(kept, tensors(tmp_path / "b"))
    assert "optimizer" not in open_archive(tmp_path / "b", step=None).common


def test_random_streams_of_another_layout_are_left_out(tmp_path: Path) -> None:
    key = "rng_state/shard_0.0_1.2"
    source = make_checkpoint(tmp_path / "a", blobs={key: b"streams"})
    assert "random streams" in convert(source, tmp_path / "b", Changes(tp=1), verify=True).notes[0]
    assert key not in open_archive(tmp_path / "b", step=None).blobs
    convert(source, tmp_path / "c", Changes(vocab=192))
    assert open_archive(tmp_path / "c", step=None).read_blob(key) == b"streams"


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that live at once, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            storage = out.untyped_storage()
            pointer, size = storage.data_ptr(), storage.nbytes()
            if size and pointer not in self.seen:
                self.seen.add(pointer)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.gone, pointer, size)
        return out

    def gone(self, pointer: int, size: int) -> None:
        self.seen.discard(pointer)
        self.live -= size


@pytest.mark.parametrize(
    "wish",
    [
        Changes(optimizer="distributed"),
        Changes(vocab=4160),
        Changes(dtype="fp32"),
        Changes(tp=1),
    ],
)
def test_memory_is_bounded_by_twice_the_largest_tensor(tmp_path: Path, wish: Changes) -> None:
    source = make_checkpoint(tmp_path / "a", optimizer="plain", padded_vocab_size=4096)
    largest = 4160 * 16 * 4
    with LiveBytes() as count:
        convert(source, tmp_path / "b", wish, verify=True, file_bytes=largest)
    total = sum(t.num_bytes for t in open_archive(source, step=None).tensors.values())
    assert largest * 0.9 < count.peak <= 2.1 * largest < total / 3


# What is refused


def overlapping(pieces: list[Piece]) -> None:
    piece = pieces[index_of(pieces, "linear_fc2.weight") + 1]
    one = tuple(max(0, o - 1) for o in piece.part.offset)
    moved = Chunk(offset=one, size=piece.part.size)
    pieces[pieces.index(piece)] = dataclasses.replace(piece, part=moved)


def missing_chunk(pieces: list[Piece]) -> None:
    del pieces[index_of(pieces, "linear_proj.weight")]


def unknown_key(pieces: list[Piece]) -> None:
    pieces.append(renamed(pieces[0], "decoder.surprise.weight"))
    pieces.append(renamed(pieces[1], "decoder.surprise.weight"))


def per_layer_key(pieces: list[Piece]) -> None:
    for i, piece in enumerate(pieces):
        if piece.key == "decoder.layers.mlp.linear_fc2.weight":
            pieces[i] = renamed(piece, "decoder.layers.0.mlp.linear_fc2.weight")


def missing_moment(pieces: list[Piece]) -> None:
    pieces[:] = [p for p in pieces if p.key != "optimizer.state.exp_avg_sq.output_layer.weight"]


def missing_weight(pieces: list[Piece]) -> None:
    pieces[:] = [p for p in pieces if not p.key.endswith("output_layer.weight")]


def untrue_weight(pieces: list[Piece]) -> None:
    i = index_of(pieces, "linear_fc1.weight")
    data = pieces[i].make()
    data[2, 3, 1] *= 1.01
    pieces[i] = dataclasses.replace(pieces[i], make=data.clone)


BROKEN: list[tuple[Callable[[list[Piece]], None], tuple[str, ...]]] = [
    (overlapping, ("linear_fc2.weight", "overlap")),
    (missing_chunk, ("linear_proj.weight", "of 1024 elements")),
    (unknown_key, ("decoder.surprise.weight", "unknown")),
    (per_layer_key, ("linear_fc2.weight",)),
    (missing_moment, ("optimizer.state.exp_avg_sq.output_layer.weight", "--optimizer none")),
    (missing_weight, ("lacks output_layer.weight",)),
    (untrue_weight, ("linear_fc1.weight", "in 1 elements", "--optimizer none")),
]


@pytest.mark.parametrize(("change", "words"), BROKEN, ids=lambda x: getattr(x, "__name__", ""))
def test_an_incomplete_checkpoint_is_refused_by_key(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[list[Piece]], None],
    words: tuple[str, ...],
) -> None:
    source = make_checkpoint(tmp_path / "a", change=change)
    code, _, err = run(capsys, source, tmp_path / "b", "--verify")
    assert code == 3 and err.count("\n") == 1
    assert all(word in err for word in words), err
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    is_change_of_value = change is untrue_weight
    code, _, err = run(capsys, source, "--verify", tool=inspect_checkpoint)
    assert code == (4 if is_change_of_value else 3) and words[0] in err
    if is_change_of_value:
        assert run(capsys, source, tmp_path / "b", "--optimizer", "none")[0] == 0


def test_a_flipped_byte_is_refused_by_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_checkpoint(tmp_path / "a")
    path = files.folder_of(source, ITERATION) / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    code, _, err = run(capsys, source, tmp_path / "b")
    assert code == 3 and "__0_0.distcp" in err and not (tmp_path / "b").exists()
    assert run(capsys, source, tool=inspect_checkpoint)[0] == 0
    assert run(capsys, source, "--verify", tool=inspect_checkpoint)[0] == 4
    path.unlink()
    assert "is missing" in run(capsys, source, tmp_path / "b")[2]


def test_without_manifest_a_cut_file_is_still_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_checkpoint(tmp_path / "a")
    folder = files.folder_of(source, ITERATION)
    (folder / files.MANIFEST).unlink()
    code, out, _ = run(capsys, source, tmp_path / "b", "--tp", 1)
    assert code == 0 and "cannot be verified" in out
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-400])
    code, _, err = run(capsys, source, tmp_path / "c")
    assert code == 3 and "is cut" in err and not (tmp_path / "c").exists()


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
        (("--format", "hf", "--tp", 2), 2, ("--tp", "no layout")),
        (("--format", "hf", "--optimizer", "plain"), 2, ("--optimizer plain",)),
        (("--ckpt-step", 7), 3, ("iter_0000007", "complete are: 5", "--ckpt-step")),
        (("--max-shard-gb", 0), 2, ("--max-shard-gb",)),
    ],
)
def test_a_wish_that_cannot_be_is_one_line(
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
    before = snapshot(source)
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
    (tmp_path / "file").write_text("")
    assert run(capsys, source, tmp_path / "file" / "c")[0] == 1
    (tmp_path / "empty").mkdir()
    assert run(capsys, source, tmp_path / "empty")[0] == 0
    (tmp_path / "empty").rename(tmp_path / "taken")
    (tmp_path / "empty").mkdir()
    assert run(capsys, tmp_path / "empty", tmp_path / "c")[0] == 3
    assert snapshot(source) == before and (tmp_path / "b" / "mine").read_text() == "keep"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: (f / "metadata.json").unlink(), "half-written"),
        (
            lambda f: (f / "metadata.json").write_text('{"sharded_backend": "fsdp_dtensor"}'),
            "fsdp_dtensor",
        ),
        (lambda f: ((f / "metadata.json").unlink(), (f / "mp_rank_00").mkdir()), "legacy"),
        (lambda f: (f / ".metadata").write_bytes(b"nonsense"), ".metadata cannot be read"),
        (lambda f: (f / "common.pt").write_bytes(b"nonsense"), "common.pt cannot be read"),
    ],
)
def test_other_formats_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Any, words: str
) -> None:
    source = make_checkpoint(tmp_path / "a")
    spoil(files.folder_of(source, ITERATION))
    code, _, err = run(capsys, source, tmp_path / "b")
    assert code == 3 and words in err and not (tmp_path / "b").exists()


def test_optimizers_of_one_layout_are_refused_with_the_flag_that_helps(tmp_path: Path) -> None:
    for kind in ("dp_reshardable", "dp_zero_gather_scatter"):
        content = {"distrib_optim_sharding_type": kind}
        source = make_checkpoint(tmp_path / kind, content=content)
        with pytest.raises(Refused, match=f"{kind}.*--dist-ckpt-optim-fully-reshardable"):
            convert(source, tmp_path / "b", Changes(tp=1))


def test_an_index_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    source = make_checkpoint(tmp_path / "a")
    (files.folder_of(source, ITERATION) / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(Refused, match="does not belong"):
        open_archive(source, step=None)
    assert not (tmp_path / "ran").exists()


def test_a_failure_on_the_way_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path / "a")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron.training.checkpoint.convert.convert.write_common", full)
    code, _, err = run(capsys, source, tmp_path / "b", "--tp", 1)
    assert code == 1 and "No space left" in err
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_result_that_differs_fails_verification(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path / "a")
    read = archives.Archive.read

    def wrong(self: Archive, key: str, *how: Any) -> torch.Tensor:
        data = read(self, key, *how)
        is_result = "unfinished" in str(self.folder)
        return data + 1 if is_result and key == "output_layer.weight" else data

    monkeypatch.setattr(archives.Archive, "read", wrong)
    code, _, err = run(capsys, source, tmp_path / "b", "--vocab", 192, "--verify")
    assert code == 4 and "output_layer.weight" in err
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


# Inspection


def test_inspection_says_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_checkpoint(tmp_path / "a")
    code, out, _ = run(capsys, source, "--json", "--verify", tool=inspect_checkpoint)
    record = json.loads(out)
    assert code == 0 and record["verified"] and record["problem"] is None
    assert (record["iteration"], record["consumed_samples"]) == (ITERATION, 40)
    assert (record["layout"], record["optimizer"]) == ("tp2.pp1.dp2", "distributed")
    assert len(record["tensors"]) == 36 and record["true_vocab_size"] == 101
    assert record["loads_under"] == {
        "tp": [1, 2, 4],
        "pp": ["1", "2", "2x2", "4"],
        "dp": [1, 2, 4, 8],
    }
    code, out, _ = run(capsys, files.folder_of(source, ITERATION), tool=inspect_checkpoint)
    assert code == 0 and "decoder.layers.mlp.linear_fc2.weight  bfloat16 (4, 16, 24)" in out
    assert run(capsys, tmp_path, "--what", tool=inspect_checkpoint)[0] == 2
