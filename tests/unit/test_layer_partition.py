"""Cuts are read as megatron-core reads them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.layer_partition import (
    partition_of_ends,
    partition_of_text,
    partition_with_ends_counted,
    text_of_partition,
)
from megatron.trainer.config.layout import Layout

core: Any = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
pieces = st.recursive(
    st.sampled_from(["t", "tt", "|", "t|", ",", "E", "L"]),
    lambda inner: st.builds(
        lambda a, b, n: f"{a}({b})*{n}" if n else a + b,
        inner.filter(lambda s: "(" not in s),
        inner.filter(lambda s: "(" not in s and s.strip(",")),
        st.integers(0, 3),
    ),
    max_leaves=4,
)


@settings(max_examples=300)
@given(pieces)
def test_texts_mean_what_megatron_core_takes_them_to_mean(inner: str) -> None:
    text = f"E{inner}L"
    theirs = core.PipelineParallelLayerLayout.parse_str_to_list(text)
    layers = sum(chunk.count(core.LayerType.decoder) for chunk in theirs)
    flat = [kind for chunk in theirs for kind in chunk]
    legal = (
        flat.count(core.LayerType.embedding) == 1
        and flat.count(core.LayerType.loss) == 1
        and layers > 0
    )
    if not legal:
        if layers:
            with pytest.raises(UsageError):
                partition_of_text(text, num_layers=layers)
        return
    wanted = tuple(chunk.count(core.LayerType.decoder) for chunk in theirs)
    assert partition_of_text(text, num_layers=layers) == wanted
    with pytest.raises(UsageError, match=f"--num-layers {layers + 1}"):
        partition_of_text(text, num_layers=layers + 1)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=24).filter(any))
def test_a_text_comes_back(cut: list[int]) -> None:
    assert partition_of_text(text_of_partition(cut), num_layers=sum(cut)) == tuple(cut)


def _core_counts(layers: int, layout: Layout, **how: Any) -> tuple[int, ...]:
    """Layers of every chunk as megatron-core builds them from its own flags."""
    from unittest import mock

    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

    virtual = layout.vpp if layout.vpp > 1 else None
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_dtype=__import__("torch").float32,
        **how,
    )
    with mock.patch.object(
        parallel_state, "get_virtual_pipeline_model_parallel_world_size", return_value=virtual
    ):
        return tuple(
            get_num_layers_to_build(
                config, vp_stage=k // layout.pp if virtual else None, pp_rank=k % layout.pp
            )
            for k in range(layout.pp * layout.vpp)
        )


@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize(("first", "last"), [(4, None), (None, 2), (4, 2), (2, 6)])
def test_ends_are_those_of_megatron_core(vpp: int, first: Any, last: Any) -> None:
    given_ends = [n for n in (first, last) if n]
    layout = Layout(pp=4, vpp=vpp)
    layers = sum(given_ends) + (4 - len(given_ends)) * 4
    cut = partition_of_ends(num_layers=layers, pp=4, vpp=vpp, first=first, last=last)
    assert cut == _core_counts(
        layers,
        layout,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
    )


@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize(("embedding", "loss"), [(True, False), (False, True), (True, True)])
def test_counted_ends_are_those_of_megatron_core(vpp: int, embedding: bool, loss: bool) -> None:
    layout = Layout(pp=2, vpp=vpp)
    layers = 8 - embedding - loss
    cut = partition_with_ends_counted(
        num_layers=layers, pp=2, vpp=vpp, embedding=embedding, loss=loss
    )
    assert cut == _core_counts(
        layers,
        layout,
        account_for_embedding_in_pipeline_split=embedding,
        account_for_loss_in_pipeline_split=loss,
    )
