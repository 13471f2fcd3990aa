"""The cost model has the properties of what it models."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.fit_constants import fit_constants
from copus_ext.cost_model.cluster_spec import ClusterSpec, here, preset
from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.gpus import GpuSpec, kind_of
from copus_ext.cost_model.layer_time import p2p_time_s, tp_collective_s
from copus_ext.cost_model.megatron_flags import spec_of_arguments, spec_of_flags
from copus_ext.cost_model.memory import (
    layer_activation_bytes,
    memory,
    peaks,
    stage_parameters,
)
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.cost_model.models import PRESETS
from copus_ext.cost_model.peak_correction import KINDS, PeakCorrection, fit_probability
from copus_ext.cost_model.rows import RECOMPUTE_FULL, ConfigBatch
from copus_ext.cost_model.spec_file import SpecError, quantity
from copus_ext.cost_model.step import PARTS, min_step_s, step_time
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.space import LEGAL, Limits, enumerate_points, points_of, to_config_batch
from megatron.trainer.checkpoint.resume import merge_resume_config
from megatron.trainer.common.device import Device
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.layout import Layout
from megatron.trainer.data.tokenizer import build_tokenizer
from megatron.trainer.model.gpt import build_model
from megatron.trainer.train.build import groups_of
from megatron.trainer.train.pretrain import tokenizer_flags
from tests.helpers.examples import with_values
from tests.helpers.jobs import FURTHER, LATENT, MOE, TINY, TINY_GPT2
from tests.helpers.one_rank import cpu_of_one

MODEL, CLUSTER = PRESETS["llama-2-13b"], preset("h100-80g:32")


def some_rows() -> ConfigBatch:
    points = enumerate_points(MODEL, CLUSTER, 96, Limits(max_micro_batch=4))
    legal = points.take(points.code == LEGAL)
    return to_config_batch(MODEL, CLUSTER, legal).full()


ROWS = some_rows()
CONSTANTS = CLUSTER.load_constants()


WITHOUT_SIZE = {"--tokenizer-type": "ByteLevelTokenizer", "--vocab-size": None}
BYTES = " ".join(with_values(TINY, WITHOUT_SIZE))


@pytest.fixture
def device() -> Iterator[Device]:
    with cpu_of_one() as found:
        yield found


@pytest.mark.parametrize(
    "flags",
    [
        TINY,
        BYTES,
        f"{BYTES} --pad-vocab-for-tensor-parallel-size 1 --make-vocab-size-divisible-by 1",
        f"{TINY} --qk-layernorm --add-qkv-bias --ffn-hidden-size 200",
        TINY_GPT2,
        f"{TINY_GPT2} --qk-layernorm --kv-channels 16",
        FURTHER,
        f"{TINY} {LATENT} --normalization LayerNorm --qk-layernorm",
        f"{TINY_GPT2} --quick-geglu",
        MOE,
        f"{MOE} --moe-layer-freq [0]*1+[1]*2+[0]*1 --moe-shared-expert-intermediate-size 16 "
        "--moe-shared-expert-gate",
        f"{FURTHER} --num-experts 4 --moe-layer-freq 2",
        f"{TINY_GPT2} --num-experts 4",
    ],
)
def test_parameters_are_those_of_the_model_that_is_built(device: Device, flags: str) -> None:
    words = [*flags.split(), "--train-iters", "1"]
    config = resolve(parse_args(words), 1)
    tokens = build_tokenizer(**tokenizer_flags(config)).vocab_size
    config = merge_resume_config(config, None, vocab_size=tokens)
    model = build_model(config, groups_of(config), device)
    built = sum(p.numel() for chunk in model.chunks for p in chunk.parameters())
    recorded = json.loads(json.dumps(config.flat()))
    assert spec_of_arguments(SimpleNamespace(**recorded)).num_parameters == built
    alone = spec_of_flags(words)
    assert alone.vocab_size == tokens
    rows = config.model.padded_vocab_size
    alone = dataclasses.replace(alone, vocab_size=rows, make_vocab_size_divisible_by=1)
    assert alone.num_parameters == built


@settings(deadline=None)
@given(st.integers(1, 10**6), st.integers(1, 64))
def test_the_planner_pads_the_vocabulary_as_the_trainer_does(vocab_size: int, tp: int) -> None:
    spec = dataclasses.replace(MODEL, vocab_size=vocab_size)
    flags = f"{TINY.partition('--pad-vocab')[0]} --train-iters 1 --kv-channels 8"
    flags += f" --tensor-model-parallel-size {tp} --num-attention-heads {tp}"
    config = resolve(parse_args([*flags.split(), "--ffn-hidden-size", str(tp)]), tp)
    rows = merge_resume_config(config, None, vocab_size=vocab_size).model.padded_vocab_size
    assert int(spec.padded_vocab_size(tp)) == rows


def test_parts_add_up_and_none_is_negative() -> None:
    times = step_time(ROWS, Constants())
    assert set(times.parts) == set(PARTS)
    np.testing.assert_allclose(sum(times.parts.values()), times.step_s, rtol=1e-12)
    assert all((values >= -1e-12).all() for values in times.parts.values())
    for name, values in times.parts.items():
        assert (values <= times.step_s).all(), name


def test_a_step_takes_at_least_its_lower_bound() -> None:
    exact, least = step_time(ROWS, Constants()).step_s, min_step_s(ROWS, Constants())
    assert (least <= exact * (1 + 1e-12)).all()
    assert np.median(least / exact) > 0.85


def test_rows_are_priced_one_by_one_as_together() -> None:
    together = step_time(ROWS, Constants()).step_s
    for i in range(0, len(ROWS), 97):
        alone = step_time(ROWS.take(np.array([i])), Constants()).step_s[0]
        assert alone == pytest.approx(together[i], rel=1e-12)
    twice = step_time(ROWS.take(np.tile(np.arange(len(ROWS)), 2)), Constants()).step_s
    np.testing.assert_allclose(twice, np.tile(together, 2), rtol=1e-12)


def test_activations_follow_the_published_formula() -> None:
    """arXiv 2205.05198: n h (10 + 24/t + 5 a s / (h t)) with dropout and unfused attention."""
    model = ModelSpec(
        num_layers=4,
        hidden_size=1024,
        num_attention_heads=16,
        seq_length=512,
        dropout=True,
        fused_attention=False,
    )
    points = enumerate_points(model, preset("a100-80g:8"), 8, Limits(recompute=("none",)))
    rows = to_config_batch(model, preset("a100-80g:8"), points.take(points.code == LEGAL))
    rows = rows.change(sequence_parallel=False).full()
    n, h, t = rows.tokens, rows.hidden_size, rows.tp
    want = n * h * (10 + 24 / t + 5 * 16 * 512 / (h * t))
    np.testing.assert_allclose(layer_activation_bytes(rows), want, rtol=1e-12)
    plain = ROWS.change(implementation=np.ones(len(ROWS), dtype=int))
    assert (layer_activation_bytes(plain) > layer_activation_bytes(ROWS)).all()
    split = layer_activation_bytes(rows.change(sequence_parallel=True))
    np.testing.assert_allclose(split, want - n * h * 10 * (1 - 1 / t), rtol=1e-12)


def test_memory_adds_up_and_recomputation_saves() -> None:
    found = memory(ROWS)
    assert set(found.stages) == set(KINDS)
    total = np.sum(list(found.stages.values()), axis=0)
    np.testing.assert_allclose(total.max(axis=0), found.peak_bytes)
    full = memory(ROWS.change(recompute=np.full(len(ROWS), RECOMPUTE_FULL)))
    assert (full.peak_bytes <= found.peak_bytes * (1 + 1e-9)).all()
    sharded = memory(ROWS.change(use_distributed_optimizer=np.ones(len(ROWS), dtype=bool)))
    assert (sharded.peak_bytes <= found.peak_bytes * (1 + 1e-9)).all()


def test_static_bytes_of_one_gpu_are_18_per_parameter() -> None:
    model, cluster = PRESETS["llama-2-7b"], preset("h100-80g:1")
    points = enumerate_points(model, cluster, 1, Limits(recompute=("none",)))
    stages = memory(to_config_batch(model, cluster, points).full()).stages
    held = sum(stages[kind][0, 0] for kind in ("weights", "grads", "optimizer"))
    assert held == 18 * model.num_parameters


@pytest.mark.parametrize(
    ("flags", "width"),
    [
        ("--bf16", 4),
        ("--bf16 --grad-reduce-in-bf16", 2),
        ("--fp16", 2),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", 4),
        ("", 4),
    ],
)
def test_gradients_have_the_width_that_the_flags_give_them(flags: str, width: int) -> None:
    """As the trainer would make them, in memory and on the network."""
    shape = "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 128"
    text = f"{shape} --max-position-embeddings 128 --vocab-size 1000 {flags}"
    spec = spec_of_flags(text.split())
    assert spec.gradient_bytes == width
    layout = Configuration(layout=Layout(dp=2), micro_batch_size=1, global_batch_size=8)
    rows = to_config_batch(spec, preset("a100-80g:2"), points_of([layout]))
    held = float(stage_parameters(rows).sum())
    assert float(memory(rows).stages["grads"].sum()) == width * held
    assert float(rows.gradient_bytes) == width


def test_the_probability_to_fit_is_a_half_at_the_limit() -> None:
    peaks = np.array([60.0, 76.0, 95.0])
    found = fit_probability(peaks, 76.0, 0.07)
    assert found[1] == pytest.approx(0.5, abs=1e-6)
    assert found[0] > 0.999 and found[2] < 0.01


def _peaked(correction: PeakCorrection, configurations: list[Configuration]) -> tuple[Any, Any]:
    rows = to_config_batch(PRESETS["llama-2-13b"], preset("a100-80g:8"), points_of(configurations))
    return peaks(rows, correction=correction)


def _of_ways(*ways: str) -> list[Configuration]:
    return [
        Configuration(
            layout=Layout(tp=2, pp=2, dp=2),
            micro_batch_size=size,
            global_batch_size=64,
            recompute=way,  # pyright: ignore[reportArgumentType]
            sequence_parallel=True,
        )
        for way in ways
        for size in (1, 4)
    ]


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.0, 1.3])
def test_measured_peaks_are_met_and_others_stay_uncertain(factor: float) -> None:
    cheap, dear = _of_ways("full"), _of_ways("none")
    both = points_of([*cheap, *dear])
    rows = to_config_batch(PRESETS["llama-2-13b"], preset("a100-80g:8"), both).full()
    predicted = memory(rows)
    truth = predicted.peak_bytes + (factor - 1) * predicted.moving_bytes
    every = PeakCorrection.of(predicted, truth)
    found, sd = _peaked(every, [*cheap, *dear])
    assert found == pytest.approx(truth, rel=0.04)
    assert (sd < 0.06).all()
    # Peaks of whole recomputation say little of what no recomputation keeps.
    little = memory(rows.take(np.arange(2)))
    some = PeakCorrection.of(little, truth[:2])
    _, sd = _peaked(some, [*cheap, *dear])
    assert sd[3] > 1.5 * sd[0] and sd[3] > 0.06
    # Nobody needs less than nothing besides its tensors.
    assert every.fixed_bytes >= -predicted.stages["context"].max()


@pytest.mark.parametrize("ranks", [1, 4, 6])
def test_cpu_ranks_are_in_one_node(ranks: int) -> None:
    cluster = preset(f"cpu:{ranks}")
    assert (cluster.num_nodes, cluster.gpus_per_node) == (1, ranks)


def test_specs_survive_json_and_refuse_nonsense() -> None:
    assert ClusterSpec.from_json(CLUSTER.to_json()) == CLUSTER
    assert ModelSpec.from_json(MODEL.to_json()) == MODEL
    with pytest.raises(SpecError, match="colour"):
        ModelSpec.from_json({**MODEL.to_json(), "colour": 1})
    with pytest.raises(SpecError, match="num_nodes 0"):
        ClusterSpec.from_json({**CLUSTER.to_json(), "num_nodes": 0})
    with pytest.raises(SpecError, match="memory_bytes"):
        GpuSpec(name="x", memory_bytes=-1, peak_flops=1, hbm_bytes_per_s=1, num_sms=1)
    with pytest.raises(SpecError, match="do not fill"):
        preset("h100-80g:12")


def test_shipped_constants_say_where_they_come_from() -> None:
    from copus_ext.cost_model import cluster_spec

    files = sorted(cluster_spec._CONSTANTS.glob("*.json"))
    assert {"a100-80g", "h100-80g", "h200-141g", "mi210-64g", "cpu"} <= {f.stem for f in files}
    for file in files:
        record: dict[str, Any] = json.loads(file.read_text())
        assert record["fitted_on"] and "residual" in record
        Constants.from_json(record["constants"])


def test_a_fit_finds_the_constants_that_made_the_times() -> None:
    truth = dataclasses.replace(Constants(), gemm_efficiency=0.6, tp_bytes_per_s=80e9)
    # Short pipelines, which are quick to price.
    rows = ROWS.take(np.flatnonzero((ROWS.pp <= 2) & (ROWS.vpp == 1))[::10])
    seconds = step_time(rows, truth).step_s
    found = fit_constants(rows, seconds, prior=Constants(), prior_weight=0.01)
    assert step_time(rows, found).step_s == pytest.approx(seconds, rel=0.02)
    assert found.gemm_efficiency == pytest.approx(0.6, rel=0.1)
    assert found.tp_bytes_per_s == pytest.approx(80e9, rel=0.1)
    # What the data say nothing about stays where it was.
    assert found.tp_cross_bytes_per_s == pytest.approx(Constants().tp_cross_bytes_per_s, rel=1e-3)
    with pytest.raises(ValueError, match="positive"):
        fit_constants(rows, -seconds, prior=Constants())


def test_the_peak_is_on_the_first_or_the_last_stage() -> None:
    model = PRESETS["llama-3-70b"]
    points = enumerate_points(model, preset("h100-80g:256"), 128, Limits())
    rows = to_config_batch(
        model, preset("h100-80g:256"), points.take(np.flatnonzero(points.code == LEGAL))
    )
    assert len(rows) > 1000
    np.testing.assert_allclose(peaks(rows)[0], memory(rows).peak_bytes, rtol=1e-12)
    here = rows.change(on_cpu=np.ones(len(rows), dtype=bool))
    np.testing.assert_allclose(peaks(here)[0], memory(here).peak_bytes, rtol=1e-12)


def test_known_models_have_their_known_size() -> None:
    known = {"gpt3-175b": 174.6, "llama-3.2-3b": 3.21, "llama-2-7b": 6.74, "llama-2-13b": 13.02}
    for name, billions in {
        **known,
        "qwen2.5-32b": 32.76,
        "llama-3-8b": 8.03,
        "llama-3-70b": 70.55,
        "llama-2-70b": 68.98,
        "llama-3.1-405b": 405.85,
    }.items():
        assert PRESETS[name].num_parameters / 1e9 == pytest.approx(billions, rel=0.002)
    for name, (every, active) in {
        "mixtral-8x7b": (46.70, 12.88),
        "mixtral-8x22b": (140.63, 39.15),
        "qwen3-30b-a3b": (30.53, 3.35),
        "deepseek-v3-sized": (671 * 60 / 61, 37),
    }.items():
        model = PRESETS[name]
        assert model.num_parameters / 1e9 == pytest.approx(every, rel=0.002)
        assert model.num_active_parameters / 1e9 == pytest.approx(active, rel=0.02)
    assert MODEL.num_active_parameters == MODEL.num_parameters
    assert "num_experts" not in MODEL.to_json()


def test_better_hardware_is_never_slower() -> None:
    before = step_time(ROWS, Constants()).step_s
    better = {"gemm_efficiency": 1.1, "attention_efficiency": 1.5}
    better |= dict.fromkeys(("tp_bytes_per_s", "dp_bytes_per_s", "nic_efficiency"), 2.0)
    less = ("memory_factor", "launch_s", "exchange_s", "tp_latency_s", "optimizer_factor", "step_s")
    for field, times in {**better, **dict.fromkeys(less, 0.5)}.items():
        c = dataclasses.replace(Constants(), **{field: getattr(Constants(), field) * times})
        after = step_time(ROWS, c).step_s
        assert (after <= before * (1 + 1e-12)).all() and (after < before).any(), field
    for name in ("peak_flops", "hbm_bytes_per_s", "nic_bytes_per_s", "intra_bytes_per_s"):
        rows = ROWS.change(**{name: getattr(ROWS, name) * 2})
        assert (step_time(rows, Constants()).step_s <= before * (1 + 1e-12)).all(), name


def test_scattered_messages_are_parts_that_are_gathered() -> None:
    rows = ROWS.take(np.flatnonzero((ROWS.tp == 4) & (ROWS.pp == 2) & (ROWS.vpp == 1)))
    parts = p2p_time_s(rows, CONSTANTS)[0]
    legacy = dataclasses.replace(MODEL, implementation="legacy")
    whole, scattered, before = (
        p2p_time_s(rows.change(sequence_parallel=0 * rows.tp > 0, **more), CONSTANTS)[0]
        for more in ({}, {"scatter_gather": True}, legacy.batch_fields(4))
    )
    gather = tp_collective_s(rows, CONSTANTS, 2.0 * rows.tokens * rows.hidden_size)
    np.testing.assert_allclose(scattered, parts + gather)
    np.testing.assert_array_equal(scattered, before)
    sent = parts - CONSTANTS.exchange_s
    np.testing.assert_allclose(whole - CONSTANTS.exchange_s, 4 * sent)


def test_sizes_with_units() -> None:
    known = {
        "80GiB": 80 * 2**30,
        "400Gb/s": 50e9,
        "100 Gbit/s": 12.5e9,
        "100Gbps": 12.5e9,
        "50GB/s": 50e9,
        "1e12FLOP/s": 1e12,
        "7": 7,
    }
    assert {text: quantity(text) for text in known} == known
    for text in ("", "GB", "10 apples", "-5GB", "1.2.3"):
        with pytest.raises(SpecError):
            quantity(text)


def test_a_driver_name_finds_its_preset() -> None:
    for name, mib, kind in (
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", 40960, "a100-40g"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100-80g"),
        ("NVIDIA H200", 143771, "h200-141g"),
        ("NVIDIA GH200 480GB", 97871, "gh200-96g"),
        ("NVIDIA GH200 144G HBM3e", 147000, "gh200-144g"),
        ("Tesla V100-SXM2-16GB", 16160, "v100-16g"),
        ("Tesla V100-SXM2-32GB", 32510, "v100-32g"),
    ):
        assert kind_of(name, mib) == kind
    assert here().world_size >= 1
    with pytest.raises(SpecError, match="RTX"):
        kind_of("NVIDIA GeForce RTX 4090", 24564)
