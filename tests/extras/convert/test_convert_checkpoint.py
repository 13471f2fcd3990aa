"""Offline conversion: what it keeps, what it changes, what it refuses with which exit code."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.trainer.checkpoint import files
from megatron.trainer.config.layout import Layout
from megatron.trainer.extras.convert import command as convert_checkpoint
from megatron.trainer.extras.convert import writing
from megatron.trainer.extras.convert.convert import convert
from megatron.trainer.extras.convert.target import Changes
from megatron.trainer.extras.inspect_checkpoint import command as inspect_checkpoint
from megatron.trainer.extras.inspect_checkpoint.archive import Archive, open_archive
from tests.extras.convert.checkpoints import cut_like_ranks
from tests.helpers.checkpoints import (
    ITERATION,
    command,
    edit_common,
    make_checkpoint,
)
from tests.helpers.processes import wait_until


def run(
    capsys: pytest.CaptureFixture[str], *args: Any, tool: Any = convert_checkpoint
) -> tuple[int, str, str]:
    return command(capsys, tool, *args)


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


def test_uneven_stages_stay_until_the_pipeline_changes(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"pipeline_model_parallel_size": 2, "layers_of_chunks": [1, 3]}
    source = make_checkpoint(tmp_path / "a", **flags, pipeline_model_parallel_layout="Et|tttL")
    for number, (changes, partition) in enumerate(((Changes(dp=4), (1, 3)), (Changes(pp=4), None))):
        convert(source, tmp_path / str(number), changes)
        arguments = open_archive(tmp_path / str(number), step=None).arguments
        assert arguments["layers_of_chunks"] == partition
        assert (arguments["pipeline_model_parallel_layout"] is None) is (partition is None)


def test_context_parallelism_stays_until_another_size_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    levels = "hierarchical_context_parallel_sizes"
    flags: dict[str, Any] = {"context_parallel_size": 4, levels: [2, 2], "cp_comm_type": ["a2a"]}
    source = make_checkpoint(tmp_path / "a", ours=True, **flags)
    for i, (asked, layout, world_size) in enumerate(
        (
            ((), "tp2.cp4.pp1.dp2", 16),
            (("--pp", 2), "tp2.cp4.pp2.dp2", 32),
            (("--cp", 2), "tp2.cp2.pp1.dp2", 8),
            (("--cp", 1, "--dp", 8), "tp2.pp1.dp8", 16),
        )
    ):
        code, out, err = run(capsys, source, tmp_path / str(i), *asked, "--json")
        assert code == 0, err
        assert json.loads(out)["layout"] == layout
        archive = open_archive(tmp_path / str(i), step=None)
        arguments = archive.arguments
        assert str(Layout.of_arguments(arguments)) == layout
        assert str(Layout.from_json(archive.common[files.OUR_KEY]["layout"])) == layout
        assert arguments["world_size"] == world_size
        assert arguments[levels] == (None if "--cp" in asked else [2, 2])
    for asked, code, words in (
        (("--cp", 3), 3, "--seq-length 32 is not divisible by 6"),
        (("--cp", 0), 2, "--cp 0"),
    ):
        got, _, err = run(capsys, source, tmp_path / "made", *asked)
        assert got == code and words in err and not (tmp_path / "made").exists(), err


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


def test_padding_can_go_but_no_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = make_checkpoint(tmp_path / "known", tensor_model_parallel_size=1)
    unknown = make_checkpoint(
        tmp_path / "unknown", tokenizer_type="HuggingFaceTokenizer", vocab_size=None
    )
    for source, flags, code, words in (
        (known, ("--vocab", 101), 0, ""),  # 100 and the end of the document
        (known, ("--vocab", 100), 3, "101"),
        (known, ("--vocab", 110, "--true-vocab", 50), 3, "--true-vocab 50"),
        (unknown, ("--vocab", 110), 2, "--true-vocab"),
        (unknown, ("--vocab", 110, "--true-vocab", 105), 0, ""),
    ):
        made = tmp_path / "made"
        got, _, err = run(capsys, source, made, "--verify", *flags)
        assert got == code and words in err and made.exists() is (code == 0), err
        if code == 0 and source is known:
            key = "optimizer.state.exp_avg.embedding.word_embeddings.weight"
            assert torch.equal(tensors(made)[key], tensors(source)[key][:101])
        shutil.rmtree(made, ignore_errors=True)


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


def test_random_streams_of_another_layout_are_left_out(tmp_path: Path) -> None:
    key = "rng_state/shard_0.0_1.2"
    source = make_checkpoint(tmp_path / "a", blobs={key: b"streams"})
    assert "random streams" in convert(source, tmp_path / "b", Changes(tp=1), verify=True).notes[0]
    assert key not in open_archive(tmp_path / "b", step=None).blobs
    convert(source, tmp_path / "c", Changes(vocab=192))
    assert open_archive(tmp_path / "c", step=None).read_blob(key) == b"streams"


CHANGES = (
    Changes(vocab=192),
    Changes(tp=1),
    Changes(optimizer="plain"),
)


@pytest.mark.parametrize(("dtype", "all_changes"), [("bf16", CHANGES), ("fp32", CHANGES[2:])])
def test_rectangles_cut_anywhere_are_put_together(
    tmp_path: Path, dtype: str, all_changes: tuple[Changes, ...]
) -> None:
    how: dict[str, Any] = {"dtype": dtype, "num_layers": 2}
    plain = make_checkpoint(tmp_path / "plain", **how)
    source = make_checkpoint(tmp_path / "a", change=cut_like_ranks, file_bytes=10_000, **how)
    whole, cut = (open_archive(root, step=None) for root in (plain, source))
    assert max(len(t.chunks) for t in cut.tensors.values()) > 10
    assert len([n for n in cut.file_names() if n.endswith(".distcp")]) > 3
    assert all(torch.equal(whole.read(key), cut.read(key)) for key in whole.tensors)
    for number, changes in enumerate(all_changes):
        results = []
        for root in (plain, source):
            to = tmp_path / f"{root.name}-{number}"
            convert(root, to, changes, verify=root is source)
            results.append(open_archive(to, step=None))
        assert results[0].tensors.keys() == results[1].tensors.keys()
        assert all(torch.equal(results[0].read(k), results[1].read(k)) for k in results[0].tensors)


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
    "changes",
    [
        Changes(optimizer="distributed"),
        Changes(vocab=4160),
        Changes(dtype="fp32"),
        Changes(tp=1),
    ],
)
def test_memory_is_bounded_by_twice_the_largest_tensor(tmp_path: Path, changes: Changes) -> None:
    source = make_checkpoint(tmp_path / "a", optimizer="plain", padded_vocab_size=4096)
    largest = 4160 * 16 * 4
    with LiveBytes() as count:
        convert(source, tmp_path / "b", changes, verify=True, file_bytes=largest)
    total = sum(t.num_bytes for t in open_archive(source, step=None).tensors.values())
    assert largest * 0.9 < count.peak <= 2.1 * largest < total / 3


def test_every_file_is_on_the_disk_before_the_result_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(writing, "_sync", synced.append)
    source = make_checkpoint(tmp_path / "a")
    convert(source, tmp_path / "to", Changes())
    (there,) = {p for p in synced if p.name.startswith(".to")}
    made = {p.relative_to(tmp_path / "to") for p in (tmp_path / "to").rglob("*")}
    assert made == {p.relative_to(there) for p in synced if there in p.parents}


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


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["muon", "dist_muon"])
def test_momenta_in_place_of_moments_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str, name: str
) -> None:
    """As Muon has them, whose layouts are those of any other optimizer."""
    source = make_checkpoint(tmp_path / "a", dtype=dtype, optimizer="plain", muon=True)

    def of_megatron_lm(common: dict[str, Any]) -> dict[str, Any]:
        common["args"].optimizer, common["args"].use_distributed_optimizer = name, True
        return common

    edit_common(files.folder_of(source, ITERATION), of_megatron_lm)
    (files.folder_of(source, ITERATION) / files.MANIFEST).unlink()
    code, out, err = run(capsys, source, "--json", "--verify", tool=inspect_checkpoint)
    record = json.loads(out)
    assert code == 0 and record["problem"] is None and err == ""
    assert record["loads_under"]["tp"] == [1, 2, 4]
    assert record["bytes_by_state"].keys() >= {"momentum_buffer", "exp_avg", "exp_avg_sq"}
    convert(source, tmp_path / "b", Changes(pp=2, tp=4, vocab=192), verify=True)
    convert(tmp_path / "b", tmp_path / "c", Changes(pp=1, tp=2, vocab=128), verify=True)
    same(tensors(source), tensors(tmp_path / "c"))
    for flags in (("--optimizer", "none", "--dtype", "fp32"), ("--optimizer", "none")):
        shutil.rmtree(tmp_path / "c")
        assert run(capsys, source, tmp_path / "c", *flags, "--verify")[0] == 0
    code, _, err = run(capsys, source, tmp_path / "d", "--optimizer", "distributed")
    assert code == 3 and "--optimizer distributed is for Adam alone" in err


def test_momenta_follow_another_number_format(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "a", optimizer="plain", muon=True)
    convert(source, tmp_path / "b", Changes(dtype="fp32"), verify=True)
    assert not any("fp32_param" in key for key in tensors(tmp_path / "b"))
    convert(tmp_path / "b", tmp_path / "c", Changes(dtype="bf16"), verify=True)
    same(tensors(source), tensors(tmp_path / "c"))


# Ends from outside


_SLOW = """
import pathlib, signal, sys
from megatron.trainer.extras.convert import convert
def hold(folder, _):
    (pathlib.Path(folder).parent / "held").touch()
    signal.pause()
convert.write_common = hold
from megatron.trainer.extras.convert.command import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_conversion_that_is_ended_leaves_nothing_that_stops_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    source = make_checkpoint(tmp_path / "a")
    words = [str(source), str(tmp_path / "b"), "--pp", "2"]
    held = subprocess.Popen([sys.executable, "-c", _SLOW, *words], start_new_session=True)
    try:
        assert wait_until(lambda: list(tmp_path.glob(".b.unfinished-*/held")), 100)
        (there,) = tmp_path.glob(".b.unfinished-*")
        assert run(capsys, *words[:1], tmp_path / "b", *words[2:])[0] == 0
        assert there.is_dir(), "it is being written"
        shutil.rmtree(tmp_path / "b")
        held.send_signal(signal.Signals[name])
        assert held.wait(60) in (130, 143, -9)
    finally:
        held.kill()
        held.wait()
    assert list(tmp_path.glob(".b.unfinished-*")) == ([there] if name == "SIGKILL" else [])
    # A container gives the next process the same number.
    there.mkdir(exist_ok=True)
    with mock.patch("os.getpid", return_value=int(there.name.rpartition("-")[2])):
        assert run(capsys, *words[:1], tmp_path / "b", *words[2:])[0] == 0
    assert not list(tmp_path.glob(".b.unfinished-*"))
