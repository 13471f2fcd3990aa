"""Inspection: which tensors a checkpoint must hold, how they are covered, what is said of it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.trainer.checkpoint import files
from megatron.trainer.common.errors import Refused
from megatron.trainer.distributed.sharding import flat_to_rects
from megatron.trainer.extras.inspect_checkpoint import command as inspect_checkpoint
from megatron.trainer.extras.inspect_checkpoint import contents
from megatron.trainer.extras.inspect_checkpoint.archive import Chunk, _check_format
from megatron.trainer.extras.inspect_checkpoint.checks import coverage_problem
from tests.helpers.checkpoints import BIASED, ITERATION, MIXTURE, SHARED, command, make_checkpoint

EXPERTS = "mlp.experts.experts."
BIAS = "decoder.layers.mlp.router.expert_bias"


def cut(shape: tuple[int, ...], cuts: list[list[int]], base: tuple[int, ...] = ()) -> list[Chunk]:
    """A grid of chunks."""
    chunks = [Chunk(offset=(), size=())]
    for length, places in zip(shape, cuts):
        edges = sorted({0, length, *(p for p in places if p < length)})
        pairs = list(itertools.pairwise(edges))
        chunks = [
            Chunk(offset=(*c.offset, a), size=(*c.size, b - a)) for c in chunks for a, b in pairs
        ]
    return chunks


GRIDS = st.lists(st.integers(1, 6), min_size=1, max_size=3).flatmap(
    lambda shape: st.tuples(
        st.just(tuple(shape)),
        st.tuples(*(st.lists(st.integers(1, 6), max_size=3) for _ in shape)).map(list),
        st.randoms(use_true_random=False),
    )
)


@given(GRIDS)
def test_a_grid_covers_and_loses_it_with_any_chunk_gone_or_doubled(grid: Any) -> None:
    shape, cuts, random = grid
    chunks = cut(shape, cuts)
    random.shuffle(chunks)
    assert coverage_problem(shape, chunks) is None
    problem = coverage_problem(shape, chunks[1:])
    assert problem is not None and "elements" in problem
    problem = coverage_problem(shape, [*chunks, chunks[0]])
    assert problem is not None and "overlap" in problem


def test_many_rectangles_of_many_layers_are_compared() -> None:
    rows, columns, per_layer = 350, 64, 350
    size = rows * columns
    edges = [size * n // per_layer + 7 * (0 < n < per_layer) for n in range(per_layer + 1)]
    rects = [
        rect
        for start, stop in itertools.pairwise(edges)
        for rect in flat_to_rects((rows, columns), start, stop)
    ]
    assert len(rects) > 690
    chunks = [
        Chunk(offset=(layer, *lo), size=(1, *(b - a for a, b in zip(lo, hi))))
        for layer in range(30)
        for lo, hi in rects
    ]
    shape = (30, rows, columns)
    assert coverage_problem(shape, chunks) is None
    columns_first = [Chunk(offset=c.offset[::-1], size=c.size[::-1]) for c in chunks]
    assert coverage_problem(shape[::-1], columns_first) is None
    assert "overlap" in str(coverage_problem(shape, [*chunks, chunks[10_000]]))
    assert "elements" in str(coverage_problem(shape, chunks[1:]))


def test_chunks_that_no_line_divides_are_compared() -> None:
    # Four around one in the middle: no straight cut.
    wheel = [
        ((0, 0), (1, 2)),
        ((0, 2), (2, 1)),
        ((2, 1), (1, 2)),
        ((1, 0), (2, 1)),
        ((1, 1), (1, 1)),
    ]
    chunks = [Chunk(offset=o, size=s) for o, s in wheel]
    assert coverage_problem((3, 3), chunks) is None
    chunks[0] = Chunk(offset=(0, 0), size=(1, 3))
    assert "overlap" in str(coverage_problem((3, 3), chunks))
    adds_up = [Chunk(offset=(0, 0), size=(2, 3)), Chunk(offset=(1, 1), size=(2, 3))]
    assert "overlap" in str(coverage_problem((3, 4), adds_up))
    assert "leaves" in str(coverage_problem((2, 2), [Chunk(offset=(1, 0), size=(2, 2))]))
    assert "axes" in str(coverage_problem((2, 2), [Chunk(offset=(0,), size=(4,))]))


def parts(flags: dict[str, Any], prefix: str) -> dict[str, tuple[int, ...]]:
    weights = contents.expected_weights(flags)
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def test_experts_stand_in_place_of_the_mlp() -> None:
    found = parts(MIXTURE, contents.LAYERS)
    assert {k: v for k, v in found.items() if "attention" not in k} == {
        "pre_mlp_layernorm.weight": (4, 16),
        "mlp.router.weight": (4, 4, 16),
        f"{EXPERTS}linear_fc1.weight": (4, 4, 24, 16),
        f"{EXPERTS}linear_fc2.weight": (4, 4, 16, 12),
    }
    assert contents.expected_weights(BIASED)[BIAS] == (4, 4)
    biases = parts({**MIXTURE, "add_bias_linear": True}, contents.LAYERS)
    assert biases["mlp.router.bias"] == (4, 4)
    assert biases[f"{EXPERTS}linear_fc1.bias"] == (4, 4, 24)
    assert biases[f"{EXPERTS}linear_fc2.bias"] == (4, 4, 16)


def test_layers_of_two_kinds_have_keys_of_their_own() -> None:
    dense, first = parts(SHARED, f"{contents.LAYERS}0."), parts(SHARED, f"{contents.LAYERS}1.")
    assert dense["mlp.linear_fc1.weight"] == (48, 16) and "mlp.router.weight" not in dense
    assert first["mlp.shared_experts.linear_fc1.weight"] == (16, 16)
    assert first["mlp.shared_experts.linear_fc2.weight"] == (16, 8)
    assert first["mlp.shared_experts.gate_weight"] == (1, 16)
    assert first[f"{EXPERTS}linear_fc1.weight"] == (4, 24, 16)
    # A number, or a list that Megatron-LM has read already.
    for freq in ("2", 2, [1, 0, 1, 0]):
        keys = contents.expected_weights({**MIXTURE, "moe_layer_freq": freq})
        assert f"{contents.LAYERS}1.mlp.linear_fc1.weight" in keys
        assert f"{contents.LAYERS}2.mlp.router.weight" in keys
    with pytest.raises(Refused, match="moe_layer_freq is '0'"):
        contents.expected_weights({**MIXTURE, "moe_layer_freq": "0"})


@pytest.mark.parametrize(
    ("key", "axes"),
    [
        ("embedding.word_embeddings.weight", 0),
        ("decoder.layers.mlp.linear_fc1.weight", 1),
        (f"decoder.layers.{EXPERTS}linear_fc1.weight", 2),
        (f"optimizer.state.exp_avg.decoder.layers.{EXPERTS}linear_fc2.weight", 2),
        ("decoder.layers.12.mlp.linear_fc1.weight", 0),
        (f"decoder.layers.12.{EXPERTS}linear_fc1.weight", 1),
        ("decoder.layers.mlp.shared_experts.linear_fc1.weight", 1),
    ],
)
def test_layers_and_experts_are_leading_axes(key: str, axes: int) -> None:
    assert contents.leading_axes(key) == axes


def test_inspection_says_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_checkpoint(tmp_path / "a")
    code, out, _ = command(capsys, inspect_checkpoint, source, "--json", "--verify")
    record = json.loads(out)
    assert code == 0 and record["verified"] and record["problem"] is None
    assert (record["iteration"], record["consumed_samples"]) == (ITERATION, 40)
    assert (record["layout"], record["optimizer"]) == ("tp2.pp1.dp2", "distributed")
    assert len(record["tensors"]) == 36 and record["true_vocab_size"] == 101
    assert record["loads_under"] == {
        "tp": [1, 2, 4],
        "pp": ["1", "2", "2x2", "4"],
        "dp": [1, 2, 4, 8],
    }
    code, out, _ = command(capsys, inspect_checkpoint, files.folder_of(source, ITERATION))
    assert code == 0 and "decoder.layers.mlp.linear_fc2.weight  bfloat16 (4, 16, 24)" in out
    (tmp_path / "empty").mkdir()
    for args, expected in (
        ((tmp_path / "nowhere",), 1),
        ((tmp_path / "empty", "--what"), 2),
        ((tmp_path / "empty",), 3),
    ):
        code, out, _ = command(capsys, inspect_checkpoint, *args, "--json")
        record = json.loads(out)
        assert code == record["exit_code"] == expected and record["problem"]


def test_a_mixture_that_predicts_further_tokens_is_refused() -> None:
    with pytest.raises(Refused, match="num_experts is 4 and mtp_num_layers is 1"):
        contents.expected_weights({**MIXTURE, "mtp_num_layers": 1})


def test_inspection_shows_experts_and_the_sizes_they_load_under(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_checkpoint(tmp_path / "a", **SHARED)
    code, out, _ = command(capsys, inspect_checkpoint, source, "--json", "--verify")
    record = json.loads(out)
    assert code == 0 and record["verified"] and record["layout"] == "tp2.pp1.ep2.dp2"
    assert record["experts"] == {"num_experts": 4, "topk": 2, "layers": 3, "shared": 8}
    loads = record["loads_under"]
    assert loads["tp"] == [1, 2, 4] and loads["ep"] == [1, 2, 4]
    assert loads["etp"] == [1, 2, 3, 4, 6, 12]
    code, out, _ = command(capsys, inspect_checkpoint, source)
    assert code == 0 and "4 experts in 3 layers, 2 of them for each token" in out
    assert "loads under --ep 1, 2, 4" in out
    code, out, _ = command(capsys, inspect_checkpoint, make_checkpoint(tmp_path / "b"), "--json")
    assert json.loads(out)["experts"] is None and "ep" not in json.loads(out)["loads_under"]


@pytest.mark.parametrize("depth", [300, 900, 20_000])
def test_a_mark_that_is_nested_too_deeply_is_refused(tmp_path: Path, depth: int) -> None:
    text = '{"weight_map": ' + "[" * depth + "]" * depth + "}"
    (tmp_path / files.CORE_MARK).write_text(text)
    with pytest.raises(Refused, match="too deeply"):
        _check_format(tmp_path)
