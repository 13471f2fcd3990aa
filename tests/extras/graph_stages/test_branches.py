"""Branches before a decoder: nodes, edges, samples of a text, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from copus_ext.extras.graph_stages.model import Branch, BranchedShape
from copus_ext.extras.graph_stages.stage_graph import check_series_parallel
from copus_ext.extras.graph_stages.train import TextWindows, main, shape_of_json
from megatron.trainer.common.errors import UsageError

IMAGE = Branch(name="image", num_layers=4, seq_length=8, nodes=2, merged=4)
WORDS = Branch(name="words", num_layers=2, seq_length=6, reads="tokens")


def shape(**changes: Any) -> BranchedShape:
    values = {"branches": (IMAGE, WORDS), "decoder_layers": 2, "seq_length": 5, "patch_size": 16}
    return BranchedShape(**{**values, **changes})


def test_nodes_and_edges_are_those_of_the_branches_and_the_decoder() -> None:
    found = shape(decoder_nodes=2)
    assert found.nodes == ("image.0", "image.1", "words", "decoder.0", "decoder.1")
    assert found.edges == ((0, 1), (1, 3), (2, 3), (3, 4))
    assert found.output_lengths() == [8, 2, 6, 13, 13] and found.joined_length == 13
    check_series_parallel(found.nodes, found.edges)
    assert found.stage_of([["words"], ["image.1", "image.0"], ["decoder.0", "decoder.1"]]) == (
        *(1, 1, 0),
        *(2, 2),
    )


@pytest.mark.parametrize("stages", [[["image.0"]], [["words", "words"], []], [["nowhere"]]])
def test_stages_must_hold_each_node_once(stages: list[list[str]]) -> None:
    with pytest.raises(ValueError, match="once"):
        shape().stage_of(stages)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Branch(name="a", num_layers=3, seq_length=4, nodes=2), "do not divide"),
        (lambda: Branch(name="a", num_layers=2, seq_length=5, merged=2), "do not divide"),
        (lambda: Branch(name="a", num_layers=2, seq_length=5, reads="sound"), "patches or tokens"),
        (lambda: shape(decoder_nodes=3), "do not divide"),
        (lambda: shape(branches=(IMAGE, IMAGE)), "names of their own"),
        (lambda: shape(branches=()), "names of their own"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_a_shape_is_read_from_json() -> None:
    raw = {
        "branches": [{"name": "image", "num_layers": 4, "seq_length": 8, "nodes": 2, "merged": 4}],
        "decoder_layers": 2,
        "seq_length": 5,
    }
    assert shape_of_json(raw).branches == (IMAGE,)
    for bad in ({}, {**raw, "layers": 1}, {**raw, "branches": [{"name": "a"}]}):
        with pytest.raises(UsageError, match="--shape"):
            shape_of_json(bad)


def test_samples_are_bytes_of_the_text_in_order() -> None:
    text = bytes(range(256)) * 2
    windows = TextWindows(text, shape(), seed=3)
    batch = windows.batch(0, 2)
    assert batch["image"].shape == (2, 8, 16) and batch["words"].shape == (2, 6)
    levels = (batch["image"] + 1.25) * 64
    joined = torch.cat([levels.flatten(1).round().long(), batch["words"], batch["tokens"]], dim=1)
    assert (joined.diff(dim=1) % 256 == 1).all()
    assert torch.equal(batch["labels"][:, :-1], batch["tokens"][:, 1:])
    # A sample does not depend on the micro-batch that it is in.
    assert torch.equal(windows.batch(1, 1)["words"], batch["words"][1:])
    with pytest.raises(UsageError, match="a sample takes 140"):
        TextWindows(text[:140], shape(), seed=3)


def test_a_command_that_cannot_run_says_so_in_one_line(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--shape", str(tmp_path / "none.json"), "--text", "x"])
    assert caught.value.code == 2 and capsys.readouterr().err.count("\n") == 1
