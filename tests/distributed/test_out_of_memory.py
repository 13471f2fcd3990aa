"""What ran out of memory is not tried again when the run is started again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from copus_ext.controller.decision_log import NAME, read_journal
from copus_ext.controller.out_of_memory import FILE
from tests.helpers.jobs import steps_of
from tests.helpers.on_ranks import on_ranks

pytestmark = pytest.mark.timeout(400)


def test_a_micro_batch_that_did_not_fit_is_not_tried_again(tmp_path: Path) -> None:
    launches = [on_ranks("worker_out_of_memory", tmp_path, 2, timeout_s=180)]
    while launches[-1]["ran_out"] and len(launches) < 5:
        launches.append(on_ranks("worker_out_of_memory", tmp_path, 2, timeout_s=180))
    assert launches[0]["ran_out"], "the controller tries a larger micro-batch"
    assert not launches[-1]["ran_out"]
    lines = [json.loads(line) for line in (tmp_path / "run" / FILE).read_text().splitlines()]
    assert lines[::2] == lines[1::2], "one of each rank"
    sizes = [line["micro_batch_size"] for line in lines[::2]]
    assert len(sizes) == len(launches) - 1
    assert sizes == sorted(set(sizes), reverse=True), "each launch tries less than those before"
    assert sizes[-1] > 1 and lines[-1]["seq_length"] == 32

    told = [line for line in launches[-1]["told"] if "ran out of memory before" in line]
    assert len(told) == len(sizes)
    assert all(f"micro-batch {size} of 32 tokens" in line for size, line in zip(sizes, told))
    steps = steps_of(tmp_path / "run")
    assert steps[-1]["consumed_samples"] == 360
    assert {step["micro_batch_size"] for step in steps} == {1}
    decisions = [r for r in read_journal(tmp_path / "run" / NAME) if r["kind"] == "decision"]
    rows = decisions[-1]["situation"]["rows"]
    assert max(row["micro_batch_size"] for row in rows) < sizes[-1]


def test_a_launch_begins_with_less_than_what_did_not_fit(tmp_path: Path) -> None:
    wanted = ["--micro-batch-size", "4", "--exit-interval", "5"]
    launches = [on_ranks("worker_out_of_memory", tmp_path, 2, *wanted, timeout_s=120)]
    while launches[-1]["ran_out"] and len(launches) < 4:
        launches.append(on_ranks("worker_out_of_memory", tmp_path, 2, *wanted, timeout_s=120))
    told = ["".join(launch["told"]) for launch in launches]
    assert [launch["ran_out"] for launch in launches] == [True, True, False], "4, 2, then 1"
    assert "micro-batch 2 in place of 4" in told[1] and "micro-batch 1 in place of 4" in told[2]
    assert {step["micro_batch_size"] for step in steps_of(tmp_path / "run")} == {1}
