"""COPUS in Megatron-LM's own program, unmodified: that of the newest megatron-core's wheel."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from copus_ext.commands import replay
from megatron.trainer.common.core_version import since
from tests.helpers.launch import ROOT, run_ranks
from tests.helpers.text import text_prefix

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not since("0.19"), reason="PYTHONPATH lacks the newest megatron-core"),
]
RANK = ROOT / "tests" / "guest" / "rank.py"
MODEL = """--num-layers 4 --hidden-size 32 --ffn-hidden-size 128 --num-attention-heads 4
--seq-length 32 --max-position-embeddings 32 --swiglu --normalization RMSNorm
--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 8 --lr 2e-3
--min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 --tokenizer-type NullTokenizer
--vocab-size 127 --split 95,4,1 --eval-iters 1 --eval-interval 20 --log-interval 1
--save-interval 1000 --train-iters 64"""
ON_CPU = """--transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion
--no-persist-layer-norm --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
--no-bias-dropout-fusion --no-rope-fusion"""
SPLIT = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
TP2 = "--tensor-model-parallel-size 2"
# Grows at 128 samples and at 256, and a batch of the flags that is too large shrinks.
GROWS = "--copus-policy doubling --copus-max-global-batch-size 32"
SETTINGS = "doubling_first_tokens: 4096\ndoubling_ratio: 2\n"
LINE = re.compile(
    r"iteration +(\d+)/ *\d+ \| consumed samples: +(\d+) \|.*learning rate: (\S+) \| "
    r"global batch size: +(\d+) \| lm loss: (\S+) \|.*grad norm: (\S+) \|"
)
RUNS = {
    "plain": ("plain", SPLIT),
    "observed": ("copus", f"{SPLIT} --copus --copus-mode observe"),
    "off": ("copus", SPLIT),
    "grown": ("copus", f"{SPLIT} --copus {GROWS}"),
    "adaptive": ("copus", f"{TP2} --global-batch-size 32 --train-iters 12 --copus"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("guest")
    settings = folder / "settings.yaml"
    settings.write_text(SETTINGS)
    found: dict[str, Any] = {"folder": folder}
    for name, (kind, flags) in RUNS.items():
        places = f"--data-path {text_prefix()} --data-cache-path {folder / 'cache'}"
        words = f"{MODEL} {ON_CPU} {places} --save {folder / name} {flags}".split()
        if GROWS in flags:
            words += ["--copus-config", str(settings)]
        done = run_ranks([RANK, kind, *words], 2, timeout_s=300).check()
        found[name] = [tuple(map(float, row)) for row in LINE.findall(done.stdout)]
    return found


def test_observing_changes_no_digit(runs: dict[str, Any]) -> None:
    assert len(runs["plain"]) == 64
    assert runs["observed"] == runs["off"] == runs["plain"]


def test_the_batch_grows_at_its_samples_and_every_sample_counts(runs: dict[str, Any]) -> None:
    rows = runs["grown"]
    # That loop prints the rate of the step to come, which is the first of the new batch.
    assert rows[:15] == runs["plain"][:15] and rows[15][3:] == runs["plain"][15][3:]
    assert [row[3] for row in rows] == [8] * 16 + [16] * 8 + [32] * 8
    assert rows[-1][1] == 512


def test_the_default_policy_shrinks_a_batch_that_is_too_large(runs: dict[str, Any]) -> None:
    sizes = [row[3] for row in runs["adaptive"]]
    assert sizes[0] == 32 and min(sizes) < 32
    rows = runs["adaptive"]
    assert rows[-1][1] == sum(sizes)


def test_the_journal_can_be_decided_again(
    runs: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run: Path = runs["folder"] / "grown"
    assert replay.main([str(run)]) == 0
    assert "0 different" in capsys.readouterr().out
    lines = map(json.loads, (run / "journal.jsonl").read_text().splitlines())
    measured = [r for r in lines if r["kind"] == "decision"][-1]["situation"]["noise"]
    assert measured["grad_norm_sq"] is not None


def test_the_program_is_that_of_the_wheel() -> None:
    from importlib.util import find_spec

    spec = find_spec("megatron.training.training")
    assert spec is not None and "megatron-core-" in str(spec.origin)
    assert "guest" in os.environ["PYTHONPATH"]
