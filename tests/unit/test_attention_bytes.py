"""The bytes that a score costs are those that megatron-core's own attention moves."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import GlobalMemoryBuffer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.layer_time import attention_s, core_backward
from tests.unit.test_implementation import rows_of

TOKENS, SAMPLES, HEADS, CHANNELS = 64, 2, 4, 16
SCORES = SAMPLES * HEADS * TOKENS * TOKENS


class ScoreBytes(TorchDispatchMode):
    """Adds up the bytes that operators read and write of tensors that hold every score."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        written = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        places = {x.untyped_storage().data_ptr() for x in read}
        is_view = all(x.untyped_storage().data_ptr() in places for x in written)
        if (is_view and not func._schema.is_mutable) or not read:
            return out
        if func is torch.ops.aten.baddbmm.default and kwargs["beta"] == 0:
            read = read[1:]  # then cuBLAS does not look at what is added
        times = 1
        if func is torch.ops.aten.masked_fill.Scalar:
            times = 2  # a copy is made and then filled (ATen, TensorAdvancedIndexing.cpp)
        whole = [x for x in (*read, *written) if x.numel() == SCORES]
        self.moved += times * sum(x.numel() * x.element_size() for x in whole)
        return out


def attention(monkeypatch: pytest.MonkeyPatch) -> DotProductAttention:
    """megatron-core's in bf16, with the softmax that its configuration has by default: in fp32, and
    no fused kernel."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(parallel_state, "_GLOBAL_MEMORY_BUFFER", GlobalMemoryBuffer())
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * CHANNELS,
        num_attention_heads=HEADS,
        bf16=True,
        params_dtype=torch.bfloat16,
        attention_dropout=0.0,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
    )
    alone: Any = SimpleNamespace(size=lambda: 1)
    groups = ProcessGroupCollection(tp=alone)
    return DotProductAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)


def traced(attend: DotProductAttention) -> tuple[float, float]:
    """Bytes of a score, forward and backward."""
    shape = TOKENS, SAMPLES, HEADS, CHANNELS
    inputs = [torch.randn(shape, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    mask = torch.ones(1, 1, TOKENS, TOKENS).triu(1).bool()
    with ScoreBytes() as forward:
        out = attend(*inputs, mask)
    with ScoreBytes() as backward:
        out.sum().backward()
    assert all(x.grad is not None for x in inputs)
    return forward.moved / SCORES, backward.moved / SCORES


def test_a_softmax_in_torch_moves_what_is_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = traced(attention(monkeypatch))
    rows = rows_of(fused_attention=False, softmax_in_fp32=True)
    # Products cost nothing here, so that bytes are left.
    c = dataclasses.replace(Constants(), attention_efficiency=1e30, memory_factor=1.0)
    core = attention_s(rows, c)
    scores = float(rows.tokens[0] * rows.num_attention_heads[0] / rows.tp[0] * rows.seq_length[0])
    each = float(rows.hbm_bytes_per_s[0]) / scores
    assert core[0] * each == pytest.approx(forward)
    assert core_backward(rows, c, core)[0] * each == pytest.approx(backward)
