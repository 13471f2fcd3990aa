"""The same run gives the same losses under every layout (invariant 2 of the architecture)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.distributed.worker_layouts import CASES, NUM_DAILY, PIPELINES, STEPS
from tests.helpers.nightly import case
from tests.helpers.on_ranks import ranks_fixture

rows = ranks_fixture("worker_layouts", 4, timeout_s=1600, has_nightly=True)


def numbered(numbers: Iterable[int]) -> list[Any]:
    return [case(n, daily=n < NUM_DAILY, id=str(CASES[n])) for n in numbers]


@pytest.mark.timeout(1680)
@pytest.mark.parametrize("number", numbered(range(len(CASES))))
def test_losses_and_norms_equal_those_of_plain_data_parallelism(
    rows: list[dict[str, Any]], number: int
) -> None:
    model = CASES[number][0]
    first, row = rows[[case[0] for case in CASES].index(model)], rows[number]
    loss, norm = (1e-2, 1e-1) if model.endswith("bf16") else (1e-5, 1e-4)
    assert len(row["losses"]) == STEPS
    assert row["losses"] == pytest.approx(first["losses"], rel=loss)
    assert row["grad_norms"] == pytest.approx(first["grad_norms"], rel=norm)
    assert row["params_norms"] == pytest.approx(first["params_norms"], rel=loss)
    assert len(row["evaluations"]) == 2, "one of the validation, one of the test samples"
    assert row["evaluations"] == pytest.approx(first["evaluations"], rel=loss)


@pytest.mark.timeout(1680)
@pytest.mark.parametrize("number", numbered(PIPELINES))
def test_later_stages_gather_their_weights_before_they_wait_for_a_message(
    rows: list[dict[str, Any]], number: int
) -> None:
    *_, vpp, more = CASES[number]
    num_chunks = (more.count("|") + 1) // 2 if "layout" in more else vpp
    early, row = rows[number]["early"], rows[number]
    # An interleaved pipeline trains with two chunks at the start, as Megatron-LM does. The first
    # evaluation starts all chunks, and the second has their weights already.
    counts = [*[min(num_chunks, 2)] * STEPS, num_chunks, 0]
    assert early["gathers"][2:] == [counts] * 2, "ranks 2 and 3 are the second stage"
    for name in ("losses", "evaluations"):
        assert early[name] == pytest.approx(row[name], rel=1e-5), "nothing else gathers here"


def test_the_run_learns(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["losses"][-1] < row["losses"][0] - 0.05


def test_no_layout_leaves_groups_behind(rows: list[dict[str, Any]]) -> None:
    for resource in ("num_fds", "num_threads"):
        counts = [row[resource] for row in rows]
        assert max(counts[1:]) <= counts[0] + 2, counts
