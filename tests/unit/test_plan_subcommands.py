"""What a plan says of how a model is implemented."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.models import PRESETS
from copus_ext.planner.plan import Ranked
from copus_ext.planner.profile import ProfileStore, Timing
from copus_ext.planner.search import Planner
from copus_ext.planner.space import Limits
from tests.unit.test_plan_command import json_of, run


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
