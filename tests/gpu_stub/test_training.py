"""`pretrain_gpt.py` on CUDA and NCCL of the stub does what it does on CPU ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_stub.launch import train_on_stub
from tests.helpers.jobs import MOE, TINY, losses_of, steps_of, train

STEPS, SAVED = 6, 4
SHARDED = f"--train-iters {STEPS} --use-distributed-optimizer"
OVERLAP = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
BALANCED = "--moe-balance lagged --moe-aux-loss-coeff 1e-2"
OBSERVE = "--copus --copus-mode observe"
CASES = {
    "one rank": (1, TINY, SHARDED),
    "kfac": (2, TINY, f"{SHARDED} --kfac --kfac-interval 2"),
    "clipped groups": (2, TINY, f"{SHARDED} --clip-group-size 4 --clip-group-norm 1.5"),
    "dp2 with overlap": (2, TINY, OVERLAP),
    "cp2": (2, TINY, f"{SHARDED} --context-parallel-size 2"),
    "tp2.pp2 with sequence parallelism": (4, TINY, f"{SHARDED} {TP2} {PP2} --sequence-parallel"),
    "pp2.vpp2.dp2": (4, TINY, f"{OVERLAP} {PP2} --num-virtual-stages-per-pipeline-rank 2"),
    "experts, tp2.ep4": (
        4,
        MOE,
        f"{OVERLAP} {BALANCED} {TP2} --expert-model-parallel-size 4 "
        "--expert-tensor-parallel-size 1",
    ),
}
"""Name -> ranks, base flags, flags."""


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_cpu_ranks(name: str, tmp_path: Path) -> None:
    ranks, base, flags = CASES[name]
    train_on_stub(flags.split(), ranks, tmp_path / "stub", base=base).check()
    train(flags.split(), ranks, tmp_path / "cpu", base=base).check()
    found, wanted = losses_of(tmp_path / "stub"), losses_of(tmp_path / "cpu")
    assert len(found) == STEPS and wanted[-1] < wanted[0]
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one rank in bf16: `plain`; `observe`, whose noise is measured."""
    folder = tmp_path_factory.mktemp("one-rank")
    plain = [*SHARDED.split(), "--bf16", "--micro-batch-size", "2"]
    train_on_stub(plain, 1, folder / "plain").check()
    train_on_stub([*plain, *OBSERVE.split()], 1, folder / "observe").check()
    return folder


def test_half_precision_comes_near_to_a_cpu(folder: Path, tmp_path: Path) -> None:
    flags = [*SHARDED.split(), "--bf16", "--micro-batch-size", "2"]
    train(flags, 1, tmp_path / "cpu").check()
    assert losses_of(folder / "plain") == pytest.approx(losses_of(tmp_path / "cpu"), rel=1e-4)


def test_a_controller_that_observes_changes_no_bit(folder: Path) -> None:
    assert losses_of(folder / "observe") == losses_of(folder / "plain")
    assert all(step["noise"]["measured"] for step in steps_of(folder / "observe"))


def test_noise_is_that_of_cpu_ranks(tmp_path: Path) -> None:
    flags = [*OVERLAP.split(), *OBSERVE.split()]
    train_on_stub(flags, 2, tmp_path / "stub").check()
    train(flags, 2, tmp_path / "cpu").check()
    found, wanted = (
        [step["noise"]["step"]["all"] for step in steps_of(tmp_path / name)]
        for name in ("stub", "cpu")
    )
    assert len(found) == STEPS
    for own, other in zip(found, wanted):
        assert own == pytest.approx(other, rel=1e-3)


def test_a_resumed_run_is_that_of_one_launch(folder: Path, tmp_path: Path) -> None:
    flags = [*SHARDED.split(), "--bf16", "--micro-batch-size", "2"]
    flags += ["--save", str(tmp_path / "save"), "--load", str(tmp_path / "save")]
    run = tmp_path / "run"
    train_on_stub([*flags, "--exit-interval", str(SAVED)], 1, run).check()
    resumed = train_on_stub(flags, 1, run).check()
    assert f"(iteration {SAVED})" in resumed.stdout
    assert losses_of(run) == losses_of(folder / "plain")
