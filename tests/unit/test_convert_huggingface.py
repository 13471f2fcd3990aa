"""Hugging Face models out and in: every bit, every field, every logit, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from megatron.training import checkpoint_files as files
from megatron.training.arguments import parse_args, resolve, with_checkpoint_args
from megatron.training.checkpoint import model_state, sharding_metadata
from megatron.training.config.model import ModelConfig
from megatron.training.device import use_device
from megatron.training.layout import Layout
from megatron.training.model import build_model
from megatron.training.offline import config_json, contents, huggingface, llama
from megatron.training.offline.archive import open_archive
from megatron.training.offline.refusal import Refused
from megatron.training.offline.target import Wish
from megatron.training.parallel import build_groups, destroy_groups
from tests.helpers.checkpoints import FLAGS, make_checkpoint
from tools import convert_checkpoint

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

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
    code = convert_checkpoint.main([str(a) for a in args])
    return code, capsys.readouterr().err


def make_model(
    folder: Path, *, dtype: torch.dtype = torch.float32, shards: int = 1, **changes: Any
) -> dict[str, torch.Tensor]:
    """A model with random weights, written by safetensors itself."""
    folder.mkdir()
    config = {**CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = llama.shapes_of(llama.arguments_of(config), config["vocab_size"])
    generator = torch.Generator().manual_seed(2)
    tensors = {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}
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
    huggingface.load(tmp_path / "hf", tmp_path / "core", Wish(tp=2), verify=True)
    archive = open_archive(tmp_path / "core", step=None)
    table = archive.read(contents.EMBEDDING)
    assert table.shape == (256, 16) and not table[101:].any()
    outcome = huggingface.save(
        tmp_path / "core", tmp_path / "out", Wish(), verify=True, shard_bytes=5000
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
    rows = llama.join(key, [q, k[:2], v[:2]], flags)[:, 0].tolist()
    assert rows == [0, 1, 10, 20, 2, 3, 11, 21]


def test_out_and_in_keeps_all_but_the_padding(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "a")
    huggingface.save(source, tmp_path / "hf", Wish(), verify=True)
    assert stored(tmp_path / "hf")["model.embed_tokens.weight"].shape == (101, 16)
    huggingface.load(tmp_path / "hf", tmp_path / "b", Wish(vocab=128), verify=True)
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
    source = make_checkpoint(tmp_path / "a")
    huggingface.save(source, tmp_path / "hf", Wish(dtype="fp32"), verify=True)
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
        path.rename(model / f"{path.stem}.bin")
    refused("pickles")
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
    arguments = llama.arguments_of({**CONFIG, "rope_scaling": LLAMA3})
    assert arguments["use_rope_scaling"] and arguments["rope_scaling_factor"] == 16.0
    config = llama.config_of(arguments, 101, torch.float32)
    assert config["rope_scaling"] == {**LLAMA3, "rope_theta": 500000.0}
    assert llama.arguments_of(config) == arguments
    kept = {"rope_scaling": SCALING, "max_position_embeddings": 8192}  # as transformers 5 takes it
    assert llama.arguments_of({**CONFIG, **kept})["rope_scaling_factor"] == 16.0


def test_an_adapter_beside_the_model_is_not_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(tmp_path / "hf")
    (tmp_path / "hf" / "adapter_config.json").write_text("{}")
    code, err = run(capsys, tmp_path / "hf", tmp_path / "a")
    assert code == 3 and "merge the adapter" in err and not (tmp_path / "a").exists()


TINY: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}
# What each family needs to be a network of this trainer, and a window that is switched off.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"sliding_window": 4},
    "qwen3": {"sliding_window": 4},
    "granite": {"attention_multiplier": 8**-0.5},
}
CLASSES = {
    name: transformers.AutoConfig.for_model(name).__class__
    for name in (*FAMILIES, *config_json.REFUSED_FAMILIES)
    if name != "gemma3"  # which holds a gemma3_text
}
Logits = Callable[[Path], torch.Tensor]


def ids() -> torch.Tensor:
    """What the logits are computed of: as long as the positions of `TINY`."""
    return torch.randint(0, 61, (2, 32), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def logits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Logits]:
    """Gives the logits of a checkpoint in the trainer's own model, started with
    `--use-checkpoint-args`."""
    store = tmp_path_factory.mktemp("store") / "store"
    flags = "--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data"
    flags += " --tokenizer-type NullTokenizer --seq-length 32"

    def compute(checkpoint: Path) -> torch.Tensor:
        archive = open_archive(checkpoint, step=None)
        args = with_checkpoint_args(parse_args(flags.split()), archive.arguments)
        rows = archive.arguments["padded_vocab_size"]
        config = resolve(args, 1).replace(padded_vocab_size=rows)
        model = build_model(config, groups, device, draw=False)
        state = model_state(model, sharding_metadata(config, groups))
        loaded: Any = dist_checkpointing.load(state, str(archive.folder))
        (chunk,) = model.unwrapped
        chunk.load_state_dict(loaded["model"])
        chunk.eval()
        with torch.no_grad():
            return chunk(ids(), torch.arange(32).expand(2, 32), None)

    with use_device("cpu") as device:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        groups = build_groups(Layout(tp=1, pp=1, vpp=1, dp=1), timeout_minutes=1)
        yield compute
        destroy_groups()
        dist.destroy_process_group()


def make_random(folder: Path, config: dict[str, Any]) -> torch.Tensor:
    """Writes a model of transformers with random weights beside this very `config.json`; returns
    its logits."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    read = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(read, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        low, high = (0.5, 1.5) if "norm" in name else (-0.5, 0.5)
        torch.nn.init.uniform_(parameter, low, high)
    state = model.state_dict()
    if read.tie_word_embeddings:
        del state["lm_head.weight"]
    safetensors.save_file(state, folder / "model.safetensors")
    with torch.no_grad():
        return model(ids()).logits


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": family, **TINY, **FAMILIES[family], **changes}


def check_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.std() > 0.3  # or the comparison says nothing
    assert (got[..., : expected.shape[-1]] - expected).abs().max() <= 2e-5 * expected.std()


# The form of releases before 5.
V4 = {"rope_parameters": None, "rope_theta": 100.0}
BOTH_WAYS: dict[str, dict[str, Any]] = {
    "llama": config_of("llama", architectures=["LlamaForCausalLM"]),
    "biases": config_of("llama", attention_bias=True, mlp_bias=True),
    "scaled": config_of("llama", rope_parameters={**LLAMA3, "rope_theta": 100.0}),
    "scaled, transformers 4": config_of("llama", **V4, rope_scaling=LLAMA3),
    "mistral": config_of("mistral"),
    "mistral, wide window": config_of("mistral", sliding_window=32),
    "qwen2": config_of("qwen2", tie_word_embeddings=True),
    "qwen2, transformers 4": config_of("qwen2", **V4, max_window_layers=1),
    "qwen2, wide window": config_of("qwen2", use_sliding_window=True, sliding_window=32),
    "qwen3": config_of("qwen3", layer_types=["full_attention"] * 2),
    "qwen3, scaled": config_of("qwen3", rope_parameters={**LLAMA3, "rope_theta": 100.0}),
    "granite": config_of("granite", attention_bias=True, mlp_bias=True),
}


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_logits_are_those_of_transformers_both_ways(
    tmp_path: Path, logits: Logits, name: str
) -> None:
    expected = make_random(tmp_path / "hf", BOTH_WAYS[name])
    huggingface.load(tmp_path / "hf", tmp_path / "core", Wish(), verify=True)
    check_same(logits(tmp_path / "core"), expected)
    huggingface.save(tmp_path / "core", tmp_path / "out", Wish(), verify=True)
    same(stored(tmp_path / "hf"), stored(tmp_path / "out"))
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys"))
    assert model.config.eos_token_id is None
    with torch.no_grad():
        assert torch.equal(model.eval()(ids()).logits, expected)


def test_every_field_of_transformers_is_in_one_table() -> None:
    tables = (config_json.USED, config_json.NEUTRAL.keys(), config_json.BOUND.keys())
    known = set().union(*tables)
    assert len(known) == sum(len(table) for table in tables)
    for family, config in CLASSES.items():
        assert config().to_dict().keys() <= known, family
    # Written by releases before 5.
    assert {"torch_dtype", "rope_theta", "rope_scaling", "pruned_heads", "is_decoder"} <= known


@pytest.mark.parametrize("family", FAMILIES)
def test_an_absent_field_is_what_transformers_takes(family: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 61}
    # 32 heads of width 1, so that a scale of 1 is the usual one.
    sizes |= {"num_attention_heads": 32, "max_position_embeddings": 16}
    whole = CLASSES[family](**sizes).to_dict()
    assert whole["num_key_value_heads"] == (8 if family == "mistral" else 32)
    arguments = llama.arguments_of({"model_type": family, **sizes})
    assert arguments == llama.arguments_of(whole)


# Another value than that of `config_of` for every field that is no neutral one.
CHANGED: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 67,
    "max_position_embeddings": 64,
    "rms_norm_eps": 0.5,
    "tie_word_embeddings": True,
    "attention_dropout": 0.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
    "rope_theta": 5.0,
    "rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": 4.0},
    "hidden_act": "gelu",
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 8,
    "use_sliding_window": True,
    "partial_rotary_factor": 0.5,
    "rope_local_base_freq": 5.0,
    "quantization_config": {"quant_method": "fp8"},
    "compression_config": {"format": "int-quantized"},
    "per_layer_config": {"1": {"head_dim": 4}},
    "pruned_heads": {"0": [1]},
    "auto_map": {"AutoModelForCausalLM": "modeling.Other"},
    "is_causal": False,
    "query_pre_attn_scalar": 256,
    "attention_multiplier": 0.5,
}
SWITCHES = """attention_bias mlp_bias rope_interleaved use_mrope use_bidirectional_attention
is_encoder_decoder add_cross_attention tie_encoder_decoder"""
OTHERS = """sliding_window_pattern _sliding_window_pattern attn_logit_softcapping clip_qkv
final_logit_softcapping embedding_multiplier residual_multiplier logits_scaling logit_scale
cross_attention_hidden_size"""
CHANGED |= dict.fromkeys(SWITCHES.split(), True) | dict.fromkeys(OTHERS.split(), 3)
REFUSED = config_json.BOUND.keys() | {"attention_bias", "mlp_bias"}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_other_field_is_copied_or_refused_by_name(
    tmp_path: Path, logits: Logits, family: str
) -> None:
    fields = (config_json.USED | config_json.BOUND.keys()) - {"model_type", "architectures"}
    is_qwen = family.startswith("qwen")  # whose window has no effect without its switch
    assert fields == CHANGED.keys()
    for name in sorted(fields):
        config = config_of(family, **{name: CHANGED[name]})
        if name in REFUSED and not (is_qwen and name == "sliding_window"):
            with pytest.raises(Refused, match=rf"^config.json: {name} is ") as refusal:
                llama.arguments_of(config)
            assert f"is {CHANGED[name]!r}" in str(refusal.value)
            continue
        if name in ("rope_theta", "rope_scaling"):
            config |= {**V4, name: CHANGED[name]}
        if name == "head_dim" and family == "granite":
            config["attention_multiplier"] = 0.5
        expected = make_random(tmp_path / name, config)
        huggingface.load(tmp_path / name, tmp_path / f"{name}-core", Wish())
        check_same(logits(tmp_path / f"{name}-core"), expected)
        arguments = open_archive(tmp_path / f"{name}-core", step=None).arguments
        assert arguments["attention_dropout"] == (0.5 if name == "attention_dropout" else 0)
        assert llama.config_of(arguments, 61, torch.float32)["attention_dropout"] in (0.5, 0)


NEUTRAL_VALUES = {
    "chunk_size_feed_forward": 2,
    "bos_token_id": 5,
    "eos_token_id": [6, 7],
    "pad_token_id": 3,
    "initializer_range": 0.5,
    "use_cache": False,
    "pretraining_tp": 2,
    "max_window_layers": 1,
    "id2label": {"0": "a", "1": "b", "2": "c"},
    "label2id": {"a": 0, "b": 1, "c": 2},
    "problem_type": "regression",
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0",
    "max_length": 7,
    "temperature": 0.5,
    "is_llama_config": True,
    "output_hidden_states": True,
    "output_attentions": True,
}
BOUND_VALUES = {
    "layer_types": ["full_attention"] * 2,
    "sliding_window": 32,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "query_pre_attn_scalar": 8,
    "attention_multiplier": 8**-0.5,
    "is_causal": True,
    "hidden_act": "silu",
    "hidden_activation": "silu",
    "logit_scale": 1,
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0),
    **dict.fromkeys(("rope_interleaved", "use_mrope", "use_bidirectional_attention"), False),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv")),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_neutral_fields_change_no_logit(tmp_path: Path, logits: Logits, family: str) -> None:
    changed = NEUTRAL_VALUES.keys() | BOUND_VALUES.keys()
    assert changed <= config_json.NEUTRAL.keys() | config_json.BOUND.keys()
    # Without return_dict the model of transformers returns tuples.
    left = CLASSES[family]().to_dict().keys() - config_json.USED - changed
    assert left == {"_name_or_path", "return_dict", "is_encoder_decoder"}
    plain = make_random(tmp_path / "plain", config_of(family))
    expected = make_random(tmp_path / "hf", config_of(family, **NEUTRAL_VALUES, **BOUND_VALUES))
    assert torch.equal(plain, expected)
    huggingface.load(tmp_path / "hf", tmp_path / "core", Wish())
    check_same(logits(tmp_path / "core"), expected)


# Flags without a field: how weights are drawn, rows padded and outputs dropped; older spellings of
# flags that are stored beside them.
OF_NO_FIELD = """init_method_std hidden_dropout make_vocab_size_divisible_by
pad_vocab_for_tensor_parallel_size padded_vocab_size vocab_size use_rotary_position_embeddings
add_position_embedding"""
ANOTHER = {"normalization": "LayerNorm", "position_embedding_type": "none", "rotary_percent": 0.5}


def test_every_flag_of_a_model_is_exported_or_refused() -> None:
    flags = {**FLAGS, "use_rope_scaling": True, "rope_scaling_factor": 4.0}
    flags |= {"qk_layernorm": False, "add_qkv_bias": False, "squared_relu": False}
    before = llama.config_of(flags, 100, torch.float32)
    kept = []
    for name in [f.name for f in dataclasses.fields(ModelConfig)]:
        value = flags.get(name)
        changed = not value if value is None or isinstance(value, bool) else value * 2
        other = ANOTHER.get(name, changed)
        try:
            after = llama.config_of({**flags, name: other}, 100, torch.float32)
        except Refused as refusal:
            assert str(refusal).startswith(f"{name} is "), refusal
            continue
        if after == before:
            kept.append(name)
    assert sorted(kept) == sorted(OF_NO_FIELD.split())
