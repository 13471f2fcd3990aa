"""Mixtures of experts as Hugging Face models: which are read and written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.trainer.common.errors import Refused
from megatron.trainer.extras.convert import command as convert_checkpoint
from megatron.trainer.extras.convert.target import Changes
from megatron.trainer.extras.huggingface import config_json, exchange, experts
from tests.helpers.checkpoints import MIXTURE, command, make_checkpoint

CONFIGS: dict[str, dict[str, Any]] = {
    name: {
        "model_type": name,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 61,
        "max_position_embeddings": 32,
        experts.FAMILIES[name].count[0]: 4,
        "num_experts_per_tok": 2,
    }
    for name in experts.FAMILIES
}


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mixtral", {"sliding_window": 16}, "sliding_window is 16"),
        ("mixtral", {"num_experts": 8}, "num_local_experts is 4 and num_experts is 8"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, of 4 experts"),
        ("mixtral", {"norm_topk_prob": False}, "norm_topk_prob is False, a field unknown"),
        ("mixtral", {"router_aux_loss_coef": -1}, "router_aux_loss_coef is -1"),
        ("qwen2_moe", {"num_experts": 0}, "num_experts is 0"),
        ("qwen2_moe", {"shared_expert_intermediate_size": None}, "shared_expert_inter"),
        ("qwen2_moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window"),
        ("qwen3_moe", {"decoder_sparse_step": 5}, "no layer has experts"),
        ("qwen3_moe", {"mlp_only_layers": "0"}, "mlp_only_layers is '0'"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "a field unknown here"),
    ],
    ids=str,
)
def test_a_configuration_that_is_no_mixture_of_the_trainer_is_refused(
    family: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(Refused, match=r"^config\.json: ") as refusal:
        config_json.arguments_of({**CONFIGS[family], **changes})
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias is True"),
        ({"moe_router_score_function": "sigmoid"}, "moe_router_score_function is 'sigmoid'"),
        ({"moe_router_num_groups": 2, "moe_router_group_topk": 1}, "moe_router_num_groups is 2"),
        ({"moe_router_topk_scaling_factor": 2.5}, "moe_router_topk_scaling_factor is 2.5"),
        ({"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor is 1.0"),
        ({"add_bias_linear": True}, "add_bias_linear is True"),
        ({"moe_router_load_balancing_type": ["sinkhorn"]}, "moe_router_load_balancing_type is"),
        ({"moe_router_pre_softmax": True}, "moe_router_pre_softmax is True"),
        ({"moe_layer_freq": "2"}, "moe_layer_freq is '2'"),
        ({"add_qkv_bias": True}, "add_qkv_bias is True"),
        ({"moe_shared_expert_intermediate_size": 8}, "moe_shared_expert_gate is None"),
        (
            {
                "moe_shared_expert_intermediate_size": 8,
                "moe_shared_expert_gate": True,
                "qk_layernorm": True,
            },
            "qk_layernorm is True",
        ),
    ],
    ids=str,
)
def test_a_mixture_that_no_configuration_expresses_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: dict[str, Any], words: str
) -> None:
    source = make_checkpoint(tmp_path / "a", optimizer="none", **{**MIXTURE, **flags})
    code, _, err = command(capsys, convert_checkpoint, source, tmp_path / "hf", "--format", "hf")
    assert code == 3 and words in err and err.count("\n") == 1, err
    assert not (tmp_path / "hf").exists()


def test_what_acts_in_training_only_is_left_out_with_a_note(tmp_path: Path) -> None:
    training = {"moe_z_loss_coeff": 1e-3, "moe_aux_loss_coeff": [0.01, 0.1]}
    training["moe_router_load_balancing_type"] = ["aux_loss", "seq_aux_loss"]
    source = make_checkpoint(tmp_path / "a", **{**MIXTURE, **training})
    outcome = exchange.save(source, tmp_path / "hf", Changes(), verify=True)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["model_type"] == "mixtral" and config["router_aux_loss_coef"] == 0.02
    assert "router_aux_loss_coef 0.02 is --moe-aux-loss-coeff 0.01" in outcome.notes[0]
    assert "moe_z_loss_coeff, seq_aux_loss" in outcome.notes[1]


def test_the_balance_loss_of_transformers_has_the_same_strength() -> None:
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    topk, logits = 2, torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
    theirs = mixtral.load_balancing_loss_func((logits,) * 4, num_experts=4, top_k=topk)
    scores = logits.softmax(dim=-1)
    chosen = torch.zeros_like(scores).scatter(1, scores.topk(topk).indices, 1.0)
    ours = 4 * (chosen.sum(dim=0) / chosen.sum() * scores.mean(dim=0)).sum()
    arguments = config_json.arguments_of({**CONFIGS["mixtral"], "router_aux_loss_coef": 0.5})
    (weight,) = arguments["moe_aux_loss_coeff"]
    assert 4 * weight * float(ours) == pytest.approx(0.5 * float(theirs))


@pytest.mark.parametrize(
    ("fields", "freq"),
    [
        ({}, "1"),
        ({"decoder_sparse_step": 2}, "[0]*1+[1]*1+[0]*1+[1]*1"),
        ({"mlp_only_layers": [0]}, "[0]*1+[1]*3"),
        ({"mlp_only_layers": [3], "decoder_sparse_step": 2}, "[0]*1+[1]*1+[0]*2"),
    ],
    ids=str,
)
def test_layers_with_experts_go_both_ways(fields: dict[str, Any], freq: str) -> None:
    arguments = config_json.arguments_of({**CONFIGS["qwen3_moe"], **fields})
    assert arguments["moe_layer_freq"] == freq
    config = config_json.config_of(arguments, 61, torch.float32)
    assert config_json.arguments_of(config) == arguments
    if len(fields) == 1:
        assert {key: config[key] for key in fields} == fields
