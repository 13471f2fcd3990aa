"""Hugging Face models out and in: every bit, every shape, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.trainer.checkpoint import files
from megatron.trainer.extras.convert import command as convert_checkpoint
from megatron.trainer.extras.convert.target import Changes
from megatron.trainer.extras.huggingface import config_json, exchange
from megatron.trainer.extras.inspect_checkpoint import contents
from megatron.trainer.extras.inspect_checkpoint.archive import open_archive
from tests.helpers.checkpoints import FLAGS, command, make_checkpoint

safetensors = pytest.importorskip("safetensors.torch")

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
}
SCALING: dict[str, Any] = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0}
SCALING |= {"high_freq_factor": 4.0}
LLAMA3 = {**SCALING, "original_max_position_embeddings": 8192}


def run(capsys: pytest.CaptureFixture[str], *args: Any) -> tuple[int, str]:
    code, _, err = command(capsys, convert_checkpoint, *args)
    return code, err


def make_model(
    folder: Path, *, dtype: torch.dtype = torch.float32, shards: int = 1, **changes: Any
) -> dict[str, torch.Tensor]:
    """A model with random weights, written by safetensors itself."""
    folder.mkdir()
    config = {**CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    found = exchange.counterparts(config_json.arguments_of(config), config["vocab_size"])
    generator = torch.Generator().manual_seed(2)
    tensors = {n: torch.randn(c.shape, generator=generator).to(dtype) for n, c in found.items()}
    names = list(tensors)
    if shards == 1:
        safetensors.save_file(tensors, folder / "model.safetensors")
        return tensors
    weight_map = {name: f"part-{i % shards}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        part = {n: tensors[n] for n in names if weight_map[n] == file}
        safetensors.save_file(part, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def stored(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= safetensors.load_file(file)
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_in_and_out_keeps_every_bit(tmp_path: Path, tied: bool, groups: int) -> None:
    changes = {"tie_word_embeddings": tied, "num_key_value_heads": groups}
    before = make_model(tmp_path / "hf", shards=3, dtype=torch.bfloat16, **changes)
    exchange.load(tmp_path / "hf", tmp_path / "core", Changes(tp=2), verify=True)
    archive = open_archive(tmp_path / "core", step=None)
    table = archive.read(contents.EMBEDDING)
    assert table.shape == (128, 16) and not table[101:].any()
    outcome = exchange.save(
        tmp_path / "core", tmp_path / "out", Changes(), verify=True, shard_bytes=5000
    )
    same(before, stored(tmp_path / "out"))
    assert outcome.num_compared == len(before)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(shards) > 3 and set(index["weight_map"].values()) == {p.name for p in shards}
    largest = max(t.numel() * 2 for t in before.values())
    assert all(p.stat().st_size <= max(5000, largest) + 2000 for p in shards)
    assert index["metadata"]["total_size"] == sum(t.numel() * 2 for t in before.values())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {k: config[k] for k in CONFIG} == {**CONFIG, **changes}


def test_rows_are_where_megatron_core_looks_for_them() -> None:
    flags = {"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 1, "hidden_size": 4}
    q, k, v = (torch.arange(n, n + 4.0)[:, None] for n in (0, 10, 20))
    key = "self_attention.linear_qkv.weight"
    rows = exchange.join(key, [q, k[:2], v[:2]], flags)[:, 0].tolist()
    assert rows == [0, 1, 10, 20, 2, 3, 11, 21]


def test_out_and_in_keeps_all_but_the_padding(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "a")
    exchange.save(source, tmp_path / "hf", Changes(), verify=True)
    assert stored(tmp_path / "hf")["model.embed_tokens.weight"].shape == (101, 16)
    exchange.load(tmp_path / "hf", tmp_path / "b", Changes(vocab=128), verify=True)
    first, second = (open_archive(tmp_path / n, step=None) for n in "ab")
    for key in contents.expected_weights(FLAGS):
        rows = 101 if key in (contents.EMBEDDING, contents.HEAD) else None
        assert torch.equal(first.read(key)[:rows], second.read(key)[:rows]), key
    assert {k: second.arguments[k] for k in ("kv_channels", "num_query_groups", "swiglu")} == {
        "kv_channels": 4,
        "num_query_groups": 2,
        "swiglu": True,
    }
    assert files.read_latest(tmp_path / "b") == second.iteration == 0


def test_another_number_format_comes_from_the_masters(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "a", hidden_dropout=0.1)
    outcome = exchange.save(source, tmp_path / "hf", Changes(dtype="fp32"), verify=True)
    assert [note.startswith("hidden_dropout 0.1") for note in outcome.notes] == [True]
    master = open_archive(source, step=None).read(
        "optimizer.state.param.decoder.final_layernorm.weight"
    )
    assert torch.equal(stored(tmp_path / "hf")["model.norm.weight"], master)


def test_a_tied_head_that_is_stored_too_is_taken_if_it_is_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = make_model(tmp_path / "hf", tie_word_embeddings=True)
    path = tmp_path / "hf" / "model.safetensors"
    table = tensors["model.embed_tokens.weight"]
    safetensors.save_file({**tensors, "lm_head.weight": table.clone()}, path)
    assert run(capsys, tmp_path / "hf", tmp_path / "a")[0] == 0
    safetensors.save_file({**tensors, "lm_head.weight": table + 1}, path)
    code, err = run(capsys, tmp_path / "hf", tmp_path / "b")
    assert code == 3 and "lm_head.weight" in err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "phi3"}, "phi3"),
        ({"model_type": None}, "model_type"),
        ({"model_type": "gemma2"}, "scales its embedding"),
        ({"architectures": ["MistralForCausalLM"]}, "architectures"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"model_type": "mistral", "max_position_embeddings": 8192}, "sliding_window is 4096"),
        ({"shiny_new_part": None}, "shiny_new_part"),
        ({"quantization_config": {"modules": ["x" * 500]}}, "xx...; only null can be imported"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "hidden_size 16"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"attention_dropout": 1}, "attention_dropout"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "high_freq_factor": 8.0}}, "high_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "default", "type": "mrope"}}, "default and mrope"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 1]}}, "mrope_section"),
        ({"rope_scaling": SCALING, "max_position_embeddings": 64}, "original_max_position"),
        ({"rope_scaling": {**LLAMA3, "factor": None}}, "lacks factor"),
        ({"rope_parameters": {"rope_theta": 2}}, "rope_theta is 500000.0 and, in rope_parameters"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": LLAMA3}, "differ"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 2}}}, "full_attention"),
        ({"rope_theta": 10000.5}, "10000.5"),
        ({"num_key_value_heads": 3}, "groups"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "16"}, "hidden_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"head_dim": [4]}, "head_dim"),
        ({"num_key_value_heads": -2}, "num_key_value_heads"),
        ({"rope_scaling": ["llama3"]}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": "x"}}, "factor"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"intermediate_size": 32}, "gate_proj"),
        ({"num_hidden_layers": 4}, "model.layers.3"),
        ({"num_hidden_layers": 2}, "model.layers.2"),
        ({"tie_word_embeddings": True}, "lm_head.weight"),
    ],
    ids=str,
)
def test_a_model_that_is_no_such_llama_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], words: str
) -> None:
    make_model(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    code, err = run(capsys, tmp_path / "hf", tmp_path / "a")
    assert code == 3 and words in err and err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_damaged_files_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "hf"
    make_model(model, shards=3)
    index_path, shard = model / "model.safetensors.index.json", model / "part-1.safetensors"
    whole, index = shard.read_bytes(), index_path.read_text()

    def refused(*words: str) -> None:
        code, err = run(capsys, model, tmp_path / "a")
        assert code == 3 and all(w in err for w in words), err
        assert not (tmp_path / "a").exists()

    shard.write_bytes(whole[:-10])
    refused("part-1.safetensors")
    shard.unlink()
    refused("part-1.safetensors", "missing")
    shard.write_bytes(whole)
    listed = json.loads(index)
    listed["weight_map"].pop("model.norm.weight")
    index_path.write_text(json.dumps(listed))
    refused("model.norm.weight", "index lacks it")
    listed["weight_map"]["model.norm.weight"] = "../part-0.safetensors"
    index_path.write_text(json.dumps(listed))
    refused("outside the folder")
    index_path.unlink()
    refused("3 safetensors files")
    for path in model.glob("*.safetensors"):
        path.rename(model / f"pytorch_model-{path.stem}.bin")
    refused("pickles")
    (model / "adapter_config.json").write_text("{}")
    refused("merge the adapter")
    (model / "config.json").write_text("{")
    refused("config.json is damaged")


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"swiglu": False}, "swiglu"),
        ({"normalization": "LayerNorm"}, "normalization"),
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type"),
        ({"qk_layernorm": True, "add_qkv_bias": True}, "qk_layernorm is True and add_qkv_bias"),
        ({"rotary_percent": 0.5}, "rotary_percent"),
    ],
    ids=str,
)
def test_another_network_is_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: dict[str, Any], word: str
) -> None:
    source = make_checkpoint(tmp_path / "a", optimizer="none", **flags)
    code, err = run(capsys, source, tmp_path / "hf", "--format", "hf")
    assert code == 3 and word in err and not (tmp_path / "hf").exists()


def test_wishes_that_do_not_go_with_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(tmp_path / "hf")
    for flags, code, word in (
        (("--format", "hf"), 2, "--format hf"),
        (("--ckpt-step", 3), 2, "--ckpt-step"),
        (("--tp", 0), 2, "--tp 0"),
        (("--tp", 8), 3, "--num-attention-heads 4"),
        (("--vocab", 100), 3, "101"),
        (("--optimizer", "distributed"), 3, "--finetune"),
    ):
        got, err = run(capsys, tmp_path / "hf", tmp_path / "a", *flags)
        assert got == code and word in err and not (tmp_path / "a").exists(), err


def test_scaled_rotary_positions_go_both_ways() -> None:
    arguments = config_json.arguments_of({**CONFIG, "rope_scaling": LLAMA3})
    assert arguments["use_rope_scaling"] and arguments["rope_scaling_factor"] == 16.0
    config = config_json.config_of(arguments, 101, torch.float32)
    assert config["rope_scaling"] == {**LLAMA3, "rope_theta": 500000.0}
    assert config_json.arguments_of(config) == arguments
    kept = {"rope_scaling": SCALING, "max_position_embeddings": 8192}  # as transformers 5 takes it
    assert config_json.arguments_of({**CONFIG, **kept})["rope_scaling_factor"] == 16.0
