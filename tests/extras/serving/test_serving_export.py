"""Measured loss increases of a small checkpoint, and the quantised model that is written of it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
from safetensors.torch import load_file

from copus_ext.extras.serving import command
from copus_ext.extras.serving.export import quantisation_config
from copus_ext.extras.serving.held_out import HeldOut, Text
from copus_ext.extras.serving.measure import matrices_of
from copus_ext.extras.serving.quantise import check_group_size, pack, quantise, unpack
from copus_ext.extras.serving.sensitivity import FILE, Sensitivity
from copus_ext.extras.serving.source import Source
from megatron.trainer.common.errors import UsageError
from megatron.trainer.extras.convert.target import Changes
from megatron.trainer.extras.convert.writing import Piece
from megatron.trainer.extras.huggingface import exchange
from tests.helpers.checkpoints import make_checkpoint

GROUP = 8
CLUSTER = {
    "gpu": {
        "name": "board",
        "memory_bytes": "2GiB",
        "peak_flops": 2e12,
        "hbm_bytes_per_s": 2e6,
        "num_sms": 8,
    },
    "num_nodes": 2,
    "gpus_per_node": 1,
    "intra_bytes_per_s": "1GB/s",
    "nic_bytes_per_s": "1GB/s",
}
"""Two boards that take long to read a weight, so that bits matter for the smallest model."""


@pytest.fixture(scope="module", autouse=True)
def few_documents() -> Iterator[None]:
    before, MockGPTLowLevelDataset.size = MockGPTLowLevelDataset.size, 1000
    yield
    MockGPTLowLevelDataset.size = before


def quiet(pieces: list[Piece]) -> None:
    """Matrices as at the start of a training."""
    for i, piece in enumerate(pieces):
        if "norm" not in piece.key and not piece.key.startswith("optimizer"):
            pieces[i] = dataclasses.replace(piece, make=lambda p=piece: 0.2 * p.make())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In fp32, of a run on invented data."""
    root = tmp_path_factory.mktemp("serving") / "c"
    return make_checkpoint(root, dtype="fp32", optimizer="none", change=quiet, mock_data=True)


@pytest.fixture
def words(checkpoint: Path, tmp_path: Path) -> list[str]:
    """Flags of a plan for it."""
    (tmp_path / "cluster.json").write_text(json.dumps(CLUSTER))
    short = "--prompts 2 --prompt 16 --generate 16 --eval-samples 8 --device cpu --group-size"
    cluster = ["--cluster", str(tmp_path / "cluster.json")]
    return [str(checkpoint), *cluster, *short.split(), str(GROUP)]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], str]:
    code = command.main([*words, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def read_by_the_published_layout(folder: Path) -> dict[str, torch.Tensor]:
    """The matrices of a `pack-quantized` model, number by number: groups and ignored modules from
    `config.json`; value i of a row from bit i * num_bits on, less half of the range; one scale for
    each group of columns."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors" and config["format"] == "pack-quantized"
    stored, found = load_file(folder / "model.safetensors"), {}
    for name in [key for key in stored if key.endswith(".weight_packed")]:
        stem = name.removesuffix(".weight_packed")
        (scheme,) = (
            group["weights"]
            for group in config["config_groups"].values()
            if any(re.match(t.removeprefix("re:"), stem) for t in group["targets"])
        )
        assert stem not in config["ignore"] and scheme["type"] == "int" and scheme["symmetric"]
        bits, per_scale = scheme["num_bits"], scheme["group_size"]
        rows, columns = stored[f"{stem}.weight_shape"].tolist()
        data = stored[name].numpy().view(np.uint32)
        scales = stored[f"{stem}.weight_scale"]
        assert data.shape == (rows, columns * bits // 32)
        assert scales.shape == (rows, columns // per_scale)
        whole = torch.empty(rows, columns, dtype=scales.dtype)
        for i in range(columns):
            word, offset = divmod(i * bits, 32)
            value = (data[:, word] >> np.uint32(offset)) & np.uint32((1 << bits) - 1)
            signed = torch.from_numpy(value.astype(np.int64) - (1 << (bits - 1)))
            whole[:, i] = signed.to(scales.dtype) * scales[:, i // per_scale]
        found[f"{stem}.weight"] = whole
    return found


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_a_weight_is_at_most_half_a_step_off(bits: int) -> None:
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(bits))
    weight[0, :8] = 0
    made = quantise(weight, bits, 8)
    half = 1 << (bits - 1)
    assert made.values.min() >= -half and made.values.max() <= half - 1
    steps = made.scales.repeat_interleave(8, dim=1)
    off = (made.whole() - weight).abs()
    # The largest weight of a group is half a step beyond the last value.
    assert (off <= 0.5001 * steps).all()
    assert (made.whole()[0, :8] == 0).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_words_hold_the_values(bits: int) -> None:
    half = 1 << (bits - 1)
    values = torch.randint(-half, half, (5, 64), dtype=torch.int8)
    words = pack(values, bits)
    assert words.dtype == torch.int32 and words.shape == (5, 64 * bits // 32)
    assert torch.equal(unpack(words, bits), values)


def test_groups_fill_the_rows() -> None:
    check_group_size(16, 48, "x")
    for size in (32, 12, 4):
        with pytest.raises(UsageError, match=rf"--group-size {size} .* such as 16"):
            check_group_size(size, 48, "x")


def test_a_module_is_named_once() -> None:
    names = [f"model.layers.{i}.mlp.{x}_proj" for i in range(12) for x in ("up", "down")]
    bits = [4, 8, 16] * 4
    config = quantisation_config(bits, 128, names)
    for name in [*names, "lm_head", "model.embed_tokens"]:
        groups = [
            group["weights"]["num_bits"]
            for group in config["config_groups"].values()
            if any(re.match(t.removeprefix("re:"), name) for t in group["targets"])
        ]
        layer = name.split(".")[2] if "layers" in name else ""
        own = bits[int(layer)] if layer else 16
        assert groups == ([] if own == 16 else [own]), name
        assert own != 16 or name in config["ignore"] or name == "model.embed_tokens"


def test_measuring_leaves_the_weights_and_knows_each_layer(checkpoint: Path) -> None:
    source = Source(checkpoint, device="cpu", num_samples=8)
    seen: list[tuple[int, int]] = []
    found = source.sensitivity((4, 8), GROUP, on_layer=lambda *at: seen.append(at))
    assert seen == [(i, 4) for i in range(1, 5)]
    assert [sorted(x) for x in found.loss_increase] == [["4", "8"]] * 4
    spread = [abs(x["4"]) for x in found.loss_increase]
    assert min(spread) > max(abs(x["8"]) for x in found.loss_increase) / 2 and max(spread) > 0
    with source.open() as opened:
        held_out = HeldOut(opened, source.text)
        assert held_out.losses().mean == pytest.approx(found.loss, abs=1e-9)
        layer = matrices_of(opened.model, 2)
        assert len(layer) == 4
        for parameter in opened.model.unwrapped[0].parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
        base = held_out.losses()
        assert base.mean == pytest.approx(found.loss_16, abs=1e-9)
        for parameter in layer.values():
            parameter.copy_(quantise(parameter.to(torch.bfloat16), 4, GROUP).whole())
        increase, error = held_out.losses().increase_over(base)
    assert increase == pytest.approx(found.loss_increase[2]["4"], abs=1e-9)
    assert error == pytest.approx(found.standard_error[2]["4"], abs=1e-9)


def test_a_second_plan_measures_nothing(
    words: list[str],
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, first, _ = run(capsys, *words, "--max-loss-increase", "5")
    assert code == 0 and (checkpoint / FILE).is_file()
    monkeypatch.setattr(Source, "open", lambda self: pytest.fail("measured again"))
    code, second, err = run(capsys, *words, "--max-loss-increase", "5")
    assert code == 0 and second == first and "loss increases are those of" in err
    given = ["--sensitivity", str(checkpoint / FILE), "--max-loss-increase", "5"]
    assert run(capsys, *words, *given)[1] == first
    monkeypatch.undo()
    kept = Sensitivity.read(checkpoint / FILE)
    other = Source(checkpoint, device="cpu", num_samples=4)
    assert other.settings(GROUP) != kept.settings == json.loads(json.dumps(kept.settings))


def test_the_written_model_has_the_weights_that_were_measured(
    words: list[str], checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "served"
    code, plan, _ = run(capsys, *words, "--max-loss-increase", "0.01", "--apply", str(out))
    assert code == 0
    bits = [b for stage in plan["stages"] for b in stage["bits"]]
    assert len(set(bits)) > 1, bits
    assert plan["applied"]["loss_increase"] <= 0.01
    exchange.save(checkpoint, tmp_path / "plain", Changes(dtype="bf16"))
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    packed, stored = read_by_the_published_layout(out), load_file(out / "model.safetensors")
    for name, weight in plain.items():
        layer = re.fullmatch(r"model\.layers\.(\d+)\..*_proj\.weight", name)
        if layer is None or bits[int(layer[1])] == 16:
            assert torch.equal(stored[name], weight), name
            continue
        expected = quantise(weight, bits[int(layer[1])], GROUP).whole()
        assert torch.equal(packed[name], expected), name
        assert packed[name].dtype == torch.bfloat16 and name not in stored
    config = json.loads((out / "config.json").read_text())
    config.pop("quantization_config")
    assert config == json.loads((tmp_path / "plain" / "config.json").read_text())


def test_transformers_reads_it(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "served"
    assert run(capsys, *words, "--max-loss-increase", "0.01", "--apply", str(out))[0] == 0
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True, dtype=torch.bfloat16
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys"))
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.long))  # unpacks
    own = dict(model.named_parameters())
    for name, weight in read_by_the_published_layout(out).items():
        assert torch.equal(own[name].data, weight), name


def test_a_loss_above_the_limit_leaves_nothing(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sum of single layers is within the limit by a file that promises too much."""
    each = [{"4": 0.0, "8": 0.0}] * 4
    promise = Sensitivity(
        settings={},
        group_size=GROUP,
        loss=1.0,
        loss_16=1.0,
        loss_increase=each,
        standard_error=each,
    )
    promise.write(tmp_path / "promise.json")
    out = tmp_path / "served"
    given = ["--sensitivity", str(tmp_path / "promise.json"), "--max-loss-increase", "1e-7"]
    code, record, err = run(capsys, *words, *given, "--apply", str(out))
    assert code == 4 and record["status"] == "failed"
    assert "above --max-loss-increase 1e-07" in err and "was not written" in err
    assert not out.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cluster.json", "promise.json"]


@pytest.mark.parametrize(
    ("flags", "more", "said"),
    [
        ({"mock_data": False}, [], "what it was trained on; give held-out text with --data-path"),
        ({"data_path": ["/nowhere/x"]}, [], "give held-out text with --data-path"),
        ({"mock_data": True}, ["--group-size", "32"], "--group-size 32 must"),
        ({"mock_data": True, "num_experts": 4, "moe_layer_freq": "1"}, [], "mixtures of experts"),
        ({"mock_data": True, "mtp_num_layers": 1}, [], "does not know --mtp-num-layers"),
        ({"mock_data": True, "swiglu": False}, ["--apply", "new"], "swiglu is False"),
    ],
)
def test_what_cannot_be_measured_or_written_is_refused(
    flags: dict[str, Any],
    more: list[str],
    said: str,
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if "num_experts" in flags:
        flags = {**flags, "moe_router_topk": 2, "moe_ffn_hidden_size": 12}
    root = make_checkpoint(tmp_path / "c", dtype="fp32", optimizer="none", change=quiet, **flags)
    code, record, err = run(capsys, str(root), *words[1:], "--bits", "8,16", *more)
    assert code == (3 if "swiglu" in flags else 2) and said in err, err
    assert record["reason"] and not (tmp_path / "new").exists()


def test_the_text_is_that_of_the_flags() -> None:
    run = {"data_path": "1 a 2 b", "split": "9,1,0", "seq_length": 64, "seed": 7}
    own = Text.of_run(run, num_samples=3)
    assert own.to_json() == {
        "data_path": ["1", "a", "2", "b"],
        "split": "9,1,0",
        "seed": 7,
        "seq_length": 64,
        "num_samples": 3,
    }
    other = Text.of_run(run, data_path=["c"], split="0,1,0", num_samples=3).to_json()
    assert (other["data_path"], other["split"]) == (["c"], "0,1,0")


def test_what_is_no_checkpoint_is_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "llama"}')
    for name, said in (("hf", "is a Hugging Face model"), ("nowhere", "is not a directory")):
        code, _, err = run(capsys, str(tmp_path / name), *words[1:])
        assert code == 2 and said in err and "--save directory" in err
