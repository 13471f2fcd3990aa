"""Stages on several types of GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from copus_ext.perf.cluster_spec import preset
from copus_ext.perf.model_spec import PRESETS
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.cuts import Cut, NoCut, best_cut, problem_of
from copus_ext.planner.mixed import Placed, StageType, best_placement, mixed_problem

MODEL = PRESETS["llama-2-7b"]
C = Configuration(
    tp=2, pp=4, dp=4, micro_batch_size=1, global_batch_size=128, sequence_parallel=True
)
GIB = 2.0**30


def stage_type(kind: str, num: int = 2, gib: float = 70.0) -> StageType:
    return StageType(cluster=preset(f"{kind}:32"), num_stages=num, limit_bytes=gib * GIB)


@pytest.mark.parametrize("vpp", [1, 2])
def test_equal_types_are_one(vpp: int) -> None:
    c = dataclasses.replace(C, vpp=vpp)
    fast = stage_type("h100-80g")
    alone = best_cut(problem_of(MODEL, fast.cluster, c, limit_bytes=70 * GIB))
    assert best_cut(mixed_problem(MODEL, c, [fast] * 4)) == alone
    placed = best_placement(MODEL, c, [fast, fast])
    assert isinstance(placed, Placed) and placed.cut == alone


def test_slower_gpus_get_fewer_layers_wherever_they_stand() -> None:
    fast, slow = stage_type("h100-80g"), stage_type("a100-80g")
    for stages in ([fast, fast, slow, slow], [slow, fast, fast, slow], [slow, slow, fast, fast]):
        cut = best_cut(mixed_problem(MODEL, C, stages))
        assert isinstance(cut, Cut)
        of: dict[Any, list[int]] = {"fast": [], "slow": []}
        for stage, layers in zip(stages, cut.layers):
            of["slow" if stage is slow else "fast"].append(layers)
        assert max(of["slow"]) < min(of["fast"])


def test_the_best_order_is_no_slower_than_any() -> None:
    fast, slow = stage_type("h100-80g", 1), stage_type("a100-80g", 3, 38.0)
    found = best_placement(MODEL, C, [slow, fast])
    assert isinstance(found, Placed) and sorted(found.order) == [0, 0, 0, 1]
    for order in ([fast, slow, slow, slow], [slow, slow, slow, fast]):
        cut = best_cut(mixed_problem(MODEL, C, order))
        assert isinstance(cut, NoCut) or found.cut.step_s <= cut.step_s
    limits = [[38.0, 70.0][i] * GIB for i in found.order]
    assert all(need <= limit for need, limit in zip(found.cut.peak_bytes, limits))


def test_gpus_of_little_memory_stand_where_little_is_in_flight() -> None:
    c = dataclasses.replace(C, tp=1, dp=8, sequence_parallel=False, micro_batch_size=2)
    large, small = stage_type("h100-80g", 2, 75.0), stage_type("h100-80g", 2, 30.0)
    found = best_placement(MODEL, c, [small, large])
    assert isinstance(found, Placed) and found.order == (1, 1, 0, 0)


def test_what_cannot_be_placed() -> None:
    fast = stage_type("h100-80g")
    with pytest.raises(ValueError, match="one per stage"):
        mixed_problem(MODEL, C, [fast] * 3)
    with pytest.raises(ValueError, match="make 2 stages but pp=4"):
        best_placement(MODEL, C, [fast])
    tiny = stage_type("h100-80g", 2, 2.0)
    none = best_placement(MODEL, C, [tiny, tiny])
    assert isinstance(none, NoCut) and none.code == "memory"
