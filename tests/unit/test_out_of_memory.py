"""What counts as out of memory, and what is then left alone."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from copus_ext.controller import out_of_memory
from copus_ext.controller.out_of_memory import (
    FILE,
    OutOfMemoryCallback,
    TooLarge,
    is_of_host,
    is_out_of_memory,
    judge_of,
    memory_history,
    remembered,
    too_large_of,
)
from copus_ext.controller.throughput_table import ThroughputTable, configuration_of_run
from copus_ext.planner.plan import Ranked
from copus_ext.planner.space import points_of, to_config_batch
from megatron.trainer.common.errors import Relaunch
from megatron.trainer.config.layout import Layout
from megatron.trainer.train.callbacks import Callback, Callbacks
from tests.unit.test_controller_parts import config, flags

pytestmark = pytest.mark.unit


def note(run_dir: Path, *too_large: TooLarge, more: str = "") -> None:
    (run_dir / "control").mkdir(exist_ok=True)
    lines = [json.dumps(asdict(one)) + "\n" for one in too_large]
    (run_dir / FILE).write_text("".join(lines) + more)


def too_large(micro: int, layout: Layout | None = None) -> TooLarge:
    run = config()
    return TooLarge.of(configuration_of_run(run, micro, 8, layout), run.batch.seq_length)


def test_errors_that_say_that_memory_is_used_up() -> None:
    yes = [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    ]
    no = [RuntimeError("shapes differ"), ValueError("out of memory"), KeyboardInterrupt()]
    no.append(Relaunch("changing the layout failed: OutOfMemoryError: CUDA out of memory"))
    assert all(map(is_out_of_memory, yes)) and not any(map(is_out_of_memory, no))


def test_errors_of_the_host_are_told_from_those_of_a_gpu() -> None:
    host = [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")]
    gpu = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")]
    assert all(map(is_of_host, host)) and not any(map(is_of_host, gpu))


def test_what_needs_less_is_still_tried(tmp_path: Path) -> None:
    run = config()
    note(tmp_path, too_large(4), too_large(4), more='{"configuration": "tp1')
    assert remembered(tmp_path) == [too_large(4)]
    fits = judge_of(tmp_path, run)
    assert [fits(configuration_of_run(run, n, 16)) for n in (1, 2, 4, 8)] == [True] * 2 + [
        False
    ] * 2
    assert fits(configuration_of_run(run, 4, 8, Layout(pp=2))), "another layout"
    less = replace(configuration_of_run(run, 4, 8), recompute="full")
    assert fits(less), "other memory options"
    fewer, more = (configuration_of_run(run, 4, 8, Layout(dp=n)) for n in (1, 4))
    assert not fits(fewer) and fits(more), "optimizer state is split over the replicas"
    half: Any = SimpleNamespace(batch=SimpleNamespace(seq_length=run.batch.seq_length // 2))
    fits = judge_of(tmp_path, half)  # shorter samples of another phase
    assert [fits(configuration_of_run(run, n, 16)) for n in (4, 8)] == [True, False]
    assert judge_of(None, run)(configuration_of_run(run, 64, 64))


def test_the_table_leaves_it_out(tmp_path: Path) -> None:
    run = config()
    rows: dict[bool, Any] = {}
    for is_noted in (False, True):
        if is_noted:
            note(tmp_path, too_large(2))
        table = ThroughputTable(run, flags(), gpu=None, memory=memory_history(tmp_path, run))
        found, now = table.rows(
            [8, 16], micro_batch_size=2, global_batch_size=8, measured=lambda c, i=1: None
        )
        rows[is_noted] = {(r.micro_batch_size, r.global_batch_size) for r in found}
        assert (found[now].micro_batch_size, found[now].global_batch_size) == (2, 8)
    assert {micro for micro, _ in rows[False]} >= {1, 2, 4}
    assert rows[True] == {(1, 8), (1, 16), (2, 8)}, "what runs stays"


def test_it_bounds_what_other_layouts_need(tmp_path: Path) -> None:
    large = "--num-layers 8 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16"
    run = config(f"{large} --seq-length 4096 --max-position-embeddings 4096")
    lacked = configuration_of_run(run, 4, 16, Layout(pp=2))
    seq_length = run.batch.seq_length
    other = replace(lacked, recompute="full")
    cut = configuration_of_run(run, 4, 16, Layout(pp=2, layer_partition=(3, 5)))
    left_out = [TooLarge.of(other, seq_length), TooLarge.of(cut, seq_length)]
    left_out += [TooLarge.of(lacked, 2 * seq_length)]
    left_out += [TooLarge.of(replace(lacked, micro_batch_size=1), seq_length, of_host=True)]
    note(tmp_path, TooLarge.of(lacked, seq_length), *left_out)
    assert too_large_of(tmp_path, run) == [lacked]
    gpu = "NVIDIA H100 80GB HBM3", 81559.0
    peaks: list[dict[int, float]] = []
    for memory in (None, memory_history(tmp_path, run)):
        planner = ThroughputTable(run, flags(), gpu=gpu, memory=memory).planner
        assert planner is not None
        able = [configuration_of_run(run, micro, 16) for micro in (1, 2, 4)]
        rows = to_config_batch(planner.model, planner.cluster, points_of(able))
        peaks.append(dict(zip((1, 2, 4), map(float, planner.peak_bytes_of(rows)))))
        fits = [isinstance(planner.explain(c), Ranked) for c in able]
        assert fits == ([True] * 3 if memory is None else [True, False, False])
    before, after = peaks
    assert all(after[micro] > 1.5 * before[micro] for micro in before)


@pytest.mark.parametrize(("noted", "begins_with"), [((), 8), ((8,), 4), ((2, 8), 1), ((1,), 8)])
def test_a_launch_begins_with_a_micro_batch_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: tuple[int, ...], begins_with: int
) -> None:
    monkeypatch.setattr(out_of_memory.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(out_of_memory, "broadcast_from_rank0", lambda value: value)
    note(tmp_path, *map(too_large, noted))
    context: Any = SimpleNamespace(config=config(), run_dir=tmp_path)
    # Two replicas: a batch of 16 is divided by 1, 2, 4 and 8.
    assert out_of_memory.micro_batch_that_fits(context, 8, 16) == begins_with


def test_other_errors_and_an_error_of_a_callback_leave_the_run_its_own(tmp_path: Path) -> None:
    class Broken(Callback):
        def on_train_error(self, context: Any, error: BaseException) -> None:
            raise OSError("disk full")

    one = OutOfMemoryCallback()
    one._run_dir = tmp_path
    (tmp_path / "control").mkdir()
    context: Any = SimpleNamespace(config=config(), micro_batch_size=4, global_batch_size=8)
    callbacks = Callbacks([Broken(), one])
    one.on_train_step_start(context)
    callbacks.tell_error(context, RuntimeError("shapes differ"))
    one.on_train_step_end(context)
    callbacks.tell_error(context, MemoryError())
    assert not (tmp_path / FILE).exists(), "a save, or a move"
    one.on_train_step_start(context)
    callbacks.tell_error(context, MemoryError())
    assert remembered(tmp_path) == [replace(too_large(4), of_host=True)]
