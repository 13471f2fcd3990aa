"""Noise that is measured in Megatron-LM's own program is that of single samples, and our trainer
goes on from its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.trainer.logging.metrics import read_metrics
from tests.guest.program import HAS_PROGRAM, MODEL, evaluations, start_from, steps, train
from tests.helpers.launch import ROOT, run_ranks
from tests.helpers.text import text_prefix

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not HAS_PROGRAM, reason="PYTHONPATH lacks Megatron-LM's own program"),
]
STEPS, START = 8, 4
LAYOUTS = {
    "dp2": "--use-distributed-optimizer --overlap-grad-reduce",
    # The vocabulary is padded to a multiple of 128 as without tensor parallelism.
    "tp2": "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64",
    "pp2": "--pipeline-model-parallel-size 2",
    "vpp2": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
}
OPTIMIZERS = {
    "plain": "",
    "sharded": "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable",
}
# Ours, with the optimizer of each of these.
OWN = {
    "plain": LAYOUTS["tp2"],
    "sharded": f"{LAYOUTS['pp2']} --use-distributed-optimizer",
}
WATCHED = "--copus --copus-mode observe --log-interval 1"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Folders, with the output of all but the first kind of runs: they start at the same step."""
    folder = tmp_path_factory.mktemp("noise")
    found: dict[str, Any] = {"folder": folder}
    for name, flags in OPTIMIZERS.items():
        flags = f"--save-interval {START} --train-iters {STEPS} {flags}"
        found[name] = train(folder, name, "plain", flags, ranks=2).stdout
        start_from(folder, name, START)
    weights = f"--load {folder / 'plain_start'} --no-load-optim --no-load-rng"
    weights = f"{weights} --train-iters {START + 2}"
    train(folder, "samples", f"per_sample={folder / 'samples.json'}", weights, ranks=1)
    for name, flags in LAYOUTS.items():
        train(folder, name, "copus", f"{weights} {flags} {WATCHED}", ranks=2)
    for name, flags in OWN.items():
        places = f"--data-path {text_prefix()} --save {folder / f'own_{name}'}"
        load = f"--load {folder / f'{name}_start'} --train-iters {STEPS}"
        words = f"{MODEL} {places} {load} {flags} {WATCHED}".split()
        done = run_ranks([ROOT / "pretrain_gpt.py", *words], 2, timeout_s=240).check()
        found[f"own_{name}"] = done.stdout
    return found


def squares(run: Path) -> dict[str, dict[str, float]]:
    """What was measured in the first step behind the start."""
    row = next(r for r in read_metrics(run) if r["kind"] == "step" and r["iteration"] == START + 1)
    assert row["consumed_samples"] == 8 * (START + 1)
    return row["noise"]["squares"]


@pytest.mark.parametrize("name", [*LAYOUTS, "own_plain", "own_sharded"])
def test_squares_are_those_of_single_samples(runs: dict[str, Any], name: str) -> None:
    expected = json.loads((runs["folder"] / "samples.json").read_text())
    own = squares(runs["folder"] / name)
    assert {"attention", "mlp", "head"} <= own["small"].keys() == own["big"].keys()
    for kind in ("small", "big"):
        for group, value in own[kind].items():
            assert value == pytest.approx(expected[kind][group], rel=1e-5), (kind, group)


@pytest.mark.parametrize("name", LAYOUTS)
def test_both_trainers_measure_the_same(runs: dict[str, Any], name: str) -> None:
    own, guest = (squares(runs["folder"] / run) for run in ("own_plain", name))
    for kind in ("small", "big"):
        shared = guest[kind].keys() & own[kind].keys()
        assert len(shared) >= 3
        for group in shared:
            assert guest[kind][group] == pytest.approx(own[kind][group], rel=1e-6), (kind, group)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_our_trainer_goes_on_from_its_checkpoint(runs: dict[str, Any], name: str) -> None:
    own, theirs = steps(runs[f"own_{name}"]), steps(runs[name])[START:]
    assert [row[:4] for row in own] == [row[:4] for row in theirs] and len(own) == STEPS - START
    for a, b in zip(own, theirs, strict=True):
        assert a[4:] == pytest.approx(b[4:], rel=1e-6)
    ends = zip(evaluations(runs[f"own_{name}"]), evaluations(runs[name]), strict=True)
    for (_, a), (_, b) in ends:
        assert a == pytest.approx(b, rel=1e-6)
