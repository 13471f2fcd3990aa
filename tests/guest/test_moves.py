"""Megatron-LM's own program, unmodified, changes its layout while it runs."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megatron.trainer.logging.metrics import read_metrics
from tests.guest.program import HAS_PROGRAM, SPLIT, Runs, evaluations, steps, tensors, train
from tests.helpers.nightly import case

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not HAS_PROGRAM, reason="PYTHONPATH lacks Megatron-LM's own program"),
]
HOME = "tp2.pp1.dp2"
AWAY = ("tp1.pp2.dp2", "tp1.pp1.dp4", "tp4.pp1.dp1", "tp1.pp4.dp1", "tp2.pp2.dp1")
AWAY += ("tp1.pp2.vpp2.dp2", "tp2.pp2.vpp2.dp1")
BROKEN = ("prepare", "extract", "tear down", "groups", "copy", "verify")
ROUND_TRIPS = [f"{i}:{to}>{HOME}:8:1" for i, to in enumerate(AWAY, 2)]
ROUND_TRIPS += [f"{i}:tp1.pp2.dp2!{phase}:8:1" for i, phase in enumerate(BROKEN, 9)]
DENSE = (
    "--tensor-model-parallel-size 2 --group-query-attention --num-query-groups 4 --bf16 "
    f"--train-iters 17 --dist-ckpt-optim-fully-reshardable {SPLIT}"
)
EXPERTS = """--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01
--moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 64 --sequence-parallel
--moe-router-enable-expert-bias --moe-router-score-function sigmoid --use-distributed-optimizer
--dist-ckpt-optim-fully-reshardable --train-iters 24"""
SIZES = {3: (16, 1), 9: (8, 1)}
LAYOUTS = {3: "tp1.pp2.ep2.dp2", 6: "tp2.pp1.ep2.etp1.dp2", 9: "tp1.pp1.ep4.dp4"}
LAYOUTS[12] = STAYS = "tp1.pp1.ep2.dp4"
# Each layout can cut its own batch alone: 8 in 1 on two replicas, 3 in 3 on one.
CUT_ANEW = "4:tp2.pp1.dp1:3:3,8:tp1.pp1.dp2:8:1"
MUON = "--optimizer muon --muon-tp-mode duplicated --tensor-model-parallel-size 2 --train-iters 10"
MUON_TRIPS = "3:tp1.pp2.dp1>tp2.pp1.dp1:8:1,6:tp1.pp1.dp2>tp2.pp1.dp1:8:1"
MOVES = "--copus --copus-layouts all"
MOVE = re.compile(r"^MOVE (.*)$", re.MULTILINE)
HOLDS = re.compile(r"^HOLDS (.*)$", re.MULTILINE)


def listed(layouts: dict[int, str]) -> str:
    """The changes of sizes, under some layouts."""
    rows, batch, micro = [], 8, 1
    for step in sorted({*SIZES, *layouts}):
        batch, micro = SIZES.get(step, (batch, micro))
        rows.append(f"{step}:{layouts.get(step, STAYS)}:{batch}:{micro}")
    return ",".join(rows)


RUNS = {
    "plain": ("plain", DENSE),
    "there and back": ("moving=" + ",".join(ROUND_TRIPS), f"{DENSE} {MOVES}"),
    "muon": ("plain", MUON),
    "muon moved": (f"moving={MUON_TRIPS}", f"{MUON} {MOVES}"),
    "stayed": ("moving=" + listed({}), f"{EXPERTS} {MOVES}"),
    "moved": ("moving=" + listed(LAYOUTS), f"{EXPERTS} {MOVES}"),
    "cut anew": (f"moving={CUT_ANEW}", f"--train-iters 16 --eval-interval 6 {MOVES}"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("moves"), _told)


def _told(runs: Runs, name: str) -> dict[str, Any]:
    kind, flags = RUNS[name]
    ranks = 4 if name in ("plain", "there and back", "stayed", "moved") else 2
    output = train(runs.folder, name.replace(" ", "_"), kind, flags, ranks=ranks).stdout
    return {
        "steps": steps(output),
        "evaluations": evaluations(output),
        "moves": [json.loads(row) for row in MOVE.findall(output)],
        "holds": [json.loads(row) for row in HOLDS.findall(output)],
    }


def test_a_layout_that_comes_back_leaves_every_bit(runs: Runs) -> None:
    plain, moved = runs["plain"], runs["there and back"]
    assert len(plain["steps"]) == 17 and moved["steps"] == plain["steps"]
    assert len(plain["evaluations"]) == 2 and moved["evaluations"] == plain["evaluations"]
    own, theirs = (
        tensors(runs.folder / name / "iter_0000017") for name in ("there_and_back", "plain")
    )
    assert own.keys() == theirs.keys() and len(own) > 30
    assert any("exp_avg_sq" in name for name in own)
    assert [name for name in own if not own[name].equal(theirs[name])] == []


@pytest.mark.nightly
@pytest.mark.skipif(not find_spec("emerging_optimizers"), reason="lacks emerging-optimizers")
def test_muon_comes_back_with_every_bit(runs: Runs) -> None:
    plain, moved = runs["muon"], runs["muon moved"]
    assert [move["kind"] for move in moved["moves"]] == ["moved"] * 4
    assert len(plain["steps"]) == 10 and moved["steps"] == plain["steps"]
    assert moved["evaluations"] == plain["evaluations"]
    own, theirs = (tensors(runs.folder / name / "iter_0000010") for name in ("muon_moved", "muon"))
    assert own.keys() == theirs.keys() and any("momentum" in name for name in own)
    assert [name for name in own if not own[name].equal(theirs[name])] == []


def test_every_layout_was_there_and_what_fails_goes_back(runs: Runs) -> None:
    kinds = [move["kind"] for move in runs["there and back"]["moves"]]
    assert kinds[:14] == ["moved"] * 14
    assert kinds[14:] == ["cancelled"] * 2 + ["rolled_back"] * 4
    for move, phase in zip(runs["there and back"]["moves"][14:], BROKEN, strict=True):
        assert move["reason"] == f"{phase}: rank 1: RuntimeError: broken on purpose"


@pytest.mark.parametrize("name", ["there and back", case("moved", daily=False)])
def test_what_a_layout_holds_is_known_before_a_change(runs: Runs, name: str) -> None:
    """By which a change that does not fit is refused, as in our own trainer."""
    holds = runs[name]["holds"]
    assert len({row["layout"] for row in holds}) >= 3
    for row in holds:
        assert row["expected"] == pytest.approx(row["held"], rel=0.03), row


def _rates(run: Path) -> list[float]:
    return [row["learning_rate"] for row in read_metrics(run) if row["kind"] == "step"]


@pytest.mark.nightly
def test_experts_and_batches_move_as_on_a_layout_that_stays(runs: Runs) -> None:
    stayed, moved = runs["stayed"], runs["moved"]
    assert [move["kind"] for move in moved["moves"]] == ["moved"] * 4 and stayed["moves"] == []
    assert [row[3] for row in moved["steps"]] == [8] * 3 + [16] * 6 + [8] * 9
    # The log has the rate of the step to come, which that trainer prints before a layout changes.
    assert _rates(runs.folder / "moved") == _rates(runs.folder / "stayed")
    for own, fixed in zip(moved["steps"], stayed["steps"], strict=True):
        assert (*own[:2], own[3]) == (*fixed[:2], fixed[3])
        assert own[4] == pytest.approx(fixed[4], rel=1e-5)
        assert own[5] == pytest.approx(fixed[5], rel=1e-3), "printed with three digits"
    for (name, own), (of, fixed) in zip(moved["evaluations"], stayed["evaluations"], strict=True):
        assert name == of and own == pytest.approx(fixed, rel=1e-5)


@pytest.mark.nightly
def test_a_layout_need_not_cut_the_batch_before_it(runs: Runs) -> None:
    run = runs["cut anew"]
    assert [(move["kind"], move["reason"]) for move in run["moves"]] == [("moved", "")] * 2
    assert [row[3] for row in run["steps"]] == [8] * 4 + [3] * 4 + [8] * 10
    assert run["steps"][-1][1] == 124, "a rest smaller than the batch is dropped"


@pytest.mark.parametrize("name", ["there and back", case("moved", daily=False)])
def test_a_process_holds_no_more_after_many_changes(runs: Runs, name: str) -> None:
    moves = runs[name]["moves"]
    assert {move["groups"] for move in moves} == {moves[0]["groups"]}
    # gloo's own threads and sockets of a layout come with its groups, and go with them.
    assert max(move["threads"] for move in moves) <= moves[0]["threads"] + 10
    assert max(move["descriptors"] for move in moves) <= moves[0]["descriptors"] + 100


@pytest.mark.nightly
def test_the_journal_has_every_change(runs: Runs) -> None:
    assert runs["moved"]
    file = runs.folder / "moved" / "journal.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    found = [(row["start"], row["to"]) for row in rows if row["kind"] == "relayout"]
    ends = list(LAYOUTS.values())
    assert found == list(zip([STAYS, *ends], ends))
