"""What K-FAC costs, as the planner counts it, against what the trainer does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.throughput_table import ThroughputTable
from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.extras import terms_of
from copus_ext.cost_model.kernels import gemm_s
from copus_ext.cost_model.megatron_flags import spec_of_arguments, spec_of_flags
from copus_ext.cost_model.memory import memory, peaks, static_bytes
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.cost_model.rows import ConfigBatch
from copus_ext.cost_model.step import min_step_s, step_time
from copus_ext.goodput.state import ControllerState
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.search import Planner, Rejected
from copus_ext.planner.space import (
    LEGAL,
    REJECTION_CODES,
    Limits,
    enumerate_points,
    points_of,
    to_config_batch,
)
from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.layout import Layout
from megatron.trainer.extras.kfac import planner as cost
from megatron.trainer.extras.kfac.precondition import Kfac, _lower_half
from megatron.trainer.model.gpt import build_model
from megatron.trainer.train.build import groups_of
from megatron.trainer.train.step_feature import build_features
from tests.helpers.jobs import TINY
from tests.helpers.one_rank import cpu_of_one

FLAGS = [*f"{TINY} --kfac --train-iters 1 --global-batch-size 16".split()]
MODEL = spec_of_flags(FLAGS)
PLAIN = replace(MODEL, extras={})
FLAT = Constants(gemm_efficiency=1.0, gemm_half_inner=1e-12, gemm_half_outer=1e-12)
"""Every operation of a product takes as long."""


def with_interval(interval: int) -> ModelSpec:
    return replace(MODEL, extras={**MODEL.extras, "kfac_interval": interval})


def held_bytes(rows: ConfigBatch) -> Any:
    """[n] bytes of a rank of any stage in a step that makes covariances."""
    return rows.num_layers / rows.pp * terms_of(rows).layer_bytes


def sent_bytes(rows: ConfigBatch, held: Any) -> Any:
    """[n] bytes that go once round the replicas, where a rank holds so many parameters."""
    terms = terms_of(rows)
    return rows.num_layers / rows.pp * terms.sent_layer_bytes + terms.sent_parameter_bytes * held


def compute_s(rows: ConfigBatch, c: Constants) -> Any:
    """[n] mean seconds that a rank of any stage computes in a step."""
    products = terms_of(rows).layer_products
    seconds = sum(count * gemm_s(rows, c, *sizes) for count, *sizes in products)
    return rows.num_layers / rows.pp * seconds


def rows_of(
    model: ModelSpec = MODEL, *, dp: int = 1, pp: int = 1, zero: bool = False
) -> ConfigBatch:
    """One configuration on CPU ranks."""
    layout = Layout(dp=dp, pp=pp)
    c = Configuration(
        layout=layout,
        micro_batch_size=2,
        global_batch_size=16,
        use_distributed_optimizer=zero,
        overlap=False,
    )
    return to_config_batch(model, preset(f"cpu:{layout.world_size}"), points_of([c])).full()


@pytest.fixture(scope="module")
def kfac() -> Iterator[Kfac]:
    """That of the same model on one rank, with inverses and fresh sums."""
    with cpu_of_one() as device:
        config = resolve(parse_args(FLAGS), 1).replace(padded_vocab_size=128)
        groups = groups_of(config)
        own: Any = build_features(config, build_model(config, groups, device), groups)[0]
        own.begin()
        for factors in own.factors:
            for total in factors.sums.values():
                total += torch.eye(len(total))
            factors.refresh()
            factors.begin()
        yield own


def test_the_trainer_keeps_as_many_bytes(kfac: Kfac) -> None:
    kept = [
        tensor.numel() * tensor.element_size()
        for factors in kfac.factors
        for tensor in (*factors.sums.values(), *factors.inverses.values())
    ]
    assert float(held_bytes(rows_of())[0]) == sum(kept)
    more = memory(rows_of()).stages["optimizer"] - memory(rows_of(PLAIN)).stages["optimizer"]
    assert float(more[0, 0]) == sum(kept)


def test_the_trainer_sends_as_many_bytes(kfac: Kfac) -> None:
    halves = [
        4 * piece.numel()
        for factors in kfac.factors
        for total in factors.sums.values()
        for piece in _lower_half(total)
    ]
    # An all-reduce goes round twice, once in ten steps. Blocks reach beyond the diagonal.
    found = float(sent_bytes(rows_of(dp=2), 0.0)[0])
    assert found <= 2 * sum(halves) / 10 <= 2.1 * found
    # The end of the only piece cuts one of 16 matrices, which is summed; many pieces cut all.
    for copies, share in ((2, 2 / 16), (16, 1.0)):
        rows = rows_of(zero=True).change(dp=np.array([copies]))
        gathered = sent_bytes(rows, 1000.0) - found
        assert float(gathered[0]) == pytest.approx(share * 4 * 1000.0)


def test_the_trainer_multiplies_as_much(kfac: Kfac) -> None:
    rows = rows_of(with_interval(10**9))
    with FlopCounterMode(display=False) as counter:
        for factors in kfac.factors:
            factors.product(torch.randn(factors.weight.shape))
    assert float((compute_s(rows, FLAT) * rows.peak_flops)[0]) == pytest.approx(
        counter.get_total_flops(), rel=1e-6
    )


def test_covariances_go_with_tokens_and_come_once_in_an_interval() -> None:
    def seconds(interval: int, micro: int) -> float:
        rows = rows_of(with_interval(interval)).change(micro_batch_size=micro)
        return float(compute_s(rows, FLAT)[0])

    often, seldom = (
        [seconds(interval, micro) - seconds(10**9, micro) for micro in (2, 4)]
        for interval in (1, 10)
    )
    assert often == pytest.approx([10 * s for s in seldom], rel=1e-5)
    rows = rows_of()
    of_tokens = 2 * rows.num_microbatches * rows.tokens * rows.num_layers
    of_tokens = of_tokens * cost.covariance_elements(rows) / rows.peak_flops
    assert often[1] - often[0] == pytest.approx(float(of_tokens[0]), rel=1e-5)


def test_stages_and_shards_divide_it() -> None:
    whole, half = rows_of(), rows_of(pp=2)
    assert held_bytes(half) == pytest.approx(held_bytes(whole) / 2)
    assert compute_s(half, FLAT) == pytest.approx(compute_s(whole, FLAT) / 2)
    one, shared = rows_of(dp=2), rows_of(dp=2, zero=True)
    assert cost.local_share(one) == 1 and 0.5 < cost.local_share(shared) < 1
    assert held_bytes(shared) < held_bytes(one)
    assert compute_s(shared, FLAT) < compute_s(one, FLAT)
    assert cost.local_share(rows_of(zero=True)) == 1, "a single replica has all"
    overlapped = shared.change(overlap_grad_reduce=np.array([True]))
    assert cost.local_share(overlapped) == cost.local_share(shared), "one bucket holds it all"
    wide = overlapped.change(hidden_size=np.array([4096]), ffn_hidden_size=np.array([16384]))
    assert cost.local_share(wide) == 1, "each of many buckets is cut"
    assert cost.local_share(wide.change(overlap_grad_reduce=np.array([False]))) < 0.7


def test_sides_that_are_too_wide_cost_nothing() -> None:
    wide = replace(MODEL, ffn_hidden_size=10_000)
    rows = rows_of(wide)
    h, inner = wide.hidden_size, wide.num_attention_heads * wide.channels
    attention = h**2 + (inner + 2 * wide.groups * wide.channels) ** 2 + inner**2 + h**2
    assert float(cost.covariance_elements(rows)[0]) == attention + 2 * h**2


def test_a_step_is_longer_and_without_it_nothing_changes() -> None:
    c = preset("cpu:2").load_constants()
    every: list[dict[str, Any]] = [{"dp": 2}, {"pp": 2}, {"dp": 2, "zero": True}]
    for sizes in every:
        with_it, without = (step_time(rows_of(m, **sizes), c) for m in (MODEL, PLAIN))
        more = with_it.step_s - without.step_s
        least = c.factors.compute * compute_s(rows_of(**sizes), c)
        assert (more >= 0.999 * least).all() and (least > 0).all()
        in_all = np.sum(list(with_it.parts.values()), axis=0)
        assert in_all == pytest.approx(with_it.step_s)
    assert not held_bytes(rows_of(PLAIN)).any()
    assert not sent_bytes(rows_of(PLAIN, dp=2), 5.0).any()
    assert not np.any(compute_s(rows_of(PLAIN), c))


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"pp": 2}, {"dp": 2, "pp": 2, "zero": True}])
def test_bounds_and_parts_know_it(sizes: dict[str, Any]) -> None:
    rows, c = rows_of(**sizes), preset("cpu:4").load_constants()
    assert (min_step_s(rows, c) <= step_time(rows, c).step_s).all()
    assert (min_step_s(rows, c) > min_step_s(rows_of(PLAIN, **sizes), c)).all()
    whole = memory(rows)
    assert static_bytes(rows) <= whole.peak_bytes
    assert peaks(rows)[0] == pytest.approx(whole.peak_bytes)
    costs_by_block = pytest.importorskip("copus_ext.extras.layer_partition.blocks").costs_by_block
    costs = costs_by_block(rows, c)
    kinds = ("weights", "grads", "optimizer")
    of_stages = sum(float(whole.stages[kind].sum()) for kind in kinds)
    assert costs.blocks.static_bytes.sum() == pytest.approx(of_stages)
    backward = np.zeros(whole.stages["grads"].shape)
    held = whole.stages["grads"] / rows.gradient_bytes
    plain = costs_by_block(rows_of(PLAIN, **sizes), c).end_of_step(held, backward)
    assert (costs.end_of_step(held, backward) > plain).all()


def test_half_precision_on_a_gpu_takes_twice_as_long() -> None:
    rows = rows_of(dp=2).change(element_bytes=np.array([2]))
    of_gpu = compute_s(rows.change(on_cpu=np.array([False])), FLAT)
    assert of_gpu == pytest.approx(2 * compute_s(rows, FLAT))


def test_the_planner_rejects_what_a_launch_would() -> None:
    cluster, limits = preset("cpu:4"), Limits(recompute=("none",), cross_node_tp=True)
    points = enumerate_points(MODEL, cluster, 16, limits)
    code = REJECTION_CODES.index("extra")
    legal, rejected = (np.flatnonzero(points.code == k) for k in (LEGAL, code))
    assert len(legal) and len(rejected)
    assert (points.tp[legal] == 1).all() and (points.tp[rejected] > 1).all()
    for at in legal[::7]:
        resolve(parse_args([*FLAGS, *points.configuration(int(at)).to_flags()]), 4)
    some = points.configuration(int(rejected[0]))
    with pytest.raises(UsageError, match="--kfac"):
        resolve(parse_args([*FLAGS, *some.to_flags()]), 4)
    found = Planner(MODEL, cluster, limits=limits).explain(some)
    assert isinstance(found, Rejected) and found.code == "extra" and "--kfac" in found.detail


def test_profiles_of_models_without_it_stay_valid() -> None:
    assert "extras" not in PLAIN.to_json() and MODEL.extras["kfac_interval"] == 10
    assert ModelSpec.from_json(MODEL.to_json()) == MODEL


def test_the_planner_keeps_what_costs_and_refuses_what_no_launch_takes() -> None:
    assert MODEL.extras == {"kfac": True, "kfac_interval": 10}
    assert spec_of_flags([*FLAGS, "--kfac-damping", "0.5"]) == MODEL
    bare = [*TINY.split(), "--train-iters", "1", "--kfac-interval", "3"]
    assert not spec_of_flags(bare).extras
    # A launch needs local layers, whatever the machine of the planner would take.
    engine = [*FLAGS, "--transformer-impl", "transformer_engine"]
    assert spec_of_flags(engine).implementation == "local"
    for interval in ("0", "-2"):
        with pytest.raises(UsageError, match=f"--kfac-interval {interval} must be at least 1"):
            spec_of_flags([*FLAGS, "--kfac-interval", interval])


def test_a_profile_with_other_flags_of_an_extra_names_them(tmp_path: Path) -> None:
    run, file = resolve(parse_args([*FLAGS]), 2), tmp_path / "profile.jsonl"
    model = spec_of_arguments(SimpleNamespace(**run.flat()))
    asked = CopusConfig(copus=True, copus_profile=str(file), copus_layouts="all")

    def measured(model: ModelSpec) -> None:
        gpu = preset("cpu:2").gpu.name
        machine = {"world_size": 2, "gpu": gpu, "model": model.to_json()}
        file.write_text(json.dumps({"machine": machine}) + "\n")

    measured(model)
    ThroughputTable(run, asked, gpu=None)
    measured(replace(model, extras={**model.extras, "kfac_interval": 3}))
    with pytest.raises(UsageError, match=r"interval 3, and the run has .*interval 10"):
        ThroughputTable(run, asked, gpu=None)


def test_long_steps_of_kfac_are_in_the_throughput() -> None:
    def config(more: str) -> Any:
        train = ["--train-samples", "6400", *more.split()]
        return resolve(parse_args([*TINY.split(), *train]), 2)

    state = ControllerState()
    for i in range(30):
        seconds = 2.0 if i % 10 == 0 else 0.5
        state.record_step(
            key="tp1.pp1.dp2 1 8", consumed_samples=8 * i, batch=8, loss=1.0, seconds=seconds
        )
    for more, usual in (("", 0.5), ("--kfac --kfac-interval 10", 0.65)):
        flags = CopusConfig(copus=True, copus_layouts="all")
        rows, at = ThroughputTable(config(more), flags, gpu=None).rows(
            [8, 16],
            micro_batch_size=1,
            global_batch_size=8,
            measured=state.measured_step_time,
        )
        now = rows[at]
        assert now.source == "measured"
        assert now.samples_per_s == pytest.approx(8 / usual, rel=0.02)
        assert any(r.layout.tp > 1 for r in rows) == (not more)
        assert any(r.layout.pp > 1 for r in rows)
