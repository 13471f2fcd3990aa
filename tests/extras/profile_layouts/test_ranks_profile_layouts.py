"""Ranks time layouts, and go on after one that has no memory for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.planner.profile import read_profile
from copus_ext.planner.search import Planner
from copus_ext.planner.space import Limits
from tests.helpers.jobs import TINY
from tests.helpers.launch import ROOT, run_ranks


def test_layouts_are_timed_once_and_the_planner_reads_the_times(tmp_path: Path) -> None:
    store = tmp_path / "profile.jsonl"
    own = ["--store", store, "--fix", "tp=2,micro_batch=2", "--steps", "1", "--warm-up", "1"]
    flags = [*TINY.split(), "--train-iters", "100"]
    command = [ROOT / "tools/profile_layouts.py", *own, "--", *flags]
    first = run_ranks(command, 2, timeout_s=120, launcher="direct").check()
    machine, timings = read_profile(store)
    timed = [t.configuration for t in timings]
    assert [(c.layout.tp, c.micro_batch_size, c.num_microbatches) for c in timed] == [
        (2, 2, 2),
        (2, 2, 4),
    ]
    assert first.stdout.count("samples/s") == 2
    assert (machine["world_size"], machine["gpu"]) == (2, "CPU-rank")
    model = ModelSpec.from_json(machine["model"])
    limits = Limits(fixed={"tp": 2}, recompute=("none",))
    planner = Planner(model, preset("cpu:2"), limits=limits, timings=timings)
    sources = {
        r.configuration.micro_batch_size: r.prediction.source
        for r in planner.rank([8], top=50)[0].ranked
        if r.configuration.use_distributed_optimizer
    }
    assert sources == {1: "corrected", 2: "profiled", 4: "corrected", 8: "corrected"}
    again = run_ranks(command, 2, timeout_s=120, launcher="direct").check()
    assert "samples/s" not in again.stdout and read_profile(store)[1] == timings


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_go_on_after_a_layout_of_which_one_has_no_memory_left(
    tmp_path: Path, rank: int
) -> None:
    store = tmp_path / "profile.jsonl"
    own = ["--store", store, "--fix", "tp=1,pp=1", "--max-micro-batch", "4"]
    own += ["--global-batch-size", "8", "--steps", "1", "--warm-up", "0"]
    flags = [*own, "--", *TINY.split(), "--train-iters", "100"]
    command = [Path(__file__).with_name("worker.py"), str(rank), "2", *flags]

    def micro_batches() -> set[int]:
        return {t.configuration.micro_batch_size for t in read_profile(store)[1]}

    # No launcher ends the other rank: it has to end by itself.
    first = run_ranks(command, 2, timeout_s=120, ends_all=False)
    assert first.codes == (85, 85), first.tail()
    assert "Traceback" not in first.stderr
    told = [line for line in first.stderr.splitlines() if "out of memory" in line]
    assert len(told) == 1 and f"out of memory on rank {rank}; start this again" in told[0]
    assert micro_batches() == {1}
    # It would run out again.
    second = run_ranks(command, 2, timeout_s=120).check()
    assert second.stdout.count("skipped, out of memory before") == 2
    assert micro_batches() == {1} and "samples/s" not in second.stdout
