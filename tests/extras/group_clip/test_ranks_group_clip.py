"""Gradients clipped by groups of samples: the same under every layout and micro-batch size."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from tests.extras.group_clip.worker import (
    ADAPTIVE,
    BATCH,
    GROUP,
    LIMIT,
    MICRO,
    MODELS,
    STEPS,
    UNLIMITED,
)
from tests.helpers.on_ranks import ranks_fixture

RUNS = [f"{layout} {micro} limit" for layout, sizes in MICRO.items() for micro in sizes]
RUNS += [f"{layout} {micro} adaptive" for layout, micro in ADAPTIVE]
CLOSE = 1e-5

found = ranks_fixture("tests.extras.group_clip.worker", 2, timeout_s=240)


@pytest.fixture(scope="module")
def rows(found: dict[str, Any]) -> dict[str, Any]:
    return found["rows"]


def flat(norms: list[list[float]]) -> list[float]:
    """Norms of all groups of a run in order."""
    return [norm for step in norms for norm in step]


@pytest.mark.timeout(280)
@pytest.mark.parametrize("layout", ["pp2", "tp2"])
def test_groups_and_their_sum_are_those_of_each_group_alone(
    found: dict[str, Any], layout: str
) -> None:
    alone = found["alone"][layout]
    norms = alone["norms"]
    assert len(norms) == BATCH // GROUP
    apart = [b / a - 1 for a, b in itertools.pairwise(sorted(norms))]
    assert min(apart) > 10 * CLOSE, "groups can be told apart"
    for name in RUNS:
        assert found["rows"][name]["norms"][0] == pytest.approx(norms, rel=CLOSE), name
    assert alone["off"]["limit"] < CLOSE and alone["off"]["adaptive"] < CLOSE


@pytest.mark.parametrize("name", RUNS)
def test_neither_layout_nor_micro_batch_counts(rows: dict[str, Any], name: str) -> None:
    own, one = rows[name], rows[f"pp2 4 {name.split()[-1]}"]
    norms = flat(own["norms"])
    assert len(norms) == STEPS * BATCH // GROUP and len(own["losses"]) == STEPS
    assert norms == pytest.approx(flat(one["norms"]), rel=CLOSE)
    assert own["losses"] == pytest.approx(one["losses"], rel=CLOSE)
    assert own["grad_norms"] == pytest.approx(one["grad_norms"], rel=CLOSE)


@pytest.mark.parametrize("how", ["limit", "adaptive"])
def test_clipping_changes_the_training(rows: dict[str, Any], how: str) -> None:
    one = rows[f"pp2 4 {how}"]
    clipped = [norm > float(LIMIT) for norm in flat(one["norms"])]
    assert len(clipped) / 2 < sum(clipped) < len(clipped)
    assert one["grad_norms"] != pytest.approx(rows["pp2 4 off"]["grad_norms"], rel=1e-2)


@pytest.mark.parametrize("layout", UNLIMITED)
def test_an_infinite_limit_changes_nothing(rows: dict[str, Any], layout: str) -> None:
    own, off = (rows[f"{layout} {GROUP} {how}"] for how in ("infinite", "off"))
    for name in ("losses", "grad_norms"):
        assert len(own[name]) == STEPS and own[name] == off[name], "the same sums in order"


@pytest.mark.parametrize("model", MODELS)
def test_other_models_are_cut_into_groups(rows: dict[str, Any], model: str) -> None:
    own, off = (rows[f"{model} {how}"] for how in ("infinite", "off"))
    assert own["losses"] == off["losses"] and own["grad_norms"] == off["grad_norms"]
    assert own["norms"] and min(flat(own["norms"])) > 0


def test_a_rank_keeps_what_is_in_flight_alone(rows: dict[str, Any]) -> None:
    for name in RUNS:
        layout, micro = name.split()[0], int(name.split()[-2])
        # The first of two stages is at most two micro-batches behind the second.
        most = {"pp2": math.ceil(2 * micro / GROUP), "tp2": 1, "dp2": 0}[layout]
        assert max(rows[name]["waiting"]) <= most, name


def test_validation_and_a_second_launch_change_nothing(rows: dict[str, Any]) -> None:
    assert rows["evaluated"]["losses"] == rows["pp2 2 limit"]["losses"]
    begun, resumed = rows["begun"], rows["resumed"]
    assert len(begun["norms"]) == 3 and len(resumed["norms"]) == STEPS - 3
    whole = rows["dp2 2 limit"]
    assert flat(begun["norms"]) == flat(whole["norms"][:3])
    assert flat(resumed["norms"]) == pytest.approx(flat(whole["norms"][3:]), rel=CLOSE)
