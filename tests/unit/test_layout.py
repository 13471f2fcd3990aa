"""Layout values and the rules that make a layout and a batch legal."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.training.errors import UsageError
from megatron.training.layout import Layout, batch_problems, layout_problems

SIZES = st.integers(1, 8)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    pp = draw(SIZES)
    vpp = draw(SIZES) if pp > 1 else 1
    return Layout(tp=draw(SIZES), pp=pp, vpp=vpp, dp=draw(SIZES))


MODEL = {
    "num_layers": 8,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "ffn_hidden_size": 256,
    "seq_length": 64,
    "padded_vocab_size": 512,
    "sequence_parallel": True,
}


@given(layouts())
def test_json_round_trip_and_sizes(layout: Layout) -> None:
    assert Layout.from_json(layout.to_json()) == layout
    assert layout.world_size == layout.model_parallel_size * layout.dp
    assert Layout.from_world(layout.world_size, layout.tp, layout.pp, layout.vpp) == layout


@given(layouts(), layouts())
def test_text_tells_layouts_apart(one: Layout, other: Layout) -> None:
    assert (str(one) == str(other)) == (one == other)
    assert (".vpp" in str(one)) == (one.vpp > 1)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None])
@pytest.mark.parametrize("name", ["tp", "pp", "vpp", "dp"])
def test_sizes_are_positive_integers(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an integer"):
        Layout.from_json({name: value})


def test_unknown_json_key() -> None:
    with pytest.raises(ValueError, match="cp"):
        Layout.from_json({"tp": 1, "cp": 2})


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


def test_virtual_pipeline_needs_a_pipeline() -> None:
    with pytest.raises(UsageError, match="--pipeline-model-parallel-size"):
        Layout.from_world(4, 1, 1, 2)
    with pytest.raises(ValueError, match="pipeline"):
        Layout(vpp=2)


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
    assert layout_problems(Layout(), **MODEL) == []
    (problem,) = layout_problems(layout, **{**MODEL, **change})
    assert flag in problem
    assert "\n" not in problem


def test_relaxed_rules() -> None:
    uneven = {**MODEL, "layers_per_stage_given": True}
    assert layout_problems(Layout(pp=3), **uneven) == []
    assert layout_problems(Layout(tp=8), **MODEL) == []
    plain = {**MODEL, "seq_length": 63, "sequence_parallel": False, "padded_vocab_size": None}
    assert layout_problems(Layout(tp=2), **plain) == []


@given(layouts(), st.integers(1, 4), st.integers(1, 20))
def test_whole_number_of_microbatches(layout: Layout, micro: int, count: int) -> None:
    batch = layout.dp * micro * count
    legal = layout.vpp == 1 or count % layout.pp == 0
    assert (batch_problems(layout, micro, batch) == []) == legal


@given(layouts(), st.integers(1, 4), st.integers(1, 400))
def test_the_fix_that_is_offered_works(layout: Layout, micro: int, batch: int) -> None:
    problems = batch_problems(layout, micro, batch)
    assume(problems)
    (problem,) = problems
    for size in problem.rsplit("use ", 1)[1].split(" or "):
        assert batch_problems(layout, micro, int(size)) == []


def test_batch_below_one() -> None:
    assert batch_problems(Layout(), 0, 4) != []
    assert batch_problems(Layout(), 1, 0) != []
