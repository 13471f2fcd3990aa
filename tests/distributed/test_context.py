"""Ranks that share a sample train as one rank does: losses and every gradient."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.worker_context import CASES, CASES_OF_EIGHT, DAILY, RESUMED, WRONG
from tests.helpers.nightly import case
from tests.helpers.on_ranks import on_ranks, ranks_fixture

ConfigBatch = dict[str, dict[str, Any]]

found = ranks_fixture("worker_context", 4, timeout_s=800, has_nightly=True)


@pytest.fixture(scope="module")
def rows(found: dict[str, Any]) -> ConfigBatch:
    return found["rows"]


@pytest.mark.timeout(880)
@pytest.mark.parametrize(
    ("model", "layout"), [case(*c, daily=" ".join(c) in DAILY) for c in CASES if c[1] != "dp4"]
)
def test_loss_and_gradients_equal_those_of_whole_samples(
    rows: ConfigBatch, model: str, layout: str
) -> None:
    row, whole = rows[f"{model} {layout}"], rows[f"{model} dp4"]
    assert row["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    worst = max(row["distances"], key=row["distances"].__getitem__)
    # An expert sums few tokens; without sharing them its rounding is about the same.
    assert row["distances"][worst] < (3e-6 if model == "moe" else 1e-6), worst


@pytest.mark.parametrize(
    "layout",
    [
        case(name, daily=f"llama {name}" in DAILY)
        for name in ("cp4", "cp4 a2a", "cp2 dp2", "tp2 cp2", "tp2 cp2 sp a2a")
    ],
)
def test_what_a_rank_receives_is_what_formulas_say(rows: ConfigBatch, layout: str) -> None:
    """Gathered keys and values, or heads for tokens: as much forward as backward."""
    sizes = dict(re.findall(r"(tp|cp|dp)(\d)", layout))
    t, c, dp = (int(sizes.get(name, 1)) for name in ("tp", "cp", "dp"))
    tokens, width, layers, heads, groups, micro_batches = 32, 4, 4, 8 // t, 4 // t, 8 // dp
    forward = 2 * tokens * groups * width * (c - 1) // c
    if "a2a" in layout:
        forward = (2 * heads + 2 * max(groups, c)) * tokens * width * (c - 1) // c**2
    received = rows[f"llama {layout}"]["received"]
    assert received == 2 * forward * layers * micro_batches


@pytest.mark.nightly
def test_eight_ranks_in_three_dimensions(tmp_path: Path) -> None:
    rows = on_ranks("worker_context", tmp_path, 8, "eight", timeout_s=400)["rows"]
    whole = rows["llama dp8"]
    for model, layout in CASES_OF_EIGHT:
        row = rows[f"{model} {layout}"]
        assert row["loss"] == pytest.approx(whole["loss"], rel=1e-6)
        assert max(row["distances"].values()) < 1e-6, layout


def test_a_mean_over_the_tokens_of_one_rank_is_seen(rows: ConfigBatch) -> None:
    assert max(rows[WRONG]["distances"].values()) > 1e-3


@pytest.mark.parametrize("layout", RESUMED)
def test_a_checkpoint_goes_on_under_every_layout(found: dict[str, Any], layout: str) -> None:
    whole, own = found["resumed"]["without a stop"], found["resumed"][layout]
    assert len(own) == 2
    assert own == (whole if layout == RESUMED[0] else pytest.approx(whole, rel=1e-5))
