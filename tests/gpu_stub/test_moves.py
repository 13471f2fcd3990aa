"""A live job changes its layout on CUDA and NCCL of the stub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from copus_ext.controller.decision_log import NAME, read_journal
from copus_ext.cost_model.cluster_spec import preset
from tests.distributed.worker_controller_layouts import BASE, write_profile
from tests.gpu_stub import worker_moves
from tests.gpu_stub.launch import train_on_stub
from tests.helpers.jobs import MOE, TINY, losses_of, train

STEPS = 6
FLAGS = f"--train-iters {STEPS} --use-distributed-optimizer"
TWO = ["tp2.pp1.dp1", "tp1.pp1.dp2", "tp1.pp2.dp1", "tp1.pp1.dp2"]
"""Goes round, so that every layout is entered again."""
EXPERTS = [
    "tp1.pp1.ep2.dp4",
    "tp2.pp1.ep2.etp1.dp2",
    "tp1.pp1.ep4.dp4",
    "tp1.pp2.ep2.dp2",
    "tp1.pp1.ep2.dp4",
]
BALANCED = "--moe-balance lagged --moe-aux-loss-coeff 1e-2"
FOUR = ["tp2.pp1.dp2", "tp2.pp2.dp1", "tp1.pp1.dp4", "tp1.cp2.pp2.dp1", "tp1.pp1.dp4"]


def walk(
    path: list[str], ranks: int, folder: Path, *, base: str = TINY, more: str = ""
) -> list[list[dict[str, Any]]]:
    """Trains in the first layout, then goes through the others; the rows of every rank."""
    first, *others = path
    tp = first.split(".")[0].removeprefix("tp")
    env = {"STUB_LAYOUTS": ",".join(others), "STUB_ROWS": str(folder)}
    flags = [*FLAGS.split(), "--tensor-model-parallel-size", tp, *more.split()]
    program = Path(worker_moves.__file__)
    train_on_stub(flags, ranks, folder / "run", base=base, env=env, program=program).check()
    files = [folder / worker_moves.FILE.format(rank=rank) for rank in range(ranks)]
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of CPU ranks that stay in one layout."""
    run = tmp_path_factory.mktemp("plain") / "run"
    train(FLAGS.split(), 2, run).check()
    return losses_of(run)


@pytest.fixture(scope="module")
def ten_moves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Folder and rows of twelve moves of two ranks: three times round."""
    folder = tmp_path_factory.mktemp("moves")
    return folder, walk([*TWO, *TWO, *TWO, TWO[0]], 2, folder)


def test_every_move_is_made_and_the_losses_stay(
    ten_moves: tuple[Path, list[Any]], plain: list[float]
) -> None:
    folder, ranks = ten_moves
    for rows in ranks:
        assert [row["kind"] for row in rows] == ["moved"] * 12
        assert rows[0]["to"] == "tp1.pp1.dp2" and rows[-1]["to"] == "tp2.pp1.dp1"
    assert losses_of(folder / "run") == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("what", ["communicators", "threads", "descriptors", "bytes"])
def test_moves_leave_nothing_behind(ten_moves: tuple[Path, list[Any]], what: str) -> None:
    for rows in ten_moves[1]:
        # The first round makes what stays, such as threads of streams.
        second, third = rows[4:8], rows[8:12]
        assert [row["to"] for row in second] == [row["to"] for row in third]
        grown = [b[what] - a[what] for a, b in zip(second, third)]
        if what in ("communicators", "bytes"):
            assert grown == [0] * 4
        else:  # one that ends may end a little later; of each move would be four
            assert max(grown) < 4


def test_four_ranks_move_with_equal_losses(tmp_path: Path, plain: list[float]) -> None:
    for rows in walk(FOUR, 4, tmp_path):
        assert [row["kind"] for row in rows] == ["moved"] * (len(FOUR) - 1)
    assert losses_of(tmp_path / "run") == pytest.approx(plain, rel=1e-5)


def test_a_mixture_moves_with_equal_losses(tmp_path: Path) -> None:
    more = f"{BALANCED} --expert-model-parallel-size 2"
    for rows in walk(EXPERTS, 4, tmp_path, base=MOE, more=more):
        assert [(row["kind"], row["reason"]) for row in rows] == [("moved", "")] * 4
        assert [row["to"] for row in rows] == EXPERTS[1:]
    train([*FLAGS.split(), *BALANCED.split()], 2, tmp_path / "cpu", base=MOE).check()
    found, wanted = losses_of(tmp_path / "run"), losses_of(tmp_path / "cpu")
    assert wanted[-1] < wanted[0]
    assert found == pytest.approx(wanted, rel=1e-5)


def test_the_controller_moves_on_its_own(tmp_path: Path) -> None:
    profile, settings = tmp_path / "profile.jsonl", tmp_path / "copus.yaml"
    write_profile(profile, 2, gpu=preset("h200:1").gpu.name, slower=2)
    settings.write_text("max_micro_batch_size: 1\n")
    flags = [*BASE, "--train-samples", "24000", "--exit-interval", "12"]
    copus = ["--copus", "--copus-layouts", "all", "--copus-policy", "static"]
    copus += ["--copus-config", str(settings), "--copus-profile", str(profile)]
    run = tmp_path / "run"
    train_on_stub([*flags, *copus], 2, run, base=TINY).check()
    (relayout,) = (r for r in read_journal(run / NAME) if r["kind"] == "relayout")
    assert relayout["start"] == "tp1.pp1.dp2" and ".pp2." in relayout["to"]
    assert relayout["outcome"]["kind"] == "moved"
    train(flags, 2, tmp_path / "plain").check()
    assert losses_of(run) == pytest.approx(losses_of(tmp_path / "plain"), rel=1e-5)
