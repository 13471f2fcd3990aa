"""What parts of an implementation cost: norms, attention, logits, gradients, links, groups."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

import numpy as np
import pytest

from copus_ext.cost_model.cluster_spec import ClusterSpec, of_gpu, preset
from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.gpus import GPUS, gpu_named, kind_of
from copus_ext.cost_model.kernels import collective_s, node_bytes_per_s
from copus_ext.cost_model.megatron_flags import spec_of_flags
from copus_ext.cost_model.memory import (
    buffer_bytes,
    head_bytes,
    layer_activation_bytes,
    layer_bytes,
    memory,
    process_bytes,
)
from copus_ext.cost_model.model_spec import ATTENTION, ModelSpec, llama_ffn
from copus_ext.cost_model.models import PRESETS
from copus_ext.cost_model.rows import RECOMPUTE_FULL, ConfigBatch
from copus_ext.cost_model.spec_file import SpecError
from copus_ext.cost_model.step import step_time
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.run_flags import notes_on
from copus_ext.planner.space import points_of, to_config_batch
from megatron.trainer.config.layout import Layout

MODEL = PRESETS["llama-13b"]
CONSTANTS = preset("a100-80g:8").load_constants()


def rows_of(
    cluster: str = "a100-80g:16",
    tp: int = 4,
    pp: int = 2,
    micro: int = 2,
    *,
    sequence_parallel: bool = True,
    recompute: Any = "none",
    **model: Any,
) -> ConfigBatch:
    """One configuration of a changed model."""
    what = preset(cluster)
    c = Configuration(
        layout=Layout(tp=tp, pp=pp, dp=what.world_size // (tp * pp)),
        micro_batch_size=micro,
        global_batch_size=64,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
    )
    return to_config_batch(dataclasses.replace(MODEL, **model), what, points_of([c])).full()


def kept(**how: Any) -> float:
    """Bytes that a layer keeps."""
    return float(layer_activation_bytes(rows_of(**how))[0])


N, H, A, S, T = 2 * 2048, 5120, 40, 2048, 4
SCORES = N * A * S / T


@pytest.mark.parametrize("parallel", [True, False])
def test_norms_in_torch_keep_16_bytes_more_of_the_stream(parallel: bool) -> None:
    more = kept(norm="torch", sequence_parallel=parallel) - kept(sequence_parallel=parallel)
    assert more == 16 * N * H / (T if parallel else 1)
    assert kept(norm="fused") == kept()
    plain = kept(implementation="local"), kept(implementation="local", norm="torch")
    assert plain[0] == plain[1] > kept(implementation="local", norm="fused")
    slow, fast = (step_time(rows_of(norm=n), CONSTANTS).step_s[0] for n in ("torch", "fused"))
    assert 1.02 < slow / fast < 1.2


@pytest.mark.parametrize(("dropout", "half", "in_fp32"), [(False, 2, 6), (True, 5, 7)])
def test_scores_keep_what_their_softmax_does(dropout: bool, half: int, in_fp32: int) -> None:
    """Megatron's fused softmax saves its half output. Torch's in fp32 saves its fp32 output, and
    the product the half one; with dropout a mask and its output instead of the latter."""
    flash, unfused, torch = (
        kept(dropout=dropout, **ATTENTION[kind]) for kind in ("flash", "unfused", "torch")
    )
    heads = 4 * N * A / T
    assert unfused - (flash - heads) == pytest.approx(half * SCORES)
    assert torch - (flash - heads) == pytest.approx(in_fp32 * SCORES)
    # Nothing is copied that is fp32 anyway.
    wide: Any = {"precision": "fp32", "dropout": dropout}
    assert kept(**wide, **ATTENTION["torch"]) == kept(**wide, **ATTENTION["unfused"])


def test_attention_works_on_copies_of_its_scores() -> None:
    """Also in a layer that is recomputed: there what it keeps comes back."""
    flash, unfused, torch = (
        rows_of(recompute="full", **ATTENTION[kind]) for kind in ("flash", "unfused", "torch")
    )
    work = [float(buffer_bytes(rows)[0]) for rows in (flash, unfused, torch)]
    assert work[1] - work[0] == 4 * SCORES and work[2] - work[0] == 8 * SCORES
    back = [float(layer_bytes(rows)[1][0]) for rows in (flash, unfused, torch)]
    heads = 4 * N * A / T
    assert np.diff(back) == pytest.approx([2 * SCORES - heads, 4 * SCORES])
    assert all(rows.recompute[0] == RECOMPUTE_FULL for rows in (flash, unfused, torch))
    seconds = [step_time(rows, CONSTANTS).step_s[0] for rows in (flash, unfused, torch)]
    assert seconds[0] < seconds[1] < seconds[2]


def test_the_fused_softmax_has_a_longest_sample() -> None:
    for tokens, same in ((4096, False), (8192, True)):
        long = {"seq_length": tokens, "micro": 1}
        unfused, torch = (kept(**long, **ATTENTION[kind]) for kind in ("unfused", "torch"))
        assert (unfused == torch) is same, tokens


def test_logits_may_be_whole_and_wide() -> None:
    """Of the last stage: without the final norm, columns times bytes."""

    def logits(**how: Any) -> float:
        return float(head_bytes(rows_of(**how))[0]) - 4 * 2 * N * H / T

    assert logits() == pytest.approx(6 * N * 32000 / T)
    assert logits(logits_bytes=14) == pytest.approx(14 * N * 32000 / T)
    assert logits(logits_sharded=False) == pytest.approx(6 * N * 32000)
    assert logits(implementation="legacy") == pytest.approx(14 * N * 32000)
    assert logits(implementation="legacy", logits_sharded=True, logits_bytes=6) == logits()


def test_legacy_stands_for_its_parts() -> None:
    one = {"norm": "torch", "logits_sharded": False, "logits_bytes": 14}
    legacy, parts = rows_of(implementation="legacy"), rows_of(**one)
    assert memory(legacy).peak_bytes[0] == memory(parts).peak_bytes[0]
    assert legacy.scatters_messages[0] and not parts.scatters_messages[0]
    spec = dataclasses.replace(MODEL, **one, softmax_in_fp32=True, fused_attention=False)
    assert ModelSpec.from_json(spec.to_json()) == spec
    assert not {*MODEL.to_json()} & {*one, "softmax_in_fp32", "implementation_given"}
    with pytest.raises(SpecError, match="norm 'layer' is none of fused, torch"):
        dataclasses.replace(MODEL, norm="layer")
    with pytest.raises(SpecError, match="drop one of both"):
        dataclasses.replace(MODEL, softmax_in_fp32=True)


def test_half_gradients_are_copied_where_nothing_else_is_kept() -> None:
    """One micro-batch of short samples needs less than the copies of 26 GB of gradients."""
    short = {"tp": 1, "pp": 1, "micro": 1, "seq_length": 128, "cluster": "h200-141g:1"}
    alone = {**short, "gradient_bytes": 2}
    found = memory(rows_of(**alone))
    held = MODEL.num_parameters
    moving = float(found.moving_bytes[0])
    extra = float(found.stages["optimizer"][0, 0]) - 12 * held
    assert extra == pytest.approx(4 * held - moving) and extra > 40e9
    # With four bytes, with the precision-aware optimizer, and over enough replicas there are none.
    for other in ({**short}, {**alone, "optimizer_bytes": 8}):
        stages = memory(rows_of(**other)).stages
        assert stages["optimizer"][0, 0] == other.get("optimizer_bytes", 12) * held
    many = {**alone, "cluster": "h200-141g:64", "seq_length": 2048, "micro": 2}
    assert memory(rows_of(**many)).stages["optimizer"][0, 0] == 12 * held / 64


def test_a_process_has_buffers_for_each_kind_of_group() -> None:
    alone = process_bytes(rows_of("a100-80g:1", 1, 1))[0]
    for tp, pp, kinds in ((8, 1, 1), (1, 8, 1), (1, 1, 1), (2, 1, 2), (2, 2, 3)):
        rows = rows_of("a100-80g:8", tp, pp, sequence_parallel=False)
        assert process_bytes(rows)[0] - alone == pytest.approx(0.3e9 * kinds), (tp, pp)
    assert process_bytes(rows_of("cpu:8", 2, 2))[0] < alone


@pytest.mark.parametrize(
    ("text", "name", "gpus"),
    [
        ("a800-80g:64", "A800-80GB", 64),
        ("A800-80GB:64", "A800-80GB", 64),
        ("NVIDIA A800-SXM4-80GB:64", "A800-80GB", 64),
        ("A100-SXM4-40GB:16", "A100-40GB", 16),
        ("NVIDIA-A800:8", "A800-80GB", 8),
        ("H800:8", "H800-80GB", 8),
        ("GH200-96GB:4", "GH200-96GB", 4),
        ("Tesla V100-SXM2-32GB:8", "V100-32GB", 8),
        ("H100 80GB HBM3:8", "H100-80GB", 8),
        ("CPU-rank:2", "CPU-rank", 2),
    ],
)
def test_a_machine_is_known_by_any_of_its_names(text: str, name: str, gpus: int) -> None:
    cluster = preset(text)
    assert (cluster.gpu.name, cluster.world_size) == (name, gpus)
    kind = text.rpartition(":")[0]
    assert gpu_named(kind) is GPUS[name]
    assert of_gpu(kind, nodes=2, gpus_per_node=4).gpu.name == name
    for wrong in ("a100-33g:8", "a100 or so:8", "a100-:8", ":8", "rtx:8"):
        with pytest.raises(SpecError, match="unknown"):
            preset(wrong)
    assert kind_of("NVIDIA A800-SXM4-80GB", 81920) == "a800-80g"


def test_a_name_of_two_machines_is_refused() -> None:
    """An A100 of 40 GB and one of 80 GB have other plans."""
    with pytest.raises(SpecError, match="--cluster A100:8: write a100-40g:8 or a100-80g:8"):
        preset("A100:8")
    for name in ("A100", "NVIDIA A100-SXM4"):
        with pytest.raises(SpecError, match=f"--gpu {name}: write A100-40GB or A100-80GB"):
            gpu_named(name)
    cluster = {**preset("a100-80g:8").to_json(), "nodes": [{"gpu": "A100"}]}
    for field, data in (("nodes.gpu", cluster), ("gpu", {**cluster, "gpu": "A100"})):
        with pytest.raises(SpecError, match=f"^{field} A100: write A100-40GB or A100-80GB"):
            ClusterSpec.from_json(data)


def test_collectives_reach_a_share_of_the_link() -> None:
    """An A800 has two thirds of the link of an A100; what was fitted there is a share of it."""
    a100, a800 = (rows_of(f"{kind}-80g:8", 8, 1) for kind in ("a100", "a800"))
    large = 1e9
    seconds = [collective_s(rows, CONSTANTS, large, 8)[0] for rows in (a100, a800)]
    assert seconds[1] / seconds[0] == pytest.approx(1.5, rel=0.01)
    assert node_bytes_per_s(a100, CONSTANTS)[0] == CONSTANTS.dp_bytes_per_s
    assert node_bytes_per_s(a800, CONSTANTS)[0] == pytest.approx(CONSTANTS.dp_bytes_per_s / 1.5)
    h800 = preset("h800-80g:8")
    assert h800.intra_share == pytest.approx(200 / 450) and preset("h100:8").intra_share == 1.0
    # CPU ranks have no data sheet, and constants that nobody fitted belong to no machine.
    for kind in ("cpu:4", "mi210-64g:8"):
        assert dataclasses.replace(preset(kind), intra_bytes_per_s=1e9).intra_share == 1.0
    slow, fast = (step_time(rows, Constants()).step_s[0] for rows in (a800, a100))
    assert slow > fast


def test_the_first_llamas_have_their_known_size() -> None:
    known = {"llama-7b": 6.74, "llama-13b": 13.02, "llama-30b": 32.53, "llama-65b": 65.29}
    for name, billions in known.items():
        assert PRESETS[name].num_parameters / 1e9 == pytest.approx(billions, rel=0.001)
    assert [PRESETS[f"llama-{n}b"].ffn for n in (7, 13, 30, 65)] == [11008, 13824, 17920, 22016]
    gated = ModelSpec(
        num_layers=4, hidden_size=6656, num_attention_heads=52, seq_length=2048, gated=True
    )
    assert gated.ffn == llama_ffn(6656) == 17920
    text = """--num-layers 4 --hidden-size 6656 --num-attention-heads 52 --seq-length 2048
    --max-position-embeddings 2048 --vocab-size 1000 --swiglu"""
    assert spec_of_flags(shlex.split(text)).ffn == 17728, "as the trainer makes it"


IN_FP32 = "--attention-softmax-in-fp32"
IN_TORCH = "--attention-backend unfused --no-masked-softmax-fusion"


@pytest.mark.parametrize(
    ("flags", "kind", "named"),
    [
        ("--attention-backend unfused", "unfused", ""),
        (f"{IN_FP32} {IN_TORCH}", "torch", ""),
        (IN_TORCH, "unfused", "--no-masked-softmax-fusion"),
        (IN_FP32, "flash", ""),
    ],
)
def test_attention_is_read_and_what_does_not_count_is_named(
    flags: str, kind: str, named: str
) -> None:
    shape = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --bf16"
    text = f"{shape} --max-position-embeddings 64 --vocab-size 100 {flags}"
    spec = spec_of_flags(text.split())
    assert {name: getattr(spec, name) for name in ATTENTION[kind]} == ATTENTION[kind]
    assert spec.implementation_given
    told = " ".join(notes_on(text, no_overlap=True))
    assert named in told and ("softmax" in told) is bool(named)
