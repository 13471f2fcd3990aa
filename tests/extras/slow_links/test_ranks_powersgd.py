"""Gradients in fewer numbers: nothing is lost for good, and what must be exact is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.extras.slow_links.worker_powersgd import CASES, FEW, RANK, SHORT, STEPS
from tests.helpers.on_ranks import ranks_fixture

rows = ranks_fixture("tests.extras.slow_links.worker_powersgd", 4, timeout_s=800)


@pytest.mark.timeout(880)
@pytest.mark.parametrize("name", CASES)
def test_full_rank_trains_as_whole_gradients(rows: dict[str, Any], name: str) -> None:
    whole, full = rows["full"][f"{name} whole"], rows["full"][f"{name} full"]
    assert len(full) == STEPS and full != whole
    # A router that chooses between experts of almost the same score turns on a last bit.
    number = 2 if name == "experts" else STEPS
    for step, (own, want) in enumerate(zip(full[:number], whole[:number])):
        relative = 1e-6 if step < 3 else 1e-4
        assert own[0] == pytest.approx(want[0], rel=relative)
        assert own[1] == pytest.approx(want[1], rel=20 * relative)


@pytest.mark.parametrize("estimator", ["rank", "micro"])
def test_a_measured_step_is_exact_and_leaves_residuals_alone(
    rows: dict[str, Any], estimator: str
) -> None:
    off, on = (rows["measured"][f"{estimator} {rank}"] for rank in (0, RANK))
    assert [bool(s) for s in on["squares"]] == [False, True] * (FEW // 2)
    for own, want in zip(on["squares"][1::2], off["squares"][1::2]):
        for kind in ("small", "big"):
            assert own[kind] == pytest.approx(want[kind], rel=1e-6)
    assert on["norms"][1::2] == pytest.approx(off["norms"][1::2], rel=1e-6)
    assert on["norms"][0] != pytest.approx(off["norms"][0], rel=1e-3)
    sizes = on["residuals"]
    assert sizes[0] > 0 and sizes[1] == sizes[0] and sizes[2] != sizes[1] and sizes[3] == sizes[2]


@pytest.mark.parametrize("name", SHORT)
def test_what_is_sent_and_what_is_left_are_what_went_in(rows: dict[str, Any], name: str) -> None:
    found = rows["sums"][name]
    assert found["lost"] > 0.1, "little fits into so few columns"
    assert found["off"] < 1e-6


@pytest.mark.parametrize("name", SHORT)
def test_bytes_are_those_of_the_formula(rows: dict[str, Any], name: str) -> None:
    found = rows["sums"][name]
    per_number = 2 if "bf16" in name else 4
    assert len(found["shapes"]) == 4 * 4
    rest = found["numbers"] - sum(m * n for m, n in found["shapes"])
    factors = sum(RANK * (m + n) for m, n in found["shapes"])
    assert found["bytes"] == FEW * (4 * factors + per_number * rest)


def test_a_move_drops_residuals_and_goes_on(rows: dict[str, Any]) -> None:
    found = rows["moves"]
    assert found["kind"] == "moved", found["reason"]
    assert found["before"] > 0 and found["after"] == 0 and found["last"] > 0
    whole = [loss for loss, _ in rows["full"]["sharded whole"][:FEW]]
    assert found["losses"] == pytest.approx(whole, rel=1e-2)
    assert found["losses"] == sorted(found["losses"], reverse=True)


def test_some_stages_compress(rows: dict[str, Any]) -> None:
    assert sorted(rows["moves"]["stages"]) == [[0, True], [0, True], [1, False], [1, False]]
