"""Changing the layout: the configuration under another, what it costs, and when it is barred."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.step_settings import Request, StepSettings
from megatron.trainer.config import Config
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.relayout import with_layout
from megatron.trainer.train.callbacks import Callback, CallbackContext, Callbacks
from tests.helpers.jobs import TINY, layout_flags

RECOMPUTE = "--recompute-granularity full --recompute-method block"
LAYOUTS = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 2, 2), (2, 2, 1), (2, 2, 2)]


def config(*more: str) -> Config:
    resolved = resolve(parse_args([*TINY.split(), "--train-iters", "10", *more]), 4)
    return resolved.replace(padded_vocab_size=512)


def layout(tp: int, pp: int, vpp: int) -> Layout:
    return Layout(tp=tp, pp=pp, vpp=vpp, dp=4 // (tp * pp))


@pytest.mark.parametrize("way", list(itertools.permutations(LAYOUTS, 2)))
def test_the_configuration_is_that_of_a_launch_under_the_layout(way: Any) -> None:
    start, end = way
    moved = with_layout(config(*layout_flags(*start)), layout(*end))
    fresh = config(*layout_flags(*end))
    ours, theirs = moved.flat(), fresh.flat()
    assert moved.layout == layout(*end)
    free = {"pad_vocab_for_tensor_parallel_size", "sequence_parallel", "notes", "global_batch_size"}
    free |= {"num_virtual_stages_per_pipeline_rank"}
    assert {k for k in ours if ours[k] != theirs[k]} <= free
    again = with_layout(with_layout(config(), layout(*end)), layout(1, 1, 1))
    assert again == with_layout(config(), layout(1, 1, 1))


def test_sequence_parallelism_follows_the_flags() -> None:
    two = layout(2, 1, 1)
    assert with_layout(config(), two).parallel.sequence_parallel
    own = config("--tensor-model-parallel-size", "2")
    assert not with_layout(own, two).parallel.sequence_parallel
    given = config("--tensor-model-parallel-size", "2", "--sequence-parallel")
    assert with_layout(given, two).parallel.sequence_parallel
    assert not with_layout(given, layout(1, 1, 1)).parallel.sequence_parallel


@pytest.mark.parametrize(
    ("to", "more", "words"),
    [
        (Layout(tp=1, pp=4, vpp=4, dp=1), (), "--num-layers 4"),
        (Layout(dp=8), (), "for 8 ranks"),
        (layout(1, 2, 2), ("--no-overlap-p2p-communication",), "overlap-p2p"),
        (
            layout(1, 2, 2),
            tuple(f"{RECOMPUTE} --recompute-num-layers 2".split()),
            "--recompute-num-layers 2",
        ),
    ],
)
def test_what_cannot_be_is_refused(to: Layout, more: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        with_layout(config(*more), to)


@pytest.mark.parametrize(
    "text", ["", "tp2", "tp2.pp1.dpx", "tp0.pp1.dp1", "tp1.pp1.dp1 x", "tp=1 pp=1"]
)
def test_other_text_is_no_layout(text: str) -> None:
    with pytest.raises(ValueError):
        Layout.from_text(text)


def test_the_last_move_counts_whatever_is_asked_beside_it() -> None:
    class Asks(Callback):
        def __init__(self, request: Request) -> None:
            self.request = request

        def on_train_step_end(self, context: CallbackContext) -> Request | None:
            return self.request

    def move(job: Any) -> None:
        raise AssertionError(job)

    settings = StepSettings(global_batch_size=4)
    callbacks = Callbacks(
        [
            Asks(Request(kind="change", reason="a", move=move)),
            Asks(Request(kind="save", reason="b", settings=settings)),
        ]
    )
    found = callbacks.fire("on_train_step_end", None)  # type: ignore[arg-type]
    assert found is not None
    assert (found.kind, found.move, found.settings) == ("save", move, settings)
