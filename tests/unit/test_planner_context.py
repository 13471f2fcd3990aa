"""Ranks that share samples in the planner: elements, bytes, seconds, rules, search and texts."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from copus_ext.commands import plan
from copus_ext.cost_model import context, kernels, layer_time
from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.megatron_flags import spec_of_flags
from copus_ext.cost_model.memory import memory, peaks, static_bytes
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.cost_model.models import PRESETS
from copus_ext.cost_model.step import min_step_s, step_time
from copus_ext.planner import sharing
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
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.layout_rules import ContextExchange, context_problems

CLUSTER = preset("h100-80g:64")
LONG = 131072


def llama(size: str, seq_length: int = LONG, **more: Any) -> ModelSpec:
    """Llama 3 of some size."""
    layers, hidden, heads, ffn = {
        "8B": (32, 4096, 32, 14336),
        "70B": (80, 8192, 64, 28672),
        "405B": (126, 16384, 128, 53248),
    }[size]
    return ModelSpec(
        **{
            **dict(num_layers=layers, hidden_size=hidden, num_attention_heads=heads),
            **dict(num_query_groups=8, ffn_hidden_size=ffn, vocab_size=128256),
            **dict(gated=True, bias=False, normalization="RMSNorm", tied=False),
            **dict(seq_length=seq_length),
            **more,
        }
    )


def configuration(text: str, form: str = "p2p", batch: int = 64, **more: Any) -> Configuration:
    layout = Layout.from_text(text)
    values = {"micro_batch_size": 1, "global_batch_size": batch, **more}
    return Configuration(
        layout=layout,
        cp_comm_type=form if layout.cp > 1 else None,
        sequence_parallel=layout.tp > 1,
        **values,
    )


def rows_of(model: ModelSpec, *configurations: Configuration, cluster: Any = CLUSTER) -> Any:
    return to_config_batch(model, cluster, points_of(configurations)).full()


# MB that a rank receives of a layer, forward and backward, in bf16: shared/design/context.md.
TABLE = {
    ("8B", 1): {2: (537, 805, 1342), 4: (805, 1208, 1007), 8: (940, 1409, 587)},
    ("70B", 8): {2: (67, 101, 336), 4: (101, 151, 302), 8: (117, 176, 235), 16: (126, 189, 189)},
    ("405B", 8): {2: (67, 101, 604), 4: (101, 151, 503), 8: (117, 176, 352), 16: (126, 189, 252)},
}


@pytest.mark.parametrize(("model", "tp"), TABLE, ids=str)
def test_bytes_received_are_those_of_the_table(model: str, tp: int) -> None:
    for cp, want in TABLE[model, tp].items():
        layout = f"tp{tp}.cp{cp}.pp1.dp1"
        forms = [configuration(layout, form) for form in ("p2p", "a2a")]
        own = configuration(layout, "all_gather")
        rows = [rows_of(llama(model), c) for c in forms]
        # Plain torch keeps what it gathered; Transformer Engine gathers again.
        rows.insert(0, rows_of(llama(model, implementation="local"), own))
        found = [2.0 * float(np.sum(context.received_elements(r))) / 1e6 for r in rows]
        assert tuple(round(mb) for mb in found) == want, cp
        again = rows_of(llama(model), own)
        assert np.sum(context.received_elements(again)) * 2e-6 == pytest.approx(found[1])


@pytest.mark.parametrize(
    ("layout", "form", "elements"),
    [
        ("tp1.cp2.pp1.dp1", "all_gather", 65536),
        ("tp1.cp2.pp1.dp1", "a2a", 98304),
        ("tp1.cp4.pp1.dp1", "all_gather", 98304),
        ("tp1.cp4.pp1.dp1", "a2a", 73728),
        ("tp2.cp2.pp1.dp1", "all_gather", 32768),
    ],
)
def test_elements_are_those_that_ranks_were_seen_to_receive(
    layout: str, form: str, elements: int
) -> None:
    """Two layers, as counted on CPU ranks (shared/proofs/context/measured/f_cost.txt)."""
    model = ModelSpec(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=8,
        num_query_groups=4,
        seq_length=512,
        precision="fp32",
        implementation="local",
    )
    c = configuration(layout, form, micro_batch_size=2)
    rows = rows_of(model, c, cluster=preset("cpu:4"))
    forward, backward = context.received_elements(rows)
    assert 2 * forward[0] == 2 * backward[0] == elements


def test_attention_has_the_share_of_the_work_that_the_table_says() -> None:
    shares = {"8B": (12.5, 36.4, 69.6), "70B": (7.2, 23.6, 55.3), "405B": (4.0, 14.4, 40.1)}
    for name, want in shares.items():
        found = []
        for length in (8192, 32768, LONG):
            model = llama(name, length)
            rows = rows_of(model, configuration("tp1.pp1.dp1"))
            keys = float(context.keys_of_a_token(rows)[0])
            attention = 4.0 * keys * model.hidden_size * model.num_layers
            weights = model.num_parameters - 128256 * model.hidden_size
            found.append(round(100 * attention / (2 * weights + attention), 1))
        assert tuple(found) == want


def test_work_is_even_and_whole_rectangles_are_a_2c_th_more() -> None:
    model = llama("8B", implementation="local")
    for cp in (2, 4, 8):
        chunks = [(r, 2 * cp - 1 - r) for r in range(cp)]
        causal = [sum(i + 0.5 for i in pair) for pair in chunks]
        whole = [sum(i + 1 for i in pair) for pair in chunks]
        assert len(set(causal)) == len(set(whole)) == 1
        rows = rows_of(model, configuration(f"tp1.cp{cp}.pp1.dp1", "all_gather"))
        other = rows_of(model, configuration(f"tp1.cp{cp}.pp1.dp1", "a2a"))
        ratio = context.keys_of_a_token(rows) / context.keys_of_a_token(other)
        assert ratio[0] == pytest.approx(whole[0] / causal[0]) == 1 + 1 / (2 * cp)


def test_a_fused_backward_pass_of_attention_is_two_and_a_half_forward_ones() -> None:
    """So that a whole pass weighs 3.5 / 3 of what its operations say."""
    for fused, factor in ((True, 2.5), (False, 2.0)):
        model = llama("8B", 4096, fused_attention=fused)
        rows = rows_of(model, configuration("tp1.pp1.dp1"))
        assert layer_time.core_backward(rows, Constants(), 1.0)[0] == factor


def test_activations_and_logits_fall_by_c_and_weights_stay() -> None:
    model = llama("8B", 65536)
    layouts = ["tp1.pp2.dp32", *(f"tp1.cp{c}.pp2.dp{32 // c}" for c in (2, 4, 8))]
    rows = rows_of(model, *(configuration(x, batch=64) for x in layouts))
    found = memory(rows).stages
    cp = rows.cp
    for kind in ("weights", "grads", "optimizer"):
        assert (found[kind] == found[kind][:, :1]).all(), kind
    assert static_bytes(rows) == pytest.approx(np.full(4, static_bytes(rows)[0]))
    for kind in ("activations", "logits"):
        # The stage that is not last has no logits; the last holds one micro-batch.
        assert found[kind][:, 0] == pytest.approx(found[kind][:, 3] * cp[3], rel=1e-9), kind
    dense = dataclasses.replace(model, implementation="local")
    gathered = [
        float(memory(rows_of(dense, configuration(layouts[2], form))).stages["activations"][1, 0])
        for form in ("a2a", "all_gather")
    ]
    # 2 s b G d elements of a layer stay, less the keys and values that a rank has anyway.
    more = 2 * 65536 * 8 * 128 * 2 * (1 - 1 / 4) * 16
    assert gathered[1] - gathered[0] == pytest.approx(more, rel=0.05)


def test_replicas_and_ranks_of_a_sample_reduce_the_same_gradients() -> None:
    c = CLUSTER.load_constants()
    model = llama("8B", 8192)
    apart, together = (
        rows_of(model, configuration(x)) for x in ("tp2.pp2.dp16", "tp2.cp4.pp2.dp4")
    )
    for size in (1e6, 1e9):
        one, other = (layer_time.ring_s(r, c, size) for r in (apart, together))
        assert one == other
    # Messages of the pipeline are of a rank's own tokens, over the same distance.
    whole, part = (layer_time.p2p_time_s(r, c)[0, 0] - c.exchange_s for r in (apart, together))
    assert part == pytest.approx(whole / 4)
    counts = [configuration(x).num_microbatches for x in ("tp2.pp2.dp16", "tp2.cp4.pp2.dp4")]
    assert counts == [4, 16], "B / (b dp)"


def test_near_ranks_of_a_sample_reduce_first_where_pipelines_lie_between_replicas() -> None:
    c = CLUSTER.load_constants()
    one, other = (
        rows_of(llama("8B", 8192), configuration(x, use_tp_pp_dp_mapping=True))
        for x in ("tp1.pp8.dp8", "tp1.cp8.pp8.dp1")
    )
    assert layer_time.ring_s(other, c, 1e9) < layer_time.ring_s(one, c, 1e9)


def test_a_ring_hides_where_the_table_says_and_a_gather_does_not() -> None:
    """s / cp >= 2 (G / H) F / bandwidth: 400 TFLOP/s over 50 GB/s are 4,000 tokens of 8B."""
    c = Constants(attention_efficiency=1.0, memory_factor=1e-9, nic_efficiency=1.0, launch_s=1e-12)
    gpu = dataclasses.replace(CLUSTER.gpu, peak_flops=400e12)
    nodes = {"gpus_per_node": 1, "num_nodes": 8, "nic_bytes_per_s": 50e9, "nic_is_measured": True}
    cluster = dataclasses.replace(preset("h100-80g:8"), gpu=gpu, **nodes)
    forward = {}
    for tokens in (3500, 4500):
        model = llama("8B", 8 * tokens)
        rows = rows_of(model, configuration("tp1.cp8.pp1.dp1"), cluster=cluster)
        core = layer_time.attention_s(rows, c)
        latency = c.tp_latency_s / 2
        forward[tokens] = context.exchange_s(rows, c, core, 2.5 * core)[0][0] - latency
        gather = rows.change(cp_comm_type=np.array([context.GATHER]))
        sent = context.exchange_s(gather, c, core, 2.5 * core)[0][0] - latency
        assert sent == pytest.approx(4.0 * 8 * tokens * 8 * 128 * 7 / 8 / 50e9)
    assert forward[3500] > 0 and forward[4500] == pytest.approx(0.0, abs=1e-12)


def test_ranks_of_a_processor_wait_for_one_another_by_the_root_of_their_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = llama("8B", 8192)
    names = ["tp1.pp1.dp2", "tp1.cp2.pp1.dp1", "tp2.pp1.dp1"]
    some = [configuration(name) for name in names]
    some.append(configuration("tp1.cp2.pp1.dp1", "a2a"))
    rows = rows_of(model, *some, cluster=preset("cpu:2"))
    np.testing.assert_array_equal(context.meetings(rows), [0, 1, 0, 2])
    once = kernels.meeting_s(rows, np.ones(4))
    assert (once > 0).all()
    np.testing.assert_allclose(kernels.meeting_s(rows, 4 * np.ones(4)), 2 * once)
    devices = rows_of(model, configuration("tp1.cp2.pp1.dp1"), cluster=preset("h100-80g:2"))
    assert not kernels.meeting_s(devices, np.ones(1)).any()
    c = preset("cpu:2").load_constants()
    late = step_time(rows, c)
    monkeypatch.setattr(kernels, "_BEHIND", 0.0)
    even = step_time(rows, c)
    np.testing.assert_array_equal(late.step_s > even.step_s, [False, True, True, True])
    np.testing.assert_array_equal(late.parts["compute"], even.parts["compute"])


def test_at_long_samples_attention_and_the_exchange_cost_what_they_should() -> None:
    model, c = llama("8B"), CLUSTER.load_constants()
    few = configuration("tp8.pp1.dp8", recompute="full")
    rows = rows_of(model, few, configuration("tp8.cp8.pp1.dp1", recompute="full"))
    times = step_time(rows, c)
    assert sum(times.parts.values()) == pytest.approx(times.step_s)
    assert times.parts["cp"][0] == 0 < times.parts["cp"][1]
    assert (min_step_s(rows, c) <= times.step_s * (1 + 1e-12)).all()
    alone = rows.take(np.array([0]))
    assert step_time(alone, c).step_s[0] == pytest.approx(times.step_s[0], rel=1e-12)


SHAPES = st.fixed_dictionaries(
    {
        "heads": st.sampled_from([4, 6, 8, 16]),
        "groups": st.sampled_from([1, 2, 4]),
        "seq_length": st.sampled_from([24, 64, 96, 128, 2048]),
        "local": st.booleans(),
    }
)


@settings(deadline=None, max_examples=25)
@given(SHAPES, st.sampled_from([4, 8, 12]), st.sampled_from(["all_gather", "p2p", "a2a"]))
def test_rules_are_those_of_the_trainer(shape: dict[str, Any], gpus: int, form: str) -> None:
    if shape["heads"] % shape["groups"]:
        return
    model = ModelSpec(
        num_layers=4,
        hidden_size=16 * shape["heads"],
        num_attention_heads=shape["heads"],
        num_query_groups=shape["groups"],
        ffn_hidden_size=384,
        seq_length=shape["seq_length"],
        implementation="local" if shape["local"] else "te",
    )
    place = dataclasses.replace(preset("h100-80g:8"), gpus_per_node=gpus)
    own = [REJECTION_CODES.index(x) for x in ("sequence", "context", "context_heads")]
    seen = set()
    for cp in (None, 1, 2, 3, 4, 6, 8):
        fixed = {"vpp": 1, "micro_batch": 1} | ({} if cp is None else {"cp": cp})
        if cp is not None and gpus % cp:
            continue
        limits = Limits(fixed=fixed, recompute=("none",), cp_comm_types=(form,))
        points = enumerate_points(model, place, 12, limits)
        for i in range(len(points)):
            c, code = points.configuration(i), int(points.code[i])
            problems = context_problems(
                c.layout,
                model.shape(),
                seq_length=model.seq_length,
                sequence_parallel=c.layout.tp > 1,
                exchange=ContextExchange(
                    cp_comm_type=c.cp_comm_type, has_engine=not shape["local"]
                ),
            )
            if code == LEGAL:
                assert not problems, (str(c), problems)
            elif code in own:
                assert problems, str(c)
                detail = Planner(model, place, limits=limits).explain(c)
                assert isinstance(detail, Rejected) and detail.detail and detail.fix
            seen.add(str(c.layout))
        if cp is None:
            # All sizes that the rules allow are there.
            for tp, size, pp in ((1, 2, 1), (2, 2, 1), (1, 4, 1), (1, 2, 2)):
                if gpus % (tp * size * pp) or model.num_attention_heads % tp:
                    continue
                if model.groups % tp and tp % model.groups:
                    continue
                layout = Layout(tp=tp, cp=size, pp=pp, dp=gpus // (tp * size * pp))
                problems = context_problems(
                    layout,
                    model.shape(),
                    seq_length=model.seq_length,
                    sequence_parallel=tp > 1,
                    exchange=ContextExchange(cp_comm_type=form, has_engine=not shape["local"]),
                )
                assert (str(layout) in seen) == (not problems), (str(layout), problems)


SPACES = [
    (llama("8B", 8192), "h100-80g:16", 16, {}),
    (llama("8B", 65536), "h100-80g:16", 12, {}),
    (PRESETS["llama-2-13b"].with_seq_length(2048), "a100-80g:16", 32, {"max_micro_batch": 8}),
    (
        PRESETS["llama-2-13b"].with_seq_length(2048),
        "h100-80g:24",
        24,
        {"cp_comm_types": ("all_gather", "a2a")},
    ),
    (
        PRESETS["mixtral-8x7b"].with_seq_length(4096),
        "h100-80g:16",
        16,
        {"max_micro_batch": 4, "whole_samples": True},
    ),
]


@pytest.mark.parametrize(("model", "kind", "batch", "more"), SPACES, ids=lambda x: str(x)[:12])
def test_what_is_left_out_is_never_faster_nor_smaller(
    model: ModelSpec, kind: str, batch: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against all: the best are the same, and all that is gone has a kin that is there."""
    cluster, limits = preset(kind), Limits(recompute=("none", "full"), **more)
    c = cluster.load_constants()
    few = enumerate_points(model, cluster, batch, limits)
    best = Planner(model, cluster, limits=limits).rank([batch], top=8)[0].ranked
    never = lambda *args: False  # noqa: E731
    monkeypatch.setattr(sharing.Sharing, "is_never_faster", never)
    every = enumerate_points(model, cluster, batch, limits)
    again = Planner(model, cluster, limits=limits).rank([batch], top=400)[0].ranked
    kept = {str(few.configuration(i)) for i in range(len(few))}
    assert best[0] == again[0]
    assert best == [r for r in again if str(r.configuration) in kept][: len(best)]
    legal = np.flatnonzero(every.code == LEGAL)
    rows = to_config_batch(model, cluster, every.take(legal)).full()
    seconds, bytes_ = step_time(rows, c).step_s, peaks(rows.unevenly_loaded())[0]
    found = {str(every.configuration(int(i))): k for k, i in enumerate(legal)}
    gone = [name for name in found if name not in kept]
    assert len(gone) > 20
    for name in gone:
        k = found[name]
        own = every.configuration(int(legal[k]))
        g = math.gcd(own.layout.cp, own.micro_batch_size)
        layout = dataclasses.replace(own.layout, cp=own.layout.cp // g, dp=own.layout.dp * g)
        form = own.cp_comm_type if layout.cp > 1 else None
        size = own.micro_batch_size // g
        kin = dataclasses.replace(own, layout=layout, cp_comm_type=form, micro_batch_size=size)
        assert g > 1 and str(kin) in kept and str(kin) in found, name
        j = found[str(kin)]
        assert seconds[j] <= seconds[k] * (1 + 1e-12) and bytes_[j] <= bytes_[k] * (1 + 1e-12), name


def test_nothing_of_the_kin_of_measured_layouts_is_left_out() -> None:
    model, cluster = PRESETS["llama-2-13b"].with_seq_length(2048), preset("h100-80g:16")
    timed = configuration("tp2.pp1.dp8", batch=64, micro_batch_size=2)
    kin = configuration("tp2.cp2.pp1.dp4", batch=64, micro_batch_size=4)
    for known, is_there in ((None, False), (points_of([timed]), True)):
        points = enumerate_points(model, cluster, 64, Limits(), known)
        names = {str(points.configuration(i)) for i in range(len(points))}
        assert (str(kin) in names) == is_there and str(timed) in names
    planner = Planner(model, cluster, timings=[Timing(configuration=kin, step_s=1.0)])
    ranked = planner.rank([64], top=2000)[0].ranked
    sources = {r.configuration: r.prediction.source for r in ranked}
    assert sources[kin] == "profiled"
    asked = Limits(fixed={"cp": 2, "micro_batch": 4})
    assert len(enumerate_points(model, cluster, 64, asked)), "what is asked for is there"


@pytest.mark.parametrize(("length", "batch"), [(8192, 32), (LONG, 8)])
def test_the_best_are_those_of_brute_force(length: int, batch: int) -> None:
    planner = Planner(llama("8B", length), preset("h100-80g:32"))
    every = planner._judged([batch]).candidates
    rows = to_config_batch(planner.model, planner.cluster, every).full()
    seconds = step_time(rows, planner.constants).step_s
    seconds = seconds[in_order(seconds, rarities(planner.model, every))]
    found = planner.rank([batch], top=12)[0]
    assert found.num_ranked == len(every) and {int(x) for x in every.cp} >= {1, 2, 4}
    got = [r.prediction.step_s for r in found.ranked]
    assert got == pytest.approx(list(seconds[:12]), rel=1e-12)


def test_samples_that_no_rank_can_hold_are_shared() -> None:
    """Two samples of 256k tokens on 8 GPUs: fewer samples than replicas, and none fits one GPU."""
    limits = Limits(fixed={"tp": 1, "pp": 1})
    planner = Planner(llama("8B", 262144), preset("h200-141g:8"), limits=limits)
    best = planner.rank([2], top=1)[0].ranked[0]
    assert best.configuration.layout.cp in (4, 8)
    assert "cp" in best.prediction.time_s
    assert planner.rank([1], top=1)[0].ranked[0].configuration.layout.cp == 8
    alone = dataclasses.replace(limits, fixed={"tp": 1, "pp": 1, "cp": 1})
    assert not Planner(planner.model, planner.cluster, limits=alone).rank([2])[0].ranked


def test_a_configuration_becomes_text_flags_and_json_and_comes_back() -> None:
    c = configuration("tp2.cp4.pp2.dp4", "a2a")
    text = "tp2.cp4.pp2.dp4,micro_batch=1,cp_comm_type=a2a,recompute=none,sp=1,zero=1"
    assert str(c) == text
    assert configuration_of(text, global_batch_size=64, world_size=64) == c
    args = parse_args(c.to_flags())
    assert (args.context_parallel_size, args.cp_comm_type) == (4, ("a2a",))
    record = c.to_json()
    assert (record["cp"], record["cp_comm_type"]) == (4, "a2a")
    timing = Timing(configuration=c, step_s=1.0)
    plain = Timing(configuration=configuration("tp2.pp2.dp16"), step_s=1.0)
    ring = Timing(configuration=configuration("tp2.cp4.pp2.dp4"), step_s=1.0)
    assert len({x.key for x in (timing, plain, ring)}) == 3
    for one in (timing, plain, ring):
        assert Timing.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert sizes("--fix", "cp=2") == {"cp": 2}
    assert sizes("--fix", "tp2.cp2.pp1.dp4")["cp"] == 2
    assert sizes("--fix", "tp2.pp1.dp4")["cp"] == 1
    for bad in ("cp=3", "cp_comm_type=a2a", "cp=2,cp_comm_type=ring"):
        with pytest.raises(UsageProblem):
            configuration_of(bad, global_batch_size=64, world_size=64)


def test_flags_of_an_answer_are_legal_for_the_trainer() -> None:
    flags = """--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 256
    --max-position-embeddings 256 --bf16 --mock-data --tokenizer-type NullTokenizer
    --vocab-size 127 --train-iters 1 --lr 1e-3"""
    base = [str(word) for word in flags.split()]
    model = spec_of_flags(base)
    planner = Planner(model, preset("h100-80g:8"), limits=Limits(fixed={"cp": 4}))
    ranked = planner.rank([8], top=40)[0].ranked
    assert {r.configuration.cp_comm_type for r in ranked} == {"p2p", "a2a"}
    for r in ranked:
        words = [*base, *r.configuration.to_flags()]
        config = resolve(
            parse_args(words), 8, cuda_available=True, transformer_engine_available=True
        )
        assert config.layout == r.configuration.layout
        assert config.parallel.cp_exchange[0] == r.configuration.cp_comm_type


def run(capsys: pytest.CaptureFixture[str], text: str) -> tuple[int, str, str]:
    code = plan.main(text.split())
    out, err = capsys.readouterr()
    return code, out, err


ASKED = "--model llama-3-70b --cluster h100-80g:128 --global-batch-size 32 --seq-length 131072"


def test_the_command_shows_and_limits_the_size(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, f"{ASKED} --top 3")
    header, *rows = out[out.index("rank ") :].splitlines()
    first = next(row for row in rows if row.split()[0] == "1")
    names = header.split()
    assert code == 0 and names[2:5] == ["tp", "cp", "exchange"]
    assert int(first.split()[3]) > 1 and first.split()[4] in ("p2p", "a2a")
    _, short, _ = run(
        capsys, "--model llama-2-7b --seq-length 2048 --cluster h100-80g:8 --global-batch-size 64"
    )
    assert "exchange" not in short[short.index("rank ") :].splitlines()[0]
    _, asked, _ = run(
        capsys,
        "--model llama-2-7b --seq-length 2048 "
        "--cluster h100-80g:8 --global-batch-size 64 --max cp=1",
    )
    assert "exchange" in asked[asked.index("rank ") :].splitlines()[0]
    for more, forms in (("--cp-comm-type a2a", {"a2a"}), ("--fix cp=16", {"p2p"})):
        found = json.loads(run(capsys, f"{ASKED} {more} --json --top 5")[1])["plans"][0]["ranked"]
        named = [r["configuration"].get("cp_comm_type") for r in found]
        assert {x for x in named if x} <= forms, "16 ranks cannot share the 8 heads of tp8"
    code, _, err = run(capsys, f"{ASKED} --cp-comm-type ring")
    assert code == 2 and "all_gather, p2p, a2a" in err
    code, _, err = run(capsys, f"{ASKED} --fix cp=3")
    assert code == 2 and "tp x cp x pp does not divide 128" in err
    code, out, _ = run(capsys, f"explain tp8.cp8.pp2.dp1,recompute=full {ASKED}")
    assert code == 0 and "  cp  " in out and "--context-parallel-size 8" in out


def test_times_of_another_length_are_those_of_another_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, path = PRESETS["llama-2-7b"].with_seq_length(2048), tmp_path / "profile.jsonl"
    from copus_ext.planner.profile import ProfileStore

    machine = {"model": model.to_json(), "world_size": 8, "gpu": "H100-80GB"}
    ProfileStore(path, machine).add(
        Timing(configuration=configuration("tp2.pp1.dp4", batch=8), step_s=1.0)
    )
    base = (
        "--model llama-2-7b --seq-length 2048 "
        f"--cluster h100-80g:8 --global-batch-size 8 --profile {path}"
    )
    assert run(capsys, base)[0] == 0
    code, _, err = run(capsys, f"{base} --seq-length 4096")
    assert code == 0 and "1 times of llama-2-7b with samples of 2048 tokens" in err


def test_one_replica_of_many_ranks_is_blind() -> None:
    assert configuration("tp1.cp4.pp1.dp1", batch=1).noise_unmeasurable
    assert not configuration("tp1.cp4.pp1.dp1", batch=2).noise_unmeasurable
    assert not configuration("tp1.cp2.pp1.dp2", batch=2).noise_unmeasurable


def test_peaks_are_those_of_memory_and_ranks_of_a_sample_are_explained() -> None:
    planner = Planner(llama("8B"), preset("h100-80g:32"))
    ranked = planner.rank([8], top=20)[0].ranked
    for r in ranked:
        found = planner.explain(r.configuration)
        assert isinstance(found, Ranked)
        assert found.prediction.step_s == pytest.approx(r.prediction.step_s, rel=1e-12)
        assert found.prediction.peak_bytes == pytest.approx(r.prediction.peak_bytes)
