"""Noise that is measured in Megatron-LM's own program is that of single samples, and our trainer
goes on from its checkpoints."""

from __future__ import annotations

import json

import pytest

from megatron.trainer.logging.metrics import read_metrics
from tests.guest.program import HAS_PROGRAM, MODEL, Runs, evaluations, start_from, steps, train
from tests.helpers.launch import ROOT, run_ranks
from tests.helpers.nightly import case
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
DAILY = ("dp2", "vpp2", "plain", "own_plain")
WATCHED = "--copus --copus-mode observe --log-interval 1"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Output of runs; all but those of `OPTIMIZERS` start at the same step."""
    return Runs(tmp_path_factory.mktemp("noise"), _output)


def _output(runs: Runs, name: str) -> str:
    folder = runs.folder
    if name in OPTIMIZERS:
        flags = f"--save-interval {START} --train-iters {STEPS} {OPTIMIZERS[name]}"
        output = train(folder, name, "plain", flags, ranks=2).stdout
        start_from(folder, name, START)
        return output
    kind = name.removeprefix("own_")
    assert runs[kind if name.startswith("own_") else "plain"]
    if name.startswith("own_"):
        places = f"--data-path {text_prefix()} --save {folder / name}"
        load = f"--load {folder / f'{kind}_start'} --train-iters {STEPS}"
        words = f"{MODEL} {places} {load} {OWN[kind]} {WATCHED}".split()
        return run_ranks([ROOT / "pretrain_gpt.py", *words], 2, timeout_s=240).check().stdout
    weights = f"--load {folder / 'plain_start'} --no-load-optim --no-load-rng"
    weights = f"{weights} --train-iters {START + 2}"
    if name == "samples":
        file = folder / "samples.json"
        train(folder, name, f"per_sample={file}", weights, ranks=1)
        return file.read_text()
    return train(folder, name, "copus", f"{weights} {LAYOUTS[name]} {WATCHED}", ranks=2).stdout


def squares(runs: Runs, name: str) -> dict[str, dict[str, float]]:
    """What a run measured in the first step behind the start."""
    assert runs[name]
    rows = read_metrics(runs.folder / name)
    row = next(r for r in rows if r["kind"] == "step" and r["iteration"] == START + 1)
    assert row["consumed_samples"] == 8 * (START + 1)
    return row["noise"]["squares"]


@pytest.mark.parametrize(
    "name",
    [case(name, daily=name in DAILY) for name in (*LAYOUTS, "own_plain", "own_sharded")],
)
def test_squares_are_those_of_single_samples(runs: Runs, name: str) -> None:
    own = squares(runs, name)
    expected = json.loads(runs["samples"])
    assert {"attention", "mlp", "head"} <= own["small"].keys() == own["big"].keys()
    for kind in ("small", "big"):
        for group, value in own[kind].items():
            assert value == pytest.approx(expected[kind][group], rel=1e-5), (kind, group)


@pytest.mark.parametrize("name", [case(name, daily=name in DAILY) for name in LAYOUTS])
def test_both_trainers_measure_the_same(runs: Runs, name: str) -> None:
    own, guest = (squares(runs, run) for run in ("own_plain", name))
    for kind in ("small", "big"):
        shared = guest[kind].keys() & own[kind].keys()
        assert len(shared) >= 3
        for group in shared:
            assert guest[kind][group] == pytest.approx(own[kind][group], rel=1e-6), (kind, group)


@pytest.mark.parametrize("name", [case(name, daily=name in DAILY) for name in OPTIMIZERS])
def test_our_trainer_goes_on_from_its_checkpoint(runs: Runs, name: str) -> None:
    own, theirs = steps(runs[f"own_{name}"]), steps(runs[name])[START:]
    assert [row[:4] for row in own] == [row[:4] for row in theirs] and len(own) == STEPS - START
    for a, b in zip(own, theirs, strict=True):
        assert a[4:] == pytest.approx(b[4:], rel=1e-6)
    ends = zip(evaluations(runs[f"own_{name}"]), evaluations(runs[name]), strict=True)
    for (_, a), (_, b) in ends:
        assert a == pytest.approx(b, rel=1e-6)
