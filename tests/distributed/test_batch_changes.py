"""A batch that changes while a run goes on: every sample once, rates exact, under any layout, and
over a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.on_ranks import ranks_fixture

record = ranks_fixture("worker_batch_changes", 2, timeout_s=400, launcher="fresh")


@pytest.mark.timeout(440)
def test_batches_follow_each_other_and_the_last_takes_what_is_left(record: dict[str, Any]) -> None:
    steps = record["dp"]["steps"]
    sizes = [(s["global_batch_size"], s["micro_batch_size"]) for s in steps]
    assert sizes == [(8, 1), (8, 1), (16, 2), (16, 2), (8, 1), (24, 4), (16, 4)]
    ends = [s["consumed_samples"] for s in steps]
    assert ends == [8, 16, 32, 48, 56, 80, 96]


@pytest.mark.timeout(440)
@pytest.mark.parametrize("layout", ["tp", "pp", "vpp"])
def test_losses_do_not_depend_on_the_layout(record: dict[str, Any], layout: str) -> None:
    want = [s["loss"] for s in record["dp"]["steps"]]
    assert [s["loss"] for s in record[layout]["steps"]] == pytest.approx(want, abs=1e-5)


@pytest.mark.timeout(440)
def test_rates_come_back_bit_for_bit(record: dict[str, Any]) -> None:
    at = {s["samples"]: s for s in record["dp"]["seen"]}
    # What a step leaves is what the next one uses; a change comes after it.
    assert at[8]["lr"] == at[16]["lr"] == at[56]["lr"] == 1e-3
    assert at[32]["lr"] == at[48]["lr"] == 1e-3 * 2**0.5
    assert (at[80]["beta2"], at[80]["weight_decay"]) == (0.9, 0.2)
    assert (at[56]["beta2"], at[56]["weight_decay"]) == (0.999, 0.1)


@pytest.mark.timeout(440)
def test_a_checkpoint_carries_the_change(record: dict[str, Any]) -> None:
    whole = record["dp"]
    for name, at in (("resumed", 3), ("resumed late", 6)):
        again = record[name]
        assert again["steps"] == whole["steps"][at:], "bit-equal"
        assert again["seen"] == whole["seen"][at:]
    # The layout has one replica less: the same batches, other micro-batches.
    other = [s["loss"] for s in record["resumed as pp"]["steps"]]
    assert other == pytest.approx([s["loss"] for s in whole["steps"][3:]], abs=1e-5)


@pytest.mark.timeout(440)
def test_a_run_that_nobody_steers_goes_back_to_its_flags(record: dict[str, Any]) -> None:
    steps = record["let go"]["steps"]
    assert [s["global_batch_size"] for s in steps] == [8, 8]
    rates = record["let go"]["seen"][-1]
    assert (rates["lr"], rates["beta2"], rates["weight_decay"]) == (1e-3, 0.999, 0.1)


@pytest.mark.timeout(440)
def test_no_run_on_cpu_loads_a_compiler(record: dict[str, Any]) -> None:
    """It would take longer than torch and megatron-core together, at every start."""
    assert [name for name, run in record.items() if run["compiler"]] == []
