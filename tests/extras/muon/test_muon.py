"""Flags of Muon, what refuses them, and what the planner counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.rules import check_run, tensor_parallel_sizes
from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.extras import terms_of
from copus_ext.cost_model.megatron_flags import spec_of_flags
from copus_ext.cost_model.memory import static_bytes
from copus_ext.goodput.costs import Machine
from copus_ext.planner.run_flags import notes_on
from copus_ext.planner.space import LEGAL, Limits, enumerate_points, to_config_batch
from copus_ext.reshard.pause import predictor_of, shape_for
from megatron.trainer.common.core_version import since
from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.relayout import with_layout
from megatron.trainer.optim.optimizer import optimizer_config
from tests.helpers.examples import names_a_way_on
from tests.helpers.jobs import LATENT, MOE, TINY, TINY_GPT2

has_muon = pytest.mark.skipif(not since("0.18"), reason="megatron-core before 0.18")
MUON = "--optimizer muon"


def config(flags: str, base: str = TINY) -> Any:
    return resolve(parse_args(f"{base} --train-iters 10 {flags}".split()), 2)


@pytest.mark.skipif(since("0.18"), reason="megatron-core has it")
def test_an_older_core_is_named() -> None:
    with pytest.raises(UsageError, match=r"needs megatron-core 0\.18 or later") as found:
        config(MUON)
    assert names_a_way_on(str(found.value))


def test_another_optimizer_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--optimizer sgd is refused.*adam or .*muon") as found:
        config("--optimizer sgd")
    assert names_a_way_on(str(found.value))


def test_flags_alone_are_named_in_a_note() -> None:
    notes = " ".join(config("--muon-momentum 0.8").runtime.notes)
    assert "without --optimizer muon there is no effect of --muon-momentum" in notes


@has_muon
@pytest.mark.parametrize(
    "flags",
    [
        "--fp16",
        "--decoupled-lr 1e-4",
        "--muon-scalar-optimizer lion",
        "--muon-num-ns-steps 0",
        "--muon-num-ns-steps -3",
        "--muon-momentum 1",
        "--muon-momentum nan",
        "--muon-extra-scale-factor 0",
        "--muon-extra-scale-factor -1",
        "--muon-extra-scale-factor nan",
        "--muon-extra-scale-factor inf",
        "--muon-coefficient-type cubic",
        "--muon-coefficient-type custom",
        "--kfac",
    ],
)
def test_what_does_not_go_with_it(flags: str) -> None:
    with pytest.raises(UsageError, match=flags.split()[0]) as found:
        config(f"{MUON} {flags}")
    assert names_a_way_on(str(found.value))


@has_muon
@pytest.mark.parametrize("name", ["muon", "dist_muon"])
def test_state_that_is_to_be_split_stays_whole(name: str) -> None:
    split = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    found = config(f"--optimizer {name} {split}")
    assert found.optim.optimizer == "muon"
    assert not found.parallel.use_distributed_optimizer
    assert not found.parallel.overlap_param_gather and found.parallel.overlap_grad_reduce
    assert any("keeps its whole state on every replica" in note for note in found.runtime.notes)


@has_muon
def test_the_other_name_alone_is_told_without_a_flag_that_nobody_gave() -> None:
    (note,) = (n for n in config("--optimizer dist_muon").runtime.notes if "--optimizer" in n)
    assert "as --optimizer muon does" in note and "--use-distributed-optimizer" not in note
    assert "memory" not in note
    assert not any("--optimizer" in n for n in config(MUON).runtime.notes)


@has_muon
def test_its_flags_go_to_megatron_core() -> None:
    flags = """--muon-momentum 0.8 --muon-no-split-qkv --muon-use-nesterov --muon-num-ns-steps 6
    --muon-scale-mode shape_scaling --muon-fp32-matmul-prec high --muon-tp-mode distributed
    --muon-extra-scale-factor 0.2 --muon-coefficient-type polar_express"""
    found = optimizer_config(config(f"{MUON} {flags}"))
    assert found.optimizer == "muon" and not found.use_distributed_optimizer
    values = {name: value for name, value in vars(found).items() if name.startswith("muon_")}
    assert values == {
        "muon_momentum": 0.8,
        "muon_split_qkv": False,
        "muon_nesterov": True,
        "muon_scale_mode": "shape_scaling",
        "muon_fp32_matmul_prec": "high",
        "muon_coefficient_type": "polar_express",
        "muon_num_ns_steps": 6,
        "muon_tp_mode": "distributed",
        "muon_extra_scale_factor": 0.2,
        "muon_scalar_optimizer": "adam",
    }


@has_muon
def test_blocks_that_depend_on_the_layout_do_not_go_with_changes_of_it() -> None:
    found = config(f"{MUON} --muon-tp-mode blockwise")
    with pytest.raises(UsageError, match="--muon-tp-mode blockwise") as refused:
        check_run(CopusConfig(copus_layouts="all"), found)
    assert names_a_way_on(str(refused.value))
    check_run(CopusConfig(copus_layouts="current"), found)
    check_run(CopusConfig(copus_layouts="all"), config(MUON))


ONE_GROUP = "--group-query-attention --num-query-groups 1"
CUT_GROUP = f"{ONE_GROUP} --tensor-model-parallel-size 2"
NO_SPLIT = "--muon-no-split-qkv"


@has_muon
def test_a_group_that_ranks_share_is_not_taken_for_one_matrix_in_silence() -> None:
    """Where a rank has no whole group, megatron-core leaves out the split without a word."""
    for base in (TINY, MOE):
        for mode in ("duplicated", "distributed", "blockwise"):
            with pytest.raises(UsageError, match=r"groups 1 .*--muon-no-split") as found:
                config(f"{MUON} {CUT_GROUP} --muon-tp-mode {mode}", base)
            assert names_a_way_on(str(found.value))
        config(f"{MUON} {CUT_GROUP} {NO_SPLIT}", base)
        config(f"{MUON} {CUT_GROUP.replace('groups 1', 'groups 2')}", base)
        config(CUT_GROUP, base)
    # Multi-latent attention has as many groups as heads.
    config(f"{MUON} --tensor-model-parallel-size 2 {LATENT}")


@has_muon
def test_no_relayout_goes_where_ranks_share_a_group() -> None:
    to = Layout(tp=2)
    with pytest.raises(UsageError, match="--muon-no-split-qkv"):
        with_layout(config(f"{MUON} {ONE_GROUP}"), to)
    with_layout(config(f"{MUON} {ONE_GROUP} {NO_SPLIT}"), to)
    flags = CopusConfig(copus_layouts="all")
    assert tensor_parallel_sizes(flags, config(f"{MUON} {ONE_GROUP}")) == [1]
    assert tensor_parallel_sizes(flags, config(f"{MUON} {ONE_GROUP} {NO_SPLIT}")) == [1, 2]


def test_no_plan_has_ranks_that_share_a_group() -> None:
    for flags, largest in (("", 2), (NO_SPLIT, 4)):
        groups = "--group-query-attention --num-query-groups 2"
        model = spec_of_flags(f"{TINY} {MUON} {groups} {flags}".split())
        found = enumerate_points(model, preset("a100-80g:8"), 64, Limits())
        assert found.tp[np.equal(found.code, LEGAL)].max() == largest, flags


@pytest.mark.parametrize("steps", [-3, 0])
def test_steps_that_no_launch_takes_are_not_planned(steps: int) -> None:
    with pytest.raises(UsageError, match=f"--muon-num-ns-steps {steps} must be at least 1"):
        spec_of_flags(f"{TINY} {MUON} --muon-num-ns-steps {steps}".split())
    assert spec_of_flags(f"{TINY} --muon-num-ns-steps {steps}".split()).extras == {}


SIZES: Any = {"tp_sizes": [1, 2], "sharded": False}
MACHINE = Machine.of(preset("a100-80g:8"))


def points(base: str) -> Any:
    model, cluster = spec_of_flags(base.split()), preset("a100-80g:8")
    found = enumerate_points(model, cluster, 64, Limits())
    return model, found, to_config_batch(model, cluster, found)


def test_a_predicted_pause_counts_one_momentum_of_a_matrix() -> None:
    before, after = Layout(tp=2), Layout(pp=2)
    held = [
        predictor_of(shape_for(spec_of_flags(f"{TINY} {flags}".split()), **SIZES), MACHINE)
        .moved(before, after)
        .held
        for flags in ("", MUON)
    ]
    # Two of four layers of the model, whose matrices have a moment less.
    assert held[0] - held[1] == 4 * 2 * (4 * 32 * 32 + 3 * 32 * 64)


def test_no_plan_splits_its_state() -> None:
    for base in (TINY, MOE):
        model, found, _ = points(f"{base} {MUON}")
        is_legal = np.equal(found.code, LEGAL)
        assert model.extras == {"muon_num_ns_steps": 5, "muon_split_qkv": True}
        assert is_legal.any() and not found.use_distributed_optimizer[is_legal].any()


def test_a_plan_knows_its_price() -> None:
    notes = notes_on(f"{TINY} {MUON}", no_overlap=False)
    assert not any("does not know" in note for note in notes)


def test_products_of_learned_positions_are_counted() -> None:
    with_them, without = (
        sum(np.mean(c * m * n * k) for c, m, n, k in terms_of(points(base)[2]).layer_products)
        for base in (f"{TINY_GPT2} {MUON}", f"{TINY_GPT2} {MUON} --position-embedding-type rope")
    )
    # Of 32 positions of width 32 for four layers.
    assert with_them - without == pytest.approx(5 * 3 * 32**3 / 4)


@pytest.mark.parametrize("base", [TINY, MOE], ids=["dense", "mixture"])
@pytest.mark.parametrize("split", ["", NO_SPLIT])
def test_one_moment_less_of_each_matrix_and_three_products_a_step(base: str, split: str) -> None:
    groups = "--group-query-attention --num-query-groups 2"
    model, found, rows = points(f"{base} {MUON} {groups} {split}")
    plain = to_config_batch(replace(model, extras={}), preset("a100-80g:8"), found)
    h, ffn = model.hidden_size, model.ffn
    matrices = [(64, 32), (32, 32)] if split else [(32, 32), (16, 32), (16, 32), (32, 32)]
    if model.num_experts:
        experts = 8 // rows.experts.ep
        router = (model.num_experts, h)
        of_mlp = [(2 * 24, h, experts), (h, 24, experts)]
    else:
        router = (0, h)
        of_mlp = [(2 * ffn, h, 1), (h, ffn, 1)]
    own, operations = 0.0, 0.0
    for m, n, count, cut in (
        [(*m, 1, rows.tp) for m in matrices]
        + [(*router, 1, 1)]
        + [(*m, rows.experts.etp if model.num_experts else rows.tp) for m in of_mlp]
    ):
        own = own + 4 * m * n * count / cut
        a, b = min(m, n), max(m, n)
        operations = operations + 5 * count * (2 * a * a * b + a * a * a)
    terms = terms_of(rows)
    assert -terms.layer_bytes == pytest.approx(np.broadcast_to(own, len(rows)))
    counted = sum(c * m * n * k for c, m, n, k in terms.layer_products)
    assert np.broadcast_to(counted, len(rows)) == pytest.approx(
        np.broadcast_to(operations, len(rows))
    )
    assert (static_bytes(rows) <= static_bytes(plain)).all()
