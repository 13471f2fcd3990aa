"""A model that two ranks trained on this project's own pages is planned and written with few bits,
and its measured loss stays within the limit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers.jobs import evaluations_of, train
from tests.helpers.launch import ROOT, run_ranks

MODEL = """--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
--seq-length 64 --max-position-embeddings 64 --micro-batch-size 4 --global-batch-size 16
--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
--tokenizer-type ByteLevelTokenizer --lr 5e-3 --lr-warmup-iters 5 --train-iters 60
--eval-interval 60 --eval-iters 2 --log-interval 1000 --tensor-model-parallel-size 2
--save-interval 60"""
CLUSTER = {
    "gpu": {
        "name": "board",
        "memory_bytes": "2GiB",
        "peak_flops": 2e12,
        "hbm_bytes_per_s": 5e7,
        "num_sms": 8,
    },
    "num_nodes": 2,
    "gpus_per_node": 1,
    "intra_bytes_per_s": "1GB/s",
    "nic_bytes_per_s": "1GB/s",
    "nodes": [{}, {"speed": 0.5}],
}
"""Two unlike boards that take long to read a weight, so that bits matter for a small model."""
LIMIT = 0.01


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a checkpoint of two tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("serving")
    tool = [ROOT / "tools/preprocess_data.py", "--input", ROOT / "docs/decisions", "--append-eod"]
    run_ranks([*tool, "--output-prefix", folder / "pages"], 1, timeout_s=120).check()
    data = ["--data-path", str(folder / "pages_text_document"), "--split", "90,10,0"]
    train([*data, "--save", str(folder / "save")], 2, folder / "run", base=MODEL).check()
    return folder


def plan(trained: Path, *words: str | Path) -> dict:
    cluster = trained / "cluster.json"
    cluster.write_text(json.dumps(CLUSTER))
    flags = ["--cluster", cluster, "--prompts", "4", "--prompt", "32", "--generate", "16"]
    flags += ["--group-size", "32", "--max-loss-increase", str(LIMIT), "--json", *words]
    tool = [ROOT / "copus_ext/commands/main.py", "plan-serving", trained / "save", *flags]
    return json.loads(run_ranks(tool, 1, timeout_s=400).check().stdout.splitlines()[-1])


def test_the_written_model_loses_no_more_than_asked_for(trained: Path) -> None:
    out = trained / "served"
    record = plan(trained, "--eval-samples", "32", "--apply", out)
    bits = [b for stage in record["stages"] for b in stage["bits"]]
    assert len(bits) == 4 and min(bits) < 16
    assert record["loss_increase"] <= LIMIT
    applied = record["applied"]
    assert applied["loss_increase"] <= LIMIT
    assert applied["loss_after"] - applied["loss_before"] == pytest.approx(
        applied["loss_increase"], abs=1e-9
    )
    # The same samples as those of the run's own evaluation, where there are as many.
    assert applied["loss_before"] == pytest.approx(evaluations_of(trained / "run")[0], abs=1e-4)
    stored = load_file(out / "model.safetensors")
    packed = {key.split(".")[2] for key in stored if key.endswith("weight_packed")}
    assert packed == {str(i) for i, b in enumerate(bits) if b < 16}
    again = plan(trained, "--eval-samples", "32", "--bits", "4,8,16")
    assert again["stages"] == record["stages"]
