"""Megatron-LM's own program, unmodified, runs its code for CUDA and NCCL on the stub, with and
without `--copus`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from megatron.trainer.logging.metrics import read_metrics
from tests.gpu_stub.launch import run_on_stub
from tests.guest.program import SPLIT, evaluations, launch, steps
from tests.guest.test_moves import MOVE
from tests.helpers.launch import ROOT, run_ranks
from tests.newest_core.prepare import VERSION, python_path

pytestmark = pytest.mark.timeout(900)
STEPS = 12
FLAGS = f"--train-iters {STEPS} {SPLIT}"
OBSERVE = "--copus --copus-mode observe"
# As many rows of the vocabulary as without tensor parallelism.
TP2 = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64"
MOVABLE = f"{FLAGS} {TP2} --dist-ckpt-optim-fully-reshardable"
MOVES = "moving=4:tp1.pp2.dp1:8:1,6:tp1.pp1.dp2:8:1,9:tp2.pp1.dp1:8:1"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
SHARED = "--expert-model-parallel-size 2"
ON_STUB = {
    "plain": ("plain", FLAGS),
    "observed": ("copus", f"{FLAGS} {OBSERVE}"),
    "moved": (MOVES, f"{MOVABLE} --copus --copus-layouts all"),
    "experts": ("copus", f"{FLAGS} {EXPERTS} {SHARED} {OBSERVE}"),
}
ON_CPU = {name: ON_STUB[name] for name in ("observed", "experts")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Device -> run -> its folder, steps, evaluations and output, of two ranks."""
    folder = tmp_path_factory.mktemp("guest")
    core = {"PYTHONPATH": f"{ROOT}:{python_path(VERSION)}"}
    # Of its flag for tensor parallelism megatron-core asks for the variable.
    on_stub = {**core, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    cpu, stub = (
        functools.partial(run_ranks, env=core),
        functools.partial(run_on_stub, env=on_stub),
    )
    # A GPU draws other weights than a CPU: all begin with those of a checkpoint.
    for name, flags in (("dense", ""), ("mixture", EXPERTS)):
        launch(folder, name, "plain", f"--train-iters 1 {flags}", ranks=1, start=cpu).check()
    found: dict[str, dict[str, Any]] = {"stub": {}, "cpu": {}}
    for device, start, cases in (("stub", stub, ON_STUB), ("cpu", cpu, ON_CPU)):
        for name, (kind, flags) in cases.items():
            begun = folder / ("mixture" if name == "experts" else "dense")
            flags += f" --load {begun} --finetune --no-load-optim --no-load-rng"
            flags += " --distributed-backend nccl" if device == "stub" else ""
            place = f"{device}-{name}"
            output = launch(folder, place, kind, flags, ranks=2, start=start).check().stdout
            found[device][name] = {
                "folder": folder / place,
                "steps": steps(output),
                "evaluations": evaluations(output),
                "output": output,
            }
    return found


@pytest.mark.parametrize("name", ON_STUB)
def test_losses_are_those_of_cpu_ranks(runs: dict[str, dict[str, Any]], name: str) -> None:
    own = runs["stub"][name]
    wanted = runs["cpu"]["experts" if name == "experts" else "observed"]
    assert len(wanted["steps"]) == STEPS and wanted["steps"][-1][4] < wanted["steps"][0][4]
    assert len(own["steps"]) == STEPS
    for found, expected in zip(own["steps"], wanted["steps"]):
        assert found[:4] == expected[:4]
        assert found[4] == pytest.approx(expected[4], rel=1e-5)
        assert found[5] == pytest.approx(expected[5], rel=2e-3), "printed with four digits"
    assert len(own["evaluations"]) == 2
    for (of, found), (name_of, expected) in zip(own["evaluations"], wanted["evaluations"]):
        assert of == name_of and found == pytest.approx(expected, rel=1e-5)


def test_it_runs_on_nccl_and_a_gpu(runs: dict[str, dict[str, Any]]) -> None:
    output = runs["stub"]["plain"]["output"]
    assert "max reserved: " in output and "max reserved: 0.00" not in output


def test_a_controller_that_observes_changes_no_digit(runs: dict[str, dict[str, Any]]) -> None:
    assert runs["stub"]["observed"]["steps"] == runs["stub"]["plain"]["steps"]


@pytest.mark.parametrize("name", ON_CPU)
def test_noise_is_that_of_cpu_ranks(runs: dict[str, dict[str, Any]], name: str) -> None:
    found, wanted = (
        [
            row["noise"]["step"]["all"]
            for row in read_metrics(runs[device][name]["folder"])
            if row["kind"] == "step" and row["noise"]["measured"]
        ]
        for device in ("stub", "cpu")
    )
    assert len(found) >= STEPS // 2
    for own, other in zip(found, wanted, strict=True):
        assert own == pytest.approx(other, rel=1e-3)


def test_every_move_is_made(runs: dict[str, dict[str, Any]]) -> None:
    moves = [json.loads(row) for row in MOVE.findall(runs["stub"]["moved"]["output"])]
    assert [(move["kind"], move["reason"]) for move in moves] == [("moved", "")] * 3
    file: Path = runs["stub"]["moved"]["folder"] / "journal.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    ends = [row["to"] for row in rows if row["kind"] == "relayout"]
    assert ends == ["tp1.pp2.dp1", "tp1.pp1.dp2", "tp2.pp1.dp1"]
