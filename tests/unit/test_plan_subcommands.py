"""The planner's sub-commands for splits of layers and micro-batches."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.model_spec import PRESETS
from copus_ext.planner.plan import Ranked
from copus_ext.planner.profile import ProfileStore, Timing
from copus_ext.planner.search import Planner
from copus_ext.planner.space import Limits
from tests.unit.test_plan_command import SEVEN, json_of, run


def test_partition_tells_the_fastest_split_of_the_layers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "--model llama-3-70b --cluster a100-80g:64 --global-batch-size 64 --top 3"
    cuts = json_of(capsys, f"partition {text}")["cuts"]
    assert cuts and all(sum(x["cut"]["layers"]) == 80 for x in cuts)
    assert "cuts" not in json_of(capsys, text)
    _, table, _ = run(capsys, f"partition {text}")
    assert "--pipeline-model-parallel-layout" in table and "with even stages" in table
    lines = [x for x in table.splitlines() if " partition " not in x and "even stages" not in x]
    assert run(capsys, text)[1].splitlines() == lines


def test_micro_batches_tells_the_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    command = f"micro-batches {SEVEN} --fix cp=1,pp=1,tp=4 --top 3"
    code, text, _ = run(capsys, f"{command} --global-batch-size 74")
    assert code == 0 and "rank 1 micro-batches 19+18: " in text and "--micro-batch-size 19" in text
    code, text, _ = run(capsys, f"{command} --global-batch-size 26")
    assert code == 0 and "unequal micro-batches make nothing" in text
    splits = json_of(capsys, f"{command} --global-batch-size 74")["micro_splits"]
    assert splits[0]["sizes"] == [19, 18]


def profile_of(path: Path, planner: Planner, found: Ranked, factor: float) -> Path:
    """A profile in which one configuration takes so many times what is predicted."""
    cluster = planner.cluster
    machine = {"model": planner.model.to_json(), "world_size": cluster.world_size}
    store = ProfileStore(path, {**machine, "gpu": cluster.gpu.name})
    measured = factor * found.prediction.step_s
    store.add(Timing(configuration=found.configuration, step_s=measured))
    return path


def test_a_profile_holds_for_partitions_as_for_the_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    planner = Planner(PRESETS["llama-3-70b"], preset("a100-80g:64"))
    first = next(r for r in planner.rank([64], top=9)[0].ranked if r.configuration.layout.pp > 1)
    path = profile_of(tmp_path / "profile.jsonl", planner, first, 1.5)
    text = "partition --model llama-3-70b --cluster a100-80g:64 --global-batch-size 64 --top 9"
    found = json_of(capsys, f"{text} --profile {path}")
    assert found["cuts"]
    for cut in found["cuts"]:
        ranked = found["ranked"][cut["rank"] - 1]["prediction"]
        assert cut["even_step_s"] == pytest.approx(ranked["step_s"], rel=1e-6)
        assert cut["cut"]["step_s"] <= cut["even_step_s"] and cut["gain"] < 0.5


def test_flags_say_how_a_named_model_is_implemented(capsys: pytest.CaptureFixture[str]) -> None:
    text = "explain tp=2,pp=1 --model llama-7b --cluster A800:8 --global-batch-size 8 --json"
    flags = ["", "--implementation te", "--implementation legacy", "--implementation local"]
    flags += ["--attention unfused", "--attention torch", "--gradient-bytes 2"]
    flags += ["--optimizer-bytes 6", "--no-sequence-parallel"]
    found = [
        json.loads(run(capsys, f"{text} {more}")[1])["explained"][0]["prediction"]["memory"]
        for more in flags
    ]
    peaks = [x["peak_bytes"] for x in found]
    assert peaks[0] == peaks[1] and len(set(peaks)) == len(flags) - 1
    stages = [x["stages"][0] for x in found]
    assert stages[6]["grads"] == stages[0]["grads"] / 2
    assert stages[7]["optimizer"] == stages[0]["optimizer"] / 2
    assert stages[8]["activations"] > stages[0]["activations"]
    shape = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
    megatron = f"--megatron-args '{shape} --max-position-embeddings 64' --cluster cpu:2"
    code, _, err = run(capsys, f"{megatron} --global-batch-size 8 --gradient-bytes 2")
    assert code == 2 and "--gradient-bytes: --megatron-args says it" in err


def test_plans_without_sequence_parallelism(capsys: pytest.CaptureFixture[str]) -> None:
    text = "--model llama-7b --cluster a100-80g:8 --global-batch-size 8 --fix tp=8 --top 3"
    ranked = json_of(capsys, f"{text} --no-sequence-parallel")["ranked"]
    assert ranked and not any(x["configuration"]["sequence_parallel"] for x in ranked)
    assert not any("--sequence-parallel" in x["flags"] for x in ranked)
    # What every rank has whole needs no tokens that divide.
    odd = f"{text} --seq-length 2047"
    assert run(capsys, odd)[0] == 3 and run(capsys, f"{odd} --no-sequence-parallel")[0] == 0
    assert "--no-sequence-parallel" in run(capsys, f"{text} --no-sequence-parallel")[1]
    moe = (
        "--model mixtral-8x7b --seq-length 4096 "
        "--cluster a100-80g:8 --global-batch-size 8 --no-sequence-parallel"
    )
    code, _, err = run(capsys, moe)
    assert code == 2 and "--no-sequence-parallel" in err
    shape = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
    megatron = f"--megatron-args '{shape} --max-position-embeddings 64 --sequence-parallel'"
    both = f"{megatron} --cluster cpu:2 --global-batch-size 8 --no-sequence-parallel"
    code, _, err = run(capsys, both)
    assert code == 2 and "has --sequence-parallel; drop it" in err


def test_a_time_without_sequence_parallelism_is_of_its_own(tmp_path: Path) -> None:
    planner = Planner(PRESETS["llama-7b"], preset("a100-80g:8"), limits=Limits(fixed={"tp": 8}))
    c = planner.rank([8], top=1)[0].ranked[0].configuration
    assert c.sequence_parallel
    off = dataclasses.replace(c, sequence_parallel=False)
    store = ProfileStore(tmp_path / "profile.jsonl", {"gpu": "x"})
    for one in (c, off):
        store.add(Timing(configuration=one, step_s=9.0 if one is c else 3.0))
    assert [x.configuration for x in store.read()] == [c, off]
    assert [x.step_s for x in store.read()] == [9.0, 3.0]
    planner.retime(store.read()[1:])
    found, other = planner.explain(off), planner.explain(c)
    assert isinstance(found, Ranked) and found.prediction.source == "profiled"
    assert isinstance(other, Ranked) and other.prediction.source == "corrected"
