"""Peaks of memory on GPUs: when they are read, which is kept, and what they teach the planner."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from copus_ext.controller import peak_memory
from copus_ext.controller.peak_memory import FILE, PeakMemoryCallback, name_of, peaks_of
from copus_ext.controller.throughput_table import (
    MemoryHistory,
    ThroughputTable,
    configuration_of_run,
)
from megatron.training.config.layout import Layout
from tests.unit.test_controller_parts import config, flags

GPU = "NVIDIA H100 80GB HBM3", 81559.0


class Counters:
    """Stands for those of a GPU, which this machine lacks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, reset_to: float = 0.0) -> None:
        self.peak = self.reset_to = reset_to
        self.reads, self.resets = 0, 0
        monkeypatch.setattr(peak_memory, "peak_bytes_here", self.read)
        monkeypatch.setattr(peak_memory, "forget_peaks", self.forget)
        monkeypatch.setattr(peak_memory.dist, "get_rank", lambda: 0)
        monkeypatch.setattr(peak_memory, "broadcast_from_rank0", lambda value: value)

    def read(self) -> float:
        self.reads += 1
        return self.peak

    def forget(self) -> None:
        self.resets += 1
        self.peak = self.reset_to

    def step(self, callback: PeakMemoryCallback, context: Any, needs: float) -> None:
        self.peak = max(self.peak, needs)
        callback.on_train_step_end(context)


def context_of(run_dir: Path, micro: int, *, is_cuda: bool = True) -> Any:
    run = config()
    runtime = replace(run.runtime, device="cuda" if is_cuda else "cpu")
    step = SimpleNamespace(micro_batch_size=micro, global_batch_size=16)
    return SimpleNamespace(config=replace(run, runtime=runtime), step=step, run_dir=run_dir)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "control").mkdir()
    return tmp_path


def test_the_peak_of_a_configuration_is_its_own(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters, callback, run = Counters(monkeypatch), PeakMemoryCallback(), config()
    peaks = peaks_of(run_dir, run)
    large, small = context_of(run_dir, 4), context_of(run_dir, 1)
    callback.on_setup_start(large)
    for _ in range(20):
        counters.step(callback, large, 9e9)
    counters.step(callback, small, 9e9)  # the first step still has what the large one has left
    for number in range(20):
        counters.step(callback, small, 4e9 if number == 10 else 3e9)
    assert peaks(configuration_of_run(run, 4, 16)) == 9e9
    assert peaks(configuration_of_run(run, 1, 16)) == 4e9, "a later, higher look counts"
    assert peaks(configuration_of_run(run, 2, 16)) is None
    assert (counters.reads, counters.resets) == (4, 2)
    again = PeakMemoryCallback()
    again.on_setup_start(small)
    for _ in range(20):
        counters.step(again, small, 2e9)
    assert peaks(configuration_of_run(run, 1, 16)) == 4e9, "of all launches"
    assert len((run_dir / FILE).read_text().splitlines()) == 3


def test_cpu_ranks_have_no_counters(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters, callback = Counters(monkeypatch), PeakMemoryCallback()
    here = context_of(run_dir, 4, is_cuda=False)
    callback.on_setup_start(here)
    for _ in range(20):
        counters.step(callback, here, 9e9)
    assert counters.reads == counters.resets == 0 and not (run_dir / FILE).exists()


def test_lines_that_make_no_sense_are_left_out(run_dir: Path) -> None:
    c = configuration_of_run(config(), 4, 16)
    name = name_of(c, config().batch.seq_length)
    lines = [{"configuration": name, "peak_bytes": peak} for peak in (5e9, "7", -1, 4e9)]
    text = "".join(json.dumps(line) + "\n" for line in [*lines, [], {"configuration": name}])
    (run_dir / FILE).write_text(text + '{"configuration": "tp1')
    assert peaks_of(run_dir, config())(c) == 5e9
    assert peaks_of(None, config())(c) is None


def test_the_number_of_micro_batches_counts_with_stages_alone() -> None:
    for layout, alike in ((Layout(dp=2), True), (Layout(pp=2), False)):
        names = {name_of(configuration_of_run(config(), 1, b, layout), 128) for b in (4, 16)}
        assert (len(names) == 1) == alike


def test_a_measured_peak_shrinks_what_the_table_holds_possible() -> None:
    large = "--num-layers 8 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16"
    run = config(f"{large} --seq-length 4096 --max-position-embeddings 4096")
    rows: dict[bool, set[int]] = {}
    for is_measured in (False, True):
        # Far more than is predicted.
        peak = 0.6 * GPU[1] * 2**20 if is_measured else None
        memory = MemoryHistory(peak_bytes=lambda c: peak)  # noqa: B023
        table = ThroughputTable(run, flags(), gpu=GPU, memory=memory)
        found, _ = table.rows(
            [16],
            micro_batch_size=1,
            global_batch_size=16,
            measured=lambda c, i=1: (0.1, 0.001, 20) if c.micro_batch_size == 1 else None,
        )
        rows[is_measured] = {row.micro_batch_size for row in found}
        assert table.planner is not None
        corrected = table.planner.peaks
        assert (corrected.moving > 1.5 or corrected.fixed_bytes > 1e9) == is_measured
    assert 1 in rows[True] and rows[True] < rows[False]
