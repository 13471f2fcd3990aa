"""Networks of Hugging Face models: every field of `config.json` is copied, neutral or refused, and
logits are those of `transformers`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing

from megatron.trainer.checkpoint.save import model_state, sharding_metadata
from megatron.trainer.common.errors import Refused
from megatron.trainer.config.arguments import parse_args, resolve, with_checkpoint_args
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.model import ModelConfig
from megatron.trainer.config.moe import MoeConfig
from megatron.trainer.distributed.process_groups import build_groups
from megatron.trainer.extras.convert.target import Changes
from megatron.trainer.extras.huggingface import config_json, exchange, experts
from megatron.trainer.extras.inspect_checkpoint.archive import open_archive
from megatron.trainer.model.gpt import build_model
from tests.helpers.checkpoints import FLAGS, MIXTURE
from tests.helpers.one_rank import cpu_of_one

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

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
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "sliding_window": 4,
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 20,
    },
    "qwen3_moe": {
        "sliding_window": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "norm_topk_prob": True,
    },
}
MIXTURES = [*experts.FAMILIES]
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
def logits() -> Iterator[Logits]:
    """Gives the logits of a checkpoint in the trainer's own model, started with
    `--use-checkpoint-args`."""
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

    with cpu_of_one() as device:
        groups = build_groups(Layout(tp=1, pp=1, vpp=1, dp=1), timeout_minutes=1)
        yield compute


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
    "mixtral": config_of("mixtral", sliding_window=None),
    "mixtral, transformers 4": config_of("mixtral", **V4, router_jitter_noise=0.0),
    "mixtral, wide window": config_of("mixtral", sliding_window=32, num_key_value_heads=1),
    "qwen2_moe": config_of("qwen2_moe"),
    "qwen2_moe, in part": config_of("qwen2_moe", decoder_sparse_step=2, tie_word_embeddings=True),
    "qwen2_moe, without bias": config_of("qwen2_moe", qkv_bias=False, norm_topk_prob=True),
    "qwen3_moe": config_of("qwen3_moe"),
    "qwen3_moe, in part": config_of("qwen3_moe", mlp_only_layers=[1], norm_topk_prob=False),
}


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_logits_are_those_of_transformers_both_ways(
    tmp_path: Path, logits: Logits, name: str
) -> None:
    expected = make_random(tmp_path / "hf", BOTH_WAYS[name])
    exchange.load(tmp_path / "hf", tmp_path / "core", Changes(), verify=True)
    check_same(logits(tmp_path / "core"), expected)
    exchange.save(tmp_path / "core", tmp_path / "out", Changes(), verify=True)
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys"))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    assert model.config.eos_token_id == theirs.eos_token_id
    with torch.no_grad():
        assert torch.equal(model.eval()(ids()).logits, expected)


def test_every_field_of_transformers_is_in_one_table() -> None:
    of_experts = set().union(*(family.fields for family in experts.FAMILIES.values()))
    tables = (config_json.USED, config_json.NEUTRAL.keys(), config_json.BOUND.keys(), of_experts)
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
    groups = {"mistral": 8, "mixtral": 8, "qwen2_moe": 16, "qwen3_moe": 4}
    assert whole["num_key_value_heads"] == groups.get(family, 32)
    arguments = config_json.arguments_of({"model_type": family, **sizes})
    assert arguments == config_json.arguments_of(whole)


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
    "router_jitter_noise": 0.1,
}
CHANGED_EXPERTS: dict[str, Any] = {
    "num_local_experts": 6,
    "num_experts": 6,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
    "norm_topk_prob": False,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [0],
    "router_aux_loss_coef": 0.5,
    "qkv_bias": False,
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
    copied = {}
    for name in sorted(fields):
        if name in REFUSED and not (is_qwen and name == "sliding_window"):
            with pytest.raises(Refused, match=rf"^config.json: {name} is ") as refusal:
                config_json.arguments_of(config_of(family, **{name: CHANGED[name]}))
            assert f"is {CHANGED[name]!r}" in str(refusal.value)
        else:
            copied[name] = CHANGED[name]
    mixture = experts.FAMILIES.get(family)
    for name, value in CHANGED_EXPERTS.items():
        if mixture is None or name not in mixture.fields:
            with pytest.raises(Refused, match=f"{name} is .* a field unknown here"):
                config_json.arguments_of(config_of(family, **{name: value}))
        elif name not in mixture.count[1:]:
            copied[name] = value
    if family == "granite":
        copied["attention_multiplier"] = 0.5  # goes with its width of a head
    # The others at once, in the form of today and in that of releases before 5; each has its effect
    # on the logits.
    old_form = {name: copied.pop(name) for name in ("rope_theta", "rope_scaling")}
    for form in (copied, {**V4, **old_form}):
        config, name = config_of(family, **form), f"hf{len(form)}"
        expected = make_random(tmp_path / name, config)
        exchange.load(tmp_path / name, tmp_path / f"{name}-core", Changes())
        check_same(logits(tmp_path / f"{name}-core"), expected)
        arguments = open_archive(tmp_path / f"{name}-core", step=None).arguments
        assert arguments["attention_dropout"] == (0.5 if form is copied else 0)
        exported = config_json.config_of(arguments, 61, torch.float32)
        assert exported["attention_dropout"] == arguments["attention_dropout"]
        told = {name: form[name] for name in CHANGED_EXPERTS if name in form}
        if "mlp_only_layers" in told:
            told["mlp_only_layers"] = []  # the step says it already
        assert {name: exported[name] for name in told} == told
        assert arguments["hidden_dropout"] == 0


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
    "output_router_logits": True,
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
    "router_jitter_noise": 0.0,
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
    left -= experts.FAMILIES[family].fields if family in MIXTURES else set()
    assert left == {"_name_or_path", "return_dict", "is_encoder_decoder"}
    plain = make_random(tmp_path / "plain", config_of(family))
    expected = make_random(tmp_path / "hf", config_of(family, **NEUTRAL_VALUES, **BOUND_VALUES))
    assert torch.equal(plain, expected)
    exchange.load(tmp_path / "hf", tmp_path / "core", Changes())
    check_same(logits(tmp_path / "core"), expected)


# Flags without a field: how weights are drawn, rows padded and outputs dropped; older spellings of
# flags that are stored beside them; what counts only with multi-latent attention or further tokens.
OF_NO_FIELD = """init_method_std init_method_xavier_uniform embedding_init_method_std hidden_dropout
make_vocab_size_divisible_by pad_vocab_for_tensor_parallel_size padded_vocab_size vocab_size
use_rotary_position_embeddings add_position_embedding q_lora_rank kv_lora_rank qk_head_dim
qk_pos_emb_head_dim v_head_dim rotary_scaling_factor mscale mscale_all_dim rope_type
mtp_loss_scaling_factor"""
# Flags that this trainer may not have, and Megatron-LM stores.
STORED_BY_MEGATRON_LM = """rotary_interleaved rotary_seq_len_interpolation_factor no_rope_freq
mrope_section apply_layernorm_1p apply_residual_connection_post_layernorm squared_relu quick_geglu
glu_linear_offset activation_func_clamp_value qk_l2_norm attention_output_gate softmax_type
multi_latent_attention window_size experimental_attention_variant linear_attention_freq
num_experts mtp_num_layers spec is_hybrid_model heterogeneous_layers_config_path"""
ANOTHER = {"normalization": "LayerNorm", "position_embedding_type": "none", "rotary_percent": 0.5}


def test_every_flag_of_a_model_is_exported_or_refused() -> None:
    flags = {**FLAGS, "use_rope_scaling": True, "rope_scaling_factor": 4.0}
    flags |= {"qk_layernorm": False, "add_qkv_bias": False, "squared_relu": False}
    before = config_json.config_of(flags, 100, torch.float32)
    kept = []
    fields = {f.name for f in dataclasses.fields(ModelConfig)}
    for name in sorted(fields.union(STORED_BY_MEGATRON_LM.split())):
        value = flags.get(name)
        changed = not value if value is None or isinstance(value, bool) else value * 2
        other = ANOTHER.get(name, changed)
        try:
            after = config_json.config_of({**flags, name: other}, 100, torch.float32)
        except Refused as refusal:
            assert str(refusal).startswith(f"{name} is "), refusal
            continue
        if after == before:
            kept.append(name)
    assert sorted(kept) == sorted(OF_NO_FIELD.split())


# Flags of a mixture that say how it is trained, or how it is computed.
OF_NO_FIELD_OF_EXPERTS = """moe_router_dtype moe_balance moe_balance_samples moe_z_loss_coeff
moe_router_bias_update_rate moe_input_jitter_eps moe_pad_expert_input_to_capacity
moe_token_drop_policy moe_token_dispatcher_type moe_flex_dispatcher_backend
moe_grouped_gemm moe_permute_fusion
moe_router_fusion moe_shared_expert_overlap moe_layer_recompute moe_layers moe_shared_expert_gate"""
ANOTHER_OF_EXPERTS = {
    "moe_layer_freq": "[0]*1+[1]*3",
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": ("sinkhorn",),
    "moe_aux_loss_coeff": (0.1,),
    "moe_router_topk": 3,
    "moe_router_topk_scaling_factor": 2.5,
}


@pytest.mark.parametrize("more", [{}, {"qk_layernorm": True}], ids=["mixtral", "qwen3_moe"])
def test_every_flag_of_experts_is_exported_or_refused(more: dict[str, Any]) -> None:
    defaults = {f.name: f.default for f in dataclasses.fields(MoeConfig)}
    flags = {**defaults, **MIXTURE, **more}
    before, kept, refused = config_json.config_of(flags, 100, torch.float32), [], []
    for name in sorted(defaults):
        value = flags[name]
        changed = (not value) if value is None or isinstance(value, bool) else f"{value} or other"
        changed = value * 2 if isinstance(value, int) and value is not False else changed
        other = ANOTHER_OF_EXPERTS.get(name, changed)
        try:
            after = config_json.config_of({**flags, name: other}, 100, torch.float32)
        except Refused as refusal:
            assert str(refusal).startswith((f"{name} is ", "moe_shared_expert_gate is ", "qk_")), (
                refusal
            )
            refused.append(name)
            continue
        if after == before:
            kept.append(name)
    assert sorted(kept) == sorted(OF_NO_FIELD_OF_EXPERTS.split())
    assert "moe_router_enable_expert_bias" in refused and "moe_expert_capacity_factor" in refused


@pytest.mark.parametrize("name", [name for name in BOTH_WAYS if name.startswith(tuple(MIXTURES))])
def test_experts_in_one_tensor_and_in_many_are_the_same_model(tmp_path: Path, name: str) -> None:
    config = BOTH_WAYS[name]
    make_random(tmp_path / "hf", config)
    stacked = safetensors.load_file(tmp_path / "hf" / "model.safetensors")
    assert any(key.endswith("mlp.experts.gate_up_proj") for key in stacked)
    exchange.load(tmp_path / "hf", tmp_path / "a", Changes(), verify=True)
    exchange.save(tmp_path / "a", tmp_path / "many", Changes(), verify=True)
    names = safetensors.load_file(tmp_path / "many" / "model.safetensors").keys()
    family = experts.FAMILIES[config["model_type"]]
    assert f"model.layers.1.{family.block}.gate.weight" in names or "in part" in name
    for part in family.projections:
        assert any(key.endswith(f".{family.block}.experts.3.{part}.weight") for key in names)
    exchange.load(tmp_path / "many", tmp_path / "b", Changes(), verify=True)
    first, second = (open_archive(tmp_path / folder, step=None) for folder in "ab")
    assert first.tensors.keys() == second.tensors.keys()
    assert all(torch.equal(first.read(key), second.read(key)) for key in first.tensors)
    assert first.arguments == second.arguments
    written = json.loads((tmp_path / "many" / "config.json").read_text())
    read = transformers.AutoConfig.from_pretrained(tmp_path / "hf").to_dict()
    read[family.count[0]] = 4
    fields = {*family.fields, "intermediate_size"} - {*family.count[1:]}
    assert {key: written[key] for key in fields} == {key: read[key] for key in fields}
