"""What the planner calls legal runs, with the parameters it counts; what it rejects by rule the
trainer and megatron-core refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from copus_ext.cost_model.cluster_spec import preset
from copus_ext.planner.search import Planner
from copus_ext.planner.space import Limits
from tests.distributed.worker_planner import BATCH, MIXTURE, SOME, tiny_spec
from tests.helpers.jobs import TINY
from tests.helpers.nightly import case
from tests.helpers.on_ranks import on_ranks

NUM_LAYOUTS = 38
"""Of a mixture of experts on four ranks."""


@pytest.mark.timeout(640)
@pytest.mark.parametrize(
    ("world", "which"),
    [case(2, "all", daily=True), case(4, "some", daily=True), case(4, "all", daily=False)],
)
def test_every_legal_configuration_runs(tmp_path: Path, world: int, which: str) -> None:
    rows = on_ranks("worker_planner", tmp_path, world, which, timeout_s=600)
    sent = [row for row in rows if row["kind"] == "sent"]
    rows = [row for row in rows if row["kind"] != "sent"]
    assert all(row["counted"] == pytest.approx(row["predicted"], rel=0.1) for row in sent), sent
    assert len(sent) == {2: 0, 4: 1}[world]
    dense = [row["name"] for row in rows if row["kind"] == "dense"]
    of_mixture = [row["name"] for row in rows if row["kind"] != "dense"]
    if which == "some":
        assert len(dense) >= 16 // SOME and len(of_mixture) >= NUM_LAYOUTS // SOME
    else:
        assert len(dense) >= {2: 12, 4: 16}[world], dense
        assert len(of_mixture) == {2: 0, 4: NUM_LAYOUTS}[world], of_mixture
    first: dict[Any, float] = {}
    for row in rows:
        assert len(row["losses"]) == 1, row["name"]
        # The vocabulary is padded for the tensor size, which changes the softmax.
        alike = row["kind"], row["name"].split(".")[0]
        loss = row["losses"][0]
        assert loss == pytest.approx(first.setdefault(alike, loss), rel=1e-5), row["name"]
        for counted, predicted in row["parameters"]:
            assert counted == predicted, row["name"]


def rejected_examples(world: int) -> list[Any]:
    """One configuration for every rule that rejects some."""
    from copus_ext.planner.space import LEGAL, REJECTION_CODES, Limits, enumerate_points

    found = []
    for batch, limits in (
        (BATCH, Limits(cross_node_tp=True)),
        (6, Limits(cross_node_tp=True)),
        (BATCH, Limits(fixed={"tp": 8, "vpp": 1}, cross_node_tp=True)),
        (BATCH, Limits(fixed={"pp": 2, "vpp": 4})),
    ):
        size = 8 if limits.fixed.get("tp") else world
        points = enumerate_points(tiny_spec(), preset(f"cpu:{size}"), batch, limits)
        for code in np.unique(points.code[points.code != LEGAL]):
            i = int(np.flatnonzero(points.code == code)[0])
            found.append((REJECTION_CODES[code], points.configuration(i)))
    return found


WORDS = {
    "heads": "num-attention-heads",
    "query_groups": "query-groups",
    "layers": "num-layers",
    "virtual": "virtual|num-layers",
    "batch": "global-batch-size",
    "interleave_microbatches": "micro-batches",
}


def test_every_rule_that_rejects_is_one_of_the_trainer() -> None:
    from megatron.trainer.common.errors import UsageError
    from megatron.trainer.config.arguments import parse_args, resolve

    base = TINY.replace("--pad-vocab-for-tensor-parallel-size 4", "")
    examples = rejected_examples(6) + rejected_examples(4)
    assert {"heads", "layers", "virtual", "batch"} <= {code for code, _ in examples}
    for code, configuration in examples:
        flags = [*base.split(), *configuration.to_flags(), "--train-iters", "1"]
        with pytest.raises(UsageError, match=WORDS[code]):
            resolve(parse_args(flags), configuration.layout.world_size)
            pytest.fail(f"{code}: {configuration} was accepted")


def test_every_rule_for_experts_is_said_as_the_trainer_says_it() -> None:
    import shlex

    from copus_ext.cost_model.megatron_flags import spec_of_flags
    from copus_ext.planner.plan import Rejected
    from copus_ext.planner.space import LEGAL, REJECTION_CODES, enumerate_points
    from megatron.trainer.common.errors import UsageError
    from megatron.trainer.config.arguments import parse_args, resolve

    cluster = preset("cpu:4")
    base = MIXTURE.replace("--pad-vocab-for-tensor-parallel-size 4", "--train-iters 1")
    seen, legal = set(), 0
    for more, fixed, mapping in (
        ("", {}, False),
        ("--moe-token-dispatcher-type allgather", {}, False),
        ("--num-experts 6", {"ep": 4}, False),
        ("--moe-ffn-hidden-size 25", {}, False),
        ("--moe-shared-expert-intermediate-size 18", {"tp": 4}, False),
        ("", {"pp": 2}, True),
    ):
        flags = [*shlex.split(base), *shlex.split(more)]
        spec = spec_of_flags(flags)
        limits = Limits(
            fixed={**fixed, "micro_batch": 1, "vpp": 1},
            recompute=("none",),
            use_distributed_optimizer=(True,),
            cross_node_tp=True,
            cross_node_ep=True,
            narrow_experts=True,
            use_tp_pp_dp_mapping=mapping,
        )
        planner = Planner(spec, cluster, limits=limits)
        points = enumerate_points(spec, cluster, BATCH, limits)
        for i in range(len(points)):
            c = points.configuration(i)
            args = parse_args([*flags, *c.to_flags()])
            if points.code[i] == LEGAL:
                resolve(args, 4)
                legal += 1
                continue
            seen.add(REJECTION_CODES[points.code[i]])
            found = planner.explain(c)
            assert isinstance(found, Rejected)
            with pytest.raises(UsageError) as refused:
                resolve(args, 4)
            assert f"{found.detail}; {found.fix}" in str(refused.value), str(c)
    assert seen == {"experts", "expert_ffn", "shared_expert", "expert_alltoall", "expert_copies"}
    assert legal >= 30


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_model_parallel_size": 3},
        {"tensor_model_parallel_size": 8},
        {"tensor_model_parallel_size": 2, "num_query_groups": 3},
        {"pipeline_model_parallel_size": 3},
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 4},
    ],
    ids=str,
)
def test_megatron_core_refuses_the_same(sizes: dict[str, int]) -> None:
    import torch
    from megatron.core.transformer import transformer_config

    build: Any = transformer_config.TransformerConfig
    shape: dict[str, Any] = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4}
    good = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    build(**shape, **good, pipeline_dtype=torch.float32)
    with pytest.raises((ValueError, AssertionError)):
        config = build(**{**shape, **sizes}, pipeline_dtype=torch.float32)
        _layers_of_chunk(config)


def _layers_of_chunk(config: Any) -> None:
    """What megatron-core checks when it cuts the layers."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    get_num_layers_to_build(config, vp_stage=0, pp_rank=0)


def test_megatron_core_refuses_widths_lengths_and_counts(tmp_path: Path) -> None:
    found = on_ranks("worker_core_refuses", tmp_path, 2, timeout_s=100)
    assert "not divisible" in found["ffn 65"] and not found["ffn 64"]
    assert "divisible by tensor" in found["sequence 9"] and not found["sequence 8"]
    assert "remainder of M" in found["interleaved 3"]
    assert found["interleaved 4"] == "a forward step"


@pytest.mark.parametrize(("batch", "micro_batch", "replicas"), [(6, 1, 4), (8, 3, 1)])
def test_megatron_core_refuses_a_batch_that_does_not_divide(
    batch: int, micro_batch: int, replicas: int
) -> None:
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator

    with pytest.raises(AssertionError):
        ConstantNumMicroBatchesCalculator(batch, micro_batch, replicas, False, 0)
