"""Peaks of memory on GPUs: when they are read, which is kept, and what they teach the planner."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from copus_ext.commands.pretrain import controllers
from copus_ext.controller import peak_memory
from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.peak_memory import FILE, PeakMemoryCallback, PeakStore, alike, peaks_of
from copus_ext.controller.throughput_table import (
    MemoryHistory,
    ThroughputTable,
    configuration_of_run,
)
from copus_ext.cost_model.peak_correction import AS_PREDICTED
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.profile import Timing
from megatron import core
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.layout import Layout
from tests.helpers.jobs import TINY
from tests.unit.test_controller_parts import config, flags

GPU = "NVIDIA H100 80GB HBM3", 81559.0
LARGE = (
    "--num-layers 8 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 "
    "--seq-length 4096 --max-position-embeddings 4096"
)


def on_gpus(more: str = "") -> Any:
    """The configuration of a run that believes to be on GPUs."""
    run = config(more)
    return replace(run, runtime=replace(run.runtime, device="cuda"))


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        peak_memory, "gpu_of", lambda c: GPU if c.runtime.device == "cuda" else None
    )


class Counters:
    """Stands for those of a GPU, which this machine lacks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peak = 0.0
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
        self.peak = 0.0

    def step(self, callback: PeakMemoryCallback, context: Any, needs: float) -> None:
        self.peak = max(self.peak, needs)
        callback.on_train_step_end(context)


def context_of(run_dir: Path | None, micro: int, *, run: Any = None, batch: int = 16) -> Any:
    step = SimpleNamespace(micro_batch_size=micro, global_batch_size=batch, elapsed_s=0.1)
    return SimpleNamespace(config=run or on_gpus(), step=step, run_dir=run_dir)


def peak_of(run_dir: Path | None, c: Configuration, run: Any = None) -> float | None:
    found = {
        alike(one.configuration): one.peak_bytes for one in peaks_of(run_dir, run or on_gpus())()
    }
    return found.get(alike(c))


def test_the_peak_of_a_configuration_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters, callback, run = Counters(monkeypatch), PeakMemoryCallback(), on_gpus()
    large, small = context_of(tmp_path, 4), context_of(tmp_path, 1)
    callback.on_setup_start(large)
    for _ in range(20):
        counters.step(callback, large, 9e9)
    counters.step(callback, small, 9e9)  # the first step still has what the large one has left
    for number in range(20):
        counters.step(callback, small, 4e9 if number == 10 else 3e9)
    assert peak_of(tmp_path, configuration_of_run(run, 4, 16)) == 9e9
    assert peak_of(tmp_path, configuration_of_run(run, 1, 16)) == 4e9, "a later, higher look counts"
    assert peak_of(tmp_path, configuration_of_run(run, 1, 64)) == 4e9, "of any batch"
    assert peak_of(tmp_path, configuration_of_run(run, 2, 16)) is None
    assert (counters.reads, counters.resets) == (4, 2)
    again = PeakMemoryCallback()
    again.on_setup_start(small)
    for _ in range(20):
        counters.step(again, small, 2e9)
    assert peak_of(tmp_path, configuration_of_run(run, 1, 16)) == 4e9, "of all launches"
    assert peak_of(tmp_path, configuration_of_run(run, 1, 16), on_gpus(LARGE)) is None
    assert peak_of(None, configuration_of_run(run, 1, 16)) is None


def test_a_move_and_another_batch_of_one_stage_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters, callback = Counters(monkeypatch), PeakMemoryCallback()
    here = context_of(tmp_path, 1)
    callback.on_setup_start(here)
    for _ in range(8):
        counters.step(callback, here, 3e9)
    for _ in range(3):
        counters.step(callback, context_of(tmp_path, 1, batch=64), 3e9)
    assert counters.resets == 1, "another batch needs the same memory"
    counters.peak = 8e9  # of the copies that a move held
    callback.on_relayout_end(here)
    for _ in range(20):
        counters.step(callback, here, 3e9)
    assert counters.resets == 2
    assert peak_of(tmp_path, configuration_of_run(on_gpus(), 1, 16)) == 3e9


def test_cpu_ranks_have_no_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters, callback = Counters(monkeypatch), PeakMemoryCallback()
    here = context_of(tmp_path, 4, run=config())
    callback.on_setup_start(here)
    for _ in range(20):
        counters.step(callback, here, 9e9)
    assert counters.reads == counters.resets == 0 and not (tmp_path / FILE).exists()
    assert peaks_of(tmp_path, config())() == []


@pytest.mark.skipif(
    not core.__version__.startswith(metadata.version("megatron-core")),
    reason="this megatron-core is unpacked beside another that is installed",
)
def test_a_source_tree_of_megatron_core_says_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = PeakStore(tmp_path, on_gpus())
    installed.add(configuration_of_run(on_gpus(), 4, 16), step_s=0.1, peak_bytes=5e9)
    names = "torch", "megatron-core"
    header = json.loads((tmp_path / FILE).read_text().splitlines()[0])
    assert header["machine"]["versions"] == {name: metadata.version(name) for name in names}

    def version(name: str) -> str:
        if name == "megatron-core":
            raise metadata.PackageNotFoundError(name)
        return metadata.version(name)

    monkeypatch.setattr(peak_memory, "version", version)
    assert peak_of(tmp_path, configuration_of_run(on_gpus(), 4, 16)) == 5e9, "the same machine"


def test_a_line_that_a_kill_cut_short_spoils_no_other(tmp_path: Path) -> None:
    store, run = PeakStore(tmp_path, on_gpus()), on_gpus()
    store.add(configuration_of_run(run, 4, 16), step_s=0.1, peak_bytes=5e9)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"configuration": "tp1')
    store.add(configuration_of_run(run, 1, 16), step_s=0.1, peak_bytes=2e9)
    store.add(configuration_of_run(run, 1, 16), step_s=0.1, peak_bytes=1e9)
    cut = configuration_of_run(run, 8, 16, Layout(pp=2, layer_partition=(1, 3)))
    store.add(cut, step_s=0.1, peak_bytes=7e9)
    assert len(PeakStore(tmp_path, on_gpus()).read()) == 2
    assert peak_of(tmp_path, configuration_of_run(run, 4, 16)) == 5e9
    assert peak_of(tmp_path, configuration_of_run(run, 1, 16)) == 2e9


@pytest.mark.parametrize(("layout", "counts"), [(Layout(dp=2), 1), (Layout(pp=2), 3)])
def test_the_number_of_micro_batches_counts_with_stages_alone(layout: Layout, counts: int) -> None:
    """Up to two for each stage."""
    batches = [layout.dp * n for n in (1, 2, 4, 8, 16)]
    names = {alike(configuration_of_run(config(), 1, batch, layout)) for batch in batches}
    assert len(names) == counts


def test_a_measured_peak_shrinks_what_the_table_holds_possible() -> None:
    """It counts also where nothing has been timed, and as often as it was measured."""
    run = config(LARGE)
    one = configuration_of_run(run, 1, 16)
    peak = Timing(configuration=one, step_s=1.0, peak_bytes=0.6 * GPU[1] * 2**20)
    found: dict[int, Any] = {}
    for number in (0, 1):
        memory = MemoryHistory(peaks=lambda: [peak] * number)  # noqa: B023
        table = ThroughputTable(run, flags(), gpu=GPU, memory=memory)
        rows, _ = table.rows(
            [16, 32], micro_batch_size=1, global_batch_size=16, measured=lambda c, i=1: None
        )
        assert table.planner is not None
        found[number] = {row.micro_batch_size for row in rows}, table.planner.peaks
    assert found[0][1] == AS_PREDICTED != found[1][1]
    assert 1 in found[1][0] and found[1][0] < found[0][0]


def test_times_of_cpu_ranks_say_nothing_of_memory() -> None:
    """So that the space of candidates is not made anew with every time."""
    table = ThroughputTable(config(), flags(), gpu=None)
    assert table.planner is not None
    table.rows(
        [8, 16], micro_batch_size=1, global_batch_size=8, measured=lambda c, i=1: (0.1, 0.001, 20)
    )
    assert table.planner.peaks == AS_PREDICTED


@pytest.mark.parametrize(
    ("own", "names"),
    [
        ("", []),
        ("--copus", ["Controller", "PeakMemoryCallback", "OutOfMemoryCallback"]),
        ("--copus --copus-mode observe", ["Controller", "PeakMemoryCallback"]),
        ("--copus --copus-mode off", []),
    ],
)
def test_which_callbacks_a_run_has(own: str, names: list[str]) -> None:
    words = [*TINY.split(), "--train-samples", "64", *own.split()]
    args = parse_args(words, {"copus controller": CopusConfig})
    found = controllers(args, resolve(args, 1))
    assert [type(one).__name__ for one in found] == names
