"""Layout values and the rules that make a layout and a batch legal."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.layout_rules import (
    batch_problems,
    expert_problems,
    group_of_microbatches,
    layout_problems,
    recompute_problems,
)
from megatron.trainer.config.model_shape import ModelShape

SIZES = st.integers(1, 8)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    pp = draw(SIZES)
    vpp = draw(SIZES) if pp > 1 else 1
    return Layout(tp=draw(SIZES), cp=draw(SIZES), pp=pp, vpp=vpp, dp=draw(SIZES))


@st.composite
def cut_layouts(draw: st.DrawFn) -> Layout:
    pp = draw(st.integers(2, 6))
    vpp = draw(st.integers(1, 3))
    counts = draw(st.lists(st.integers(1, 12), min_size=pp * vpp, max_size=pp * vpp))
    if draw(st.booleans()):
        counts[0] = 0
    return Layout(tp=draw(SIZES), pp=pp, vpp=vpp, dp=draw(SIZES), layer_partition=tuple(counts))


MODEL = {
    "num_layers": 8,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "padded_vocab_size": 512,
    "untie_embeddings_and_output_weights": True,
}


def problems_of_layout(layout: Layout, *, seq_length: int = 64, **changes: Any) -> list[str]:
    return layout_problems(
        layout, {**MODEL, **changes}, seq_length=seq_length, sequence_parallel=True
    )


@given(layouts() | cut_layouts(), layouts() | cut_layouts())
def test_json_and_text_round_trip(layout: Layout, other: Layout) -> None:
    assert (str(layout) == str(other)) == (layout == other)
    assert (".vpp" in str(layout)) == (layout.vpp > 1)
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    assert Layout.from_text(str(layout)) == layout
    further = {"cut"} if layout.layer_partition else set()
    further |= {"cp"} if layout.cp > 1 else set()
    assert set(layout.to_json()) == {"tp", "pp", "vpp", "dp"} | further


@given(layouts())
def test_sizes(layout: Layout) -> None:
    assert layout.world_size == layout.tp * layout.cp * layout.pp * layout.dp
    assert (
        Layout.from_world(layout.world_size, layout.tp, layout.pp, layout.vpp, cp=layout.cp)
        == layout
    )


@given(cut_layouts())
def test_every_layer_is_on_one_stage_in_order(layout: Layout) -> None:
    counts = layout.layers_of_chunks(0) if layout.layer_partition else None
    num_layers = sum(counts) if counts else 3 * layout.pp * layout.vpp
    stages = [layout.layers_of_stage(num_layers, stage) for stage in range(layout.pp)]
    assert all(len(chunks) == layout.vpp for chunks in stages)
    order = [layer for chunk in range(layout.vpp) for stage in stages for layer in stage[chunk]]
    assert order == list(range(num_layers))
    own = tuple(len(stages[k % layout.pp][k // layout.pp]) for k in range(layout.pp * layout.vpp))
    assert own == layout.layers_of_chunks(num_layers)


@pytest.mark.parametrize(
    "cut", [(4,), (4, 4, 4), (-1, 9), (0, 0), (1.5, 3), (True, 2), ("4", 4), 5, 1.5, "44"]
)
def test_a_cut_is_one_number_for_every_chunk(cut: Any) -> None:
    with pytest.raises(ValueError, match=r"partition|chunk"):
        Layout(pp=2, layer_partition=cut)
    with pytest.raises(ValueError, match="needs a layer"):
        Layout(pp=3, layer_partition=(4, 0, 1))
    assert Layout(pp=3, layer_partition=(0, 5, 0)).layers_of_chunks(5) == (0, 5, 0)
    assert Layout(pp=2, layer_partition=(4, 4)) == Layout(pp=2), "equal chunks need no partition"
    assert str(Layout(pp=4, dp=2, layer_partition=(5, 4, 4, 3))) == "tp1.pp4.dp2.cut5-4x2-3"


@pytest.mark.parametrize("text", ["cut", "cut5", "cut5-x", "cut5x9999999999", "cut5-3-1", "cut-"])
def test_a_cut_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"partition|layout|chunk"):
        Layout.from_text(f"tp1.pp2.dp1.{text}")
    with pytest.raises(ValueError, match="chunks"):
        Layout.from_text("tp1.pp1000000000.dp1.cut1x1000000000")


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None])
@pytest.mark.parametrize("name", ["tp", "cp", "pp", "vpp", "dp"])
def test_sizes_are_positive_integers(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an integer"):
        Layout.from_json({name: value})
    with pytest.raises(ValueError, match="sp"):
        Layout.from_json({"tp": 1, "sp": 2})
    with pytest.raises(ValueError, match="pipeline"):
        Layout(vpp=2)
    with pytest.raises(UsageError, match="--pipeline-model-parallel-size"):
        Layout.from_world(4, 1, 1, 2)


@given(st.integers(1, 64), SIZES, SIZES)
def test_world_is_divided_or_refused(world: int, tp: int, pp: int) -> None:
    if world % (tp * pp) == 0:
        assert Layout.from_world(world, tp, pp).world_size == world
        return
    with pytest.raises(UsageError) as error:
        Layout.from_world(world, tp, pp)
    for part in (
        f"world size {world}",
        f"--tensor-model-parallel-size {tp}",
        f"--pipeline-model-parallel-size {pp}",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("layout", "change", "flag"),
    [
        (
            Layout(tp=2),
            {"num_attention_heads": 7, "num_query_groups": 1},
            "--num-attention-heads 7",
        ),
        (Layout(tp=4), {"num_query_groups": 6}, "--num-query-groups 6"),
        (Layout(tp=2), {"ffn_hidden_size": 255}, "--ffn-hidden-size 255"),
        (Layout(pp=3), {}, "--num-layers 8"),
        (Layout(pp=2, vpp=3), {}, "--num-layers 8"),
        (Layout(tp=2), {"seq_length": 63}, "--seq-length 63"),
        (Layout(tp=2), {"padded_vocab_size": 511}, "--pad-vocab-for-tensor-parallel-size"),
    ],
)
def test_each_rule_alone(layout: Layout, change: dict, flag: str) -> None:
    assert problems_of_layout(Layout()) == []
    (problem,) = problems_of_layout(layout, **change)
    assert flag in problem
    assert "\n" not in problem


def test_relaxed_rules() -> None:
    assert problems_of_layout(Layout(pp=3, layer_partition=(3, 3, 2))) == []
    (problem,) = problems_of_layout(Layout(pp=3, layer_partition=(4, 3, 2)))
    assert "9 layers and --num-layers is 8" in problem
    assert problems_of_layout(Layout(tp=8)) == []
    told = {"seq_length": 63, "sequence_parallel": False, "knows_vocabulary": False}
    assert layout_problems(Layout(tp=2), {**MODEL, "padded_vocab_size": None}, **told) == []


@given(layouts(), st.integers(0, 4), st.integers(0, 20))
def test_whole_number_of_microbatches(layout: Layout, micro: int, count: int) -> None:
    batch = layout.dp * micro * count
    legal = micro > 0 and count > 0 and (layout.vpp == 1 or count % layout.pp == 0)
    assert (batch_problems(layout, micro, batch) == []) == legal


@given(layouts(), st.integers(1, 40), st.integers(1, 12))
def test_groups_of_micro_batches_are_those_that_megatron_core_schedules(
    layout: Layout, count: int, asked: int
) -> None:
    assume(layout.vpp > 1)
    problems = batch_problems(layout, 1, layout.dp * count, group_size=asked)
    assert problems == [] or batch_problems(layout, 1, layout.dp * count) == problems
    group = group_of_microbatches(layout, count, asked)
    assert group in (asked, layout.pp)
    if not problems:
        # The two checks of its interleaved schedule.
        assert layout.pp <= group <= count
        assert count % group == 0 or count % group >= layout.pp


@given(layouts(), st.integers(1, 4), st.integers(1, 400))
def test_the_fix_that_is_offered_works(layout: Layout, micro: int, batch: int) -> None:
    problems = batch_problems(layout, micro, batch)
    assume(problems)
    (problem,) = problems
    for size in problem.rsplit("use ", 1)[1].split(" or "):
        assert batch_problems(layout, micro, int(size)) == []


@given(layouts(), st.sampled_from([1, 2, 4]), st.sampled_from([None, 1, 2]))
def test_the_copies_of_experts_that_an_order_of_ranks_needs_are_offered(
    layout: Layout, ep: int, etp: int | None
) -> None:
    assume(layout.pp > 1 and layout.ranks_of_a_stage % (ep * (etp or layout.tp)) == 0)
    layout = dataclasses.replace(layout, ep=ep, etp=etp)
    many = 9 * 25 * 49 * 64
    experts = {"num_experts": many, "moe_ffn_hidden_size": many, "add_bias_linear": False}
    shape = ModelShape.of({**MODEL, **experts, "use_tp_pp_dp_mapping": True})
    problems = expert_problems(layout, shape, sequence_parallel=True)
    assert bool(problems) == (layout.expert_data_parallel_size != layout.dp)
    for problem in problems:
        found = re.search(r"--expert-tensor-parallel-size = (\d+)", problem)
        assert found is not None, problem
        for offered in ({"ep": int(found[1]), "etp": 1}, {"ep": 1, "etp": int(found[1])}):
            fixed = dataclasses.replace(layout, **offered)
            assert not expert_problems(fixed, shape, sequence_parallel=True)


@given(layouts(), st.integers(1, 4), st.integers(1, 200))
def test_uneven_micro_batches_need_whole_replicas_only(
    layout: Layout, micro: int, batch: int
) -> None:
    even = batch_problems(layout, micro, batch)
    uneven = batch_problems(layout, micro, batch, uneven=True)
    if layout.pp > 1:
        assert uneven == even
        return
    assert (uneven == []) == (batch % layout.dp == 0)
    for problem in uneven:
        for size in problem.rsplit("use ", 1)[1].split(" or "):
            assert batch_problems(layout, micro, int(size), uneven=True) == []


@pytest.mark.parametrize(
    ("cut", "method", "number", "part"),
    [
        ((3, 5), "uniform", 1, None),
        ((3, 5), "uniform", 2, "does not divide the 3 layers"),
        ((2, 6), "uniform", 2, None),
        ((0, 8), "uniform", 8, None),
        ((3, 5), "block", 5, None),
        ((3, 5), "block", 6, "more than the 5 layers"),
        (None, "uniform", 3, "does not divide the 4 layers"),
        (None, "block", 3, None),
    ],
)
def test_recomputation(cut: Any, method: str, number: int, part: str | None) -> None:
    problems = recompute_problems(
        Layout(pp=2, layer_partition=cut), num_layers=8, method=method, recompute_num_layers=number
    )
    assert bool(problems) == (part is not None)
    assert part is None or part in problems[0]
