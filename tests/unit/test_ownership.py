"""Ownership from names and shapes: nothing is lost, and nothing counts twice. That it is the live
model's under every kind of layout, tests/distributed/test_ownership.py shows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.cost_model.models import PRESETS
from copus_ext.reshard import ownership
from copus_ext.reshard.ownership import all_of_layout, rank_of
from copus_ext.reshard.parameters import WORDS
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.model_shape import LatentShape, ModelShape
from megatron.trainer.distributed.sharding import Record

TOY = ModelShape(
    num_layers=2,
    hidden_size=6,
    ffn_hidden_size=8,
    num_attention_heads=2,
    num_query_groups=2,
    kv_channels=3,
    padded_vocab_size=32,
    gated=True,
)


def latent_widths(tp: int) -> st.SearchStrategy[LatentShape]:
    few = st.integers(1, 3)
    return st.builds(
        LatentShape,
        q_lora_rank=st.none() | few.map(lambda n: n * tp),
        kv_lora_rank=few.map(lambda n: n * tp),
        qk_head_dim=few,
        qk_pos_emb_head_dim=st.just(2 * tp),
        v_head_dim=few,
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelShape, Layout]:
    tp, pp = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.integers(1, 4))
    vpp = draw(st.integers(1, 2)) if pp > 1 else 1
    dp = draw(st.integers(1, 512 // (tp * pp)))
    divisors = [n for n in range(1, tp + 1) if tp % n == 0]
    groups = draw(st.sampled_from([*divisors, 2 * tp]))
    heads = math.lcm(tp, groups) * draw(st.integers(1, 2))
    channels = draw(st.integers(1, 3))
    if (heads + 2 * groups) * channels % tp:
        channels *= tp
    further = draw(st.integers(0, 2))
    shape = ModelShape(
        num_layers=pp * vpp * draw(st.integers(1, 2)),
        hidden_size=draw(st.integers(1, 24)) * (tp if further else 1),
        ffn_hidden_size=tp * draw(st.integers(1, 5)),
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=channels,
        padded_vocab_size=tp * draw(st.integers(1, 20)),
        learned_positions=draw(st.integers(0, 9)),
        gated=draw(st.booleans()),
        linear_bias=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        normalization=draw(st.sampled_from(["LayerNorm", "RMSNorm"])),
        qk_layernorm=draw(st.booleans()),
        tied=draw(st.booleans()) and not (further and pp > 1),
        latent=draw(st.none() | latent_widths(tp)),
        mtp_num_layers=further,
        fused_norm=draw(st.booleans()),
        use_distributed_optimizer=draw(st.integers(0, 3)) > 0,
        overlap_grad_reduce=draw(st.booleans()),
        ddp_bucket_size=draw(st.none() | st.integers(1, 2000)),
        use_tp_pp_dp_mapping=draw(st.booleans()),
    )
    return shape, Layout(tp=tp, pp=pp, vpp=vpp, dp=dp)


def rank_at(shape: ModelShape, layout: Layout, tp: int, pp: int, dp: int) -> int:
    return rank_of(tp, pp, dp, layout, use_tp_pp_dp_mapping=shape.use_tp_pp_dp_mapping)


def counts(records: Iterable[Record]) -> dict[str, np.ndarray]:
    """How often every element of every tensor is there."""
    found: dict[str, np.ndarray] = {}
    for key, shape, lo, hi, *_ in records:
        if key not in found:
            found[key] = np.zeros(shape, np.int16)
        found[key][tuple(map(slice, lo, hi))] += 1
    return found


@settings(max_examples=30, deadline=None)
@given(cases(), st.data())
def test_every_element_is_owned_once(case: tuple[ModelShape, Layout], data: st.DataObject) -> None:
    shape, layout = case
    ranks = all_of_layout(shape, layout)
    assert len(ranks) == layout.world_size
    first = counts(record for records in ranks for record in records if record.is_first)
    assert all((count == 1).all() for count in first.values())
    assert set(first) == {record.key for records in ranks for record in records}
    for records in ranks:
        filled: dict[int, int] = defaultdict(int)
        for record in records:
            assert record.offset == filled[record.shard], "shards are filled from their start"
            filled[record.shard] += record.numel
            assert record.numel > 0
        assert list(filled) == list(range(len(filled)))
    if shape.tied:
        tp, dp = (data.draw(st.integers(0, n - 1)) for n in (layout.tp, layout.dp))
        ends = [
            [(r.lo, r.hi, r.offset) for r in ranks[rank] if r.key == WORDS]
            for rank in (rank_at(shape, layout, tp, stage, dp) for stage in (0, layout.pp - 1))
        ]
        assert ends[0] == ends[1], "copies of the embedding are cut alike"


@settings(max_examples=30, deadline=None)
@given(cases())
def test_replicas_share_what_one_would_hold(case: tuple[ModelShape, Layout]) -> None:
    shape, layout = replace(case[0], use_distributed_optimizer=True), case[1]
    ranks = all_of_layout(shape, layout)
    alone = all_of_layout(replace(shape, use_distributed_optimizer=False), layout)
    for tp, pp in {(0, 0), (layout.tp - 1, layout.pp - 1), (layout.tp // 2, layout.pp // 2)}:
        replicas = [rank_at(shape, layout, tp, pp, dp) for dp in range(layout.dp)]
        shared = counts(record for rank in replicas for record in ranks[rank])
        whole = counts(alone[replicas[0]])
        assert shared.keys() == whole.keys()
        for key, count in whole.items():
            assert count.max() == 1
            assert (shared[key] == count).all(), key
        for rank in replicas[1:]:
            copies = [record._replace(is_first=False) for record in alone[replicas[0]]]
            assert alone[rank] == copies


def test_a_buffer_by_hand() -> None:
    """Backwards, from multiples of 64: output layer 0 to 192, last norm 192 to 198, fc2 256 to 304,
    fc1 320 to 416, its norm 448, qkv 512 to 620, proj 640 to 676, its norm 704, embedding 768 to
    960, which is padded to 1024: shares of 64."""
    layout, shape = Layout(dp=16), replace(TOY, num_layers=1)
    ranks = [[(r.key, r.lo, r.hi) for r in records] for records in all_of_layout(shape, layout)]
    words, fc1 = "embedding.word_embeddings.weight", "decoder.layers.mlp.linear_fc1.weight"
    assert ranks[3] == [("decoder.final_layernorm.weight", (0,), (6,))]
    assert ranks[5] == [
        (fc1, (0, 0, 0), (1, 8, 6)),
        (fc1, (0, 8, 0), (1, 10, 6)),
        (fc1, (0, 10, 0), (1, 11, 4)),
    ]
    assert ranks[12] == [(words, (0, 0), (10, 6)), (words, (10, 0), (11, 4))]
    assert ranks[15] == []


def test_default_buckets_are_larger_on_many_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(TOY, overlap_grad_reduce=True)
    one_bucket, layout = all_of_layout(shape, Layout(dp=4)), Layout(dp=4)
    monkeypatch.setattr(ownership, "MIN_BUCKET", 100)
    monkeypatch.setattr(ownership, "BUCKET_PER_REPLICA", 10)
    assert all_of_layout(shape, layout) == all_of_layout(
        replace(shape, ddp_bucket_size=100), layout
    )
    monkeypatch.setattr(ownership, "BUCKET_PER_REPLICA", 50)
    assert all_of_layout(shape, layout) == all_of_layout(
        replace(shape, ddp_bucket_size=200), layout
    )
    assert all_of_layout(shape, layout) != one_bucket


def test_illegal_layouts_are_refused() -> None:
    for layout, why in {
        Layout(pp=3): "num-layers 2",
        Layout(tp=4): "attention-heads 2",
        Layout(pp=2, vpp=2): "2 virtual",
    }.items():
        with pytest.raises(ValueError, match=why):
            all_of_layout(TOY, layout)


LATENT = replace(
    PRESETS["llama-2-7b"],
    name="latent",
    kv_lora_rank=512,
    q_lora_rank=1536,
    qk_layernorm=True,
    mtp_num_layers=2,
)
WHOLE_QUERY = replace(LATENT, name="whole-query", q_lora_rank=None, bias=True)
NORMED = replace(PRESETS["llama-3-70b"], name="normed", qk_layernorm=True, mtp_num_layers=1)


@pytest.mark.parametrize(
    "spec", [*PRESETS.values(), LATENT, WHOLE_QUERY, NORMED], ids=lambda spec: spec.name
)
def test_the_elements_are_the_parameters_of_the_model(spec: ModelSpec) -> None:
    shape = spec.shape(padded_vocab_size=int(spec.padded_vocab_size(1)))
    layout = Layout(tp=8, pp=4 if spec.num_layers % 4 == 0 else 2, dp=2)
    if shape.padded_vocab_size % layout.tp or spec.num_attention_heads % layout.tp:
        layout = Layout(pp=4, dp=2)
    ranks = all_of_layout(shape, layout)
    first = sum(r.numel for records in ranks for r in records if r.is_first)
    assert first == spec.num_parameters
