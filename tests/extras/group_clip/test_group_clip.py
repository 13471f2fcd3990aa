"""Gradients clipped by groups of samples: which samples, which parameters, which factor, and the
flags."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.rules import check_run
from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.megatron_flags import spec_of_flags
from copus_ext.cost_model.memory import memory
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.cost_model.rows import concatenate
from copus_ext.gns.hooks import CONTROL_SET, GROUPS, measured_parameters
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.plan import Rejected
from copus_ext.planner.run_flags import notes_on
from copus_ext.planner.search import Planner
from copus_ext.planner.space import (
    LEGAL,
    REJECTION_CODES,
    Limits,
    enumerate_points,
    may_overlap,
    points_of,
    to_config_batch,
)
from megatron.trainer.checkpoint.resume import merge_resume_config
from megatron.trainer.common.device import Device
from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.layout import Layout
from megatron.trainer.data.dataloader import BatchReader
from megatron.trainer.data.sampler import micro_batch_indices
from megatron.trainer.extras.group_clip.clip import GroupClip, scale_of
from megatron.trainer.extras.group_clip.flags import limit_of
from megatron.trainer.model.gpt import Model, build_model
from megatron.trainer.train.build import groups_of
from megatron.trainer.train.step_feature import build_features
from tests.helpers.examples import config_of, names_a_way_on
from tests.helpers.jobs import FURTHER, LATENT, TINY, TINY_GPT2
from tests.helpers.one_rank import cpu_of_one

CLIP = "--clip-group-size 4 --clip-group-norm 1.5"
sizes = st.integers(1, 4)


def config(flags: str) -> Any:
    return config_of(f"--global-batch-size 16 {flags}", 2)


@given(start=st.integers(0, 99), turns=sizes, dp=sizes, micro=sizes, micros=sizes, other=sizes)
def test_replicas_take_turns_by_whole_groups(
    start: int, turns: int, dp: int, micro: int, micros: int, other: int
) -> None:
    size = micro * micros
    batch = turns * dp * size
    ranks = [micro_batch_indices(start, batch, micro, r, dp, block=size) for r in range(dp)]
    assert sorted(n for rows in ranks for row in rows for n in row) == [
        *range(start, start + batch)
    ]
    for rows in ranks:
        assert all(len(row) == micro for row in rows)
        for first in range(0, len(rows), micros):
            group = [n for row in rows[first : first + micros] for n in row]
            assert group == [*range(group[0], group[0] + size)] and (group[0] - start) % size == 0
    if micros == 1:
        assert ranks == [micro_batch_indices(start, batch, micro, r, dp) for r in range(dp)]
    if batch % (dp * size * other):
        with pytest.raises(UsageError, match="reads together"):
            micro_batch_indices(start, batch, micro, 0, dp, block=size * other)


def test_batches_that_are_read_ahead_are_groups_too() -> None:
    class Numbered:
        def __len__(self) -> int:
            return 48

        def __getitem__(self, index: int) -> dict[str, Any]:
            tokens = torch.full((2,), index)
            return dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids"), tokens)

    reader = BatchReader(Numbered())
    where: Any = {"global_batch_size": 16, "micro_batch_size": 2, "dp_rank": 1, "dp_size": 2}
    for consumed in (0, 16, 32):
        batches = reader.read(consumed_samples=consumed, block=4, **where)
        read = [next(batches)["tokens"][0, 0].item() for _ in range(4)]
        assert read == [consumed + n for n in (4, 6, 12, 14)]
    batches = reader.read(consumed_samples=0, **where)
    assert [next(batches)["tokens"][0, 0].item() for _ in range(4)] == [2, 6, 10, 14]
    reader.close()


@pytest.mark.parametrize(
    ("norm", "limit", "factor"),
    [
        (0.5, 2.0, 1.0),
        (8.0, 2.0, 0.25),
        (0.0, 2.0, 1.0),
        (8.0, math.inf, 1.0),
        (0.0, math.inf, 1.0),
        (8.0, None, 0.125),
        (0.0, None, 0.0),
        (math.inf, 2.0, math.nan),
        (math.inf, math.inf, math.nan),
        (math.nan, None, math.nan),
        (math.inf, None, math.nan),
    ],
)
def test_the_factor_of_a_group(norm: float, limit: float | None, factor: float) -> None:
    found = scale_of(torch.tensor(norm, dtype=torch.float64), limit).item()
    assert found == pytest.approx(factor, nan_ok=True)


@pytest.fixture
def device() -> Iterator[Device]:
    with cpu_of_one() as found:
        yield found


def clipped_model(flags: str, device: Device) -> tuple[Model, Any, GroupClip]:
    """A model of one rank, its process groups, and what clips its groups of samples."""
    own = resolve(parse_args([*flags.split(), *CLIP.split(), "--train-iters", "1"]), 1)
    own = merge_resume_config(own, None, vocab_size=127)
    groups = groups_of(own)
    model = build_model(own, groups, device)
    (clip,) = build_features(own, model, groups)
    assert isinstance(clip, GroupClip)
    return model, groups, clip


@pytest.mark.parametrize(
    "flags",
    [
        TINY,
        TINY_GPT2,
        FURTHER,
        f"{TINY} {LATENT} --qk-layernorm",
    ],
)
def test_the_norm_is_over_the_parameters_that_decisions_are_made_on(
    device: Device, flags: str
) -> None:
    model, groups, clip = clipped_model(flags, device)
    control = [
        m.param for m in measured_parameters(model.chunks, groups) if GROUPS[m.group] in CONTROL_SET
    ]
    counted = clip.counted()
    assert counted and set(map(id, counted)) == set(map(id, control))
    clip.remove_hooks()
    model.detach_hooks()


def test_hooks_that_miss_a_group_end_the_run(device: Device) -> None:
    model, _, clip = clipped_model(TINY, device)
    clip.begin(8, 1)
    reduce: Any = model.core_config.finalize_model_grads_func
    with pytest.raises(RuntimeError, match=r"--clip-group-size 4: 0 groups .* 2 .*drop"):
        reduce(model.chunks)


def test_values_of_the_limit() -> None:
    assert limit_of("2.5") == 2.5 and limit_of("inf") == math.inf and limit_of("adaptive") is None
    for text in ("0", "-1", "nan", "none"):
        with pytest.raises(ValueError, match=text):
            limit_of(text)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--clip-group-size 4", ["--clip-group-norm"]),
        ("--clip-group-norm 1", ["--clip-group-size"]),
        ("--clip-group-size 0 --clip-group-norm 1", ["--clip-group-size 0", "at least 1"]),
        ("--clip-group-size 4 --clip-group-norm much", ["--clip-group-norm much", "adaptive"]),
        ("--clip-group-size 4 --clip-group-norm 0", ["--clip-group-norm 0", "above 0"]),
        ("--clip-group-size 3 --clip-group-norm 1", ["--micro-batch-size 2", "use 2 or 4"]),
        (f"{CLIP} --global-batch-size 20", ["--global-batch-size 20", "use 16 or 24"]),
        (f"{CLIP} --rampup-batch-size 4 4 64", ["--global-batch-size 4", "use 8"]),
        (f"{CLIP} --overlap-grad-reduce", ["excludes --overlap-grad-reduce"]),
        (f"{CLIP} --context-parallel-size 2", ["excludes --context-parallel-size 2"]),
        (f"{CLIP} --num-experts 2", ["excludes --num-experts"]),
        (f"{CLIP} --calculate-per-token-loss", ["excludes --calculate-per-token-loss"]),
        (f"{CLIP} --fp16", ["excludes --fp16", "--bf16"]),
        (f"{CLIP} --bf16 --grad-reduce-in-bf16", ["excludes --grad-reduce-in-bf16"]),
        (f"{CLIP} --allow-uneven-micro-batches", ["excludes --allow-uneven-micro-batches"]),
        (f"{CLIP} --grad-compression-rank 2", ["excludes --grad-compression-rank"]),
        (f"{CLIP} --micro-batch-size-schedule 50%:1", ["excludes", "--micro-batch-size-schedule"]),
    ],
)
def test_what_groups_do_not_go_with(flags: str, parts: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        config(flags)
    text = str(error.value)
    assert all(part in text for part in parts), text
    assert all(names_a_way_on(line) for line in text.splitlines()), text


def test_virtual_stages_ask_for_a_batch_that_fits_both() -> None:
    piped = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    config(f"{CLIP} {piped}")
    with pytest.raises(UsageError, match="use 12 or 24"):
        config(f"--clip-group-size 6 --clip-group-norm 1 {piped}")


def test_a_run_is_told_that_clipping_changes_it() -> None:
    def notes(flags: str) -> str:
        return " ".join(config(flags).runtime.notes)

    assert "changes the training" in notes(CLIP)
    assert "changes the training" in notes("--clip-group-size 4 --clip-group-norm adaptive")
    assert "changes the training" not in notes("--clip-group-size 4 --clip-group-norm inf")
    assert config("").extras["group_clip"].clip_group_size is None


FLAGS: list[str] = [*f"{TINY} {CLIP} --train-iters 1 --global-batch-size 16".split()]


def test_the_planner_rejects_what_a_launch_would() -> None:
    model, cluster = spec_of_flags(FLAGS), preset("cpu:4")
    limits = Limits(overlap=False, recompute=("none",), cross_node_tp=True)
    points = enumerate_points(model, cluster, 16, limits)
    code = REJECTION_CODES.index("extra")
    legal, rejected = (np.flatnonzero(points.code == c) for c in (LEGAL, code))
    for at in legal:
        resolve(parse_args([*FLAGS, *points.configuration(int(at)).to_flags()]), 4)
    for at in rejected:
        with pytest.raises(UsageError, match="--clip-group-size"):
            resolve(parse_args([*FLAGS, *points.configuration(int(at)).to_flags()]), 4)
    assert {int(points.micro_batch_size[i]) for i in legal} == {1, 2, 4}
    some = [points.configuration(int(i)) for i in rejected]
    assert any(c.micro_batch_size == 8 for c in some) and any(c.layout.cp == 2 for c in some)
    found = Planner(model, cluster, limits=limits).explain(some[0])
    assert isinstance(found, Rejected) and found.code == "extra"
    assert "--clip-group-size 4" in found.detail
    mixture = dataclasses.replace(model, num_experts=4)
    assert not (enumerate_points(mixture, cluster, 16, limits).code == LEGAL).any()


@pytest.mark.parametrize("size", ["0", "-4"])
def test_the_planner_refuses_a_size_that_no_launch_takes(size: str) -> None:
    with pytest.raises(UsageError, match=f"--clip-group-size {size} must be at least 1"):
        spec_of_flags([*FLAGS, "--clip-group-size", size])


@pytest.mark.parametrize(
    ("tp", "pp", "micro", "copies"),
    [(1, 1, 4, 1), (2, 1, 4, 2), (1, 2, 1, 2), (1, 2, 4, 3), (1, 4, 2, 3), (1, 4, 4, 5)],
)
def test_the_planner_counts_the_copies_of_gradients(
    tp: int, pp: int, micro: int, copies: int
) -> None:
    model = spec_of_flags(FLAGS)
    layout = Layout(tp=tp, pp=pp, dp=1)
    c = Configuration(layout=layout, micro_batch_size=micro, global_batch_size=16)
    cluster = preset(f"cpu:{tp * pp}")

    def stages(spec: ModelSpec) -> Any:
        return memory(to_config_batch(spec, cluster, points_of([c]))).stages

    plain, own = stages(dataclasses.replace(model, extras={})), stages(model)
    np.testing.assert_allclose(own["optimizer"] - plain["optimizer"], copies * plain["grads"])
    np.testing.assert_array_equal(own["grads"], plain["grads"])


def test_plans_are_made_without_what_clipping_excludes() -> None:
    model, text = spec_of_flags(FLAGS), shlex.join(FLAGS)
    assert model.extras == {"clip_group_size": 4} and not may_overlap(model)
    assert ModelSpec.from_json(json.loads(json.dumps(model.to_json()))) == model
    plain = dataclasses.replace(model, extras={})
    assert may_overlap(plain) and "extras" not in plain.to_json()
    (note,) = [n for n in notes_on(text, no_overlap=False) if "--clip-group-size" in n]
    assert "priced without --overlap-grad-reduce" in note
    assert not any("overlap" in n for n in notes_on(text, no_overlap=True))


def test_rows_with_and_without_groups_can_be_fitted_together() -> None:
    c = Configuration(layout=Layout(dp=2), micro_batch_size=2, global_batch_size=16)
    model, cluster = spec_of_flags(FLAGS), preset("cpu:2")
    specs = model, dataclasses.replace(model, extras={})
    parts = [to_config_batch(spec, cluster, points_of([c])) for spec in specs]
    together = memory(concatenate(parts)).peak_bytes
    np.testing.assert_allclose(together, [memory(part).peak_bytes[0] for part in parts])
    assert together[0] > together[1]


def test_stages_of_unlike_layers_count_the_copies_too() -> None:
    c = Configuration(layout=Layout(pp=2), micro_batch_size=2, global_batch_size=16, overlap=False)
    rows = to_config_batch(spec_of_flags(FLAGS), preset("cpu:2"), points_of([c])).full()
    found = memory(rows).stages
    whole = sum(float(found[kind].sum()) for kind in ("weights", "grads", "optimizer"))
    costs_by_block = pytest.importorskip("copus_ext.extras.layer_partition.blocks").costs_by_block
    costs = costs_by_block(rows, preset("cpu:2").load_constants())
    assert costs.blocks.static_bytes.sum() == pytest.approx(whole)


@pytest.mark.parametrize("mode", ["act", "observe"])
def test_the_controller_does_not_read_clipped_gradients(mode: Any) -> None:
    flags = CopusConfig(copus=True, copus_mode=mode)
    check_run(flags, config(""))
    with pytest.raises(UsageError, match=r"--copus .*--clip-group-size .*drop") as error:
        check_run(flags, config(CLIP))
    assert names_a_way_on(str(error.value))
