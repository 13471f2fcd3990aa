"""The models that have a name, by their public `config.json`."""

from __future__ import annotations

from typing import Any

from copus_ext.cost_model.model_spec import ModelSpec, llama_ffn


def _llama(name: str, **shape: Any) -> ModelSpec:
    common = {"gated": True, "bias": False, "normalization": "RMSNorm", "tied": False}
    return ModelSpec(name=name, **{**common, **shape})


def _first_llama(
    name: str, num_layers: int, hidden_size: int, *, seq_length: int = 2048
) -> ModelSpec:
    """Of arXiv 2302.13971, and those of its successor without groups: heads of 128 columns."""
    return _llama(
        name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=hidden_size // 128,
        ffn_hidden_size=llama_ffn(hidden_size),
        vocab_size=32000,
        seq_length=seq_length,
    )


PRESETS = {
    spec.name: spec
    for spec in (
        ModelSpec(
            name="gpt3-175b",
            num_layers=96,
            hidden_size=12288,
            num_attention_heads=96,
            seq_length=2048,
            vocab_size=51200,
            learned_positions=2048,
        ),
        _llama(
            "llama-3.2-3b",
            num_layers=28,
            hidden_size=3072,
            num_attention_heads=24,
            num_query_groups=8,
            kv_channels=128,
            ffn_hidden_size=8192,
            vocab_size=128256,
            seq_length=131072,
            tied=True,
        ),
        _first_llama("llama-7b", 32, 4096),
        _first_llama("llama-13b", 40, 5120),
        _first_llama("llama-30b", 60, 6656),
        _first_llama("llama-65b", 80, 8192),
        _first_llama("llama-2-7b", 32, 4096, seq_length=4096),
        _first_llama("llama-2-13b", 40, 5120, seq_length=4096),
        _llama(
            "llama-2-70b",
            num_layers=80,
            hidden_size=8192,
            num_attention_heads=64,
            num_query_groups=8,
            ffn_hidden_size=28672,
            vocab_size=32000,
            seq_length=4096,
        ),
        _llama(
            "qwen2.5-32b",
            num_layers=64,
            hidden_size=5120,
            num_attention_heads=40,
            num_query_groups=8,
            kv_channels=128,
            ffn_hidden_size=27648,
            qkv_bias=True,
            vocab_size=152064,
            seq_length=131072,
        ),
        _llama(
            "llama-3-8b",
            num_layers=32,
            hidden_size=4096,
            num_attention_heads=32,
            num_query_groups=8,
            ffn_hidden_size=14336,
            vocab_size=128256,
            seq_length=8192,
        ),
        _llama(
            "llama-3-70b",
            num_layers=80,
            hidden_size=8192,
            num_attention_heads=64,
            num_query_groups=8,
            ffn_hidden_size=28672,
            vocab_size=128256,
            seq_length=8192,
        ),
        _llama(
            "llama-3.1-405b",
            num_layers=126,
            hidden_size=16384,
            num_attention_heads=128,
            num_query_groups=8,
            ffn_hidden_size=53248,
            vocab_size=128256,
            seq_length=131072,
        ),
        _llama(
            "mixtral-8x7b",
            num_layers=32,
            hidden_size=4096,
            num_attention_heads=32,
            num_query_groups=8,
            ffn_hidden_size=14336,
            num_experts=8,
            moe_router_topk=2,
            vocab_size=32000,
            seq_length=32768,
        ),
        _llama(
            "mixtral-8x22b",
            num_layers=56,
            hidden_size=6144,
            num_attention_heads=48,
            num_query_groups=8,
            ffn_hidden_size=16384,
            num_experts=8,
            moe_router_topk=2,
            vocab_size=32768,
            seq_length=65536,
        ),
        _llama(
            "qwen3-30b-a3b",
            num_layers=48,
            hidden_size=2048,
            num_attention_heads=32,
            num_query_groups=4,
            kv_channels=128,
            ffn_hidden_size=6144,
            qk_layernorm=True,
            num_experts=128,
            moe_router_topk=8,
            moe_ffn_hidden_size=768,
            vocab_size=151936,
            seq_length=40960,
        ),
        _llama(
            "deepseek-v3-sized",
            num_layers=60,
            hidden_size=7168,
            num_attention_heads=128,
            num_query_groups=8,
            kv_channels=96,
            ffn_hidden_size=18432,
            num_experts=256,
            moe_layer_freq="[0]*3+[1]*57",
            moe_router_topk=8,
            moe_ffn_hidden_size=2048,
            moe_shared_expert_intermediate_size=2048,
            vocab_size=129280,
            seq_length=163840,
        ),
        _llama(
            "copus-quickstart",
            num_layers=8,
            hidden_size=256,
            num_attention_heads=8,
            ffn_hidden_size=1024,
            vocab_size=257,
            seq_length=128,
            precision="fp32",
        ),
    )
}
"""Models by name. Their samples are as long as their context, `max_position_embeddings` of the
public `config.json`; GPT-3's is that of arXiv 2005.14165."""

STAND_INS = {
    "deepseek-v3-sized": (
        "plain attention with as many parameters in place of --multi-latent-attention, 60 layers "
        "of 61, so that stages can be even, and no further tokens"
    )
}
"""What models of a known model's size have in place of what the cost model does not know."""
