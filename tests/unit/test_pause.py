"""The predicted pause of a change of layout: its bytes are the plan's, and its seconds what was
measured."""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from copus_ext.cost_model.cluster_spec import ClusterSpec
from copus_ext.cost_model.cluster_spec import preset as cluster
from copus_ext.cost_model.models import PRESETS
from copus_ext.goodput import costs
from copus_ext.goodput.costs import LayoutChangeCosts, Machine, MovedBytes, pause_s
from copus_ext.reshard.ownership import all_of_layout
from copus_ext.reshard.pause import MAX_COUNTED, PausePredictor, shape_for
from copus_ext.reshard.plan import element_bytes, make_plan
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.model_shape import ModelShape
from megatron.trainer.distributed.sharding import Record
from tests.unit.test_plan_layouts import EXAMPLES, changes

pytestmark = pytest.mark.unit
RESULTS = Path(__file__).resolve().parents[2] / "docs/results"
MACHINE = Machine(
    device="cuda",
    ranks_per_node=8,
    within_bytes_per_s=300e9,
    across_bytes_per_s=50e9,
    memory_bytes_per_s=3e12,
)


@settings(max_examples=EXAMPLES, deadline=None)
@given(changes(), st.sampled_from([1, 2, 4, 8, 1024]), st.booleans())
def test_the_bytes_are_those_of_the_plan(
    case: tuple[ModelShape, Layout, Layout], ranks_per_node: int, keeps_momenta: bool
) -> None:
    shape, before, after = case
    shape = replace(shape, keeps_momenta=keeps_momenta)
    predictor = PausePredictor(shape, replace(MACHINE, ranks_per_node=ranks_per_node))
    source, target = all_of_layout(shape, before), all_of_layout(shape, after)
    plan = make_plan(source, target, ranks_per_node=ranks_per_node, shape=shape)
    near, far = predictor.received(before, after)

    def size_of(record: Record) -> int:
        return element_bytes(shape, record.key, len(record.lo))

    assert (near + far).tolist() == plan.received_bytes
    across = [0] * len(target)
    for op in plan.ops:
        if op.source_rank // ranks_per_node != op.target_rank // ranks_per_node:
            record = target[op.target_rank][op.target]
            across[op.target_rank] += op.numel * size_of(record)
    if shape.tied:  # its copies may overlap without being equal
        assert all(a <= b for a, b in zip(far.tolist(), across))
    else:
        assert far.tolist() == across
    moved = predictor.moved(before, after)
    held = [sum(r.numel * size_of(r) for r in own) for own in (*source, *target)]
    assert moved.held == max(held) and plan.target_bytes == held[len(source) :]
    if ranks_per_node >= len(target):
        assert max(plan.received_bytes) <= moved.within and moved.across == 0


def test_the_busiest_rank_is_that_of_the_plan() -> None:
    """But for norms, which go from one rank to several tensor-parallel ones."""
    spec = replace(PRESETS["llama-3.2-3b"], tied=False)
    predictor = PausePredictor(shape_for(spec, tp_sizes=[1, 2, 4], sharded=True), MACHINE)
    layouts = [Layout(dp=8), Layout(tp=2, pp=2, dp=2), Layout(pp=4, dp=2), Layout(tp=4, dp=2)]
    for before, after in itertools.permutations(layouts, 2):
        source, target = (all_of_layout(predictor.shape, x) for x in (before, after))
        busiest = make_plan(source, target).busiest_bytes
        assert predictor.moved(before, after).within == pytest.approx(busiest, rel=0.01)


def test_many_pairs_of_a_large_model_are_counted_in_the_way_of_the_plan() -> None:
    """Whole numbers of hundreds of gigabytes stay exact."""
    spec = PRESETS["llama-3-70b"]
    predictor = PausePredictor(shape_for(spec, tp_sizes=[8], sharded=True), MACHINE)
    before, after = Layout(tp=8, pp=4, dp=2), Layout(tp=4, pp=8, dp=2)
    source, target = (all_of_layout(predictor.shape, x) for x in (before, after))
    plan = make_plan(source, target, ranks_per_node=8)
    near, far = predictor.received(before, after)
    assert (near + far).tolist() == plan.received_bytes
    assert predictor.moved(before, after) is predictor.moved(before, after)


def test_a_change_to_the_same_layout_takes_no_time() -> None:
    spec, layout = PRESETS["llama-3.2-3b"], Layout(tp=2, dp=4)
    predictor = PausePredictor(shape_for(spec, tp_sizes=[1, 2], sharded=True), MACHINE)
    assert predictor.seconds(layout, layout) == 0.0
    assert predictor.seconds(layout, Layout(dp=8)) > sum(costs.FIXED_S.values())


@given(
    st.integers(0, 10**12),
    st.integers(0, 10**12),
    st.integers(0, 10**12),
    st.sampled_from(["held", "within", "across"]),
    st.sampled_from(["cpu", "cuda"]),
)
def test_more_bytes_or_a_slower_link_take_longer(
    held: int, within: int, across: int, more: str, device: str
) -> None:
    moved = MovedBytes(held=held, within=within, across=across)
    machine = replace(MACHINE, device=device)
    base = pause_s(moved, machine)
    larger = replace(moved, **{more: getattr(moved, more) + 10**9})
    assert pause_s(larger, machine) > base
    link = {
        "held": "memory_bytes_per_s",
        "within": "within_bytes_per_s",
        "across": "across_bytes_per_s",
    }[more]
    slower = replace(machine, **{link: getattr(machine, link) / 4})
    assert pause_s(larger, slower) > pause_s(larger, machine)


def test_no_change_takes_longer_than_one_that_moves_everything() -> None:
    spec = PRESETS["llama-3.2-3b"]
    for per_node in (2, 8):
        machine = replace(MACHINE, ranks_per_node=per_node)
        predictor = PausePredictor(shape_for(spec, tp_sizes=[1, 2, 4], sharded=True), machine)
        layouts = [Layout(dp=8), Layout(tp=2, dp=4), Layout(tp=4, dp=2), Layout(tp=2, pp=2, dp=2)]
        for before in layouts:
            most = predictor.max_seconds(before)
            for after in layouts:
                # The largest stage of the other layout may be a little larger.
                assert predictor.seconds(before, after) <= 1.5 * most


def test_of_many_ranks_all_of_the_state_is_taken_to_move() -> None:
    shape = shape_for(PRESETS["llama-3.2-3b"], tp_sizes=[1, 2], sharded=True)
    predictor = PausePredictor(shape, MACHINE)
    before, after = Layout(dp=2 * MAX_COUNTED), Layout(tp=2, dp=MAX_COUNTED)
    moved = pause_s(predictor.moved(before, after), MACHINE)
    assert predictor.seconds(before, after) == predictor.max_seconds(before) > 0.99 * moved


def test_the_constants_are_the_lines_through_what_was_measured() -> None:
    found = json.loads((RESULTS / "relayout_cost.json").read_text())
    sets = [
        [r for r in found[part][size]["rows"] if r["kind"] == "change"]
        for part, size in (
            ("restarts", "8M, 2 ranks"),
            ("restarts", "20M, 2 ranks"),
            ("changes", "20M, 2 ranks"),
            ("changes", "40M, 2 ranks"),
        )
    ]
    held = [statistics.median(r["state_bytes"] / 2 for r in rows) for rows in sets]
    memory = cluster("cpu:1").gpu.hbm_bytes_per_s
    for phase, fixed in costs.FIXED_S.items():
        seconds = [statistics.median(r["phases"][phase] for r in rows) for rows in sets]
        line = statistics.linear_regression(held, seconds)
        assert fixed == pytest.approx(line.intercept, abs=6e-5), phase
        if phase in costs.STATE_PASSES:
            assert costs.STATE_PASSES[phase] == pytest.approx(line.slope * memory, abs=6e-3)


@pytest.mark.parametrize("size", ["20M, 2 ranks", "40M, 2 ranks"])
def test_measured_pauses_of_cpu_ranks_are_predicted_within_a_third(size: str) -> None:
    rows = json.loads((RESULTS / "relayout_cost.json").read_text())["changes"][size]["rows"]
    machine = Machine.of(cluster("cpu:2"))
    off = []
    for r in rows:
        moved = MovedBytes(held=r["state_bytes"] // 2, within=r["busiest_bytes"], across=0)
        off.append(pause_s(moved, machine) / r["pause_s"])
    assert 0.67 < statistics.median(off) < 1.5


def test_a_machine_is_read_of_the_planners_description() -> None:
    one = Machine.of(cluster("h100-80g:16"))
    assert (one.device, one.ranks_per_node) == ("cuda", 8)
    assert one.within_bytes_per_s == 450e9
    data = cluster("h100-80g:16").to_json()
    slow = {"bytes_per_s": [[0, 1e9], [2e9, 0]], "latency_s": 0.0}
    timed = Machine.of(ClusterSpec.from_json({**data, "links": slow}))
    assert timed.across_bytes_per_s == 1e9
    assert Machine.of(cluster("cpu:2")).device == "cpu"


def test_measured_pauses_correct_predictions_in_proportion() -> None:
    known = LayoutChangeCosts()
    assert known.seconds_of(4.0) == 4.0
    known.record_success(seconds=6.0, prior_s=4.0)
    known.record_success(seconds=1.0, prior_s=2.0)
    assert known.seconds_of(8.0) == 12.0
    # A change whose prediction is not known counts by its seconds alone.
    other = LayoutChangeCosts()
    other.record_success(seconds=3.0)
    assert other.seconds_of(8.0) == 3.0
