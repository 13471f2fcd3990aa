"""How often the host waits for the GPU in a step. Kernels that it has started go on meanwhile, but
it starts no further ones: each wait is a gap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_stub import worker_waits
from tests.gpu_stub.launch import train_on_stub
from tests.helpers.jobs import MOE, TINY

STEPS = 8
PLAIN = f"--bf16 --train-iters {STEPS} --use-distributed-optimizer"
NORM = "get_grad_norm_fp32"
"""Where megatron-core waits once, since clipping depends on the norm."""


def waits(folder: Path, ranks: int, *flags: str, base: str = TINY) -> list[dict[str, Any]]:
    """Of each step of rank 0 from the second to the last but one."""
    env, program = {"STUB_ROWS": str(folder / "rows.json")}, Path(worker_waits.__file__)
    run, own = folder / "run", [*PLAIN.split(), *flags]
    train_on_stub(own, ranks, run, base=base, env=env, program=program).check()
    rows = json.loads((folder / "rows.json").read_text())[2:]
    assert len(rows) == STEPS - 2
    for row in rows:
        # Nothing waits but where torch says so, so that every wait has its line.
        assert row["counted"] == sum(row["own"].values()) + sum(row["core"].values())
    return rows


def test_a_plain_step_waits_three_times(tmp_path: Path) -> None:
    for row in waits(tmp_path, 1):
        assert sum(row["own"].values()) <= 3, row["own"]
        assert sum(row["core"].values()) == 1 and NORM in next(iter(row["core"]))


def test_a_measured_step_waits_once_more(tmp_path: Path) -> None:
    rows = waits(tmp_path, 2, "--copus", "--copus-mode", "observe")
    # Some steps end with a decision, for which ranks tell each other more.
    usual = [row for row in rows if not any("broadcast" in line for line in row["own"])]
    assert len(usual) >= 3
    for row in usual:
        assert sum(row["own"].values()) <= 4, row["own"]
    for row in rows:
        of_noise = {line: n for line, n in row["own"].items() if line.startswith("gns/")}
        assert sum(of_noise.values()) == 1 and "finish" in next(iter(of_noise))


@pytest.mark.parametrize("flags", ["--tensor-model-parallel-size 2", "--clip-grad 0"])
def test_other_plain_steps_wait_no_more(flags: str, tmp_path: Path) -> None:
    for row in waits(tmp_path, 2, *flags.split()):
        assert sum(row["own"].values()) <= 3, row["own"]
        assert sum(row["core"].values()) <= 1, row["core"]


EXPERTS = {
    "no balance": "--moe-router-load-balancing-type none",
    "auxiliary loss": "--moe-aux-loss-coeff 1e-2",
    "lagged balance": "--moe-balance lagged --moe-aux-loss-coeff 1e-2",
    "measured": "--copus --copus-mode observe",
}


@pytest.mark.parametrize("name", EXPERTS)
def test_a_mixture_waits_no_more(name: str, tmp_path: Path) -> None:
    flags = ["--expert-model-parallel-size", "2", *EXPERTS[name].split()]
    rows = waits(tmp_path, 2, *flags, base=MOE)
    usual = [row for row in rows if not any("broadcast" in line for line in row["own"])]
    assert len(usual) >= 3
    more = 1 if name == "measured" else 0
    for row in usual:
        assert sum(row["own"].values()) <= 3 + more, row["own"]
        of_noise = {line: n for line, n in row["own"].items() if line.startswith("gns/")}
        assert sum(of_noise.values()) == more
