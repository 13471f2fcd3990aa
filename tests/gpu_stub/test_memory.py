"""The planner's peak of memory against torch's own allocator; `bench/gpu_stub_memory.py` measures
more points."""

from __future__ import annotations

import pytest

from bench.gpu_stub_memory import measured, points, row_of

POINTS = {point.name: point for point in points()}
CHECKED = [
    "gpt, 4 tp2 sp",
    "llama, 1 pp4 stage 1",
    "llama, 1 tp2",
    "llama, 2 dp4",
    "long, 1 cp2",
    "experts, 1 ep2",
]


@pytest.mark.parametrize("name", CHECKED)
def test_the_planner_knows_what_a_step_allocates(name: str) -> None:
    row = row_of(POINTS[name], measured(POINTS[name]))
    assert abs(row["error_of_moving"]) < 0.03, row
    assert abs(row["error"]) < 0.05, "what is reserved beside it, in holes"
