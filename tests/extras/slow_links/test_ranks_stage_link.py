"""Messages between pipeline stages: whole ones change nothing, short ones little."""

from __future__ import annotations

from typing import Any

import pytest

from tests.extras.slow_links.worker_stage_link import LAYOUTS, LOW, RANK, STEPS
from tests.helpers.on_ranks import ranks_fixture

rows = ranks_fixture("tests.extras.slow_links.worker_stage_link", 4, timeout_s=600)


@pytest.mark.timeout(680)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_messages_change_no_bit(rows: dict[str, Any], layout: str) -> None:
    own, linked = rows[f"{layout} whole"], rows[f"{layout} linked"]
    assert len(own["numbers"]) == STEPS and own["numbers"] == linked["numbers"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_short_messages_are_shorter_and_nearly_the_same(rows: dict[str, Any], layout: str) -> None:
    short, whole = rows[f"{layout} short"], rows[f"{layout} whole"]
    # 32 numbers of four bytes against 32 bytes and a scale.
    assert short["bytes"] / whole["bytes"] == pytest.approx(36 / 128, rel=1e-3)
    losses, exact = ([loss for loss, _ in row["numbers"]] for row in (short, whole))
    assert losses != exact and losses == pytest.approx(exact, rel=5e-3)


@pytest.mark.parametrize("layout", LOW)
def test_the_end_of_a_step_goes_as_factors(rows: dict[str, Any], layout: str) -> None:
    low, whole, full = (rows[f"{layout} {name}"] for name in ("low", "whole", "full"))
    losses, exact, same = ([loss for loss, _ in row["numbers"]] for row in (low, whole, full))
    assert same != exact and same == pytest.approx(exact, rel=1e-4)
    assert losses != exact and losses == pytest.approx(exact, rel=2e-2)
    # A message is 32 tokens of 32 numbers of four bytes.
    saved = 4 * (32 * 32 - RANK * (32 + 32))
    assert whole["bytes"] - low["bytes"] == STEPS * LOW[layout] * saved
    assert full["bytes"] - whole["bytes"] == STEPS * LOW[layout] * 4 * 32 * 32


@pytest.mark.parametrize("name", ["short", "low"])
def test_a_measured_step_has_its_exact_gradient(rows: dict[str, Any], name: str) -> None:
    short, whole = rows[f"pp2 measured {name}"], rows["pp2 measured whole"]
    assert short == whole and len(short["noise"]) == STEPS
