"""Plans between random layouts: each element once, from one that has it, at the
least cost, and evenly."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from copus_ext.reshard.ownership import all_of_layout
from copus_ext.reshard.parameters import check
from copus_ext.reshard.plan import BYTES_PER_ELEMENT, TransferOp, make_plan
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.model_shape import ExpertShape, ModelShape
from megatron.trainer.distributed.sharding import Record, volume

EXAMPLES = int(os.environ.get("COPUS_TEST_EXAMPLES", "15"))
"""More of them by hand, and then on more ranks too."""
WORLDS = [2, 3, 4, 6, 8, 12, 16, 24, 48, 64, 96, *[128, 256, 512] * (EXAMPLES > 15)]
pytestmark = pytest.mark.timeout(60 + EXAMPLES)


@st.composite
def expert_shapes(draw: st.DrawFn, num_layers: int) -> ExpertShape:
    """Experts in all layers, or in some."""
    some = [1] * num_layers
    some[draw(st.integers(0, num_layers - 1))] = draw(st.integers(0, 1))
    return ExpertShape(
        layers=tuple(some),
        num_experts=draw(st.sampled_from([4, 6])),
        moe_ffn_hidden_size=12 * draw(st.integers(1, 2)),
        moe_shared_expert_intermediate_size=24 * draw(st.integers(0, 1)),
        moe_shared_expert_gate=draw(st.booleans()),
        moe_grouped_gemm=draw(st.booleans()),
    )


def layouts_of(shape: ModelShape, world: int) -> list[Layout]:
    """Those that the model can have; with experts only some of their sizes."""
    found = []
    for tp, pp, vpp in itertools.product((1, 2, 3, 4, 6, 8, 12), (1, 2, 3, 4, 6, 12), (1, 2)):
        if world % (tp * pp) or shape.num_layers % (pp * vpp) or (pp == 1 and vpp > 1):
            continue
        dp = world // (tp * pp)
        sizes = itertools.product((1, 2, 3, 4), (1, 2, tp)) if shape.experts else [(1, tp)]
        for ep, etp in sizes:
            if tp * dp % (ep * etp) == 0:
                layout = Layout(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, dp=dp)
                with contextlib.suppress(ValueError):
                    check(shape, layout)
                    found.append(layout)
    return found


@st.composite
def changes(draw: st.DrawFn) -> tuple[ModelShape, Layout, Layout]:
    """A model and two layouts of the same ranks that it can have."""
    world, num_layers = draw(st.sampled_from(WORLDS)), draw(st.sampled_from([4, 8, 12]))
    shape = ModelShape(
        num_layers=num_layers,
        experts=draw(st.none() | expert_shapes(num_layers)),
        hidden_size=draw(st.integers(1, 40)),
        ffn_hidden_size=24 * draw(st.integers(1, 3)),
        num_attention_heads=24,
        num_query_groups=24,
        kv_channels=draw(st.integers(1, 3)),
        padded_vocab_size=24 * draw(st.integers(1, 8)),
        learned_positions=draw(st.sampled_from([0, 7])),
        gated=draw(st.booleans()),
        linear_bias=draw(st.booleans()),
        normalization=draw(st.sampled_from(["LayerNorm", "RMSNorm"])),
        tied=draw(st.booleans()),
        use_distributed_optimizer=draw(st.integers(0, 3)) > 0,
        overlap_grad_reduce=draw(st.booleans()),
        ddp_bucket_size=draw(st.none() | st.integers(100, 5000)),
        use_tp_pp_dp_mapping=draw(st.booleans()),
    )
    legal = layouts_of(shape, world)
    return shape, draw(st.sampled_from(legal)), draw(st.sampled_from(legal))


def overlap(a: Record, b: Record) -> int:
    lo, hi = map(max, a.lo, b.lo), map(min, a.hi, b.hi)
    edges = [y - x for x, y in zip(lo, hi)]
    return 0 if min(edges) <= 0 else volume([0] * len(edges), edges)


def disjoint(pieces: list[TransferOp]) -> bool:
    return not any(
        all(x < y for x, y in zip(map(max, a.lo, b.lo), map(min, a.hi, b.hi)))
        for a, b in itertools.combinations(pieces, 2)
    )


@settings(max_examples=EXAMPLES, deadline=None)
@given(changes())
def test_plans_are_complete_minimal_and_even(case: tuple[ModelShape, Layout, Layout]) -> None:
    shape, before, after = case
    source, target = all_of_layout(shape, before), all_of_layout(shape, after)
    plan = make_plan(source, target)
    by_target: dict[tuple[int, int], list[TransferOp]] = defaultdict(list)
    sent = [0] * len(source)
    for p in plan.ops:
        record = source[p.source_rank][p.source]
        assert all(a <= b for a, b in zip(record.lo, p.lo))
        assert all(a >= b for a, b in zip(record.hi, p.hi))
        by_target[p.target_rank, p.target].append(p)
        if p.source_rank != p.target_rank:
            sent[p.source_rank] += p.numel * BYTES_PER_ELEMENT
    needs = 0
    for rank, records in enumerate(target):
        own: dict[str, list[Record]] = defaultdict(list)
        for record in source[rank]:
            own[record.key].append(record)
        for number, record in enumerate(records):
            pieces = by_target.pop((rank, number))
            assert all(source[p.source_rank][p.source].key == record.key for p in pieces)
            assert all(x <= y for p in pieces for x, y in zip(record.lo, p.lo))
            assert all(x >= y for p in pieces for x, y in zip(record.hi, p.hi))
            assert sum(p.numel for p in pieces) == record.numel and disjoint(pieces)
            # Records of one rank share nothing; both copies of a tied embedding may be on one.
            held = sum(overlap(record, other) for other in own[record.key])
            needs += record.numel - min(held, record.numel)
    assert not by_target
    assert plan.sent_bytes == sent
    assert plan.wire_bytes == plan.minimum_bytes == needs * BYTES_PER_ELEMENT


@settings(max_examples=EXAMPLES, deadline=None)
@given(changes())
def test_replicas_share_the_sending(case: tuple[ModelShape, Layout, Layout]) -> None:
    """Where every rank of a replica group holds the same, none sends more than its part and one
    largest piece."""
    shape, before, after = case
    shape = replace(shape, use_distributed_optimizer=False, tied=False)
    source, target = all_of_layout(shape, before), all_of_layout(shape, after)
    plan = make_plan(source, target)
    groups: dict[tuple, list[int]] = defaultdict(list)
    for rank, records in enumerate(source):
        groups[tuple((r.key, r.lo) for r in records)].append(rank)
    largest = max((p.numel for p in plan.ops), default=0) * BYTES_PER_ELEMENT
    for ranks in groups.values():
        loads = [plan.sent_bytes[rank] for rank in ranks]
        assert max(loads) - min(loads) <= 2 * largest


@settings(max_examples=EXAMPLES // 4, deadline=None)
@given(changes())
def test_a_layout_that_stays_moves_nothing(case: tuple[ModelShape, Layout, Layout]) -> None:
    shape, before, _ = case
    records = all_of_layout(shape, before)
    assert make_plan(records, records).wire_bytes == 0
