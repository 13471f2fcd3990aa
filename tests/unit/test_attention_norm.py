"""Our norm and attention against the ones they replace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from megatron.trainer.model.attention import SdpaAttention
from megatron.trainer.model.norm import Norm


def config(**values: Any) -> Any:
    base = {
        "layernorm_zero_centered_gamma": False,
        "kv_channels": 8,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "attention_dropout": 0.0,
        "apply_query_key_layer_scaling": False,
        "context_parallel_size": 1,
        "cp_comm_type": None,
        "normalization": "RMSNorm",
        "params_dtype": torch.float32,
        "sequence_parallel": True,
    }
    return SimpleNamespace(**{**base, **values})


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("layer_scaling", [False, True])
def test_attention_is_causal_softmax_attention(groups: int, layer_scaling: bool) -> None:
    seq, batch, heads, size, layer = 7, 3, 4, 8, 3
    torch.manual_seed(0)
    query = torch.randn(seq, batch, heads, size)
    key, value = torch.randn(2, seq, batch, groups, size).unbind()
    settings = config(num_query_groups=groups, apply_query_key_layer_scaling=layer_scaling)
    attention = SdpaAttention(settings, layer, AttnMaskType.causal, "self")
    got = attention(query, key, value, None)
    k, v = (t.repeat_interleave(heads // groups, dim=2) for t in (key, value))
    scores = torch.einsum("sbhd,tbhd->bhst", query, k) / size**0.5
    scores = scores.masked_fill(torch.ones(seq, seq).triu(1).bool(), float("-inf"))
    want = torch.einsum("bhst,tbhd->sbhd", scores.softmax(dim=-1), v)
    torch.testing.assert_close(got, want.reshape(seq, batch, heads * size))
    # A token behind a cache looks back on all of it.
    last = attention(query[-1:], key, value, None, attn_mask_type=AttnMaskType.no_mask)
    torch.testing.assert_close(last, got[-1:])


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norm_equals_torch_and_marks_its_parameters(kind: str) -> None:
    norm = Norm(config(normalization=kind), 16, eps=1e-4)
    reference = getattr(torch.nn, kind)(16, eps=1e-4)
    x = torch.randn(5, 16)
    torch.testing.assert_close(norm(x), reference(x))
    assert {name for name, _ in norm.named_parameters()} == {
        name for name, _ in reference.named_parameters()
    }
    assert all(p.sequence_parallel for p in norm.parameters())  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_a_scale_stored_minus_one_is_the_same_norm(kind: str) -> None:
    plain = Norm(config(normalization=kind), 16)
    centred = Norm(config(normalization=kind, layernorm_zero_centered_gamma=True), 16)
    assert not centred.weight.any() and plain.weight.all()
    scale, x = torch.rand(16), torch.randn(5, 16)
    plain.weight.data.copy_(1.0 + scale)
    centred.weight.data.copy_(scale)
    torch.testing.assert_close(centred(x), plain(x))


def test_values_may_be_narrower_than_queries() -> None:
    settings = config(num_query_groups=4)
    wide = SdpaAttention(settings, 1, AttnMaskType.causal, "self")
    narrow = SdpaAttention(settings, 1, AttnMaskType.causal, "self", v_channels=3)
    query, key, value = torch.randn(3, 7, 2, 4, 8).unbind()
    whole = wide(query, key, value, None).view(7, 2, 4, 8)
    torch.testing.assert_close(
        narrow(query, key, value[..., :3], None).view(7, 2, 4, 3), whole[..., :3]
    )


def test_an_unknown_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="--normalization"):
        Norm(config(normalization="L2Norm"), 16)
