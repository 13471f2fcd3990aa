"""What a search leaves out early changes no answer."""

from __future__ import annotations

import shlex
from typing import Any

import numpy as np
import pytest

from copus_ext.commands import plan, plan_run
from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.memory import static_bytes
from copus_ext.cost_model.models import PRESETS
from copus_ext.planner.profile import Timing
from copus_ext.planner.pruning import least_bytes, numbered
from copus_ext.planner.search import Planner
from copus_ext.planner.space import LEGAL, Limits, enumerate_points, to_config_batch

BATCHES = [8, 24, 64, 512]
MOE = PRESETS["qwen3-30b-a3b"].with_seq_length(4096)


def planners() -> dict[str, Planner]:
    """A dense model, one that was timed in a layout that has not the bytes, and a mixture."""
    limits = Limits(logits_chunks=(1, 4))
    model, cluster = PRESETS["llama-2-13b"], preset("a100-40g:16")
    dense = Planner(model, cluster, limits=limits)
    every = enumerate_points(model, cluster, 64, limits)
    legal = every.take(np.flatnonzero(every.code == LEGAL))
    most = int(np.argmax(least_bytes(model, cluster, legal)))
    ran = [Timing(configuration=legal.configuration(most), step_s=5.0)]
    timed = Planner(model, cluster, limits=limits, timings=ran)
    assert least_bytes(model, cluster, legal)[most] > timed.limit_bytes
    return {"dense": dense, "timed": timed, "mixture": Planner(MOE, preset("h100-80g:32"))}


@pytest.mark.parametrize("name", ["dense", "timed", "mixture"])
def test_what_cannot_fit_need_not_be_listed(name: str) -> None:
    whole, able = planners()[name], planners()[name]
    want, got = whole.rank(BATCHES, top=3), able.rank(BATCHES, top=3, reasons=False)
    assert [p.ranked for p in want] == [p.ranked for p in got]
    assert [p.num_ranked for p in want] == [p.num_ranked for p in got]
    assert all(p.rejected for p in want) and not any(p.rejected for p in got)
    some, all_ = (
        len(p._judged(BATCHES, whole=kind).points) for p, kind in ((able, False), (whole, True))
    )
    assert some < (0.6 if name == "dense" else 1.0) * all_
    for batch in BATCHES:
        points, seconds = whole.every(batch)
        first = able.fastest(batch)
        if not len(points):
            assert first is None
            continue
        assert first is not None
        assert first.configuration == points.configuration(int(np.argmin(seconds)))
        assert first == whole.fastest(batch)


def test_bytes_of_a_kind_are_those_of_each_point() -> None:
    for model, cluster in ((PRESETS["llama-2-13b"], "a100-40g:16"), (MOE, "h100-80g:32")):
        points = enumerate_points(model, preset(cluster), 64, Limits())
        points = points.take(np.flatnonzero(points.code == LEGAL)[::7])
        each = static_bytes(to_config_batch(model, preset(cluster), points))
        assert np.allclose(least_bytes(model, preset(cluster), points), each, rtol=1e-12)


@pytest.mark.parametrize("most", [3, 2**40])
def test_numbers_stand_for_values(most: int) -> None:
    values = np.random.default_rng(0).integers(0, most, 200)
    found, size = numbered(values)
    _, want = np.unique(values, return_inverse=True)
    assert np.array_equal(found, want.reshape(-1)) and size == len(np.unique(values))
    assert numbered(np.zeros(0))[1] == 0


def test_the_first_batch_asks_for_no_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    args = plan.parse(shlex.split("--model llama-2-7b --cluster h100-80g:8 --global-batch-size 64"))
    planner = plan.planner_of(args)
    asked: list[Any] = []
    true = Planner.rank

    def noted(self: Planner, sizes: Any, **kwargs: Any) -> Any:
        asked.append((list(sizes), kwargs))
        return true(self, sizes, **kwargs)

    monkeypatch.setattr(Planner, "rank", noted)
    found = plan_run.first_batch_of(args, planner)
    ((sizes, how),) = asked
    assert found is not None and found[1]["global_batch_size"] in sizes
    assert len(sizes) > 10 and not how["reasons"]
