"""Mixtures of experts in the planner: parameters, bytes, seconds, rules, search and texts."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from typing import Any

import numpy as np
import pytest

from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.throughput_table import ThroughputTable
from copus_ext.cost_model import experts
from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.memory import (
    memory,
    peaks,
    stage_parameters,
    stage_routed_parameters,
    static_bytes,
)
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.cost_model.models import PRESETS
from copus_ext.cost_model.rows import concatenate
from copus_ext.cost_model.step import PARTS, min_step_s, step_time
from copus_ext.launch.layout_fit import LayoutFit, layouts_for
from copus_ext.monitor import journal, run_status
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.equals import in_order, rarities
from copus_ext.planner.plan import Ranked, Rejected
from copus_ext.planner.profile import Timing
from copus_ext.planner.request import UsageProblem, configuration_of, sizes
from copus_ext.planner.search import Planner
from copus_ext.planner.space import (
    LEGAL,
    REJECTION_CODES,
    Limits,
    enumerate_points,
    points_of,
    to_config_batch,
)
from copus_ext.reshard.ownership import all_of_layout
from copus_ext.reshard.relaunch import Request, merged
from megatron.trainer.checkpoint.resume import merge_resume_config
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.layout_rules import expert_problems
from megatron.trainer.model.shards import is_expert
from tests.helpers.jobs import MOE

MODEL, CLUSTER = PRESETS["mixtral-8x7b"].with_seq_length(4096), preset("h100-80g:32")
SHARED = ModelSpec(
    num_layers=4,
    hidden_size=64,
    num_attention_heads=8,
    seq_length=64,
    vocab_size=128,
    gated=True,
    bias=False,
    normalization="RMSNorm",
    tied=False,
    num_experts=8,
    moe_ffn_hidden_size=32,
    moe_shared_expert_intermediate_size=16,
    moe_shared_expert_gate=True,
)
ANY = Limits(cross_node_tp=True, cross_node_ep=True, narrow_experts=True)


def configuration(layout: Layout, micro_batch_size: int = 1, batch: int = 256) -> Configuration:
    return Configuration(
        layout=layout,
        micro_batch_size=micro_batch_size,
        global_batch_size=batch,
        sequence_parallel=layout.tp > 1,
    )


def rows_of(model: ModelSpec, *layouts: Layout, cluster: Any = CLUSTER) -> Any:
    return to_config_batch(model, cluster, points_of([configuration(x) for x in layouts])).full()


# Recorded before there were mixtures or ranks that share samples. Since then changed: the backward
# pass of fused attention, its blocks on CPU ranks, how these wait for one another, their constants,
# and the weights that later stages wait for. They must not change by a bit.
DENSE = {
    ("gpt3-175b", "a100-80g:256", "tp8.pp8.dp4", 512): (26.216809487913082, 37491465267.2),
    ("llama-2-13b", "h100-80g:16", "tp2.pp2.dp4", 64): (1.3396360935628508, 38308270991.36),
    ("copus-quickstart", "cpu:4", "tp2.pp1.dp2", 32): (2.531293074625485, 370897377.28),
}


@pytest.mark.parametrize(("case", "recorded"), DENSE.items(), ids=lambda x: str(x)[:20])
def test_dense_models_are_priced_as_before(
    case: tuple[str, str, str, int], recorded: tuple[float, float]
) -> None:
    name, kind, layout, batch = case
    cluster = preset(kind)
    what = points_of([configuration(Layout.from_text(layout), batch=batch)])
    length = {"copus-quickstart": 128}.get(name, 2048)
    rows = to_config_batch(PRESETS[name].with_seq_length(length), cluster, what)
    step_s = float(step_time(rows, cluster.load_constants()).step_s[0])
    assert (step_s, float(peaks(rows)[0][0])) == recorded


@pytest.mark.parametrize(
    "shared",
    [
        SHARED,
        dataclasses.replace(SHARED, bias=True, gated=False),
        dataclasses.replace(SHARED, moe_layer_freq="[0]*2+[1]*2"),
        dataclasses.replace(SHARED, moe_layer_freq="[0]+[1]*3"),
    ],
)
def test_parameters_are_those_that_every_rank_owns(shared: ModelSpec) -> None:
    """Held against the tensors that the switch of layouts moves."""
    model = shared
    if model.bias:
        model = dataclasses.replace(
            model, moe_shared_expert_intermediate_size=None, moe_shared_expert_gate=False
        )
    shape = model.shape(padded_vocab_size=int(model.padded_vocab_size(1)))
    for tp, pp, ep, etp in itertools.product((1, 2), (1, 2), (1, 2, 4), (1, 2)):
        dp = 8 // (tp * pp)
        if tp * dp % (ep * etp) or (model.bias and etp > 1):
            continue
        layout = Layout(tp=tp, pp=pp, ep=ep, etp=etp, dp=dp)
        rows = rows_of(model, layout)
        held, routed = stage_parameters(rows)[:, 0], stage_routed_parameters(rows)[:, 0]
        records = all_of_layout(shape, layout)
        for rank, own in enumerate(records):
            stage = rank // (tp * dp)
            # What the ranks of a group share out among them adds up to what each of them holds.
            has_experts = routed[stage] > 0
            assert has_experts == any(is_expert(r.key) for r in own), own[:1]
            assert held[stage] > routed[stage]
        total = sum(r.numel for own in records for r in own if r.is_first)
        # Vectors are whole on every tensor rank: what is cut adds up to the model.
        if tp == 1:
            whole = (held - routed).sum() + routed.sum() * ep * etp
            assert whole == total == model.num_parameters
            for stage in range(pp):
                ranks = records[stage * dp : (stage + 1) * dp]
                own = sum(r.numel for rank in ranks for r in rank if r.is_first)
                here = held[stage] + routed[stage] * (ep * etp - 1)
                assert here == own, (str(layout), stage)


def test_the_optimizer_is_shared_among_copies_of_experts() -> None:
    layouts = [Layout(dp=32), Layout(dp=32, ep=8), Layout(tp=2, dp=16, ep=8, etp=1)]
    rows = rows_of(MODEL, *layouts)
    held, routed = stage_parameters(rows)[0], stage_routed_parameters(rows)[0]
    copies = np.array([x.expert_data_parallel_size for x in layouts])
    assert list(rows.expert_copies) == list(copies) == [32, 4, 4]
    shared = (held - routed) / rows.dp + routed / copies
    assert static_bytes(rows) == pytest.approx(6 * held + 12 * shared)
    assert routed[1] == routed[0] / 8 and routed[1] == routed[2]


def test_a_mixture_with_experts_in_no_more_than_a_share_lies_between() -> None:
    few = dataclasses.replace(MODEL, moe_layer_freq="[0]*16+[1]*16")
    dense = dataclasses.replace(MODEL, num_experts=None)
    layout = Layout(tp=2, pp=4, dp=4, ep=4, etp=1)
    bytes_, seconds = [], []
    for model in (dense, few, MODEL):
        own = layout if model.num_experts else Layout(tp=2, pp=4, dp=4)
        rows = rows_of(model, own)
        bytes_.append(float(memory(rows).peak_bytes[0]))
        seconds.append(float(step_time(rows, CLUSTER.load_constants()).step_s[0]))
    assert bytes_ == sorted(bytes_) and seconds == sorted(seconds)


def test_stages_with_experts_weigh_more_than_the_mean_stage() -> None:
    """Four stages, experts in the last two: each stage is that of a model all of its kind."""
    late = dataclasses.replace(MODEL, moe_layer_freq="[0]*16+[1]*16")
    even = dataclasses.replace(MODEL, moe_layer_freq="[0,1]*16")
    dense = dataclasses.replace(MODEL, num_experts=None)
    layout = Layout(tp=2, pp=4, dp=4, ep=4, etp=1)
    rows = {
        "dense": rows_of(dense, Layout(tp=2, pp=4, dp=4)),
        **{name: rows_of(m, layout) for name, m in (("late", late), ("even", even))},
        "all": rows_of(MODEL, layout),
    }
    found = {name: memory(r) for name, r in rows.items()}
    for kind, stages in found["late"].stages.items():
        assert list(stages[:2, 0]) == list(found["dense"].stages[kind][:2, 0]), kind
        assert list(stages[2:, 0]) == list(found["all"].stages[kind][2:, 0]), kind
    assert found["late"].worst_stage[0] == 2
    peak = {name: float(peaks(r)[0][0]) for name, r in rows.items()}
    assert peak["late"] == found["late"].peak_bytes[0] > 1.2 * peak["even"]
    c = CLUSTER.load_constants()
    seconds = {name: float(step_time(r, c).step_s[0]) for name, r in rows.items()}
    assert seconds["even"] < seconds["late"] <= seconds["all"]
    assert min_step_s(rows["late"], c)[0] <= seconds["late"]
    # Two chunks of a stage, one early and one late, have as many as others.
    chunks = rows_of(late, Layout(tp=2, pp=2, vpp=2, dp=8, ep=4, etp=1))
    assert chunks.experts.stage_shares is None and chunks.experts.share == pytest.approx(0.5)


def test_uneven_stages_of_several_models_stand_in_one_table() -> None:
    late = dataclasses.replace(MODEL, moe_layer_freq="[0]*16+[1]*16")
    parts = [
        rows_of(late, Layout(pp=2, dp=16, ep=8), Layout(pp=4, dp=8, ep=8)),
        rows_of(MODEL, Layout(pp=8, dp=4, ep=4)),
        rows_of(PRESETS["llama-2-13b"].with_seq_length(2048), Layout(tp=2, dp=16)),
    ]
    both, c = concatenate(parts), CLUSTER.load_constants()
    for one in (lambda r: step_time(r, c).step_s, lambda r: peaks(r)[0]):
        apart = np.concatenate([one(part) for part in parts])
        assert list(one(both)) == pytest.approx(list(apart), rel=1e-12)
        assert list(one(both.take(np.array([1, 0])))) == pytest.approx([apart[1], apart[0]])


def test_parts_add_up_and_a_step_takes_at_least_its_bound() -> None:
    points = enumerate_points(MODEL, CLUSTER, 96, Limits(max_micro_batch=2))
    rows = to_config_batch(
        MODEL, CLUSTER, points.take(np.flatnonzero(points.code == LEGAL)[::5])
    ).full()
    c = CLUSTER.load_constants()
    times = step_time(rows, c)
    assert set(times.parts) == set(PARTS)
    assert sum(times.parts.values()) == pytest.approx(times.step_s)
    assert min(float(part.min()) for part in times.parts.values()) >= 0
    assert (min_step_s(rows, c) <= times.step_s * (1 + 1e-9)).all()
    assert rows.experts is not None
    alone = rows.experts.ep * rows.experts.etp == 1
    assert (times.parts["ep"][alone] == 0).all() and (times.parts["ep"][~alone] > 0).all()
    some = np.arange(0, len(rows), 97)
    again = step_time(rows.take(some), c).step_s
    assert again == pytest.approx(times.step_s[some], rel=1e-12)


def test_dense_models_and_mixtures_stand_in_one_table() -> None:
    dense = rows_of(PRESETS["llama-2-13b"].with_seq_length(2048), Layout(tp=2, dp=16))
    mixed = rows_of(MODEL, Layout(tp=2, dp=16, ep=8, etp=1))
    c = CLUSTER.load_constants()
    both = step_time(concatenate([dense, mixed]), c).step_s
    apart = [step_time(one, c).step_s[0] for one in (dense, mixed)]
    assert list(both) == pytest.approx(apart, rel=1e-12)


def test_bytes_of_an_all_to_all_are_those_of_the_rows() -> None:
    """t k (ep - 1) / ep rows of the hidden width four times, and a score in fp32 twice."""
    rows = rows_of(MODEL, Layout(dp=32, ep=8), Layout(tp=4, dp=8, ep=8, etp=1))
    each = 4 * 2 * 4096 + 2 * 4
    tokens = np.array([4096, 4096 / 4])
    assert experts.alltoall_bytes(rows) == pytest.approx(tokens * 2 * 7 / 8 * each)


def test_more_experts_on_fewer_links_take_longer_and_crossing_nodes_most() -> None:
    layouts = [Layout(dp=32, ep=2), Layout(dp=32, ep=8), Layout(dp=32, ep=16)]
    model = dataclasses.replace(MODEL, num_experts=16)
    rows = rows_of(model, *layouts)
    assert list(experts.members_of_node(rows)) == [2, 8, 8]
    seconds = experts.messages_s(rows, CLUSTER.load_constants())[0]
    assert seconds[0] < seconds[1] < seconds[2] and seconds[2] > 2 * seconds[1]


def test_the_group_that_is_cut_most_has_so_many_ranks_of_a_node() -> None:
    """A group of 12 in nodes of 8 is cut 8 and 4; a later one of 6 is cut 2 and 4."""
    model = dataclasses.replace(MODEL, num_experts=48, num_layers=12)
    few = preset("h100-80g:24")
    layouts = [Layout(dp=24, ep=12), Layout(dp=24, ep=6), Layout(tp=2, dp=12, ep=6, etp=2)]
    rows = rows_of(model, *layouts, cluster=few)
    assert list(experts.members_of_node(rows)) == [4, 2, 2]


def test_a_dispatcher_sends_fewer_rows_where_the_note_says() -> None:
    """All ranks' tokens are fewer than top-k rows each: ep - 1 < k (ep - 1) / ep."""
    c = CLUSTER.load_constants()
    ways = []
    for way in ("alltoall", "allgather"):
        model = dataclasses.replace(
            PRESETS["qwen3-30b-a3b"].with_seq_length(4096),
            moe_token_dispatcher_type=way,
            seq_length=16384,
        )
        rows = rows_of(model, Layout(dp=32, ep=2), Layout(dp=32, ep=8))
        ways.append(experts.messages_s(rows, c)[0])
    assert ways[1][0] < ways[0][0]
    few = [
        experts.messages_s(
            rows_of(dataclasses.replace(MODEL, moe_token_dispatcher_type=way), Layout(dp=32, ep=8)),
            c,
        )[0][0]
        for way in ("alltoall", "allgather")
    ]
    assert few[0] < few[1]


def test_expert_parallelism_has_more_rows_for_each_expert() -> None:
    model = dataclasses.replace(
        PRESETS["qwen3-30b-a3b"].with_seq_length(4096), moe_grouped_gemm=False
    )
    rows = rows_of(model, Layout(dp=32), Layout(dp=32, ep=8))
    c = CLUSTER.load_constants()
    one, many = experts.work_s(rows, c)[0] / rows.experts.busiest
    assert many < one
    assert list(experts.launches(rows)) == [20 + 2 * 128, 20 + 2 * 16]
    grouped = rows_of(dataclasses.replace(model, moe_grouped_gemm=True), Layout(dp=32))
    assert experts.work_s(grouped, c)[0][0] <= experts.work_s(rows, c)[0][0]


def test_a_candidate_fits_with_twice_the_usual_rows_on_one_rank() -> None:
    planner = Planner(MODEL, CLUSTER)
    found = [r for r in planner.rank([256], top=400)[0].ranked if r.configuration.layout.ep > 1]
    assert found
    for r in found:
        rows = to_config_batch(MODEL, CLUSTER, points_of([r.configuration]))
        even, uneven = (float(planner.peaks_of(x)[0][0]) for x in (rows, rows.unevenly_loaded()))
        assert r.prediction.peak_bytes == pytest.approx(even) and even < uneven
        assert uneven <= planner.safe_bytes(r.configuration)


@pytest.mark.parametrize(
    ("model", "limits"),
    [
        (MODEL, Limits()),
        (MODEL, ANY),
        (PRESETS["qwen3-30b-a3b"].with_seq_length(4096), Limits(max_micro_batch=4)),
    ],
    ids=["mixtral", "any", "qwen3"],
)
def test_the_best_are_those_of_brute_force(model: ModelSpec, limits: Limits) -> None:
    planner = Planner(model, CLUSTER, limits=limits)
    every = planner._judged([256]).candidates
    rows = to_config_batch(model, CLUSTER, every).full()
    seconds = step_time(rows, planner.constants).step_s
    seconds = seconds[in_order(seconds, rarities(model, every))]
    found = planner.rank([256], top=12)[0]
    assert found.num_ranked == len(every)
    got = [r.prediction.step_s for r in found.ranked]
    assert got == pytest.approx(list(seconds[:12]), rel=1e-12)
    ep, of_stage = {int(x) for x in every.ep}, every.tp * every.cp * every.dp
    assert {1, 2, 4, 8} <= ep and (of_stage % (every.ep * every.etp) == 0).all()


@pytest.mark.parametrize("cluster", ["cpu:4", "h100-80g:16"])
@pytest.mark.parametrize("mapping", [False, True])
def test_rules_are_those_of_the_trainer(cluster: str, mapping: bool) -> None:
    """The sentence of a point that is refused is the first of the trainer's."""
    models = [
        SHARED,
        dataclasses.replace(SHARED, num_experts=6, moe_ffn_hidden_size=33),
        dataclasses.replace(
            SHARED,
            bias=True,
            moe_shared_expert_intermediate_size=None,
            moe_shared_expert_gate=False,
        ),
        dataclasses.replace(SHARED, moe_shared_expert_intermediate_size=18),
    ]
    seen = set()
    place = preset(cluster)
    for model, ep in itertools.product(models, (None, 4)):
        fixed = {} if ep is None else {"ep": ep}
        limits = dataclasses.replace(ANY, fixed=fixed, use_tp_pp_dp_mapping=mapping)
        points = enumerate_points(model, place, 16, limits)
        shape = dataclasses.replace(model.shape(), use_tp_pp_dp_mapping=mapping)
        planner = Planner(model, place, limits=limits)
        own = [i for i, code in enumerate(REJECTION_CODES) if code.startswith(("expert", "shared"))]
        for i in np.flatnonzero((points.code == LEGAL) | np.isin(points.code, own)):
            c = points.configuration(int(i))
            problems = expert_problems(
                c.layout, shape, sequence_parallel=True, only_allgather_over_both=place.is_gloo
            )
            assert (points.code[i] == LEGAL) == (not problems), (str(c), problems)
            if problems and (code := REJECTION_CODES[points.code[i]]) not in seen:
                seen.add(code)
                found = planner.explain(c)
                assert isinstance(found, Rejected) and found.code == code
                assert f"{found.detail}; {found.fix}" == problems[0]
    expected = {"experts", "expert_ffn", "shared_expert", "expert_bias"}
    expected |= {"expert_alltoall"} if place.is_gloo else set()
    expected |= {"expert_copies"} if mapping else set()
    assert seen == expected


def test_experts_stay_in_a_node_and_are_wide_unless_asked() -> None:
    def sizes_of(model: ModelSpec, limits: Limits) -> set[tuple[int, int, int]]:
        points = enumerate_points(model, CLUSTER, 64, limits)
        return set(zip(points.tp.tolist(), points.ep.tolist(), points.etp.tolist()))

    model = dataclasses.replace(
        PRESETS["qwen3-30b-a3b"].with_seq_length(4096), moe_ffn_hidden_size=512
    )
    usual = sizes_of(model, Limits())
    assert max(ep * etp for _, ep, etp in usual) == 8
    assert (2, 4, 2) in usual and not any(etp > 2 for _, _, etp in usual)
    assert (1, 32, 1) in sizes_of(model, Limits(largest={"ep": 32}))
    assert (4, 2, 4) in sizes_of(model, Limits(fixed={"etp": 4}))
    assert {ep for _, ep, _ in sizes_of(model, Limits(fixed={"ep": 16}))} == {16}
    whole = sizes_of(model, Limits(whole_samples=True))
    assert (4, 2, 1) in usual - whole
    assert whole == {x for x in usual if x[1] * x[2] % x[0] == 0}


def test_experts_span_nodes_where_nothing_else_fits() -> None:
    model = PRESETS["deepseek-v3-sized"].with_seq_length(4096)
    limits = Limits(fixed={"tp": 1, "pp": 4, "micro_batch": 1}, recompute=("full",))
    planner = Planner(model, preset("h200-141g:256"), limits=limits)
    found = planner.rank([256], top=5)[0].ranked
    assert found and all(r.configuration.layout.ep > 8 for r in found)


def test_texts_flags_and_profiles_carry_the_sizes_of_experts() -> None:
    text = "tp2.pp2.ep4.etp1.dp8,micro_batch=2"
    c = configuration_of(text, global_batch_size=64, world_size=32)
    assert c.layout == Layout(tp=2, pp=2, ep=4, etp=1, dp=8)
    assert configuration_of(str(c), global_batch_size=64, world_size=32) == c
    flags = " ".join(c.to_flags())
    assert "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1" in flags
    usual = dataclasses.replace(c, layout=dataclasses.replace(c.layout, ep=1, etp=None))
    assert "expert" not in " ".join(usual.to_flags()) and c.line != usual.line
    timing = Timing(configuration=c, step_s=1.0)
    assert Timing.from_json(json.loads(json.dumps(timing.to_json()))) == timing
    plain = Timing(configuration=usual, step_s=1.0)
    assert not {"ep", "etp"} & set(plain.to_json())
    assert Timing.from_json(plain.to_json()) == plain and plain.key != timing.key
    assert sizes("--fix", "ep=4,etp=1") == {"ep": 4, "etp": 1}
    fixed = sizes("--fix", "tp2.pp1.dp4")
    assert (fixed["ep"], fixed["etp"]) == (1, 2)
    with pytest.raises(UsageProblem, match="do not divide by ep x etp"):
        configuration_of("ep=3", global_batch_size=64, world_size=32)


def test_a_profile_of_a_mixture_corrects_its_kin() -> None:
    planner = Planner(MODEL, CLUSTER)
    first, *_ = planner.rank([256], top=1)[0].ranked
    planner.retime(
        [Timing(configuration=first.configuration, step_s=1.3 * first.prediction.step_s)]
    )
    ranked = planner.rank([256], top=2000)[0].ranked
    profiled = [r for r in ranked if r.prediction.source == "profiled"]
    assert [r.configuration for r in profiled] == [first.configuration]
    other = configuration_of(
        "tp2.pp4.ep8.etp1.dp4,micro_batch=1", global_batch_size=256, world_size=32
    )
    found = planner.explain(other)
    assert isinstance(found, Ranked) and found.prediction.time_s["ep"] > 0


def config(more: str = "", ranks: int = 4) -> Any:
    """A resolved mixture with a vocabulary, as a run holds it."""
    words = shlex.split(f"{MOE} --moe-token-dispatcher-type allgather --train-iters 1 {more}")
    found = resolve(parse_args(words), ranks)
    return merge_resume_config(found, None, vocab_size=128)


def layouts_of(run: Any, flags: CopusConfig, measured: Any = lambda c: None) -> dict[Layout, Any]:
    """The layouts that a run may choose, with the rows of each."""
    table = ThroughputTable(run, flags, gpu=None)
    assert not table.note
    batch = run.batch.global_batch_size
    rows, at = table.rows([batch], micro_batch_size=1, global_batch_size=batch, measured=measured)
    assert rows[at].layout == run.layout
    found: dict[Layout, Any] = {}
    for row in rows:
        found.setdefault(row.layout, []).append(row)
    return found


def test_the_controller_is_offered_layouts_in_which_experts_see_whole_samples() -> None:
    run = config("--expert-model-parallel-size 2")
    every = layouts_of(run, CopusConfig(copus=True, copus_layouts="all"))
    assert all(x.ep * x.expert_tensor_parallel_size % x.tp == 0 for x in every)
    names = {str(x) for x in every}
    assert {"tp1.pp1.dp4", "tp1.pp1.ep4.dp4", "tp2.pp1.ep2.etp1.dp2", "tp2.pp1.ep2.dp2"} <= names
    assert "tp2.pp1.etp1.dp2" not in names
    current = layouts_of(run, CopusConfig(copus=True, copus_layouts="current"))
    assert set(current) == {run.layout}


def test_measured_times_belong_to_their_sizes_of_experts() -> None:
    run = config("--expert-model-parallel-size 2")

    def measured(c: Configuration) -> Any:
        return (0.5, 0.001, 20) if c.layout == run.layout and c.micro_batch_size == 1 else None

    found = layouts_of(run, CopusConfig(copus=True, copus_layouts="all"), measured)
    own = {row.source for row in found[run.layout] if row.micro_batch_size == 1}
    others = {row.source for x, rows in found.items() if x != run.layout for row in rows}
    assert own == {"measured"} and others == {"corrected"}


def test_stages_of_the_flags_go_with_their_sizes_of_experts_alone() -> None:
    run = config(
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tttL "
        "--expert-model-parallel-size 2"
    )
    assert run.layout == Layout(pp=2, dp=2, ep=2, layer_partition=(1, 3))
    found = layouts_of(run, CopusConfig(copus=True, copus_layouts="all"))
    cut = {str(x) for x in found if x.layer_partition}
    assert cut == {str(run.layout)}
    assert Layout(pp=2, dp=2) in found and Layout(pp=2, dp=2, ep=2) not in found


def test_a_relaunch_starts_with_the_sizes_of_experts() -> None:
    argv = [*shlex.split(MOE), "--expert-model-parallel-size", "4", "--train-iters", "1"]
    argv += ["--expert-tensor-parallel-size=1"]
    for text in ("tp2.pp1.ep2.etp1.dp2", "tp2.pp1.dp2", "tp1.pp2.ep2.dp2"):
        wanted = Request(
            launch="a", kind="relayout", iteration=0, consumed_samples=0, reason="",
            layout=Layout.from_text(text),
        )  # fmt: skip
        assert resolve(parse_args(merged(argv, wanted)), 4).layout == wanted.layout


def test_fewer_ranks_keep_the_sizes_of_experts_where_they_can() -> None:
    prefer = Layout(tp=2, ep=4, etp=1, dp=4)
    found = list(layouts_for(4, prefer))
    assert found[0] == Layout(tp=2, ep=4, etp=1, dp=2) and len(set(found)) == len(found)
    assert found[1] == Layout(tp=2, ep=2, etp=1, dp=2)
    assert {x.ep for x in layouts_for(3, prefer)} == {1}
    flags = f"{MOE} --train-iters 1 --expert-model-parallel-size 3"
    fit = LayoutFit(shlex.split(flags), stored=lambda _: {})
    flags, line = fit.first_flags(4)
    assert resolve(parse_args(flags), 4).layout.ep == 1 and "ep" not in line.split(":")[0]


def test_the_record_of_a_run_tells_the_sizes_of_experts() -> None:
    run = config("--expert-model-parallel-size 2 --tensor-model-parallel-size 2")
    flat = json.loads(json.dumps(run.flat()))
    assert run_status._layout_of_flags(flat) == str(run.layout) == "tp2.pp1.ep2.dp2"
    row = {**run.layout.to_json(), "global_batch_size": 8, "micro_batch_size": 1}
    assert journal.sizes_of(row).layout == str(run.layout)
