"""Imported models give the logits of `transformers`, which reads what is exported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.trainer.extras.convert.target import Changes
from megatron.trainer.extras.huggingface import exchange
from tests.extras.huggingface.worker import LOGITS_TP, TRAINED, VOCAB_SIZE, tokens
from tests.helpers.jobs import TEXT
from tests.helpers.launch import ROOT
from tests.helpers.on_ranks import on_ranks

transformers = pytest.importorskip("transformers")

MODELS = ("hf-tied", "hf-untied", "hf-scaled", "hf-qwen2", "hf-qwen3", "hf-mixtral")
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def make_model(folder: Path) -> None:
    torch.manual_seed(3)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 5000.0}
    if folder.name == "hf-scaled":
        rope |= {"rope_type": "llama3", "original_max_position_embeddings": 8192, **SCALING}
    family = folder.name.removeprefix("hf-")
    config = transformers.AutoConfig.for_model(
        family if family in ("qwen2", "qwen3", "mixtral") else "llama",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=32,
        rms_norm_eps=1e-6,
        tie_word_embeddings=folder.name == "hf-tied",
        rope_parameters=rope,
        initializer_range=0.2,
        **({"num_local_experts": 4} if family == "mixtral" else {}),
    )
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)


def read(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("huggingface")
    for name in MODELS:
        make_model(folder / name)
    on_ranks("tests.extras.huggingface.worker", folder, 2, timeout_s=600)
    return folder


@pytest.mark.parametrize("tp", LOGITS_TP)
@pytest.mark.parametrize("name", MODELS)
def test_an_imported_model_gives_the_logits_of_transformers(
    output: Path, name: str, tp: int
) -> None:
    model = read(output / name)
    with torch.no_grad():
        expected = model(tokens()).logits
    got = torch.load(output / f"logits-{name}-{tp}.pt", weights_only=True)
    assert got.shape[-1] == 256
    assert expected.std() > 0.3  # or the comparison says nothing
    assert (got[..., :VOCAB_SIZE] - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_what_is_exported(output: Path, tmp_path: Path, name: str) -> None:
    original = read(output / name)
    exchange.save(output / f"imported-{name}-2", tmp_path / "hf", Changes(), shard_bytes=9000)
    exported, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys"))
    with torch.no_grad():
        assert torch.equal(exported.eval()(tokens()).logits, original(tokens()).logits)


def test_transformers_reads_a_trained_checkpoint(output: Path, tmp_path: Path) -> None:
    source = output / TRAINED
    exchange.save(source, tmp_path / "hf", Changes(dtype="fp32"), verify=True)
    model = read(tmp_path / "hf")
    ids = torch.arange(64).reshape(2, 32)
    with torch.no_grad():
        loss = float(model(ids, labels=ids).loss)
    assert model.config.vocab_size == 128
    assert 4 < loss < 6  # ln 128 = 4.85 after two steps


def test_training_from_a_model_says_how_to_convert_it(tmp_path: Path) -> None:
    """It would start from scratch, as if the folder were empty."""
    (model := tmp_path / "model").mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    more = ["--load", str(model), "--run-dir", str(tmp_path / "run")]
    shape = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
    sizes = "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 2 --lr 1e-3"
    rest = f"--train-iters 1 {TEXT}"
    words = [*shape.split(), *sizes.split(), *rest.split(), *more]
    done = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), *words],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 2, done.stderr
    assert f"--load {model} is a Hugging Face model, no checkpoint; make one with" in done.stderr
