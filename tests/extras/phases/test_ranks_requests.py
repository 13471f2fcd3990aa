"""What a callback asks for where a phase begins is done before the first step of that phase."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.on_ranks import ranks_fixture

found = ranks_fixture("tests.extras.phases.worker_requests", 1, timeout_s=400)


def parts(row: dict[str, Any]) -> tuple[list[int], list[int], list[float]]:
    """Numbers, batches and rates of the steps."""
    numbers, batches, rates = zip(*row["steps"], strict=True)
    return list(numbers), list(batches), list(rates)


@pytest.mark.parametrize("way", ["", " skipped"])
def test_settings_hold_from_the_first_step_of_the_phase(found: dict[str, Any], way: str) -> None:
    before = [1, 2] if way else [1, 2, 3]
    numbers, batches, rates = parts(found[f"nothing{way}"])
    assert numbers == [*before, 4, 5, 6]
    assert batches == [16] * len(before) + [8] * 3
    assert set(rates) == {1e-3}
    numbers, batches, rates = parts(found[f"settings{way}"])
    assert numbers == [*before, *range(4, 10)]
    assert batches == [16] * len(before) + [4] * 6
    assert rates == [1e-3] * len(before) + [0.5e-3] * 6
    assert found[f"settings{way}"]["moved_at"] == [3]
    assert found[f"settings{way}"]["saved"] == [9]


@pytest.mark.parametrize("way", ["", " skipped"])
def test_a_checkpoint_is_written_and_the_move_is_made(found: dict[str, Any], way: str) -> None:
    row = found[f"save{way}"]
    assert (row["saved"], row["moved_at"]) == ([3, 6], [3])
    assert parts(row)[2][-3:] == [0.5e-3] * 3


@pytest.mark.parametrize("way", ["", " skipped"])
def test_a_run_that_is_to_stop_leaves_before_the_phase(found: dict[str, Any], way: str) -> None:
    row = found[f"stop{way}"]
    assert parts(row)[0] == ([1, 2] if way else [1, 2, 3])
    assert (row["saved"], row["moved_at"]) == ([3], [])
